"""What a request would cost on each worker, in seconds: computed there, or computed by one and decoded by another.

Arrays of [workers] in the order of `WorkerColumns`. What a worker has by the index and what it is predicted to have
soon count alike. Loading goes as `load_prefix` does it: from the arena that the worker maps as far as that holds the
prompt, and the rest from the store nodes that hold the longest part of it, all at the same time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, reduce
from itertools import repeat
from typing import Any

import numpy as np

from headrace.core.block import CacheSource
from headrace.core.choose_placement import (
    INTERFERENCE,
    Copy,
    Floats,
    Ints,
    Scores,
    Workers,
    gpu_price,
    score_placements,
)
from headrace.core.decision import PlanColumns
from headrace.core.generation import GenerateRequest, WorkerId
from headrace.core.limits import LOAD_NODES_MAX
from headrace.core.members import NO_MATCH, PrefixMatch
from headrace.core.overtaking import WaitingPrompts, queue_before
from headrace.core.step_costs import LinkCost
from headrace.core.worker_columns import WorkerColumns

# A load begins before the prompt's first step and delivers whole prefixes: no computing while it runs.
FROM_THE_START = np.zeros(1)

# Share of the cost of computing by which loading may cost more, beside one round trip: it leaves the worker to others.
FETCH_SLACK = 0.05

# Output tokens whose time counts in the choice of a decode worker: those by which a caller feels a slow one.
FIRST_TOKENS = 8

# Steps until one of a full pool's sequences ends: half of a usual output of 64 tokens.
STEPS_UNTIL_ROOM = 32


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What is known at the moment of choosing. All of it may be stale; a plan is a hint until a worker accepts it."""

    workers: WorkerColumns  # live workers of the request's model and namespace, and no others
    match: PrefixMatch
    expected: PrefixMatch = NO_MATCH  # what placements of a moment ago will bring
    queue_s: Floats | None = None  # of each worker, as of now; None: as its record says
    in_flight: Mapping[WorkerId, int] = field(default_factory=dict)  # this gateway's own calls, exact
    failed: frozenset[WorkerId] = frozenset()  # workers that already failed in this request
    usual_work_s: float = 0.0  # running mean of the least work that requests needed
    waiting: WaitingPrompts | None = None  # this gateway's own prompts without a first token; others' it knows not of

    def load(self) -> Ints:
        """Requests on each worker. Its own count lags by a refresh but includes other gateways' calls; ours is exact
        but includes only ours. The larger of two lower bounds; their sum would count our calls twice."""
        load = self.workers.load.copy()
        if self.in_flight:
            rows = np.fromiter(map(self.workers.row_of.get, self.in_flight, repeat(-1)), dtype=np.int64)
            counts = np.fromiter(self.in_flight.values(), dtype=np.int64)
            rows, counts = rows[rows >= 0], counts[rows >= 0]
            load[rows] = np.maximum(load[rows], counts)
        return load


