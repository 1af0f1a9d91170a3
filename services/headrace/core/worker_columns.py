"""Worker records as arrays, one row for each worker: what choosing among a thousand of them needs. Made once for each
listing of the workers, and not changed afterwards.

A record is what a worker said: numbers that make no sense (a rate of 0, a negative time) are bounded here, so that one
broken worker spoils its own predictions only.
"""

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import repeat
from statistics import median

import numpy as np

from headrace.core.block import CacheSource, HolderId
from headrace.core.choose_placement import Floats, Ints
from headrace.core.generation import WorkerId
from headrace.core.learned_costs import PRIOR_GRPC, PRIOR_SHARED_MEMORY
from headrace.core.members import ASSUMED_COSTS, LearnedCosts, MeasuredLink, NumberedRuns, PrefixMatch, WorkerRecord
from headrace.core.step_costs import LinkCost, PrefillCost

RATE_MIN = 1e-3  # tokens or bytes in a second: nothing that works is slower


@dataclass(frozen=True, slots=True)
class HeldBlocks:
    """Leading blocks of one prompt, by who has them."""

    device: Ints  # in each worker's own pool, [workers]
    shared: Ints  # in the arena that each worker maps, [workers]
    nodes: Mapping[str, int]  # of each store node that has any


class WorkerColumns:
    """Live workers of one model and namespace."""

    def __init__(self, records: Sequence[WorkerRecord]) -> None:
        self.records = _with_costs_of_peers(records)
        self.row_of: Mapping[WorkerId, int] = {record.worker_id: row for row, record in enumerate(self.records)}
        self.ids = np.array([worker_number(record.worker_id) for record in self.records], dtype=np.uint64)
        self.prefills = np.array([record.role.prefills for record in self.records], dtype=bool)
        self.decodes = np.array([record.role.decodes for record in self.records], dtype=bool)
        self.tokens_max: Ints = np.array([tokens_max(record) for record in self.records], dtype=np.int64)
        self.load: Ints = np.array([record.running + record.waiting for record in self.records], dtype=np.int64)
        self.pool_blocks: Ints = np.array([max(1, record.pool_blocks) for record in self.records], dtype=np.int64)
        # Of the pool, by sequences that run or wait: with none of them, all of it can be had.
        held = np.array([record.pool_blocks - record.free_blocks for record in self.records], dtype=np.int64)
        self.used_blocks: Ints = np.clip(held, 0, self.pool_blocks) * (self.load > 0)
        self.free_blocks = self.pool_blocks - self.used_blocks
        self.memory_use: Floats = self.used_blocks / self.pool_blocks
        self.queue_s = self._floats([record.queue_s for record in self.records])
        self.prefill = PrefillCost(
            base_s=self._floats([record.costs.prefill_base_s for record in self.records]),
            tokens_per_s=self._floats([record.costs.prefill_tokens_per_s for record in self.records], RATE_MIN),
            attention_s=self._floats([record.costs.prefill_attention_s for record in self.records]),
        )
        # Seconds of a step as it is now, and of one more sequence in it.
        self.sequence_s = self._floats([record.costs.decode_sequence_s for record in self.records])
        kv_tokens = self.used_blocks * np.array([r.namespace.layout.block_tokens for r in self.records], dtype=np.int64)
        kv_token_s = self._floats([record.costs.decode_kv_token_s for record in self.records])
        self.step_s = self._floats([record.costs.decode_base_s for record in self.records]) + kv_token_s * kv_tokens
        self.computing = np.flatnonzero(self.prefills) if self.prefills.any() else np.arange(len(self.records))
        # Numbers of the store nodes that workers publish to; -1: none.
        self.nodes = tuple(sorted({record.store_node for record in self.records if record.store_node}))
        numbers = {node: number for number, node in enumerate(self.nodes)}
        self.node: Ints = np.array([numbers.get(record.store_node, -1) for record in self.records], dtype=np.int64)
        self.maps_node = np.array([r.store_node_near and bool(r.store_node) for r in self.records], dtype=bool)
        # Holders by number: the workers, then the store nodes, and one that stands for all that nobody here has.
        holders = [*(record.holder_id for record in self.records), *(HolderId(f"node:{node}") for node in self.nodes)]
        self._holder_to_number = {holder: number for number, holder in enumerate(holders)}
        self._translated: tuple[Collection[HolderId | None], Ints] | None = None
        self._mapped_number = np.where(self.maps_node, len(self.records) + self.node, len(holders))
        self._measured: Mapping[tuple[str, CacheSource], list[tuple[int, MeasuredLink]]] | None = None
        self._links: dict[tuple[str, CacheSource], LinkCost] = {}
        self._block_s: dict[tuple[str, CacheSource], Floats] = {}

    def __len__(self) -> int:
        return len(self.records)

    def held(self, match: PrefixMatch) -> "HeldBlocks":
        """Who has how much of a prompt, by the index or by a prediction."""
        runs, unknown = match.num_blocks_by_holder, len(self._holder_to_number)
        if isinstance(runs, NumberedRuns):
            numbers, found = self._numbers_of(runs.holders), runs.depths
            numbers, found = numbers[found > 0], found[found > 0]
        else:
            numbers, found = self._numbers_of(runs), np.fromiter(runs.values(), dtype=np.int32, count=len(runs))
        depths: Ints = np.zeros(unknown + 1, dtype=np.int64)
        depths[numbers] = found
        of_nodes = depths[len(self) : unknown]
        known = np.flatnonzero(of_nodes)
        nodes = {self.nodes[number]: run for number, run in zip(known.tolist(), of_nodes[known].tolist(), strict=True)}
        if depths[unknown]:  # somebody of whom no worker here knows
            nodes |= {holder.removeprefix("node:"): run for holder, run in runs.items() if holder.startswith("node:")}
            depths[unknown] = 0
        return HeldBlocks(device=depths[: len(self)], shared=depths[self._mapped_number], nodes=nodes)

    def _numbers_of(self, holders: Collection[HolderId | None]) -> Ints:
        """Our numbers for these holders; for the same tuple as the last time without looking."""
        if self._translated is None or self._translated[0] is not holders:
            unknown = len(self._holder_to_number)
            numbers = map(self._holder_to_number.get, holders, repeat(unknown))  # type: ignore[arg-type]
            self._translated = (holders, np.fromiter(numbers, dtype=np.int64, count=len(holders)))
        return self._translated[1]

    def link(self, node_id: str, via: CacheSource) -> LinkCost:
        """Every worker's way to a store node, arrays of [workers]; a worker that has not used it has what others
        measured of such ways, or what is assumed of any."""
        key = (node_id, via)
        if key not in self._links:
            usual = self._usual(via)
            rates, trips = np.full(len(self), usual.bytes_per_s), np.full(len(self), usual.round_trip_s)
            for row, measured in self._by_link().get(key, ()):
                rates[row], trips[row] = max(RATE_MIN, measured.bytes_per_s), max(0.0, measured.round_trip_s)
            self._links[key] = LinkCost(rates, trips)  # type: ignore[arg-type]
        return self._links[key]

    def shared_memory(self) -> LinkCost:
        """Every worker's way to the arena that it maps, as in `link`."""
        key = ("", CacheSource.SHARED_MEMORY)
        if key not in self._links:
            usual = self._usual(CacheSource.SHARED_MEMORY)
            rates, trips = np.full(len(self), usual.bytes_per_s), np.full(len(self), usual.round_trip_s)
            for (node_id, via), rows in self._by_link().items():
                for row, measured in rows:
                    if via is CacheSource.SHARED_MEMORY and self.records[row].store_node == node_id:
                        rates[row], trips[row] = max(RATE_MIN, measured.bytes_per_s), max(0.0, measured.round_trip_s)
            self._links[key] = LinkCost(rates, trips)  # type: ignore[arg-type]
        return self._links[key]

    def block_s(self, node_id: str, via: CacheSource) -> Floats:
        """Seconds for each worker to get one block from a store node, [workers]; "": from any, or from its own."""
        key = (node_id, via)
        if key not in self._block_s:
            link = self.shared_memory() if via is CacheSource.SHARED_MEMORY else self.link(node_id, via)
            self._block_s[key] = link.seconds(self.records[0].namespace.layout.block_bytes)
        return self._block_s[key]

    def _floats(self, values: Sequence[float], least: float = 0.0) -> Floats:
        return np.maximum(np.array(values, dtype=np.float64), least)

    def _by_link(self) -> Mapping[tuple[str, CacheSource], list[tuple[int, MeasuredLink]]]:
        if self._measured is None:
            found: dict[tuple[str, CacheSource], list[tuple[int, MeasuredLink]]] = {}
            for row, record in enumerate(self.records):
                for link in record.links:
                    found.setdefault((link.node_id, link.via), []).append((row, link))
            self._measured = found
        return self._measured

    def _usual(self, via: CacheSource) -> LinkCost:
        measured = [link for (_, way), rows in self._by_link().items() if way is via for _, link in rows]
        if not measured:
            return PRIOR_SHARED_MEMORY if via is CacheSource.SHARED_MEMORY else PRIOR_GRPC
        return LinkCost(
            bytes_per_s=max(RATE_MIN, median(link.bytes_per_s for link in measured)),
            round_trip_s=max(0.0, median(link.round_trip_s for link in measured)),
        )


