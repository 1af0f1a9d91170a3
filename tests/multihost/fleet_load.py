"""Requests that go on while something is done to the fleet: a load whose answers are known, and streams that last."""

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field

from fleet import Fleet
from hosts import Host, wait_until

from headrace.client.client import HeadraceClient
from headrace.client.values import COLD, CacheOptions, Event, Sampling, TokenDelta
from headrace.core.errors import HeadraceError


@dataclass
class Outcome:
    """What came of a load so far."""

    right: int = 0
    wrong: list[str] = field(default_factory=list)


@contextmanager
def load_on(clients: list[HeadraceClient], asked: list[list[int]]) -> Iterator[Outcome]:
    """Two callers at each proxy ask these prompts in turn; what they get is compared with what they got at rest. The
    answers are short: what is asked is whether they come."""
    few = Sampling(max_tokens=4, ignore_eos=True)
    expected = [clients[0].generate(prompt, sampling=few, cache=COLD, timeout_s=120).token_ids for prompt in asked]
    outcome, ended, lock = Outcome(), threading.Event(), threading.Lock()

    def call(client: HeadraceClient, number: int) -> None:
        while not ended.wait(0.2):
            number = (number + 1) % len(asked)
            try:
                tokens = client.generate(asked[number], sampling=few, timeout_s=120).token_ids
            except HeadraceError as error:
                said = f"{type(error).__name__}: {error}"
            else:
                said = "" if tokens == expected[number] else f"{tokens} instead of {expected[number]}"
            with lock:
                outcome.right += not said
                outcome.wrong += [said] if said else []

    with ThreadPoolExecutor(2 * len(clients)) as pool:
        calls = [pool.submit(call, client, 2 * at) for client in clients for at in range(2)]
        try:
            yield outcome
        finally:
            ended.set()
            for each in calls:
                each.result()


def go_on(outcome: Outcome, *, what: str) -> None:
    """Until the load has got some more answers."""
    before = outcome.right
    wait_until(lambda: outcome.right > before + 20, within_s=120, what=f"answers {what}")


@dataclass
class LongStream:
    """A stream that has begun, and what it must come to."""

    events: Iterator[Event]
    begun: list[Event]
    expected: tuple[int, ...]

    def check_to_its_end(self) -> None:
        events = [*self.begun, *self.events]
        assert tuple(event.token_id for event in events if isinstance(event, TokenDelta)) == self.expected


@contextmanager
def long_stream(fleet: Fleet, host: Host, prompt: list[int]) -> Iterator[LongStream]:
    """A stream of the decode worker of a host through its proxy."""
    worker, client = fleet.worker(host), fleet.clients[host.name]
    long = Sampling(max_tokens=400, ignore_eos=True)
    cache = CacheOptions(decode_worker=worker.worker_id)
    expected = client.generate(prompt, sampling=long, cache=COLD, timeout_s=120).token_ids
    with client.stream(prompt, sampling=long, cache=cache, timeout_s=120) as stream:
        events = iter(stream)
        yield LongStream(events, [next(events), next(events)], expected)
