"""A worker among the members: who it is, and its record, which stands for as long as the worker serves.

Knows neither calls nor blocks: how loaded the worker is, the engine says, and which store node is beside it, the table.
"""

import asyncio
import os
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

from headrace.core.clock import Clock
from headrace.core.errors import CacheFault, IndexUnavailable
from headrace.core.generation import WorkerId
from headrace.core.limits import MEMBER_REFRESH_MS, MEMBER_TTL_MS
from headrace.core.members import LearnedCosts, MeasuredLink, WorkerRecord, WorkerRole
from headrace.core.ports import Membership
from headrace.engine.engine import Engine
from headrace.transfer.store_nodes import StoreNodeTable


@dataclass(frozen=True, slots=True)
class WorkerPlace:
    """What others find a worker by."""

    worker_id: WorkerId
    role: WorkerRole
    host: str
    metrics_port: int = 0
    ray_cluster: str = ""  # of several with one index, that of the gateways that can call it


def identity_of(place: WorkerPlace, engine: Engine, clock: Clock) -> WorkerRecord:
    """What stays of a worker's record from its start to its end."""
    return WorkerRecord(
        worker_id=place.worker_id,
        incarnation=clock.unix_ms(),
        role=place.role,
        host=place.host,
        store_node="",
        model=engine.model.name,
        namespace=engine.model.namespace,
        context_tokens_max=engine.context_tokens_max,
        pool_blocks=engine.pool.num_blocks,
        pid=os.getpid(),
        model_path=str(engine.model.path),
        metrics_port=place.metrics_port,
        window_tokens=engine.window.tokens or engine.near_window.tokens or 0,
        ray_cluster=place.ray_cluster,
    )


class WorkerMember:
    """One worker's record and the task that keeps it standing. All methods belong to the worker's event loop."""

    def __init__(
        self,
        identity: WorkerRecord,
        engine: Engine,
        *,
        nodes: StoreNodeTable,
        membership: Membership,
        clock: Clock,
        links: Callable[[], tuple[MeasuredLink, ...]],
        report_fault: Callable[[CacheFault], None],
    ) -> None:
        """nodes: started before this. links: how fast blocks came from store nodes lately."""
        self._identity = identity
        self._engine = engine
        self._nodes = nodes
        self._membership = membership
        self._clock = clock
        self._links = links
        self._report_fault = report_fault
        self._told_node = ""  # the store node of the record that was announced last
        self._announcer: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Be seen, and stay so."""
        assert self._announcer is None
        await self._announce()
        self._announcer = asyncio.create_task(self._keep_announced(), name="announce worker")

    async def stop(self) -> None:
        """Be unseen. Idempotent."""
        announcer, self._announcer = self._announcer, None
        if announcer is not None:
            announcer.cancel()
            await asyncio.wait([announcer])
        try:
            await self._membership.withdraw(self.record())
        except IndexUnavailable as fault:
            self._report_fault(fault)  # the record ends with its TTL

    @property
    def running(self) -> bool:
        """Whether the record is kept standing."""
        return self._announcer is not None and not self._announcer.done()

    def record(self) -> WorkerRecord:
        """Who this worker is, which store node it publishes to and how loaded it is now."""
        load = self._engine.load()
        return replace(
            self._identity,
            store_node=self._nodes.sink_node_id(),
            store_node_near=self._nodes.sink_node_id() == self._nodes.local_node_id(),
            running=load.running,
            waiting=load.waiting,
            free_blocks=load.free_blocks,
            kept_blocks=load.kept_blocks,
            unix_ms=self._clock.unix_ms(),
            queue_s=load.ahead.queue_s,
            costs=LearnedCosts.of(load.ahead.prefill, load.ahead.decode),
            links=self._links(),
        )

    async def _keep_announced(self) -> None:
        """Every MEMBER_REFRESH_MS, and at once when blocks go to another store node: prompts are handed over through
        the one that the record names."""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(MEMBER_REFRESH_MS / 1000):
                    await self._nodes.sink_moved(self._told_node)
            await self._announce()

    async def _announce(self) -> None:
        record = self.record()
        self._told_node = record.store_node
        try:
            await self._membership.announce(record, ttl_ms=MEMBER_TTL_MS)
        except IndexUnavailable as fault:
            self._report_fault(fault)  # the next refresh tries again
