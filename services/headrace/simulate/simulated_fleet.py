"""The workers of a simulated cluster on a virtual clock: prefill queues, caches, links, hand-offs and decode batches.

Owns what happens and when; where a request goes is a `RoutePolicy`'s to say, over the same fleet. One event loop of
(time, action), no randomness: the same requests and the same policy give the same outcome.

What is modelled, and how: a worker prefills one prompt at a time; a decode batch is a fluid (every sequence gets a
token a step, and steps last what batch and KV make them last since the batch last changed); a host sends over one link,
what is read from its memory in turn and hand-offs beside it; KV of a prefill reaches the decode worker while it is
computed, all but the last block.
"""

import heapq
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial

import numpy as np

from headrace.core.eviction import DEFAULT_POLICY, PolicyName
from headrace.core.overtaking import WaitingPrompts
from headrace.core.prefix_map import PrefixMap
from headrace.core.queue_order import AGEING_PER_S
from headrace.simulate.batch_fluid import DecodeBatch
from headrace.simulate.cluster_model import ClusterModel
from headrace.simulate.windowed_memory import make_device_memory
from headrace.simulate.worker_memory import DeviceMemory, HostMemory

# A chain whose leading part of this share is on a peer is continued there, where hosts keep chains together: a copy of
# that part would cost more room than sending the rest costs time.
KEEP_TOGETHER_SHARE = 0.25


class QueueOrder(StrEnum):
    """Which waiting prompt a worker computes next."""

    FIRST_COME = "first come"
    SHORTEST_REMAINING = "shortest remaining, with ageing"


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """One request of a trace. `ideal_tokens`: what a cache without bounds would have had of its prompt."""

    number: int
    arrival_s: float
    input_tokens: int
    output_tokens: int
    chain: tuple[int, ...]
    ideal_tokens: int


@dataclass(frozen=True, slots=True)
class RoutePlan:
    """Where a request goes. Tokens [fetch_from, fetch_to) come from host `source`; equal: nothing is fetched."""

    prefill: int | None  # None: the decode worker computes the prompt itself
    decode: int
    work_s: float  # predicted work on the worker that computes: what its queue grows by
    fetch_from: int = 0
    fetch_to: int = 0
    source: int = -1


@dataclass(slots=True)
class Outcome:
    """What became of one request."""

    request: SimulatedRequest
    computed_on: int = -1
    decoded_on: int = -1
    device_tokens: int = 0  # found in the memory of the worker that computed
    host_tokens: int = 0  # fetched
    fetched_bytes: int = 0  # of those, over the network
    ttft_s: float = 0.0
    itl_s: float = 0.0  # mean gap between its tokens; 0 for a single token


@dataclass(slots=True)
class _Job:
    """A prompt that waits for a worker, or is computed."""

    request: SimulatedRequest
    plan: RoutePlan
    outcome: Outcome
    queued_s: float
    work_s: float
    fetched_s: float = 0.0  # when what it fetches is here
    ready_s: float = 0.0  # from when on computing would not wait for that
    begun_s: float = 0.0  # when it was last taken
    left_s: float | None = None  # what it takes yet, of one that was begun and made way
    times_begun: int = 0


@dataclass(slots=True)
class _Worker:
    """One worker's prefill side."""

    memory: DeviceMemory
    waiting: list[tuple[float, int, _Job]] = field(default_factory=list)  # a heap: the least goes first
    running: _Job | None = None
    batch: DecodeBatch | None = None


