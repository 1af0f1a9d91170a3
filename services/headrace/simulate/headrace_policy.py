"""Headrace's own routing in the simulator: the same `choose_placement` that gateways run, over the simulated fleet."""

from dataclasses import dataclass

import numpy as np

from headrace.core.choose_placement import INTERFERENCE, Copy, Placement, Workers, choose_placement, gpu_price
from headrace.core.overtaking import queue_before
from headrace.core.predicted_blocks import PredictedBlocks
from headrace.simulate.simulated_fleet import QueueOrder, RoutePlan, SimulatedFleet, SimulatedRequest

# A decode worker computes a prompt itself while running sequences hold less than this share of its memory.
LOCAL_PREFILL_MEMORY_MAX = 0.9

# Weight of a new request in the running mean of the least work that requests need.
WORK_WEIGHT = 0.02


# Placements that are believed at the same time, at most.
PREDICTIONS_MAX = 4_096

# How much longer than predicted a placement is believed, in units of its work.
PREDICTION_SLACK = 1.0


@dataclass(frozen=True, slots=True)
class Queue:
    """What a prompt meets on each worker: arrays of [num_workers]."""

    before_s: np.ndarray  # seconds of work before it
    overtaken: np.ndarray  # prompts that wait there and would wait for it too


class HeadracePolicy:
    """`RoutePolicy` by predicted seconds."""

    name = "headrace"
    order = QueueOrder.SHORTEST_REMAINING
    keeps_chains_together = True

    def __init__(self, fleet: SimulatedFleet) -> None:
        self._fleet = fleet
        model = fleet.model
        ids = np.random.default_rng(1).integers(0, 2**63, model.num_workers, dtype=np.uint64)
        self._prefillers = np.array(model.prefillers)
        self._decoders = np.array(model.decoders)
        self._ids = ids
        self._usual_work_s = 0.0
        self._predicted = PredictedBlocks[int](chains_max=PREDICTIONS_MAX)

    def route(self, request: SimulatedRequest) -> RoutePlan:
        """Prefill worker, decode worker and what is fetched, chosen together."""
        fleet, model = self._fleet, self._fleet.model
        predicted = self.predicted_depths(request)
        held = fleet.device.depths(request.chain, model.num_workers)
        depth = np.maximum(held, predicted) * fleet.block_tokens
        queue = self.queue_before(request, depth)
        copy, source = self.best_copy(request)
        price = self.price(fleet.queue_s()[self._prefillers])
        placed = self._place(request, self._prefillers, depth=depth, queue=queue, copy=copy, price=price)
        self._usual_work_s += WORK_WEIGHT * (placed.least_compute_s - self._usual_work_s)
        worker = int(self._prefillers[placed.worker])
        until_s = fleet.now_s + placed.ttft_s + PREDICTION_SLACK * placed.compute_s
        if worker in model.decoders:
            self._predicted.add(worker, request.chain, until_s=until_s)
            return _plan(placed, prefill=worker, decode=worker, source=source)
        decode, local = self.choose_decode(request, placed, depth=depth, queue=queue)
        if local is not None:
            return RoutePlan(None, decode, local)
        self._predicted.add(worker, request.chain, until_s=until_s)
        return _plan(placed, prefill=worker, decode=decode, source=source)

    def predicted_depths(self, request: SimulatedRequest) -> np.ndarray:
        """Leading blocks that each worker is about to have."""
        return self._predicted.depths(request.chain, self._fleet.model.num_workers, now_s=self._fleet.now_s)

    def queue_before(self, request: SimulatedRequest, depth: np.ndarray) -> Queue:
        """What the prompt would wait for on each worker, and who would wait for it, by the order of workers.

        Workers that decode as well are taken to compute all that waits first: there the finer count makes the median
        shorter and lets more prompts in beside running decodes, whose gaps then miss their target more often.
        """
        fleet, model = self._fleet, self._fleet.model
        own = np.minimum(depth, request.input_tokens - 1)
        in_order = np.full(model.num_workers, self.order is not QueueOrder.FIRST_COME and not model.mixed_workers)
        work_s = model.prefill.seconds(own, request.input_tokens)
        return Queue(*queue_before(fleet.queue_s(), work_s, fleet.waiting_prompts(), in_order=in_order))

    def price(self, queue_s: np.ndarray) -> float:
        """What a second of GPU is worth now."""
        return gpu_price(queue_s, self._usual_work_s)

    def least_busy_decoder(self) -> int:
        """The decode worker with least KV."""
        return int(self._decoders[self._fleet.decode_tokens[self._decoders].argmin()])

    def _place(
        self,
        request: SimulatedRequest,
        among: np.ndarray,
        *,
        depth: np.ndarray,
        queue: Queue,
        copy: Copy | None,
        price: float,
    ) -> Placement:
        fleet = self._fleet
        mixed = fleet.model.mixed_workers > 0
        workers = Workers(
            queue_s=queue.before_s[among],
            overtaken=queue.overtaken[among],
            decodes=fleet.decodes[among],
            own_tokens=depth[among].astype(np.int64),
            cost=fleet.model.prefill,
            ids=self._ids[among],
        )
        if copy is not None:
            copy = Copy(copy.tokens, copy.token_bytes, copy.link, copy.link_busy_s[among])
        interference = INTERFERENCE if mixed else 0.0
        return choose_placement(
            request.input_tokens,
            workers,
            copy=copy,
            price=price,
            tie_key=lambda spared_tokens: self._tie_key(request, max(spared_tokens, int(depth.max()))),
            interference=interference,
        )

    def best_copy(self, request: SimulatedRequest) -> tuple[Copy | None, int]:
        """The longest run in the pool; of several hosts that have it, the one whose link is free soonest."""
        fleet = self._fleet
        if not fleet.hosts:
            return None, -1
        blocks = fleet.host.depths(request.chain, fleet.model.num_workers)
        longest = int(blocks.max())
        if longest == 0:
            return None, -1
        holders = np.flatnonzero(blocks == longest)
        busy_s = np.maximum(fleet.link_free_s - fleet.now_s, 0.0)
        source = int(holders[busy_s[holders].argmin()])
        waits = np.full(fleet.model.num_workers, busy_s[source])
        waits[source] = 0.0  # its own memory needs no link
        return Copy(longest * fleet.block_tokens, fleet.model.moved_token_bytes, fleet.model.network, waits), source

    def _tie_key(self, request: SimulatedRequest, spared_tokens: int) -> int:
        """A number for the first block that all would compute: equal prompts have it in common, others do not."""
        chain = request.chain
        block = min(spared_tokens // self._fleet.block_tokens, len(chain) - 1)
        return chain[block] * 0x9E3779B97F4A7C15 if chain else request.number

    def choose_decode(
        self, request: SimulatedRequest, placed: Placement, *, depth: np.ndarray, queue: Queue
    ) -> tuple[int, float | None]:
        """The decode worker, and the work if it computes the prompt itself."""
        fleet, model = self._fleet, self._fleet.model
        decoders = self._decoders
        decode = self.least_busy_decoder()
        hand_off_s = model.network.round_trip_s + fleet.block_tokens * model.kv_token_bytes / model.network.bytes_per_s
        best: tuple[float, int, float] | None = None
        for candidate in decoders[request.input_tokens - depth[decoders] <= model.local_prefill_tokens].tolist():
            own = min(int(depth[candidate]), request.input_tokens - 1)
            if fleet.memory_use(candidate) >= LOCAL_PREFILL_MEMORY_MAX:
                continue
            work_s = float(model.prefill.seconds(own, request.input_tokens))
            steps_s = (1 + (request.input_tokens - own) // model.prefill_chunk_tokens) * fleet.step_s(candidate)
            others = INTERFERENCE * fleet.decodes[candidate] + queue.overtaken[candidate]
            local_s = queue.before_s[candidate] + work_s + steps_s + others * work_s
            if local_s < placed.cost_s + hand_off_s and (best is None or local_s < best[0]):
                best = (local_s, candidate, work_s)
        return (decode, None) if best is None else (best[1], best[2])


def _plan(placed: Placement, *, prefill: int, decode: int, source: int) -> RoutePlan:
    return RoutePlan(prefill, decode, placed.compute_s, placed.fetch_from, placed.fetch_to, source)