class CandidateCosts:
    """One request on every worker of a snapshot."""

    def __init__(self, request: GenerateRequest, snapshot: Snapshot) -> None:
        columns, prompt = snapshot.workers, request.prompt
        self.columns = columns
        self.load = snapshot.load()
        self.queue_s = columns.queue_s if snapshot.queue_s is None else snapshot.queue_s
        self._request = request
        self._layout = columns.records[0].namespace.layout
        self._num_tokens = len(prompt.token_ids)
        sources = request.cache.sources
        nothing: Ints = np.zeros(len(columns), dtype=np.int64)
        held = columns.held(snapshot.match)
        device = held.device if CacheSource.DEVICE in sources else nothing
        shared = held.shared if CacheSource.SHARED_MEMORY in sources else nothing
        self.indexed_blocks: Ints = np.maximum(device, shared)  # at hand now, as the index believes
        if snapshot.expected.num_blocks_by_holder:
            coming = columns.held(snapshot.expected)
            device = np.maximum(device, coming.device) if CacheSource.DEVICE in sources else device
            shared = np.maximum(shared, coming.shared) if CacheSource.SHARED_MEMORY in sources else shared
        at_hand: Ints = np.maximum(device, shared)
        self.device_tokens: Ints = device * prompt.block_tokens
        self.held_tokens: Ints = at_hand * prompt.block_tokens  # without a network
        self.node_runs = held.nodes if CacheSource.GRPC in sources else {}  # blocks that can be read over a network
        self.far_blocks = max(self.node_runs.values(), default=0)
        self.price = gpu_price(self.queue_s[columns.computing], snapshot.usual_work_s)
        self.before_s, self.overtaken = self._order_among(snapshot.waiting)
        self.scores = self._score(self.far_blocks * prompt.block_tokens)
        self.computed_tokens: Ints = self._num_tokens - self.scores.fetch_to  # of the prompt, on each worker
        self.spared_blocks = int(self.scores.fetch_to.max()) // prompt.block_tokens  # where the furthest worker begins
        self.step_s: Floats = columns.step_s + columns.sequence_s * (self.load + 1)
        self.decode_s: Floats = self.step_s * min(FIRST_TOKENS, request.sampling.max_tokens)
        needed = self._num_tokens // prompt.block_tokens + 1
        self.memory_s: Floats = STEPS_UNTIL_ROOM * self.step_s * (needed > columns.free_blocks)

    def _order_among(self, waiting: WaitingPrompts | None) -> tuple[Floats, Ints | int]:
        """Seconds until the prompt could begin on each worker, and how many prompts there would wait for it."""
        columns = self.columns
        in_order = columns.prefills & ~columns.decodes
        if waiting is None or not in_order[waiting.rows].any():
            return self.queue_s, 0
        work_s = columns.prefill.seconds(np.minimum(self.held_tokens, self._num_tokens - 1), self._num_tokens)
        return queue_before(self.queue_s, work_s, waiting, in_order=in_order)

    def _score(self, far_tokens: int) -> Scores:
        columns = self.columns
        idle = np.zeros(len(columns))
        shared = columns.shared_memory()
        copies = [self._copy(self.held_tokens, shared, idle)]
        if far_tokens:
            way = self._way_to_far(shared, far_tokens)
            copies.append(self._copy(np.maximum(self.held_tokens, far_tokens), way, idle))
        workers = Workers(
            queue_s=self.before_s,
            overtaken=self.overtaken,
            decodes=self.load * columns.decodes,
            own_tokens=self.device_tokens,
            cost=columns.prefill,
            ids=columns.ids,
        )
        return score_placements(
            self._num_tokens,
            workers,
            copies=copies,
            price=self.price,
            interference=INTERFERENCE,
            fetch_starts=FROM_THE_START,
            fetch_slack=FETCH_SLACK,
        )

    def _copy(self, tokens: Ints, link: LinkCost, idle: Floats) -> Copy:
        """A copy of so many tokens: of layers with a window, no more is fetched than the window."""
        layout, window_tokens = self._layout, self.columns.records[0].window_tokens
        if not window_tokens:
            return Copy(tokens, layout.token_bytes, link, idle)
        if not layout.near_layers:
            return Copy(tokens, 0, link, idle, window_tokens, layout.token_bytes)
        return Copy(tokens, layout.wide.token_bytes, link, idle, window_tokens, layout.near.token_bytes)

    def _way_to_far(self, shared: LinkCost, far_tokens: int) -> LinkCost:
        """As one link: what is at hand by shared memory first, and the rest from the nodes that have most of it."""
        nodes = sorted(node for node, run in self.node_runs.items() if run == self.far_blocks)[:LOAD_NODES_MAX]
        links = [self.columns.link(node, CacheSource.GRPC) for node in nodes]
        rate: Any = reduce(np.maximum, (link.bytes_per_s for link in links))
        trip: Any = reduce(np.maximum, (link.round_trip_s for link in links))
        near = np.maximum(self.held_tokens - self.device_tokens, 0)
        far = np.maximum(far_tokens - self.held_tokens, 0)
        seconds_a_byte = (near / shared.bytes_per_s + far / rate) / np.maximum(near + far, 1)
        uses_both = (near > 0) & (far > 0)
        return LinkCost(
            bytes_per_s=np.where(near + far > 0, 1 / np.maximum(seconds_a_byte, 1e-15), rate),
            round_trip_s=np.where(uses_both, trip + shared.round_trip_s, trip),
        )

    def local_cost_s(self) -> Floats:
        """Of each worker that decodes, computing the prompt itself."""
        total: Floats = self.scores.cost_s + self.decode_s + self.memory_s
        return total

    def fetches_far(self, row: int) -> bool:
        """Whether the worker's best plan loads from other hosts' store nodes."""
        return int(self.scores.copy[row]) == 1

    @cached_property
    def tail_s(self) -> Floats:
        """For each decode worker to compute what no full block covers: at least the last token."""
        block_tokens = self._request.prompt.block_tokens
        start = (self._num_tokens - 1) // block_tokens * block_tokens
        seconds: Floats = self.columns.prefill.seconds(start, self._num_tokens)
        return seconds

    def least_hand_over_s(self, prefillers: Ints, decoders: Ints) -> Floats:
        """For each of these prefill workers: the least that handing over to one of these decode workers, other than
        itself, adds to the cost; infinite where none of them can read what it publishes."""
        columns, sources = self.columns, self._request.cache.sources
        after = self.tail_s + self.decode_s + self.memory_s
        least = np.full(len(prefillers), np.inf)
        if CacheSource.GRPC in sources:
            cost_s = (after + columns.block_s("", CacheSource.GRPC))[decoders]
            everywhere: Ints = np.zeros(len(columns), dtype=np.int64)
            least = _least_of_others(prefillers, decoders, cost_s, everywhere)
        if CacheSource.SHARED_MEMORY in sources:
            mapping = decoders[columns.maps_node[decoders]]
            cost_s = (after + columns.block_s("", CacheSource.SHARED_MEMORY))[mapping]
            least = np.minimum(least, _least_of_others(prefillers, mapping, cost_s, columns.node))
        return least

    def hand_off_s(self, prefill: int, decoders: Ints) -> Floats:
        """For each of these decode workers: seconds from the prefill worker's last block to the first token; infinite
        where it cannot read them. What was published before has come meanwhile, as far as there was time for it."""
        node = self.columns.records[prefill].store_node
        return self._hand_off_s(prefill, decoders, self.columns.block_s(node, CacheSource.GRPC)[decoders])

    def hand_offs_s(self, prefillers: Ints, decode: int) -> Floats:
        """As `hand_off_s`, for each of these prefill workers and one decode worker."""
        columns = self.columns
        nodes = [columns.records[row].store_node for row in prefillers.tolist()]
        far_s = np.array([columns.block_s(node, CacheSource.GRPC)[decode] for node in nodes], dtype=np.float64)
        return self._hand_off_s(prefillers, decode, far_s)

    def _hand_off_s(self, prefill: int | Ints, decode: int | Ints, far_s: Floats) -> Floats:
        """far_s: for the last block by gRPC. One of the workers is a row, the other one an array of rows."""
        columns, sources = self.columns, self._request.cache.sources
        block_s = far_s if CacheSource.GRPC in sources else np.full(len(far_s), np.inf)
        if CacheSource.SHARED_MEMORY in sources:
            near_s = columns.block_s("", CacheSource.SHARED_MEMORY)[decode]
            same = columns.maps_node[decode] & (columns.node[decode] == columns.node[prefill])
            block_s = np.where(same, np.minimum(block_s, near_s), block_s)
        missing = np.maximum(self._num_tokens - self.device_tokens[decode], 0) // self._request.prompt.block_tokens
        late_s = np.maximum(self.queue_s[decode], missing * np.minimum(block_s, far_s)) - self.scores.ttft_s[prefill]
        seconds = np.maximum(late_s, 0.0) + block_s + self.tail_s[decode]
        return np.where(np.equal(decode, prefill), np.inf, seconds)

    def comes_late(self, prefill: int, decode: int, hand_off_s: float) -> bool:
        """Whether the way between these two costs the first token more than FETCH_SLACK of the seconds in which the
        decode worker computes the whole prompt, and one round trip: the bound that holds for every load."""
        link: Any = self.columns.link(self.columns.records[prefill].store_node, CacheSource.GRPC)
        cold_s = self.columns.prefill.seconds(0, self._num_tokens)[decode]
        return bool(hand_off_s - self.tail_s[decode] > FETCH_SLACK * cold_s + link.round_trip_s[decode])

    def cost_s(self, computing: int | Ints, decode: int | Ints, hand_off_s: float | Floats) -> Floats:
        """Of plans whose workers are these rows; a plan without a hand-over has the same one twice."""
        cost_s: Floats = self.scores.cost_s[computing] + hand_off_s + self.decode_s[decode] + self.memory_s[decode]
        return cost_s

    def terms(self, computing: Ints, decode: Ints, *, hand_off_s: Floats, barred: Sequence[str]) -> PlanColumns:
        """The same plans, with every term."""
        scores, records = self.scores, self.columns.records
        device = np.minimum(self.device_tokens[computing], self._num_tokens - 1)
        loaded = scores.fetch_to[computing] - scores.fetch_from[computing]
        memory_s = self.memory_s[decode]
        pairs = zip(computing.tolist(), decode.tolist(), strict=True)
        return PlanColumns(
            prefill_worker=[None if row == by else records[row].worker_id for row, by in pairs],
            decode_worker=[records[row].worker_id for row in decode.tolist()],
            device_tokens=device,
            loaded_tokens=loaded,
            computed_tokens=self._num_tokens - device - loaded,
            wait_s=scores.wait_s[computing],
            fetch_s=scores.fetch_s[computing],
            compute_s=scores.compute_s[computing],
            hand_off_s=hand_off_s,
            price_s=scores.price_s[computing],
            interference_s=scores.interference_s[computing],
            decode_s=self.decode_s[decode],
            memory_s=memory_s,
            ttft_s=scores.ttft_s[computing] + hand_off_s + memory_s,
            cost_s=self.cost_s(computing, decode, hand_off_s),
            barred=barred,
        )


def _least_of_others(rows: Ints, others: Ints, cost_s: Floats, group: Ints) -> Floats:
    """For each of these rows: the least cost of the others of its group, itself left out; infinite without any.

    cost_s: [others].  group: [workers]; -1 is no group.
    """
    least = np.full(group.max() + 2, np.inf)  # the last one stands for no group
    of_others = group[others]
    np.minimum.at(least, of_others, cost_s)
    is_other = np.zeros(len(group), dtype=bool)
    is_other[others] = True
    if not is_other[rows].any():
        return least[group[rows]]
    best = np.full(len(least), -1)
    winners = np.flatnonzero(cost_s == least[of_others])
    best[of_others[winners]] = others[winners]
    second, beaten = np.full(len(least), np.inf), others != best[of_others]
    np.minimum.at(second, of_others[beaten], cost_s[beaten])
    return np.where(best[group[rows]] == rows, second[group[rows]], least[group[rows]])
