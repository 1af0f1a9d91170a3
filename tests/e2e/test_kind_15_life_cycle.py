"""Parts of the system are killed under load: nothing accepted is lost without a word, and all is well soon after."""

import time
from concurrent.futures import ThreadPoolExecutor

from dying_parts import (
    http_completions,
    kill,
    long_streams,
    pids_of,
    quiet_answers,
    stream_while,
    wait_until_replaced,
)
from live_load import ask, ask_all, cold_ids, make_token_ids, wait_until_at_rest
from local_system import BLOCK_TOKENS, LocalSystem, wait_until

from headrace.client.errors import GatewayUnreachable
from headrace.core.errors import HeadraceError, WorkerUnavailable

HIT = 5 * BLOCK_TOKENS  # of the prompts below


def make_prompts(count: int, *, seed: int) -> list[list[int]]:
    return [make_token_ids(HIT + 1, seed=seed + number) for number in range(count)]


def members(system: LocalSystem) -> list[tuple[str, int]]:
    return sorted((worker.worker_id, worker.pid) for worker in system.client.status().workers)


def test_a_prefill_worker_killed_under_load_costs_no_request(system: LocalSystem):
    """Fails when a request ends with its prefill worker, or blocks are kept for a prefill that is dead."""
    (killed,) = system.worker_ids("prefill")
    prompts = [make_token_ids(1_000, seed=81_000 + number) for number in range(12)]
    pid = system.worker_pid(killed)
    streams = stream_while(system, prompts, lambda: kill(pid), max_tokens=16)
    streams.check_every_token()
    assert not streams.cut_off
    wait_until_replaced(system, killed, role="prefill", of=1)
    wait_until_at_rest(system, dead_claims=True)


def test_twenty_streams_lose_one_of_two_decode_workers_and_only_what_it_had_begun_is_cut_off(system: LocalSystem):
    """Fails when a stream without a token fails instead of being tried at the other worker, a stream of the other
    worker is touched, or tokens are lost or doubled on the way."""
    (killed, _), prompts = system.worker_ids("decode"), make_prompts(20, seed=150_000)
    pid = system.worker_pid(killed)
    streams = stream_while(system, prompts, lambda: kill(pid), max_tokens=100)
    streams.check_every_token()
    for each in streams.cut_off:
        assert isinstance(each.error, WorkerUnavailable)
        assert killed in str(each.error)
        assert each.token_ids, "it had no token yet and could be tried again"
    assert len(streams.cut_off) < 20
    wait_until_replaced(system, killed, role="decode", of=2)
    wait_until_at_rest(system, dead_claims=True)


def gateway_pids(system: LocalSystem) -> set[int]:
    return {gateway.pid for gateway in system.client.status().gateways}


def test_one_of_two_gateways_killed_under_load_costs_what_it_had_begun_and_nothing_else(system: LocalSystem):
    """Fails when a request of which nothing was told yet fails instead of going to the other gateway, when the other's
    are touched, or when the new gateway has to learn anew who holds what."""
    prompts = make_prompts(20, seed=154_000)
    warm = [result.token_ids for result in ask_all(system, prompts)]
    (killed, kept), expected = gateway_pids(system), quiet_answers(system, prompts, max_tokens=60)
    with ThreadPoolExecutor(1) as beside:
        whole = beside.submit(http_completions, system, prompts[:8], max_tokens=60)
        streams = stream_while(system, prompts, lambda: kill(killed), max_tokens=60, expected=expected)
        assert whole.result() == ["200"] * 8, "nothing of a whole answer is told before all of it"
    streams.check_every_token()
    assert len(streams.cut_off) < 20
    assert all(isinstance(each.error, GatewayUnreachable) for each in streams.cut_off)

    def replaced() -> bool:
        now = gateway_pids(system)
        return len(now) == 2 and kept in now and killed not in now

    wait_until(replaced, what="two gateways again")
    again = ask_all(system, prompts)
    assert [result.token_ids for result in again] == warm
    assert [result.usage.cached.total for result in again] == [HIT] * 20
    wait_until_at_rest(system)


def test_all_gateways_killed_under_load_are_back_in_seconds_and_hit_as_before(system: LocalSystem):
    """Fails when their requests hang or end in something that no client knows to try again, one of which nothing was
    told does not wait for a new gateway, the workers go on for nobody, or a new gateway has to learn anew who holds
    what."""
    prompts = make_prompts(20, seed=151_000)
    warm = [result.token_ids for result in ask_all(system, prompts)]
    killed, expected = gateway_pids(system), quiet_answers(system, prompts, max_tokens=80)
    assert len(killed) == 2

    def lose_them_all() -> None:
        with long_streams(system) as long:
            long.lose(killed)

    with ThreadPoolExecutor(1) as beside:
        whole = beside.submit(http_completions, system, prompts[:4], max_tokens=100)
        streams = stream_while(system, prompts, lose_them_all, max_tokens=80, expected=expected)
        assert whole.result() == ["200"] * 4
    streams.check_every_token()
    assert all(isinstance(each.error, GatewayUnreachable) for each in streams.cut_off)
    again = ask_all(system, prompts)
    assert [result.token_ids for result in again] == warm
    assert [result.usage.cached.total for result in again] == [HIT] * 20
    assert not killed & gateway_pids(system)
    wait_until_at_rest(system)


def test_the_controller_killed_under_load_touches_no_stream_and_no_worker(system: LocalSystem):
    """Fails when traffic needs Serve's controller, status tells of an update that is none, or the new controller starts
    workers anew that run."""
    before, prompts = members(system), make_prompts(8, seed=152_000)
    (killed,) = pids_of(system, "ServeController")
    streams = stream_while(system, prompts, lambda: kill(killed), max_tokens=100)
    streams.check_every_token()
    assert not streams.cut_off
    assert members(system) == before

    def is_back() -> bool:
        return pids_of(system, "ServeController") not in ([], [killed])

    wait_until(is_back, what="another controller")
    assert [result.token_ids for result in ask_all(system, prompts)] == [each[:8] for each in streams.expected]
    assert members(system) == before


def test_the_proxy_killed_under_load_is_back_soon_and_nothing_runs_on_behind_it(system: LocalSystem):
    """Fails when the front door stays shut for long, or the workers go on for clients that were cut off."""
    before, prompts = members(system), make_prompts(8, seed=153_000)
    expected, killed = cold_ids(system, prompts[:1]), pids_of(system, "ProxyActor")
    assert len(killed) == 1

    def lose_it() -> None:
        with long_streams(system, over_http=2) as long:
            long.lose(killed)

    streams = stream_while(system, prompts, lose_it, max_tokens=80)
    streams.check_every_token()
    assert all(isinstance(each.error, GatewayUnreachable) for each in streams.cut_off)
    began_s = time.monotonic()

    def answers() -> bool:
        try:
            return [ask(system, prompts[0], timeout_s=5).token_ids] == expected
        except HeadraceError:
            return False

    wait_until(answers, what="answers through another proxy")
    print(f"the proxy was away for {time.monotonic() - began_s:.1f} s")
    wait_until_at_rest(system)
    assert members(system) == before
