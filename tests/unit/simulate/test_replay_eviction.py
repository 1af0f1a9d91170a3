"""The replay counts what a cache would have hit, the bound is a bound, and the command prints what it promises."""

import itertools
import json

import pytest
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.admin.cli import main
from headrace.core.eviction import DEFAULT_POLICY, PolicyName, make_policy
from headrace.core.recompute_cost import prefill_seconds
from headrace.simulate.clairvoyant_bound import clairvoyant_bound
from headrace.simulate.read_trace import Trace, TracedRequest
from headrace.simulate.replay_eviction import CAPACITY_SHARES, replay_eviction, replay_policy

BLOCK_TOKENS = 16
# A tree of eight blocks: chains are paths from the root.
PATHS = [(0,), (0, 1), (0, 1, 2), (0, 1, 3), (0, 4), (5,), (5, 6), (5, 6, 7)]
TRACES = st.lists(st.sampled_from(PATHS), min_size=1, max_size=9)


def make_trace(paths) -> Trace:
    requests = tuple(TracedRequest(BLOCK_TOKENS * len(path), tuple(path)) for path in paths)
    return Trace(requests=requests, block_tokens=BLOCK_TOKENS, num_blocks=8)


def turns(conversations: int, rounds: int) -> Trace:
    """Conversations that take turns, each four blocks longer every time, behind one common block."""
    numbers: dict[tuple[int, int], int] = {}
    requests = []
    for turn, user in itertools.product(range(rounds), range(conversations)):
        own = [(user, i) for i in range(4 * (turn + 1))]
        blocks = [numbers.setdefault(name, len(numbers)) for name in [(-1, 0), *own]]
        requests.append(TracedRequest(BLOCK_TOKENS * len(blocks), tuple(blocks)))
    return Trace(requests=tuple(requests), block_tokens=BLOCK_TOKENS, num_blocks=len(numbers))


def best_of_all_caches(paths, capacity: int) -> int:
    """Block hits of the best cache there is: every set of blocks that it could keep after each request is tried."""
    states = {frozenset(): 0}
    for path in paths:
        following: dict[frozenset, int] = {}
        for held, hits in states.items():
            found = next((i for i, block in enumerate(path) if block not in held), len(path))
            available = sorted(held | set(path))
            kept_size = min(capacity, len(available))
            for kept in itertools.combinations(available, kept_size):
                following[frozenset(kept)] = max(following.get(frozenset(kept), 0), hits + found)
        states = following
    return max(states.values())


@given(paths=TRACES, capacity=st.integers(1, 4))
@settings(max_examples=60, deadline=None)
def test_the_bound_is_what_the_best_of_all_caches_hits(paths, capacity) -> None:
    assert sum(clairvoyant_bound(make_trace(paths), capacity_blocks=capacity)) == best_of_all_caches(paths, capacity)


@pytest.mark.parametrize("name", list(PolicyName))
@given(paths=TRACES, capacity=st.integers(1, 8))
@settings(max_examples=25, deadline=None)
def test_no_policy_hits_more_than_the_bound(name, paths, capacity) -> None:
    trace = make_trace(paths)
    hits = replay_policy(trace, make_policy(name), capacity_blocks=capacity)
    assert sum(hits) <= sum(clairvoyant_bound(trace, capacity_blocks=capacity))


@pytest.mark.parametrize("name", list(PolicyName))
def test_a_cache_with_room_for_all_hits_all_that_came_before(name) -> None:
    trace = turns(3, 3)
    assert replay_policy(trace, make_policy(name), capacity_blocks=1_000) == [0, 1, 1, 5, 5, 5, 9, 9, 9]


def test_saved_seconds_are_what_the_prefill_takes_less_what_the_rest_takes() -> None:
    trace = make_trace([(0, 1, 2), (0, 1, 3)])
    rows = replay_eviction(trace, report=lambda line: None, shares=[1.0], policies=[PolicyName.LRU])
    tokens, hit = 3 * BLOCK_TOKENS, 2 * BLOCK_TOKENS
    saved = prefill_seconds(tokens, context_tokens=0) - prefill_seconds(tokens - hit, context_tokens=hit)
    assert [row.policy for row in rows] == ["lru", "bound"]
    assert rows[0].saved_prefill_seconds == pytest.approx(saved, abs=1e-3)
    assert rows[0].token_hit_rate == pytest.approx(hit / (2 * tokens), abs=1e-6)


def test_the_default_is_near_the_best_policy_whatever_the_capacity() -> None:
    rows = replay_eviction(turns(30, 5), report=lambda line: None)
    for share in CAPACITY_SHARES:
        seconds = {row.policy: row.saved_prefill_seconds for row in rows if row.capacity_share == share}
        best = max(value for policy, value in seconds.items() if policy != "bound")
        assert seconds[DEFAULT_POLICY] >= 0.9 * best


def test_the_command_prints_a_row_for_each_capacity_and_policy_and_the_bound(tmp_path) -> None:
    path = tmp_path / "trace.jsonl"
    lines = [{"input_length": r.input_tokens, "hash_ids": r.block_ids} for r in turns(20, 3).requests]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    runs = [CliRunner().invoke(main, ["simulate", "--eviction", "--trace", str(path), "--json"]) for _ in range(2)]
    assert runs[0].exit_code == 0
    assert runs[0].stdout == runs[1].stdout
    document = json.loads(runs[0].stdout)
    assert list(document) == ["rows"]
    keys = {"capacity_share", "policy", "default", "token_hit_rate", "saved_prefill_seconds"}
    assert all(set(row) == keys for row in document["rows"])
    shown = [(row["capacity_share"], row["policy"]) for row in document["rows"]]
    assert shown == [(share, name) for share in (0.01, 0.02, 0.05, 0.1, 0.2) for name in [*PolicyName, "bound"]]
    assert {row["policy"] for row in document["rows"] if row["default"]} == {str(DEFAULT_POLICY)}
    assert "5% of" in runs[0].stderr
    table = CliRunner().invoke(main, ["simulate", "--eviction", "--trace", str(path)])
    assert "adaptive (default)" in table.stdout


def test_the_command_refuses_a_file_that_is_no_trace_as_an_invalid_request(tmp_path) -> None:
    (tmp_path / "trace.jsonl").write_text("{}\n")
    done = CliRunner().invoke(main, ["simulate", "--eviction", "--trace", str(tmp_path / "trace.jsonl")])
    assert (done.exit_code, done.stdout) == (3, "")
