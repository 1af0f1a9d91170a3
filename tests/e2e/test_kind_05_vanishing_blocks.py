"""A lookup is a hint: blocks may vanish, and holders may stop answering, at any moment of a request."""

import os
import signal
import time

from live_load import load_while, make_token_ids, wait_until_at_rest
from local_system import BLOCK_TOKENS, LocalSystem, wait_until

from headrace.client import Selector
from headrace.core.limits import MEMBER_TTL_MS


def make_prompts(seed: int) -> list[list[int]]:
    return [make_token_ids(6 * BLOCK_TOKENS, seed=seed + i) for i in range(8)]


def test_evicting_everything_again_and_again_fails_no_request(system: LocalSystem):
    """Fails when a block that was found and is gone at the fetch is an error, or another block is read in its place."""

    def evict() -> None:
        for _ in range(30):
            reports = system.client.evict(Selector(), dry_run=False)
            assert not [report.error for report in reports if report.error]
            time.sleep(0.05)

    outcome = load_while(system, make_prompts(50_000), evict, after_s=1)
    assert (outcome.errors, outcome.wrong) == ([], 0)
    assert outcome.right > 10
    assert outcome.hits > 0
    wait_until_at_rest(system)


def test_a_store_node_that_is_paused_costs_hits_and_no_request(system: LocalSystem):
    """Fails when the closing of a forgotten node's channel reaches the requests that wait for it as a cancellation."""
    (node,) = system.client.status().store_nodes

    def pause() -> None:
        os.kill(node.pid, signal.SIGSTOP)
        try:
            time.sleep(MEMBER_TTL_MS / 1000 + 3)  # its record runs out, and its readers hear of it
        finally:
            os.kill(node.pid, signal.SIGCONT)

    outcome = load_while(system, make_prompts(51_000), pause)
    assert (outcome.errors, outcome.wrong) == ([], 0)
    wait_until(lambda: len(system.client.status().store_nodes) == 1, what="the node announced again")
    again = load_while(system, make_prompts(51_000), lambda: time.sleep(1))
    assert (again.errors, again.wrong) == ([], 0)
    assert again.hits > 0
