"""A prefill worker may stall at any moment: it costs its request some time, and never the answer."""

from dying_parts import paused
from live_load import ask_all, cold_ids, make_token_ids, wait_until_at_rest
from local_system import PATIENCE_S, LocalSystem, wait_until

from headrace.core.limits import HAND_OFF_PATIENCE_MS_MAX

assert HAND_OFF_PATIENCE_MS_MAX / 1000 < PATIENCE_S / 2  # else a request could be at its deadline before it is over


def test_a_stalled_prefill_worker_costs_its_requests_the_patience_and_harms_nobody_when_it_goes_on(
    system: LocalSystem,
):
    """Fails when a stalled process holds its requests to their deadline, or what it sends later meets anybody."""
    (stalled,) = system.worker_ids("prefill")
    prompts = [make_token_ids(400, seed=80_000 + number) for number in range(6)]
    expected = cold_ids(system, prompts)
    with paused(system.worker_pid(stalled)):
        assert [result.token_ids for result in ask_all(system, prompts)] == expected
    wait_until(lambda: stalled in system.worker_ids("prefill"), what="the worker announced again")
    wait_until_at_rest(system, dead_claims=True)  # those of a process that stands still run out
    assert [result.token_ids for result in ask_all(system, prompts)] == expected
