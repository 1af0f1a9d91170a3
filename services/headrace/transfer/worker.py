"""One worker: its engine, its publisher, its place among the members, and what every call on it has in common.

Owns the worker's life (start, be seen, drain, stop) and the account of attempts in flight. How a call's prompt is
admitted and loaded is `hold_prefix.py`'s; what it then computes is `prefill/`'s or `decode/`'s.
"""

import asyncio
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace

from headrace.core.block import NamespaceId
from headrace.core.clock import Clock
from headrace.core.errors import CacheFault, WorkerUnavailable
from headrace.core.generation import (
    ControlReport,
    DecodeCall,
    DeviceListing,
    EvictReport,
    EvictSelector,
    GenerateRequest,
    PrefillCall,
)
from headrace.core.limits import ATTEMPTS_REMEMBERED, DRAIN_TIMEOUT_MS
from headrace.core.members import WorkerRecord
from headrace.core.overtake_limits import OVERTAKE_ROUND_TRIP_MIN_MS
from headrace.core.ports import Membership, StoreNodes
from headrace.engine.engine import Engine
from headrace.engine.list_device import list_device
from headrace.transfer.coded_pool import stored_pool
from headrace.transfer.device_expiry import DeviceExpiry
from headrace.transfer.early_blocks import EarlyBlocks
from headrace.transfer.home_nodes import HomeNodes
from headrace.transfer.publish_blocks import BlockPublisher, Producer
from headrace.transfer.store_nodes import StoreNodeTable
from headrace.transfer.timed_nodes import TimedStoreNodes
from headrace.transfer.worker_member import WorkerMember, WorkerPlace, identity_of


class Worker:
    """What prefill and decode share. All methods belong to the event loop that called `start`."""

    def __init__(
        self,
        place: WorkerPlace,
        engine: Engine,
        *,
        nodes: StoreNodes,
        node_table: StoreNodeTable,
        membership: Membership,
        clock: Clock,
        report_fault: Callable[[CacheFault], None],
        load_patience_ms: int = OVERTAKE_ROUND_TRIP_MIN_MS,
    ) -> None:
        """nodes: what calls use, metered or not; node_table: its owner, started and stopped with this worker.
        load_patience_ms: a load may always take so long for its first block."""
        self.worker_id = place.worker_id
        self.engine = engine
        self.layout = engine.model.namespace.layout
        self.pool = stored_pool(engine.kv, self.layout)  # the engine's, as store nodes keep its blocks
        self.nodes = nodes
        self.clock = clock
        self.report_fault = report_fault
        self.publisher = BlockPublisher(
            nodes=nodes,
            pool=self.pool,
            producer=Producer(worker_id=place.worker_id, layout=self.layout, clock=clock),
            drop_reference=engine.pool.unref,
            report=report_fault,
        )
        self.early_blocks = EarlyBlocks(engine)
        self.home_nodes = HomeNodes(engine, nodes, report_fault=report_fault)
        self._identity = identity_of(place, engine, clock)
        self._expiry = DeviceExpiry(engine.pool, self._identity, clock=clock)
        self.timed_nodes = TimedStoreNodes(
            nodes, clock, patience_s=load_patience_ms / 1000, tell_ends=self._expiry.hear
        )
        self._node_table = node_table
        self._member = WorkerMember(
            self._identity,
            engine,
            nodes=node_table,
            membership=membership,
            clock=clock,
            links=self.timed_nodes.times.links,
            report_fault=report_fault,
        )
        self._attempts_running = 0
        self._attempts_seen: OrderedDict[str, None] = OrderedDict()
        self._idle = asyncio.Event()
        self._idle.set()
        self._serving = False

    async def start(self) -> None:
        """Be ready, then be seen: the record is announced last, and names the store node beside this worker if there is
        one. Idempotent."""
        if self._serving:
            return
        self.engine.start()
        await self._node_table.start()
        self.publisher.start()
        self._expiry.start()
        self._serving = True
        await self._member.start()

    async def stop(self) -> None:
        """Leave the members, let running calls finish for a while, end those that have not, close. Idempotent."""
        if not self._serving:
            return
        self._serving = False  # new calls are refused from here on
        await self._member.stop()
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
        if not self._serving or not self._member.running:
            return False
        tasks_run = self.publisher.running and self._expiry.running and self._node_table.following
        return self.engine.healthy() and tasks_run

    def record(self) -> WorkerRecord:
        """Who this worker is and how loaded it is now."""
        return self._member.record()

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