def tokens_max(worker: WorkerRecord) -> int:
    """Prompt plus output that one sequence may have on a worker. It announces less than its model's context when its
    pool is too small for that; of a model with a window, a sequence can be longer than the pool."""
    return worker.context_tokens_max


def _with_costs_of_peers(records: Sequence[WorkerRecord]) -> tuple[WorkerRecord, ...]:
    """What a worker has not measured is taken to be the median of those that have: by assumed costs, a new worker would
    get all requests, or none and then never measure anything."""
    usual: dict[str, float] = {}
    for cost in fields(LearnedCosts):
        assumed = getattr(ASSUMED_COSTS, cost.name)
        measured = [value for record in records if (value := getattr(record.costs, cost.name)) != assumed]
        usual[cost.name] = median(measured) if measured else assumed
    if usual == asdict(ASSUMED_COSTS):
        return tuple(records)

    def completed(costs: LearnedCosts) -> LearnedCosts:
        own = asdict(costs)
        return LearnedCosts(**{n: usual[n] if own[n] == getattr(ASSUMED_COSTS, n) else own[n] for n in own})

    return tuple(replace(record, costs=completed(record.costs)) for record in records)


def worker_number(worker_id: str) -> int:
    """A stable number for rendezvous hashing: every gateway has the same."""
    return int.from_bytes(hashlib.blake2b(worker_id.encode(), digest_size=8).digest(), "little")
