"""Which store nodes this worker can reach now, and how: its own host's through shared memory, others over gRPC.

Owns the table of adapters, kept in step with Membership, and the quarantine of a node that failed: for a short time it
is not offered, so that a dead node costs one failed call and not one per request. A node that comes back under a new
incarnation is a new node. What is done with a node is the callers' business.
"""

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from contextlib import aclosing, contextmanager, suppress
from dataclasses import dataclass, replace

from headrace.core.block import BlockHeader, Chain, NamespaceId
from headrace.core.clock import Clock, Deadline
from headrace.core.errors import CacheFault, IndexUnavailable, StoreUnavailable
from headrace.core.limits import LOST_CLAIMS_RETRY_MS, MEMBER_REFRESH_MS, NODE_QUARANTINE_MS, RELEASE_TIMEOUT_MS
from headrace.core.members import StoreNodeRecord
from headrace.core.ports import (
    PLAIN_LEASE,
    BlockSink,
    BlockSource,
    Lease,
    LeaseTerms,
    Membership,
    Reservation,
    ReserveOutcome,
)
from headrace.core.retention import KEEP, Retention
from headrace.transfer.channels import Channels
from headrace.transfer.fetch_blocks import GrpcStore
from headrace.transfer.shared_memory import SharedMemoryStore
from headrace.transfer.tls_files import Tls


class StoreNodeTable:
    """Implements StoreNodes. Follows Membership while started; while the index is away, what was known stays."""

    def __init__(
        self,
        *,
        host: str,
        membership: Membership,
        clock: Clock,
        report_fault: Callable[[CacheFault], None],
        tls: Tls | None = None,
    ) -> None:
        self._host = host
        self._membership = membership
        self._clock = clock
        self._report_fault = report_fault
        self._channels = Channels(tls)
        self._node_id_to_node: dict[str, _Node] = {}
        self._news = asyncio.Event()  # set, and replaced by a new one, at every refresh
        self._refresher: asyncio.Task[None] | None = None
        self._settler: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Read the members once, then follow them, and end claims whose release was lost."""
        await self.refresh()
        self._refresher = asyncio.create_task(self._keep_fresh(), name="follow store nodes")
        self._settler = asyncio.create_task(self._keep_settled(), name="end lost claims")

    async def stop(self) -> None:
        """Stop following and close everything. Idempotent."""
        tasks = [task for task in (self._refresher, self._settler) if task is not None]
        self._refresher = self._settler = None
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
            await _settle(self._end_lost_claims())
        for node in self._node_id_to_node.values():
            node.close()
        self._node_id_to_node.clear()
        await self._channels.close()

    @property
    def following(self) -> bool:
        """Whether the table is kept in step with the members, and lost claims are ended."""
        return all(task is not None and not task.done() for task in (self._refresher, self._settler))

    async def refresh(self) -> None:
        """Make the table what Membership says now; nodes that did not change keep their mappings and channels."""
        try:
            records = await self._membership.store_nodes()
        except IndexUnavailable as fault:
            self._report_fault(fault)
            return
        before = self._node_id_to_node
        after: dict[str, _Node] = {}
        for record in records:
            node = before.get(record.node_id)
            if node is not None and replace(node.record, draining=record.draining) == record:
                node.record = record  # a node that begins to drain is read as before
            else:
                node = _Node(record, self._host, self._channels, self._clock)
            after[record.node_id] = node
        self._node_id_to_node = after
        news, self._news = self._news, asyncio.Event()
        news.set()
        addresses = {record.address for record in records}
        for node_id, node in before.items():
            if after.get(node_id) is not node:
                await _settle(node.end_lost_claims())  # the same process, perhaps, that only says something new
                node.close()
                if node.record.address not in addresses:
                    await self._channels.drop(node.record.address)

    def local(self) -> BlockSource | None:
        """This host's node through shared memory; None while there is none or it has just failed."""
        node = self._local_node()
        return None if node is None else node.mapped

    def local_node_id(self) -> str:
        """Node id of what `local()` gives now; "" when there is none."""
        node = self._local_node()
        return "" if node is None else node.record.node_id

    def remote(self, node_id: str) -> BlockSource | None:
        """Any live node over gRPC (also this host's own); None when it is not alive or has just failed."""
        node = self._node_id_to_node.get(node_id)
        return node.remote if node is not None and node.health.usable() else None

    def sink(self) -> BlockSink | None:
        """The local node when there is one, else the first remote node by id. Never one that drains, which refuses."""
        node = self._sink_node()
        return None if node is None else node.mapped or node.remote

    def sink_at(self, node_id: str) -> BlockSink | None:
        """That node; None when it is not alive, has just failed or drains."""
        node = self._node_id_to_node.get(node_id)
        if node is None or node.record.draining or not node.health.usable():
            return None
        return node.mapped or node.remote

    def sink_node_id(self) -> str:
        """Node id of what `sink()` gives now; "" when there is none."""
        node = self._sink_node()
        return "" if node is None else node.record.node_id

    async def sink_moved(self, node_id: str) -> None:
        """Return when `sink()` is another node than this one ("": none), as far as the members say."""
        while self.sink_node_id() == node_id:
            await self._news.wait()

    def _local_node(self) -> "_Node | None":
        return next((node for node in self._usable() if node.mapped is not None), None)

    def _sink_node(self) -> "_Node | None":
        taking = (node for node in self._usable() if not node.record.draining)
        return min(taking, key=lambda node: (node.mapped is None, node.record.node_id), default=None)

    def _usable(self) -> "Iterator[_Node]":
        return (node for node in self._node_id_to_node.values() if node.health.usable())

    async def _keep_fresh(self) -> None:
        while True:
            await asyncio.sleep(MEMBER_REFRESH_MS / 1000)
            await self.refresh()

    async def _keep_settled(self) -> None:
        while True:
            await asyncio.sleep(LOST_CLAIMS_RETRY_MS / 1000)
            await self._end_lost_claims()

    async def _end_lost_claims(self) -> None:
        async with asyncio.TaskGroup() as calls:
            for node in self._node_id_to_node.values():
                calls.create_task(node.end_lost_claims())


