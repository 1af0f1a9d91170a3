"""One worker: its engine, its publisher, its place among the members, and what every call on it has in common.

Owns the worker's life (start, announce, drain, stop), the account of attempts in flight, and the first half of every
call: admit, load what is held elsewhere, share it. What a call then computes is `prefill/`'s or `decode/`'s.
"""

import asyncio
import functools
import math
import os
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, cast

from headrace.core.block import CacheSource, NamespaceId
from headrace.core.clock import Clock, Deadline
from headrace.core.errors import CacheFault, IndexUnavailable, WorkerUnavailable
from headrace.core.generation import (
    ControlReport,
    DecodeCall,
    DeviceListing,
    EvictReport,
    EvictSelector,
    GenerateRequest,
    HandOff,
    MeasuredWork,
    PrefillCall,
    WorkerId,
)
from headrace.core.learned_costs import PRIOR_GRPC, PRIOR_PREFILL
from headrace.core.limits import (
    ATTEMPTS_REMEMBERED,
    DRAIN_TIMEOUT_MS,
    MEMBER_REFRESH_MS,
    MEMBER_TTL_MS,
)
from headrace.core.members import LearnedCosts, MeasuredLink, WorkerRecord, WorkerRole
from headrace.core.overtake_limits import OVERTAKE_ROUND_TRIP_MIN_MS
from headrace.core.ports import Membership, PrefixPool, StoreNodes
from headrace.core.transfer_budget import TransferBudget
from headrace.engine.engine import Admission, Engine
from headrace.engine.event_stream import FilledBlock
from headrace.engine.list_device import list_device
from headrace.engine.pool_values import Short
from headrace.transfer.device_expiry import DeviceExpiry
from headrace.transfer.early_blocks import EarlyBlocks
from headrace.transfer.follow_prefill import await_first_block
from headrace.transfer.home_nodes import HomeNodes
from headrace.transfer.load_admitted import load_admitted
from headrace.transfer.load_prefix import LoadedPrefix, LoadPlan, asked_ways, load_prefix
from headrace.transfer.load_window import window_budget
from headrace.transfer.publish_blocks import BlockPublisher, Producer
from headrace.transfer.store_nodes import StoreNodeTable
from headrace.transfer.timed_nodes import TimedStoreNodes


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """An admitted prompt: its leading `len(sources)` blocks are valid in the pool, each with where it came from."""

    admission: Admission
    sources: tuple[CacheSource, ...]
    sink_is_local: bool  # what is computed is published to the node that shared memory was read from
    load_s: float  # what loading took
    since_s: float  # when it was done
    home_node: str = ""  # has the prefix, of which this host's node could not have all: what stands on it goes there

    @property
    def num_blocks(self) -> int:
        """Leading blocks that need not be computed."""
        return len(self.sources)

    def work(self, clock: Clock) -> MeasuredWork:
        """What the prompt took, when the last of it has been computed just now."""
        return MeasuredWork(load_s=self.load_s, compute_s=clock.now_s() - self.since_s)

    @property
    def is_stored_here(self) -> bool:
        """Whether the reused blocks are all in the node to which the others are published: the last one was read there
        just now, and a node keeps no block without its parent."""
        return self.sink_is_local and all(source is CacheSource.SHARED_MEMORY for source in self.sources[-1:])


