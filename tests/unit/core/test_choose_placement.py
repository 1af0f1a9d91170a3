"""The placement is that of least cost by the formula, found by a plain loop over everything; ties meet."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.choose_placement import (
    FETCH_STARTS,
    TIE_S,
    Copy,
    Workers,
    choose_placement,
    gpu_price,
)
from headrace.core.step_costs import LinkCost, PrefillCost

COST = PrefillCost(base_s=0.005, tokens_per_s=12_000.0, attention_s=1.3e-9)
LINK = LinkCost(bytes_per_s=25e9, round_trip_s=0.0002)
TOKEN_BYTES = 131_072


def make_workers(queue_s: list[float], own: list[int], decodes: list[int] | None = None) -> Workers:
    return Workers(
        queue_s=np.array(queue_s),
        decodes=np.array(decodes or [0] * len(queue_s)),
        own_tokens=np.array(own),
        cost=COST,
        ids=np.arange(1, len(queue_s) + 1, dtype=np.uint64) * np.uint64(0x1234567),
    )


def make_copy(tokens: int, workers: Workers, busy_s: float = 0.0, link: LinkCost = LINK) -> Copy:
    return Copy(tokens, TOKEN_BYTES, link, np.full(len(workers), busy_s))


def cost_of(n: int, queue: float, own: int, start: int, end: int, busy: float, price: float) -> float:
    own = min(own, n - 1)
    head = float(COST.seconds(own, start))
    rest = float(COST.seconds(end, n))
    moved = (end - start) * TOKEN_BYTES
    fetch = busy + float(LINK.seconds(moved)) if moved else 0.0
    return max(queue + head, fetch) + rest + price * (head + rest)


@given(
    n=st.integers(1, 60_000),
    queue=st.lists(st.floats(0, 20), min_size=1, max_size=8),
    own=st.lists(st.integers(0, 60_000), min_size=8, max_size=8),
    copy_tokens=st.integers(0, 60_000),
    busy=st.floats(0, 3),
    price=st.floats(0, 6),
)
def test_no_placement_costs_less_than_the_one_chosen(n, queue, own, copy_tokens, busy, price):
    """Fails when a term is wrong or broadcast along the wrong axis."""
    workers = make_workers(queue, own[: len(queue)])
    placed = choose_placement(
        n, workers, copy=make_copy(copy_tokens, workers, busy), price=price, tie_key=lambda spared: 7
    )
    best = math.inf
    for index, wait in enumerate(queue):
        mine, end = min(own[index], n - 1), min(copy_tokens, n - 1)
        best = min(best, cost_of(n, wait, mine, mine, mine, busy, price))
        for share in FETCH_STARTS if copy_tokens else ():
            stretch = max(end - mine, 0)
            start = mine + int(stretch * share)
            best = min(best, cost_of(n, wait, mine, start, mine + stretch, busy, price))
    assert best - 1e-9 <= placed.cost_s <= best + TIE_S + 1e-9
    mine = min(own[placed.worker], n - 1)
    said = cost_of(n, queue[placed.worker], mine, placed.fetch_from, placed.fetch_to, busy, price)
    assert placed.cost_s == pytest.approx(said)
    assert mine <= placed.fetch_from <= placed.fetch_to <= n - 1


@pytest.mark.parametrize(("bytes_per_s", "spared"), [(25e9, 9_000), (1e8, 2_000)])
def test_a_copy_that_is_sooner_computed_than_fetched_counts_for_nothing(bytes_per_s: float, spared: int):
    """Fails when prompts scatter by a block that each worker computes, or GPU time is priced as if none need to."""
    workers = make_workers([0.0, 0.0], [2_000, 0])
    asked: list[int] = []
    link = LinkCost(bytes_per_s, LINK.round_trip_s)
    copy = make_copy(9_000, workers, link=link)
    placed = choose_placement(10_000, workers, copy=copy, price=0.0, tie_key=lambda tokens: asked.append(tokens) or 1)
    assert asked == [spared]
    assert placed.least_compute_s == pytest.approx(float(COST.seconds(spared, 10_000)))


def test_a_long_queue_outweighs_a_long_match():
    workers = make_workers([5.0, 0.0], [9_000, 0])
    assert choose_placement(10_000, workers, copy=None, price=0.0, tie_key=lambda spared: 1).worker == 1


def test_a_match_outweighs_a_short_queue():
    workers = make_workers([0.3, 0.0], [9_000, 0])
    assert choose_placement(10_000, workers, copy=None, price=0.0, tie_key=lambda spared: 1).worker == 0


def test_a_slow_link_is_not_waited_for():
    """Load or compute: fetching 10 GB/s pays, fetching over a link of 10 MB/s does not."""
    workers = make_workers([0.0], [0])
    slow = LinkCost(bytes_per_s=1e7, round_trip_s=0.0002)
    fast = choose_placement(10_000, workers, copy=make_copy(9_000, workers), price=0.0, tie_key=lambda spared: 1)
    assert fast.fetch_to - fast.fetch_from > 5_000
    kept = choose_placement(
        10_000, workers, copy=make_copy(9_000, workers, link=slow), price=0.0, tie_key=lambda spared: 1
    )
    assert kept.fetch_to == kept.fetch_from


def test_the_head_is_computed_while_the_rest_travels():
    """A link about as fast as the worker: it computes a part and fetches the other."""
    link = LinkCost(bytes_per_s=12_000.0 * TOKEN_BYTES, round_trip_s=0.0)
    workers = make_workers([0.0], [0])
    placed = choose_placement(
        20_000, workers, copy=make_copy(19_000, workers, link=link), price=0.0, tie_key=lambda spared: 1
    )
    assert 0 < placed.fetch_from < placed.fetch_to


def test_dear_gpu_time_prefers_the_worker_with_the_match():
    workers = make_workers([0.6, 0.0], [8_000, 0])
    assert choose_placement(8_500, workers, copy=None, price=0.0, tie_key=lambda spared: 1).worker == 0
    workers = make_workers([0.9, 0.0], [8_000, 0])
    assert choose_placement(8_500, workers, copy=None, price=0.0, tie_key=lambda spared: 1).worker == 1
    assert choose_placement(8_500, workers, copy=None, price=2.0, tie_key=lambda spared: 1).worker == 0


def test_decodes_beside_it_count_against_a_mixed_worker():
    workers = make_workers([0.0, 0.0], [0, 0], decodes=[30, 0])
    placed = choose_placement(10_000, workers, copy=None, price=0.0, tie_key=lambda spared: 1, interference=0.02)
    assert placed.worker == 1


def test_near_ties_go_where_the_key_says_and_spread_over_keys():
    workers = make_workers([0.0] * 10, [0] * 10)
    chosen = [
        choose_placement(1_000, workers, copy=None, price=0.0, tie_key=lambda spared, key=key: key).worker
        for key in range(400)
    ]
    again = [
        choose_placement(1_000, workers, copy=None, price=0.0, tie_key=lambda spared, key=key: key).worker
        for key in range(400)
    ]
    assert chosen == again
    assert all(15 <= chosen.count(worker) <= 75 for worker in range(10))


def test_gpu_time_is_free_while_a_tenth_of_the_workers_is():
    assert gpu_price(np.array([0.0, 0.0] + [9.0] * 8), usual_work_s=1.0) == 0.0
    assert gpu_price(np.array([1.0] * 10), usual_work_s=1.0) == pytest.approx(2.0)
    assert gpu_price(np.array([100.0] * 10), usual_work_s=1.0) == 6.0
    assert gpu_price(np.array([1.0]), usual_work_s=0.0) == 0.0


def test_the_last_token_is_always_computed():
    workers = make_workers([0.0], [5_000])
    assert choose_placement(5_000, workers, copy=None, price=0.0, tie_key=lambda spared: 1).compute_s > 0


def test_of_layers_with_a_window_no_more_is_fetched_than_the_window():
    """Fails if a windowed hit is priced as its whole prefix, or a fetch shorter than the window as all of it."""
    idle, tokens = np.zeros(1), np.array([0, 10, 100, 1_000])
    everything = Copy(1_000, 12, LINK, idle)
    windowed = Copy(1_000, 0, LINK, idle, window_tokens=100, window_token_bytes=12)
    mixed = Copy(1_000, 2, LINK, idle, window_tokens=100, window_token_bytes=10)
    assert everything.moved_bytes(tokens).tolist() == [0, 120, 1_200, 12_000]
    assert windowed.moved_bytes(tokens).tolist() == [0, 120, 1_200, 1_200]
    assert mixed.moved_bytes(tokens).tolist() == [0, 120, 1_200, 3_000]
