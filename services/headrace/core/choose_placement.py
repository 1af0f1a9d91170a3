"""Where a prompt is computed: the placement of least predicted cost in seconds, over all workers at once. Pure.

    T(g)    = max(T_queue(g) + C(own, lo), T_link(g) + bytes(lo, hi) / bandwidth + round trip) + C(hi, n)
    cost(g) = T(g) + price x work(g) + interference x decodes(g) x work(g)

C is a worker's prefill cost, [own) what it has itself, [lo, hi) what it fetches while its queue drains and it computes
[own, lo). `price` puts a value on GPU time when no worker is free: spare workers make it 0. Among placements within
`TIE_S` of the best, the rendezvous hash of the first block that nobody holds decides, so that equal prompts meet.

Knows arrays only: who the workers are, what the numbers came from and what happens next are the caller's.
"""

from dataclasses import dataclass

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

    def __len__(self) -> int:
        return len(self.queue_s)


@dataclass(frozen=True, slots=True)
class Copy:
    """The best copy elsewhere: its leading tokens, and each worker's way to it."""

    tokens: int
    token_bytes: int
    link: LinkCost
    link_busy_s: Floats  # until the link is free for us, [num_workers]


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


def choose_placement(
    prompt_tokens: int, workers: Workers, *, copy: Copy | None, price: float, tie_key: int, interference: float = 0.0
) -> Placement:
    """The worker, and what it fetches, of least cost. Needs at least one worker.

    price: seconds of answer that one second of GPU is worth.  tie_key: hash of the first block that nobody holds.
    The last token is always computed: `own_tokens` and the copy never reach past `prompt_tokens - 1`.
    """
    assert len(workers) > 0
    own = np.minimum(workers.own_tokens, prompt_tokens - 1)
    starts, ends = own[:, None], own[:, None]  # first column: nothing is fetched
    if copy is not None and copy.tokens > 0:
        end = min(copy.tokens, prompt_tokens - 1)
        stretch = np.maximum(end - own, 0)[:, None]
        starts = np.concatenate([starts, own[:, None] + (stretch * FETCH_STARTS).astype(np.int64)], axis=1)
        ends = np.concatenate(
            [ends, np.broadcast_to(own[:, None] + stretch, stretch.shape[:1] + FETCH_STARTS.shape)], 1
        )
    rates = _columns(workers.cost)
    queue = workers.queue_s[:, None]
    head = rates.seconds(own[:, None], starts)
    rest = rates.seconds(ends, prompt_tokens)
    fetch = np.zeros_like(head)
    if copy is not None and copy.tokens > 0:
        moved = (ends - starts) * copy.token_bytes
        fetch = (copy.link_busy_s[:, None] + copy.link.seconds(moved)) * (moved > 0)
    ttft = np.maximum(queue + head, fetch) + rest
    work = head + rest
    cost = ttft + (price + interference * workers.decodes[:, None]) * work
    best_column = cost.argmin(axis=1)
    best_cost = cost[np.arange(len(workers)), best_column]
    chosen = _of_near_ties(best_cost, workers.ids, tie_key)
    at = (chosen, int(best_column[chosen]))
    return Placement(
        worker=chosen,
        fetch_from=int(starts[at]),
        fetch_to=int(ends[at]),
        wait_s=float(workers.queue_s[chosen]),
        compute_s=float(work[at]),
        fetch_s=float(fetch[at]),
        ttft_s=float(ttft[at]),
        cost_s=float(cost[at]),
    )


def gpu_price(queue_s: Floats, usual_work_s: float) -> float:
    """What a second of GPU is worth in seconds of answer: 0 while a tenth of the workers is free.

    usual_work_s: running mean of the least work that requests needed.
    """
    if usual_work_s <= 0:
        return 0.0
    position = int(PRICE_QUANTILE * len(queue_s))
    least_busy = float(np.partition(queue_s, position)[position])
    return min(PRICE_MAX, PRICE_PER_QUEUE * least_busy / usual_work_s)


def _columns(cost: PrefillCost) -> PrefillCost:
    """The same cost with every array as a column, to broadcast over fetch starts."""
    fields = (cost.base_s, cost.tokens_per_s, cost.attention_s)
    return PrefillCost(*(field[:, None] if isinstance(field, np.ndarray) else field for field in fields))


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