class SimulatedFleet:
    """All workers of one run. `queue_s()` and the arrays are what policies may look at."""

    def __init__(
        self,
        model: ClusterModel,
        *,
        block_tokens: int,
        order: QueueOrder = QueueOrder.FIRST_COME,
        keeps_chains_together: bool = False,
        host_eviction: PolicyName = DEFAULT_POLICY,
    ) -> None:
        """keeps_chains_together: what continues a chain that a peer has goes to that peer, not to a second copy.

        GPUs evict the least recently used leaf, as engines do; `host_eviction` is the pool's policy.
        """
        self.model = model
        self.block_tokens = block_tokens
        self.now_s = 0.0
        self.ended_s = 0.0  # when a sequence had its last token last
        self.device = PrefixMap[int]()
        self.host = PrefixMap[int]()
        self.outcomes: list[Outcome] = []
        number = model.num_workers
        self.run_end_s = np.zeros(number)  # when the prefill that runs will end
        self.pending_s = np.zeros(number)  # predicted work of those that wait
        self.pending_tokens = np.zeros(number, dtype=np.int64)  # prompt tokens of those that wait or run
        self.prefills = np.zeros(number, dtype=np.int64)  # waiting and running
        self.decodes = np.zeros(number, dtype=np.int64)  # sequences in the batch or waiting for memory
        self.decode_tokens = np.zeros(number, dtype=np.int64)  # KV that those have or will have
        self.link_free_s = np.zeros(number)  # when each host's link has sent what was asked of it
        self.busy_s = np.zeros(number)  # prefill work done, for the imbalance
        self._order = order
        self._keeps_chains_together = keeps_chains_together
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._serial = 0
        self._workers = [
            _Worker(make_device_memory(model, block_tokens=block_tokens, holder=w, held=self.device))
            for w in range(number)
        ]
        self.hosts = [
            HostMemory(model.host_tokens, block_tokens=block_tokens, policy=host_eviction, holder=w, held=self.host)
            for w in range(number if model.host_tokens else 0)
        ]
        for w in model.decoders:
            self._workers[w].batch = DecodeBatch(self, w, model.decode, self._workers[w].memory)

    # What policies look at

    def queue_s(self) -> np.ndarray:
        """Seconds until each worker could begin a prefill that came now: [num_workers]."""
        return np.maximum(self.run_end_s - self.now_s, 0.0) + self.pending_s

    def waiting_prompts(self) -> WaitingPrompts:
        """All that wait, on every worker."""
        jobs = [(number, job) for number, worker in enumerate(self._workers) for _, _, job in worker.waiting]
        return WaitingPrompts(
            rows=np.array([number for number, _ in jobs], dtype=np.int64),
            work_s=np.array([job.work_s for _, job in jobs], dtype=np.float64),
            waited_s=np.array([self.now_s - job.queued_s for _, job in jobs], dtype=np.float64),
        )

    def memory_use(self, worker: int) -> float:
        """Share of a worker's memory that running sequences hold."""
        memory = self._workers[worker].memory
        return memory.busy_tokens / memory.capacity_tokens

    def step_s(self, worker: int) -> float:
        """How long a decode step of that worker lasts now."""
        batch = self._workers[worker].batch
        assert batch is not None
        return batch.step_s

    def cached_tokens(self, worker: int) -> int:
        """Tokens that a worker's memory holds, for rules that look at the size of a tree."""
        return self._workers[worker].memory.used_tokens

    # The run

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Have something happen at a moment."""
        heapq.heappush(self._events, (time_s, self.next_serial(), action))

    def next_serial(self) -> int:
        """A number that grows: what breaks ties of time, the same way in every run."""
        self._serial += 1
        return self._serial

    def run(
        self, requests: Sequence[SimulatedRequest], route: Callable[[SimulatedRequest], RoutePlan]
    ) -> list[Outcome]:
        """Let the requests come at their times, each routed as `route` says, until all have ended."""
        for request in requests:
            self.at(request.arrival_s, partial(self._arrive, request, route))
        while self._events:
            self.now_s, _, action = heapq.heappop(self._events)
            action()
        assert len(self.outcomes) == len(requests), "a request was lost"
        return self.outcomes

    def _arrive(self, request: SimulatedRequest, route: Callable[[SimulatedRequest], RoutePlan]) -> None:
        plan = route(request)
        where = plan.decode if plan.prefill is None else plan.prefill
        job = _Job(request, plan, Outcome(request, where, plan.decode), self.now_s, plan.work_s)
        if plan.fetch_to > plan.fetch_from:
            job.fetched_s = self._begin_fetch(where, plan)
            job.ready_s = job.fetched_s - (
                job.work_s - float(self.model.prefill.seconds(plan.fetch_to, request.input_tokens))
            )
        self.decodes[plan.decode] += 1
        self.decode_tokens[plan.decode] += request.input_tokens + request.output_tokens
        self.pending_s[where] += job.work_s
        self.pending_tokens[where] += request.input_tokens
        self.prefills[where] += 1
        heapq.heappush(self._workers[where].waiting, (self._rank(job), self.next_serial(), job))
        self._make_way(where, job)
        self._start_next(where)

    def _make_way(self, where: int, job: _Job) -> None:
        """Where workers do so, the prompt that is computed waits again, from the end of its step on, if the new one
        ranks before what is left of it and memory has room for both."""
        worker, model = self._workers[where], self.model
        running = worker.running
        if running is None or not model.prefills_make_way or self._order is QueueOrder.FIRST_COME:
            return
        step_s = model.prefill_chunk_tokens / float(model.prefill.tokens_per_s)
        steps = math.floor((self.now_s - running.begun_s) / step_s) + 1
        step_ends_s = running.begun_s + steps * step_s
        left_s = float(self.run_end_s[where]) - step_ends_s
        ranks_before = self._rank(job) < left_s + AGEING_PER_S * running.queued_s
        if left_s <= 0 or not ranks_before or job.ready_s > step_ends_s:
            return
        if not worker.memory.fits(job.request.input_tokens):
            return
        running.left_s, running.work_s, running.ready_s = left_s, left_s, 0.0
        self.run_end_s[where] = step_ends_s
        self.pending_s[where] += left_s
        begun = running.times_begun
        self.at(step_ends_s, lambda: self._wait_again(where, running, begun))

    def _wait_again(self, where: int, job: _Job, begun: int) -> None:
        """The step is over in which it had to make way."""
        if job.times_begun != begun:
            return
        job.times_begun += 1  # its end, as it was planned, is void
        self._workers[where].running = None
        heapq.heappush(self._workers[where].waiting, (self._rank(job), self.next_serial(), job))
        self._start_next(where)

    def _start_next(self, where: int) -> None:
        worker = self._workers[where]
        if worker.running is not None or not worker.waiting:
            return
        job = self._take_ready(worker)
        worker.running = job
        self.pending_s[where] = max(0.0, self.pending_s[where] - job.work_s) if worker.waiting else 0.0
        if job.left_s is None:
            took_s = self._compute(where, worker, job)
            self.busy_s[where] += took_s
        else:
            took_s = job.left_s
        job.begun_s = self.now_s
        job.times_begun += 1
        self.run_end_s[where] = self.now_s + took_s
        if worker.batch is not None:
            worker.batch.prefill_runs(True)
        begun = job.times_begun
        self.at(self.run_end_s[where], lambda: self._computed(where, job, begun))

    def _take_ready(self, worker: _Worker) -> _Job:
        """The first that waiting for its fetch would not hold up; if all wait for theirs, the first."""
        waiting, passed = worker.waiting, []
        while waiting and waiting[0][2].ready_s > self.now_s:
            passed.append(heapq.heappop(waiting))
        chosen = heapq.heappop(waiting) if waiting else passed.pop(0)
        for entry in passed:
            heapq.heappush(waiting, entry)
        return chosen[2]

    def _rank(self, job: _Job) -> float:
        """The least goes first. Ageing makes all that wait better alike, so a rank never changes: a prompt that comes
        a second later starts half a second of work behind."""
        if self._order is QueueOrder.FIRST_COME:
            return 0.0
        return job.work_s + AGEING_PER_S * job.queued_s

    def _compute(self, where: int, worker: _Worker, job: _Job) -> float:
        """How long the prompt takes here, counting what the worker has by now and what it fetches."""
        request, plan, cost = job.request, job.plan, self.model.prefill
        last = request.input_tokens - 1
        found = request.chain[: last // self.block_tokens]  # the last token is computed, so its block is never held
        held = found[: worker.memory.num_leading(found)]
        own = len(held) * self.block_tokens
        worker.memory.begin(held, request.input_tokens)
        start, end = max(plan.fetch_from, own), min(plan.fetch_to, last)
        job.outcome.device_tokens = own
        alone_s = float(cost.seconds(own, request.input_tokens)) * self._slowdown(where)
        if end <= start:
            return alone_s
        # The pool may have lost blocks since the plan was made.
        there = self.hosts[plan.source].num_leading(request.chain) * self.block_tokens
        end = min(end, max(there, start))
        head = float(cost.seconds(own, start)) * self._slowdown(where)
        rest = float(cost.seconds(end, request.input_tokens)) * self._slowdown(where)
        took_s = max(head, job.fetched_s - self.now_s) + rest
        if end <= start or took_s >= alone_s:
            return alone_s  # computing is sooner than waiting for the rest of the fetch
        self._count_fetch(where, job, tokens=(start, end))
        return took_s

    def _begin_fetch(self, where: int, plan: RoutePlan) -> float:
        """When the planned tokens will be here. The transfer takes its turn on the source's link at once, however long
        the worker is busy; a host reads its own memory past the link."""
        moved = (plan.fetch_to - plan.fetch_from) * self.model.moved_token_bytes
        if plan.source == where:
            return self.now_s + float(moved / self.model.network.bytes_per_s)
        begins_s = max(self.now_s, float(self.link_free_s[plan.source]))
        self.link_free_s[plan.source] = begins_s + float(self.model.network.seconds(moved))
        return float(self.link_free_s[plan.source])

    def _count_fetch(self, where: int, job: _Job, *, tokens: tuple[int, int]) -> None:
        """The tokens come from the pool: for the books, and a use of its blocks."""
        start, end = tokens
        source = job.plan.source
        job.outcome.host_tokens = end - start
        if source != where:
            job.outcome.fetched_bytes += round((end - start) * self.model.moved_token_bytes)
        self.hosts[source].read(job.request.chain[: end // self.block_tokens])

    def _slowdown(self, where: int) -> float:
        """A prefill beside running decodes takes longer: each takes a share of the worker."""
        batch = self._workers[where].batch
        return 1.0 if batch is None else 1.0 + self.model.interference * batch.num_sequences

    def _computed(self, where: int, job: _Job, begun: int) -> None:
        if job.times_begun != begun:
            return  # it made way before its end
        worker, request = self._workers[where], job.request
        worker.running = None
        self.prefills[where] -= 1
        self.pending_tokens[where] -= request.input_tokens
        found = job.outcome
        worker.memory.end(request.chain[: found.device_tokens // self.block_tokens], request.input_tokens)
        first = (found.device_tokens + found.host_tokens) // self.block_tokens
        worker.memory.add_computed(request.chain, first=first)
        if self.hosts:
            self._publish(where, job)
        if worker.batch is not None:
            worker.batch.prefill_runs(False)
        self._hand_over(where, job)
        self._start_next(where)

    def _publish(self, where: int, job: _Job) -> None:
        """What was computed goes to memory: the host's own, or that of a peer which has most of what it stands on."""
        chain = job.request.chain
        target, there = where, self.hosts[where].num_leading(chain)
        for depth, holders in self.host.levels(chain) if self._keeps_chains_together else ():
            if depth > max(there, KEEP_TOGETHER_SHARE * len(chain)):
                target, there = holders.bit_length() - 1, depth
        if target != where:
            job.outcome.fetched_bytes += (len(chain) - there) * self.block_tokens * self.model.kv_token_bytes
        self.hosts[target].add(chain)

    def _hand_over(self, where: int, job: _Job) -> None:
        decode = job.plan.decode
        batch = self._workers[decode].batch
        assert batch is not None
        if decode == where:
            batch.join(job.outcome, computed_here=True)
            return
        present = self._workers[decode].memory.num_leading(job.request.chain) * self.block_tokens
        moved = round(max(0, job.request.input_tokens - present) * self.model.moved_token_bytes)
        last = min(moved, self.block_tokens * self.model.kv_token_bytes)
        # All but the last block went out while the prompt was computed. The last shares the link with what the host
        # sends to others, half each: it does not wait behind a long transfer.
        took_s = last / self.model.network.bytes_per_s
        shared = 2.0 if self.link_free_s[where] > self.now_s else 1.0
        self.link_free_s[where] = max(self.link_free_s[where], self.now_s) + took_s
        arrives_s = self.now_s + (self.model.network.round_trip_s + took_s * shared) * (moved > 0)
        job.outcome.fetched_bytes += moved
        self.at(arrives_s, lambda: batch.join(job.outcome, computed_here=False))

    def ended(self, outcome: Outcome) -> None:
        """A sequence has its last token."""
        request = outcome.request
        self.decodes[outcome.decoded_on] -= 1
        self.decode_tokens[outcome.decoded_on] -= request.input_tokens + request.output_tokens
        self.ended_s = self.now_s
        self.outcomes.append(outcome)
