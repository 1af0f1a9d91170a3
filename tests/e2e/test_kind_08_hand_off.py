"""A prefill worker may stall or die at any moment: it costs its request some time, and never the answer."""

import time

from dying_parts import kill, paused, stream_while, wait_until_replaced
from live_load import ask_all, cold_ids, make_token_ids, wait_until_at_rest
from local_system import LocalSystem, wait_until

from headrace.core.limits import HAND_OFF_PATIENCE_MS_MAX


def test_a_stalled_prefill_worker_costs_its_requests_the_patience_and_harms_nobody_when_it_goes_on(
    system: LocalSystem,
):
    """Fails when a stalled process holds its requests to their deadline, or what it sends later meets anybody."""
    (stalled,) = system.worker_ids("prefill")
    prompts = [make_token_ids(400, seed=80_000 + number) for number in range(6)]
    expected = cold_ids(system, prompts)
    with paused(system.worker_pid(stalled)):
        began_s = time.monotonic()
        assert [result.token_ids for result in ask_all(system, prompts)] == expected
        assert time.monotonic() - began_s < HAND_OFF_PATIENCE_MS_MAX / 1000 + 25
    wait_until(lambda: stalled in system.worker_ids("prefill"), within_s=60, what="the worker announced again")
    wait_until_at_rest(system, dead_claims=True)  # those of a process that stands still run out
    assert [result.token_ids for result in ask_all(system, prompts)] == expected


def test_a_prefill_worker_killed_under_load_costs_no_request(system: LocalSystem):
    """Fails when a request ends with its prefill worker, or a decode worker keeps blocks for one that is dead."""
    (killed,) = system.worker_ids("prefill")
    prompts = [make_token_ids(1_000, seed=81_000 + number) for number in range(12)]
    pid = system.worker_pid(killed)
    streams = stream_while(system, prompts, lambda: kill(pid), max_tokens=16)
    streams.check_every_token()
    assert not streams.cut_off
    wait_until_replaced(system, killed, role="prefill", of=1)
    wait_until_at_rest(system, dead_claims=True)