async def _settle(ending: Awaitable[None]) -> None:
    """Last try to end lost claims; what is left then ends by its own time."""
    with suppress(TimeoutError):
        async with asyncio.timeout(RELEASE_TIMEOUT_MS / 1000):
            await ending


@dataclass(slots=True)
class _Health:
    """When a node may be asked again after a failure."""

    clock: Clock
    quarantined_until_s: float = 0.0

    def usable(self) -> bool:
        return self.clock.now_s() >= self.quarantined_until_s

    @contextmanager
    def watched(self) -> Iterator[None]:
        """A call that finds the node away puts it into quarantine; the failure passes through."""
        try:
            yield
        except StoreUnavailable:
            self.quarantined_until_s = self.clock.now_s() + NODE_QUARANTINE_MS / 1000
            raise


class _Node:
    """One live node under one incarnation, by both ways that lead to it."""

    def __init__(self, record: StoreNodeRecord, host: str, channels: Channels, clock: Clock) -> None:
        self.record = record
        self.health = _Health(clock)
        self._memory = SharedMemoryStore(record, channels, clock) if record.host == host else None
        self._grpc = GrpcStore(record, channels, clock)
        self.mapped = None if self._memory is None else _WatchedStore(self._memory, self.health)
        self.remote = _WatchedStore(self._grpc, self.health)

    async def end_lost_claims(self) -> None:
        """Have the node end what was claimed by either way and never given back. Raises nothing but cancellation."""
        if self._memory is not None:
            await self._memory.end_lost_claims()
        await self._grpc.end_lost_claims()

    def close(self) -> None:
        """Drop the mapping, if there is one."""
        if self._memory is not None:
            self._memory.close()


class _WatchedStore:
    """A BlockSource and BlockSink whose StoreUnavailable is noted in the node's health."""

    def __init__(self, store: SharedMemoryStore | GrpcStore, health: _Health) -> None:
        self._store = store
        self._health = health

    async def held_blocks(self, namespace: NamespaceId, chain: Chain, *, deadline: Deadline) -> int:
        """As BlockSource.held_blocks."""
        with self._health.watched():
            return await self._store.held_blocks(namespace, chain, deadline=deadline)

    async def lease_prefix(
        self,
        namespace: NamespaceId,
        chain: Chain,
        *,
        first_block: int,
        deadline: Deadline,
        terms: LeaseTerms = PLAIN_LEASE,
    ) -> Lease:
        """As BlockSource.lease_prefix."""
        with self._health.watched():
            return await self._store.lease_prefix(
                namespace, chain, first_block=first_block, deadline=deadline, terms=terms
            )

    async def fetch_blocks(self, lease: Lease, *, deadline: Deadline) -> AsyncGenerator[memoryview, None]:
        """As BlockSource.fetch_blocks."""
        with self._health.watched():
            async with aclosing(self._store.fetch_blocks(lease, deadline=deadline)) as payloads:
                async for payload in payloads:
                    yield payload

    async def release(self, lease: Lease, *, suspects: Sequence[int] = ()) -> None:
        """As BlockSource.release."""
        with self._health.watched():
            await self._store.release(lease, suspects=suspects)

    async def reserve(
        self, headers: Sequence[BlockHeader], *, deadline: Deadline, retention: Retention = KEEP
    ) -> tuple[ReserveOutcome, ...]:
        """As BlockSink.reserve."""
        with self._health.watched():
            return await self._store.reserve(headers, deadline=deadline, retention=retention)

    async def commit(self, reservation: Reservation, *, payload_xxh3: int, deadline: Deadline) -> None:
        """As BlockSink.commit."""
        with self._health.watched():
            await self._store.commit(reservation, payload_xxh3=payload_xxh3, deadline=deadline)

    async def abort(self, reservation: Reservation) -> None:
        """As BlockSink.abort."""
        with self._health.watched():
            await self._store.abort(reservation)
