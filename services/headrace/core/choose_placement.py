"""Where a prompt is computed: the placement of least predicted cost in seconds, over all workers at once. Pure.

    T(g)    = max(T_queue(g) + C(own, lo), T_link(g) + bytes(lo, hi) / bandwidth + round trip) + C(hi, n)
    cost(g) = T(g) + (price + overtaken(g)) x work(g) + interference x decodes(g) x work(g)

C is a worker's prefill cost, [own) what it has itself, [lo, hi) what it fetches while its queue drains and it computes
[own, lo). T_queue is what a worker computes before the prompt; those that wait there and are computed after it, since
they rank behind it, wait for its work as well. `price` puts a value on GPU time when no worker is free: spare workers
make it 0. Among placements within `TIE_S` of the best, the rendezvous hash of the first block that every worker would
compute decides, so that equal prompts meet. Every worker, not only those within `TIE_S`: with these alone the
simulator's p90 moved by -1.7 % to +2.0 %, and in three of four runs less was found.

Knows arrays only: who the workers are, what the numbers came from and what happens next are the caller's.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from headrace.core.step_costs import LinkCost, PrefillCost

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]

# Predictions are not better than this; within it, meeting equal prompts is worth more.
TIE_S = 0.020

# Price of a GPU second: twice the queue that the least busy tenth has, in units of a usual request's work, at most 6.
PRICE_MAX = 6.0
PRICE_PER_QUEUE = 2.0
PRICE_QUANTILE = 0.10

# Share of a prefill's time that each running decode on the same worker loses by it.
INTERFERENCE = 0.02

# Where between its own match and the end of the peer's a worker may begin to fetch, as shares of that stretch.
FETCH_STARTS = np.array([0.0, 0.25, 0.5, 0.75])


@dataclass(frozen=True, slots=True)
class Workers:
    """The candidates, as arrays of one length [num_workers]."""

    queue_s: Floats  # until a prefill that is sent now could begin
    decodes: Ints  # decode sequences running beside
    own_tokens: Ints  # leading prompt tokens that each can use without a network
    cost: PrefillCost  # each field a float or [num_workers]
    ids: NDArray[np.uint64]  # stable random numbers that stand for the workers in the rendezvous hash
    overtaken: Ints | int = 0  # prompts that wait there, and will wait for this one too

    def __len__(self) -> int:
        return len(self.queue_s)


@dataclass(frozen=True, slots=True)
class Copy:
    """The best copy elsewhere: its leading tokens, and each worker's way to it. What differs between workers is an
    array, [num_workers]."""

    tokens: int | Ints
    token_bytes: float  # in the mean
    link: LinkCost
    link_busy_s: Floats  # until the link is free for us, [num_workers]
    # Of the last `window_tokens` of what is fetched, so many bytes more: of layers that see no more than those.
    window_tokens: int = 0
    window_token_bytes: int = 0

    def moved_bytes(self, tokens: Ints) -> NDArray[Any]:
        """What fetching so many tokens moves."""
        moved: NDArray[Any] = tokens * self.token_bytes
        return moved + np.minimum(tokens, self.window_tokens) * self.window_token_bytes if self.window_tokens else moved


@dataclass(frozen=True, slots=True)
class Scores:
    """The best placement on each worker, with the terms of `Placement`: arrays of [num_workers]."""

    fetch_from: Ints
    fetch_to: Ints
    copy: Ints  # index of the copy that is fetched from; -1: nothing is fetched
    wait_s: Floats
    compute_s: Floats
    fetch_s: Floats
    ttft_s: Floats
    price_s: Floats  # what the work costs others, by the price of GPU time and by those that it overtakes
    interference_s: Floats  # ... and by what it takes from decodes beside it
    cost_s: Floats


@dataclass(frozen=True, slots=True)
class Placement:
    """The choice, and every term in seconds."""

    worker: int
    fetch_from: int  # tokens [fetch_from, fetch_to) come from the copy; equal: nothing is fetched
    fetch_to: int
    wait_s: float  # until the worker is free
    compute_s: float  # work on the worker
    fetch_s: float  # until the fetched bytes are there
    ttft_s: float
    cost_s: float
    least_compute_s: float  # of the best placement on each worker


def choose_placement(
    prompt_tokens: int,
    workers: Workers,
    *,
    copy: Copy | None,
    price: float,
    tie_key: Callable[[int], int],
    interference: float = 0.0,
) -> Placement:
    """The worker, and what it fetches, of least cost. Needs at least one worker.

    price: seconds of answer that one second of GPU is worth.
    tie_key: hash of the block behind so many leading tokens, which are the most that any worker would not compute.
    What can be fetched and is not, since computing is sooner, does not count.
    The last token is always computed: `own_tokens` and the copy never reach past `prompt_tokens - 1`.
    """
    scores = score_placements(
        prompt_tokens, workers, copies=() if copy is None else (copy,), price=price, interference=interference
    )
    chosen = _of_near_ties(scores.cost_s, workers.ids, tie_key(int(scores.fetch_to.max())))
    return Placement(
        worker=chosen,
        fetch_from=int(scores.fetch_from[chosen]),
        fetch_to=int(scores.fetch_to[chosen]),
        wait_s=float(scores.wait_s[chosen]),
        compute_s=float(scores.compute_s[chosen]),
        fetch_s=float(scores.fetch_s[chosen]),
        ttft_s=float(scores.ttft_s[chosen]),
        cost_s=float(scores.cost_s[chosen]),
        least_compute_s=float(scores.compute_s.min()),
    )


def score_placements(
    prompt_tokens: int,
    workers: Workers,
    *,
    copies: Sequence[Copy],
    price: float,
    interference: float = 0.0,
    fetch_starts: Floats = FETCH_STARTS,
    fetch_slack: float = 0.0,
) -> Scores:
    """The best placement on each worker: computing all, or fetching from one of the copies. Needs at least one worker.

    fetch_starts: where a worker may begin to fetch, as in FETCH_STARTS.
    fetch_slack: share of the cost of computing, and of one round trip, by which fetching may cost more and still be
    taken, since it leaves the worker free for others.
    """
    assert len(workers) > 0
    own = np.minimum(workers.own_tokens, prompt_tokens - 1)
    starts, ends, fetch = _ways(own, copies, prompt_tokens, fetch_starts)
    head = workers.cost.seconds(own, starts) if copies and fetch_starts.any() else 0.0
    rest = workers.cost.seconds(ends, prompt_tokens)
    ttft = np.maximum(workers.queue_s + head, fetch) + rest
    work = head + rest
    price_here = price + workers.overtaken
    weight = price_here + interference * workers.decodes
    cost = ttft + weight * work
    best = _cheapest(cost, ends > starts, fetch_slack, copies) if fetch_slack else cost.argmin(axis=0)
    at = best * len(own) + np.arange(len(own))  # each worker's best, in the flattened arrays
    fetch_from, fetch_to, work_s = starts.take(at), ends.take(at), work.take(at)
    return Scores(
        fetch_from=fetch_from,
        fetch_to=fetch_to,
        copy=np.where(fetch_to > fetch_from, (best - 1) // len(fetch_starts), -1),
        wait_s=workers.queue_s,
        compute_s=work_s,
        fetch_s=fetch.take(at),
        ttft_s=ttft.take(at),
        price_s=price_here * work_s,
        interference_s=interference * workers.decodes * work_s,
        cost_s=cost.take(at),
    )


def _ways(own: Ints, copies: Sequence[Copy], prompt_tokens: int, fetch_starts: Floats) -> tuple[Ints, Ints, Floats]:
    """Starts, ends and seconds of fetches, [1 + copies * starts, num_workers]: the first row fetches nothing, then come
    each copy's. Where a copy holds no more than the worker itself, its rows fetch nothing either."""
    shape = (1 + len(copies) * len(fetch_starts), len(own))
    starts, ends, fetch = np.empty(shape, dtype=np.int64), np.empty(shape, dtype=np.int64), np.zeros(shape)
    starts[0] = ends[0] = own
    for number, copy in enumerate(copies):
        rows = slice(1 + number * len(fetch_starts), 1 + (number + 1) * len(fetch_starts))
        stretch = np.maximum(np.minimum(copy.tokens, prompt_tokens - 1) - own, 0)
        skipped = (stretch * fetch_starts[:, None]).astype(np.int64) if fetch_starts.any() else 0
        starts[rows], ends[rows] = own + skipped, own + stretch
        moved = copy.moved_bytes(stretch - skipped)
        begin_s = copy.link_busy_s + copy.link.round_trip_s
        fetch[rows] = (begin_s + moved / copy.link.bytes_per_s) * (moved > 0)
    return starts, ends, fetch


