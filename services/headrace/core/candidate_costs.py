"""What a request would cost on each worker, in seconds: computed there, or computed by one and decoded by another.

Arrays of [workers] in the order of `WorkerColumns`. What a worker has by the index and what it is predicted to have
soon count alike. Loading goes as `load_prefix` does it: from the arena that the worker maps as far as that holds the
prompt, and the rest from the store nodes that hold the longest part of it, all at the same time.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from headrace.core.block import CacheSource, HolderId
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
from headrace.core.decision import PlanTerms
from headrace.core.generation import GenerateRequest, WorkerId
from headrace.core.limits import LOAD_NODES_MAX
from headrace.core.members import NO_MATCH, PrefixMatch
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

    def load(self) -> Ints:
        """Requests on each worker. Its own count lags by a refresh but includes other gateways' calls; ours is exact
        but includes only ours. The larger of two lower bounds; their sum would count our calls twice."""
        load = self.workers.load.copy()
        for worker_id, count in self.in_flight.items():
            row = self.workers.row_of.get(worker_id)
            if row is not None:
                load[row] = max(load[row], count)
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
        match, expected = snapshot.match, snapshot.expected
        device = columns.device_blocks(match) if CacheSource.DEVICE in sources else nothing
        shared = columns.shared_blocks(match) if CacheSource.SHARED_MEMORY in sources else nothing
        self.indexed_blocks: Ints = np.maximum(device, shared)  # at hand now, as the index believes
        if expected.num_blocks_by_holder and CacheSource.DEVICE in sources:
            device = np.maximum(device, columns.device_blocks(expected))
        if expected.num_blocks_by_holder and CacheSource.SHARED_MEMORY in sources:
            shared = np.maximum(shared, columns.shared_blocks(expected))
        self.device_tokens: Ints = device * prompt.block_tokens
        self.held_tokens: Ints = np.maximum(device, shared) * prompt.block_tokens  # without a network
        far_blocks, self.far_nodes = _longest_elsewhere(snapshot.match) if CacheSource.GRPC in sources else (0, ())
        self.longest_blocks = max([far_blocks, *(int(each.max(initial=0)) for each in (device, shared))])
        self.price = gpu_price(self.queue_s[self._computing()], snapshot.usual_work_s)
        self.scores = self._score(far_blocks * prompt.block_tokens)
        free_blocks = columns.pool_blocks - columns.used_blocks
        self.step_s: Floats = columns.step_s + columns.sequence_s * (self.load + 1)
        self.decode_s: Floats = self.step_s * min(FIRST_TOKENS, request.sampling.max_tokens)
        needed = self._num_tokens // prompt.block_tokens + 1
        self.memory_s: Floats = STEPS_UNTIL_ROOM * self.step_s * (needed > free_blocks)
        self.memory_use: Floats = columns.used_blocks / columns.pool_blocks

    def _computing(self) -> Ints:
        """Workers that compute prompts; all, when none is there for that."""
        rows = np.flatnonzero(self.columns.prefills)
        return rows if len(rows) else np.arange(len(self.columns))

    def _score(self, far_tokens: int) -> Scores:
        columns = self.columns
        idle = np.zeros(len(columns))
        shared = columns.shared_memory()
        copies = [Copy(self.held_tokens, self._layout.token_bytes, shared, idle)]
        if self.far_nodes:
            way = self._way_to_far(shared, far_tokens)
            copies.append(Copy(np.maximum(self.held_tokens, far_tokens), self._layout.token_bytes, way, idle))
        workers = Workers(
            queue_s=self.queue_s,
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

    def _way_to_far(self, shared: LinkCost, far_tokens: int) -> LinkCost:
        """As one link: what is at hand by shared memory first, and the rest from the nodes that have most of it."""
        links = [self.columns.link(node, CacheSource.GRPC) for node in self.far_nodes]
        rate = np.max([link.bytes_per_s for link in links], axis=0)
        trip = np.max([link.round_trip_s for link in links], axis=0)
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

    def computed_tokens(self) -> Ints:
        """Of the prompt, on each worker."""
        return self._num_tokens - self.scores.fetch_to

    def fetches_far(self, row: int) -> bool:
        """Whether the worker's best plan loads from other hosts' store nodes."""
        return int(self.scores.copy[row]) == 1

    def block_s(self, prefill: int | None = None) -> tuple[Floats, Floats]:
        """For each decode worker to get the last block of what a prefill worker computed: by shared memory, over gRPC.

        Without a prefill worker: from any."""
        num_bytes = self._layout.block_bytes
        near = self.columns.shared_memory()
        record = None if prefill is None else self.columns.records[prefill]
        far = self.columns.link("" if record is None else record.store_node, CacheSource.GRPC)
        return near.seconds(num_bytes), far.seconds(num_bytes)

    def tail_s(self) -> Floats:
        """For each decode worker to compute what no full block covers: at least the last token."""
        block_tokens = self._request.prompt.block_tokens
        start = (self._num_tokens - 1) // block_tokens * block_tokens
        seconds: Floats = self.columns.prefill.seconds(start, self._num_tokens)
        return seconds

    def least_hand_over_s(self, decoders: Ints) -> Floats:
        """For each worker as a prefill worker: the least that handing over to one of these decode workers, other than
        itself, adds to the cost; infinite where none of them can read what it publishes."""
        after = self.tail_s() + self.decode_s + self.memory_s
        near_s, far_s = (after + block for block in self.block_s())
        columns = self.columns
        least = np.full(len(columns), np.inf)
        rows = np.arange(len(columns))
        if CacheSource.GRPC in self._request.cache.sources:
            ordered = decoders[np.argsort(far_s[decoders], kind="stable")]
            second = far_s[ordered[1]] if len(ordered) > 1 else np.inf
            least = np.where(rows == ordered[0], second, far_s[ordered[0]])
        if CacheSource.SHARED_MEMORY in self._request.cache.sources:
            mapping = decoders[columns.maps_node[decoders]]
            ordered = mapping[np.lexsort((near_s[mapping], columns.node[mapping]))]
            nodes, first = np.unique(columns.node[ordered], return_index=True)
            best, best_row = np.full(columns.num_nodes + 1, np.inf), np.full(columns.num_nodes + 1, -1)
            second_best = best.copy()
            best[nodes], best_row[nodes] = near_s[ordered[first]], ordered[first]
            has_second = first + 1 < np.append(first[1:], len(ordered))
            second_best[nodes[has_second]] = near_s[ordered[first[has_second] + 1]]
            node = columns.node  # -1, no node, is the last entry: nobody maps it
            near = np.where(best_row[node] == rows, second_best[node], best[node])
            least = np.minimum(least, near)
        return least

    def hand_off_s(self, prefill: int, decoders: Ints) -> Floats:
        """For each of these decode workers: seconds from the prefill worker's last block to the first token; infinite
        where it cannot read them. What was published before has come meanwhile, as far as there was time for it."""
        columns, sources = self.columns, self._request.cache.sources
        near_s, far_s = (block_s[decoders] for block_s in self.block_s(prefill))
        node = columns.node[decoders]
        same = columns.maps_node[decoders] & (node == columns.node[prefill]) & (node >= 0)
        block_s: Floats = np.where(same & (CacheSource.SHARED_MEMORY in sources), near_s, np.inf)
        if CacheSource.GRPC in sources:
            block_s = np.minimum(block_s, far_s)
        missing = np.maximum(self._num_tokens - self.device_tokens[decoders], 0) // self._request.prompt.block_tokens
        late_s = np.maximum(self.queue_s[decoders], missing * np.minimum(block_s, far_s)) - self.scores.ttft_s[prefill]
        seconds: Floats = np.maximum(late_s, 0.0) + block_s + self.tail_s()[decoders]
        return np.where(decoders == prefill, np.inf, seconds)

    def terms(self, computing: int, decode: int, *, hand_off_s: float, barred: str = "") -> PlanTerms:
        """One plan's terms."""
        scores, by_itself = self.scores, computing == decode
        device = min(int(self.device_tokens[computing]), self._num_tokens - 1)
        loaded = int(scores.fetch_to[computing] - scores.fetch_from[computing])
        records = self.columns.records
        return PlanTerms(
            prefill_worker=None if by_itself else records[computing].worker_id,
            decode_worker=records[decode].worker_id,
            device_tokens=device,
            loaded_tokens=loaded,
            computed_tokens=self._num_tokens - device - loaded,
            wait_s=float(scores.wait_s[computing]),
            fetch_s=float(scores.fetch_s[computing]),
            compute_s=float(scores.compute_s[computing]),
            hand_off_s=hand_off_s,
            price_s=float(scores.price_s[computing]),
            interference_s=float(scores.interference_s[computing]),
            decode_s=float(self.decode_s[decode]),
            memory_s=float(self.memory_s[decode]),
            ttft_s=float(scores.ttft_s[computing] + hand_off_s + self.memory_s[decode]),
            cost_s=float(scores.cost_s[computing] + hand_off_s + self.decode_s[decode] + self.memory_s[decode]),
            barred=barred,
        )


def _longest_elsewhere(match: PrefixMatch) -> tuple[int, tuple[str, ...]]:
    """Leading blocks of the longest run that a store node has, and the nodes that have as many."""
    runs = {holder: n for holder, n in match.num_blocks_by_holder.items() if is_node(holder)}
    longest = max(runs.values(), default=0)
    nodes = sorted(holder.removeprefix("node:") for holder, n in runs.items() if n == longest > 0)
    return longest, tuple(nodes[:LOAD_NODES_MAX])


def is_node(holder: HolderId) -> bool:
    """Whether a holder is a store node, which others can read from."""
    return holder.startswith("node:")
