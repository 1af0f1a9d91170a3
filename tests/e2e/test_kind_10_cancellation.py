"""A client that leaves, at any moment and in any number, leaves nothing running behind it."""

import random
import threading
from concurrent.futures import ThreadPoolExecutor

from live_load import ask, cold_ids, make_token_ids, wait_until_at_rest
from local_system import LocalSystem

from headrace.client.values import Sampling
from headrace.core.errors import HeadraceError


def test_a_storm_of_cancelled_requests_leaves_every_count_at_rest(system: LocalSystem):
    """Fails when leaving is lost anywhere between queueing, prefill, hand-over and decoding."""

    def leave(number: int) -> None:
        chosen = random.Random(number)
        prompt = make_token_ids(chosen.randint(1, 1_200), seed=100_000 + number)
        stream = system.client.stream(prompt, sampling=Sampling(max_tokens=600, ignore_eos=True), timeout_s=60)
        timer = threading.Timer(chosen.random() * 0.6, stream.close)
        timer.start()
        try:
            for _ in stream:
                pass
        except HeadraceError:
            pass
        finally:
            timer.cancel()

    with ThreadPoolExecutor(24) as pool:
        list(pool.map(leave, range(72)))
    wait_until_at_rest(system)
    prompt = make_token_ids(100, seed=1)
    assert [ask(system, prompt).token_ids] == cold_ids(system, [prompt])