def _cheapest(cost: Floats, fetches: NDArray[np.bool_], slack: float, copies: Sequence[Copy]) -> Ints:
    """The row of least cost for each worker, where fetching may cost a little more, as `score_placements` says."""
    per_copy = (len(cost) - 1) // max(1, len(copies))
    allowed = np.empty_like(cost)
    allowed[:] = slack * cost[0]
    for number, copy in enumerate(copies):
        allowed[1 + number * per_copy : 1 + (number + 1) * per_copy] += copy.link.round_trip_s
    cheapest: Ints = (cost - allowed * fetches).argmin(axis=0)
    return cheapest


def gpu_price(queue_s: Floats, usual_work_s: float) -> float:
    """What a second of GPU is worth in seconds of answer: 0 while a tenth of the workers is free.

    usual_work_s: running mean of the least work that requests needed.
    """
    if usual_work_s <= 0:
        return 0.0
    position = int(PRICE_QUANTILE * len(queue_s))
    least_busy = float(np.partition(queue_s, position)[position])
    return min(PRICE_MAX, PRICE_PER_QUEUE * least_busy / usual_work_s)


def _of_near_ties(cost: Floats, ids: NDArray[np.uint64], tie_key: int) -> int:
    """The least cost; within TIE_S of it, the highest rendezvous hash."""
    near = np.flatnonzero(cost <= cost.min() + TIE_S)
    if len(near) == 1:
        return int(near[0])
    return int(near[rendezvous(ids[near], tie_key).argmax()])


def rendezvous(ids: NDArray[np.uint64], key: int) -> NDArray[np.uint64]:
    """A pseudo-random number for each (id, key): the finaliser of splitmix64 over their sum."""
    with np.errstate(over="ignore"):
        mixed = ids + np.uint64(key & 0xFFFF_FFFF_FFFF_FFFF)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return mixed ^ (mixed >> np.uint64(31))