class Worker:
    """What prefill and decode share. All methods belong to the event loop that called `start`."""

    def __init__(
        self,
        *,
        worker_id: WorkerId,
        role: WorkerRole,
        host: str,
        engine: Engine,
        pool: PrefixPool,
        nodes: StoreNodes,
        node_table: StoreNodeTable,
        membership: Membership,
        clock: Clock,
        report_fault: Callable[[CacheFault], None],
        metrics_port: int = 0,
        load_patience_ms: int = OVERTAKE_ROUND_TRIP_MIN_MS,
        ray_cluster: str = "",
    ) -> None:
        """pool: the engine's, in the namespace's layout. nodes: what calls use, metered or not; node_table: its owner,
        started and stopped with this worker. load_patience_ms: a load may always take so long for its first block."""
        self.worker_id = worker_id
        self.engine = engine
        self._pool = pool
        self.nodes = nodes
        self.clock = clock
        self.report_fault = report_fault
        self.layout = engine.model.namespace.layout
        self.publisher = BlockPublisher(
            nodes=nodes,
            pool=pool,
            producer=Producer(worker_id=worker_id, layout=self.layout, clock=clock),
            drop_reference=engine.pool.unref,
            report=report_fault,
        )
        self._node_table = node_table
        self._membership = membership
        self._attempts_running = 0
        self._attempts_seen: OrderedDict[str, None] = OrderedDict()
        self._early_blocks = EarlyBlocks(engine)
        self.home_nodes = HomeNodes(engine, nodes, report_fault=report_fault)
        self._idle = asyncio.Event()
        self._idle.set()
        self._serving = False
        self._announcer: asyncio.Task[None] | None = None
        self._identity = WorkerRecord(
            worker_id=worker_id,
            incarnation=clock.unix_ms(),
            role=role,
            host=host,
            store_node="",
            model=engine.model.name,
            namespace=engine.model.namespace,
            context_tokens_max=engine.context_tokens_max,
            pool_blocks=engine.pool.num_blocks,
            pid=os.getpid(),
            model_path=str(engine.model.path),
            metrics_port=metrics_port,
            window_tokens=engine.window.tokens or engine.near_window.tokens or 0,
            ray_cluster=ray_cluster,
        )
        self._expiry = DeviceExpiry(engine.pool, self._identity, clock=clock)
        self._timed_nodes = TimedStoreNodes(
            nodes, clock, patience_s=load_patience_ms / 1000, tell_ends=self._expiry.hear
        )

    async def start(self) -> None:
        """Be ready, then be seen: the record is announced last. Idempotent."""
        if self._serving:
            return
        self.engine.start()
        await self._node_table.start()
        self.publisher.start()
        self._expiry.start()
        self._serving = True
        await self._announce()
        self._announcer = asyncio.create_task(self._keep_announced(), name="announce worker")

    async def stop(self) -> None:
        """Leave the members, let running calls finish for a while, end those that have not, close. Idempotent."""
        if not self._serving:
            return
        self._serving = False  # new calls are refused from here on
        await self._withdraw()
        with suppress(TimeoutError):  # what still runs then is ended by the engine, with WorkerUnavailable
            async with asyncio.timeout(DRAIN_TIMEOUT_MS / 1000):
                await self._idle.wait()
        try:
            await self.engine.stop()
        finally:
            await self._expiry.stop()
            await self.publisher.stop()
            await self._node_table.stop()

    def healthy(self) -> bool:
        """Whether a request sent now can be served, and the tasks behind it live. Being busy is healthy."""
        if not self._serving or self._announcer is None or self._announcer.done():
            return False
        tasks_run = self.publisher.running and self._expiry.running and self._node_table.following
        return self.engine.healthy() and tasks_run

    def record(self) -> WorkerRecord:
        """Who this worker is and how loaded it is now."""
        load = self.engine.load()
        return replace(
            self._identity,
            store_node=self.nodes.sink_node_id(),
            store_node_near=self.nodes.sink_node_id() == self.nodes.local_node_id(),
            running=load.running,
            waiting=load.waiting,
            free_blocks=load.free_blocks,
            kept_blocks=load.kept_blocks,
            unix_ms=self.clock.unix_ms(),
            queue_s=load.ahead.queue_s,
            costs=LearnedCosts.of(load.ahead.prefill, load.ahead.decode),
            links=self._timed_nodes.times.links(),
        )

    def evict_device(self, selector: EvictSelector, *, dry_run: bool) -> EvictReport:
        """Evict from this worker's pool; the report says what was done in fact."""
        report = self.engine.evict_device(selector, dry_run=dry_run)
        return replace(report, holder=self._identity.holder_id)

    def list_device(self, selector: EvictSelector, *, limit: int) -> DeviceListing:
        """What this worker's pool holds, heads first, and its books as they are now."""
        return list_device(self.engine.pool, self._identity, selector, limit=limit)

    def set_device_ttl(self, selector: EvictSelector, *, ttl_s: float | None) -> ControlReport:
        """As WorkerCalls.set_device_ttl."""
        return self._expiry.order(selector, ttl_s=ttl_s)

    @property
    def attempts_running(self) -> int:
        """Calls in flight."""
        return self._attempts_running

    @contextmanager
    def attempt(self, call: PrefillCall | DecodeCall) -> Iterator[None]:
        """Take a call on, or refuse it with WorkerUnavailable before anything was started; counts it while it runs.

        Refused: while stopping, for another worker or another namespace (its blocks would be hashed differently), and
        an attempt id that was here before. Ids are minted per attempt, so one that comes twice was delivered twice.
        """
        if not self._serving:
            raise WorkerUnavailable(self.worker_id, "it is stopping")
        if call.worker_id != self.worker_id:
            raise WorkerUnavailable(call.worker_id, f"the call reached worker {self.worker_id}")
        if call.request.prompt.namespace != self._namespace_of(call.request):
            raise WorkerUnavailable(self.worker_id, "the prompt was hashed for another model or other settings")
        if call.attempt_id in self._attempts_seen:
            raise WorkerUnavailable(self.worker_id, f"attempt {call.attempt_id} was here before")
        self._attempts_seen[call.attempt_id] = None
        if len(self._attempts_seen) > ATTEMPTS_REMEMBERED:
            self._attempts_seen.popitem(last=False)
        self._attempts_running += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._attempts_running -= 1
            if self._attempts_running == 0:
                self._idle.set()

    def _namespace_of(self, request: GenerateRequest) -> NamespaceId:
        """In which namespace the request's prompt must have been hashed to be computed here."""
        return self._identity.namespace.narrowed(request.cache_salt, trust_group=request.trust_group).id

    @asynccontextmanager
    async def hold_prefix(
        self,
        request: GenerateRequest,
        *,
        num_blocks: int,
        reusable_blocks: int,
        hint_nodes: tuple[str, ...],
        deadline: Deadline,
        hand_off: HandOff | None = None,
    ) -> AsyncIterator[HeldPrefix]:
        """Admit a prompt with room for `num_blocks`, and load up to `reusable_blocks` leading ones from where they are.

        hand_off: the prompt's blocks are loaded as they appear. Pool blocks are taken before the first one is there
        only if they can be had at once and no more than HAND_OFF_POOL_SHARE of the pool waits in this way; else after
        it. Thus prompts that this very worker is to prefill never wait for those that wait for somebody's prefill.
        The blocks are held for the length of the scope and given back on every way out of it. Raises Overloaded,
        InvalidRequest (can never fit), DeadlineExceeded; never a CacheFault.
        """
        ttl_s = request.cache.retention.ttl_s
        with ExitStack() as waiting:
            if hand_off is not None:
                await self._await_turn(waiting, request, num_blocks, hand_off, deadline=deadline)
            admission = await self.engine.admit(
                request.prompt,
                num_blocks=num_blocks,
                use_device=CacheSource.DEVICE in request.cache.sources,
                deadline=deadline,
                ttl_s=math.inf if ttl_s is None else ttl_s,
                account=request.trust_group,
                priority=request.priority,
            )
            try:
                num_device = min(admission.num_device_blocks, reusable_blocks)
                plan = LoadPlan(
                    first_block=num_device,
                    end_block=reusable_blocks,
                    sources=request.cache.sources,
                    hint_nodes=hint_nodes,
                    retention=request.cache.retention,
                    budget=self._budget(request, range(num_device, reusable_blocks), hint_nodes),
                )
                admitted_s = self.clock.now_s()
                loaded = await self._load(request, admission, plan, hand_off, deadline)
                waiting.close()
                held = HeldPrefix(
                    admission,
                    (CacheSource.DEVICE,) * num_device + loaded.sources,
                    sink_is_local=self.nodes.sink_node_id() == self.nodes.local_node_id(),
                    load_s=self.clock.now_s() - admitted_s,
                    since_s=self.clock.now_s(),
                    home_node=self.home_nodes.find(request, loaded, num_device=num_device, hint_nodes=hint_nodes),
                )
                if request.cache.publish:
                    self.engine.mark_loaded(admission, held.num_blocks)
                yield held
            finally:
                self.engine.release(admission)

    def _budget(self, request: GenerateRequest, blocks: range, hint_nodes: tuple[str, ...]) -> TransferBudget | None:
        """What loading these blocks may cost here; None until it is known how fast this worker computes."""
        prefill, block_tokens = self.engine.load().ahead.prefill, request.prompt.block_tokens
        if prefill == PRIOR_PREFILL or not blocks:
            return None
        ways = asked_ways(self.nodes, request.cache.sources, hint_nodes)
        times, num_bytes = self._timed_nodes.times, len(blocks) * self.layout.block_bytes
        rates = [link.bytes_per_s for link in times.links() if (link.node_id, link.via) in ways]
        return TransferBudget(
            prefill=prefill,
            first_token=blocks.start * block_tokens,
            end_token=blocks.stop * block_tokens,
            prompt_tokens=len(request.prompt.token_ids),
            predicted_s=num_bytes / min(rates, default=PRIOR_GRPC.bytes_per_s),
            round_trip_s=times.round_trip_s(ways),
        )

    async def _load(
        self,
        request: GenerateRequest,
        admission: Admission,
        plan: LoadPlan,
        hand_off: HandOff | None,
        deadline: Deadline,
    ) -> LoadedPrefix:
        """As `load_admitted`; faults are reported."""
        loaded = await self._here(load_admitted)(
            admission,
            self.engine,
            plan=plan,
            budget=lambda blocks: self._budget(request, blocks, plan.hint_nodes),
            hand_off=hand_off,
            deadline=deadline,
        )
        for fault in loaded.faults:
            self.report_fault(fault)
        return cast(LoadedPrefix, loaded)

    def _here(self, load: Callable[..., Any]) -> Callable[..., Any]:
        """A way to load, between this worker's store nodes and its pool."""
        return functools.partial(load, layout=self.layout, nodes=self._timed_nodes, pool=self._pool)

    async def _await_turn(
        self, waiting: ExitStack, request: GenerateRequest, num_blocks: int, hand_off: HandOff, *, deadline: Deadline
    ) -> None:
        """Return when pool blocks may be taken for a hand-off; `waiting` is open as long as they wait for it."""
        if self._early_blocks.may_take(num_blocks):
            waiting.enter_context(self._early_blocks.taken(num_blocks))
        elif self.engine.pool.resident_blocks(request.prompt) <= hand_off.first_block:
            fault = await await_first_block(
                request.prompt, hand_off, sources=request.cache.sources, nodes=self.nodes, deadline=deadline
            )
            if fault is not None:
                self.report_fault(fault)

    def take_reused(self, held: HeldPrefix, request: GenerateRequest) -> list[FilledBlock]:
        """The reused blocks with a pool reference each, to be offered to the worker's sink before what is computed
        behind them: a node keeps no block without its parent. Empty when all of them came from that node just now.

        Taken by hash, not from the block table, which is the engine's once the run has started. May be fewer than
        were reused, when the pool has evicted some since. Of a model with a window, only that window: a node that has
        what is before it takes that.
        """
        if held.is_stored_here:
            return []
        prompt, pool = request.prompt, self.engine.pool
        num_wanted = min(held.num_blocks, pool.resident_blocks(prompt))
        taken = pool.take(num_wanted, prompt=prompt, shared_max=num_wanted, ttl_s=held.admission.ttl_s)
        if isinstance(taken, Short):
            return []
        first = taken.first_whole
        whole_at, fresh_at = first - taken.first_block, taken.num_shared - taken.first_block
        reused = taken.block_ids[whole_at:fresh_at]
        pool.unref_all(taken.block_ids[:whole_at] + taken.block_ids[fresh_at:])
        return [
            FilledBlock(
                position=position,
                block_id=block_id,
                block_hash=prompt.chain[position],
                parent_hash=prompt.parent_of(position),
                token_ids=prompt.block_token_ids(position),
                namespace=prompt.namespace,
                narrowed_from=prompt.narrowed_from,
            )
            for position, block_id in enumerate(reused, start=first)
        ]

    async def load_back(
        self, request: GenerateRequest, block_ids: Sequence[int], saved: range, *, plan: LoadPlan, deadline: Deadline
    ) -> int:
        """Load the plan's blocks, which a run had once, its answer's among them: how many leading ones are there now.

        request: with the run's tokens so far as its prompt. saved: what need not be computed then. Raises only
        cancellation.
        """
        moved = range(plan.first_block, plan.end_block)
        budget = self._budget(request, saved, plan.hint_nodes)
        plan = replace(plan, budget=window_budget(budget, moved, saved, request.prompt.block_tokens))
        loaded: LoadedPrefix = await self._here(load_prefix)(request.prompt, block_ids, plan=plan, deadline=deadline)
        for fault in loaded.faults:
            self.report_fault(fault)
        return loaded.num_blocks

    def links(self) -> tuple[MeasuredLink, ...]:
        """How fast blocks came from store nodes lately."""
        return self._timed_nodes.times.links()

    async def _keep_announced(self) -> None:
        while True:
            await asyncio.sleep(MEMBER_REFRESH_MS / 1000)
            await self._announce()

    async def _announce(self) -> None:
        try:
            await self._membership.announce(self.record(), ttl_ms=MEMBER_TTL_MS)
        except IndexUnavailable as fault:
            self.report_fault(fault)  # the next refresh tries again

    async def _withdraw(self) -> None:
        announcer, self._announcer = self._announcer, None
        if announcer is not None:
            announcer.cancel()
            await asyncio.wait([announcer])
        try:
            await self._membership.withdraw(self.record())
        except IndexUnavailable as fault:
            self.report_fault(fault)  # the record ends with its TTL
