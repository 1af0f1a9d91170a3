"""Traces that are made up have the sharing and the times that their shape says, and read back as they were written."""

from itertools import pairwise

import pytest

from headrace.core.errors import InvalidRequest
from headrace.simulate.generate_trace import Workload, WorkloadShape, generate_trace, parse_shape, write_trace
from headrace.simulate.read_trace import Trace, read_trace


def make(workload: Workload, *, requests: int = 2_000, seed: int = 1, **shape) -> Trace:
    return generate_trace(workload, requests=requests, seed=seed, shape=WorkloadShape(**shape))


def reused_tokens(trace: Trace) -> int:
    """What a cache without bounds would find."""
    seen, found = set(), 0
    for request in trace.requests:
        for block in request.block_ids:
            found += trace.block_tokens * (block in seen)
        seen.update(request.block_ids)
    return found


@pytest.mark.parametrize("workload", list(Workload))
def test_a_trace_is_in_order_and_a_block_always_follows_the_same_block(workload: Workload):
    trace = make(workload)
    assert len(trace.requests) == 2_000
    times = [request.arrival_s for request in trace.requests]
    assert times == sorted(times)
    parents: dict[int, int] = {}
    for request in trace.requests:
        assert len(request.block_ids) == request.input_tokens // trace.block_tokens
        for parent, block in zip((-1, *request.block_ids), request.block_ids, strict=False):
            assert parents.setdefault(block, parent) == parent
            assert block < trace.num_blocks


@pytest.mark.parametrize("workload", list(Workload))
def test_the_same_seed_gives_the_same_trace_and_another_one_another(workload: Workload):
    assert make(workload, seed=7) == make(workload, seed=7)
    assert make(workload, seed=7) != make(workload, seed=8)


@pytest.mark.parametrize("workload", list(Workload))
def test_what_is_written_is_read_back(workload: Workload, tmp_path):
    trace = make(workload, requests=300)
    write_trace(trace, tmp_path / "made.jsonl")
    back = read_trace(tmp_path / "made.jsonl", report=lambda line: None)
    assert back.block_tokens == trace.block_tokens
    assert [(r.input_tokens, r.output_tokens, len(r.block_ids)) for r in back.requests] == [
        (r.input_tokens, r.output_tokens, len(r.block_ids)) for r in trace.requests
    ]
    assert reused_tokens(back) == reused_tokens(trace)


@pytest.mark.parametrize("workload", [Workload.SHARED_PREFIX, Workload.MULTI_TURN, Workload.AGENTS])
def test_requests_come_at_the_rate_that_was_asked_for(workload: Workload):
    trace = make(workload, requests=6_000, requests_per_s=20.0, gap_s=5.0)
    assert len(trace.requests) / trace.requests[-1].arrival_s == pytest.approx(20.0, rel=0.15)


def test_shared_prefixes_are_found_by_all_but_the_first_to_ask():
    trace = make(Workload.SHARED_PREFIX, prefixes=5, prefix_tokens=4_096, turn_tokens=100)
    assert reused_tokens(trace) == (2_000 - 5) * 4_096


def test_a_turn_stands_on_the_one_before_and_its_answer():
    """One conversation at a time: each prompt begins with all of the one before."""
    trace = make(Workload.MULTI_TURN, requests=6, requests_per_s=1e-6, turns=6, prefixes=1)
    for before, after in zip(trace.requests, trace.requests[1:], strict=False):
        assert after.block_ids[: len(before.block_ids)] == before.block_ids
        assert after.input_tokens > before.input_tokens + before.output_tokens


def test_an_agent_asks_its_sub_agents_at_once_and_with_one_context():
    trace = make(Workload.AGENTS, requests=4_000, branch_share=0.5)
    at = {}
    for request in trace.requests[:-3]:  # the last step may be cut short
        at.setdefault(request.arrival_s, []).append(request)
    together = [group for group in at.values() if len(group) > 1]
    assert together, "nobody asked sub-agents"
    for group in together[:-1]:
        assert len(group) == 4, "a step and its three sub-agents"
        assert {request.block_ids[:8] for request in group} == {group[0].block_ids[:8]}


def test_a_burst_is_many_requests_for_one_prefix_within_a_second():
    trace = make(Workload.BURSTS, requests=900, requests_per_s=1.0, burst_every_s=60.0, burst_requests=50)
    burst = [request for request in trace.requests if 60.0 <= request.arrival_s <= 61.0]
    assert 50 <= len(burst) <= 56
    prefixes = [request.block_ids[:8] for request in burst]
    assert max(prefixes.count(prefix) for prefix in prefixes) >= 50


def test_a_setting_that_is_none_is_refused_by_name():
    assert parse_shape(("turns=3", "gap_s=1.5")) == WorkloadShape(turns=3, gap_s=1.5)
    for wrong in ("turn=3", "turns=x", "turns=0", "gap_s=nan"):
        with pytest.raises(InvalidRequest, match=wrong.partition("=")[0]):
            parse_shape((wrong,))


def test_requests_of_a_conversation_carry_its_number_and_others_none():
    """Fails when two conversations look like one: each would seem to reuse the other."""
    trace = make(Workload.MULTI_TURN, turn_tokens=1_000)
    turns: dict[int, list[tuple[int, ...]]] = {}
    for request in trace.requests:
        turns.setdefault(request.conversation, []).append(request.block_ids)
    assert -1 not in turns
    assert all(after[: len(before)] == before for ids in turns.values() for before, after in pairwise(ids))
    assert max(map(len, turns.values())) == WorkloadShape().turns
    assert {request.conversation for request in make(Workload.SHARED_PREFIX).requests} == {-1}
