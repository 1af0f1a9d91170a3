"""Ports that count: each class has the interface of the port it wraps, passes every call on, and records what passed.

Owns when a metric moves. A wrapper never changes a result, an error, an order or a cancellation, and adds no await
that leaves the process; `compose.py` decides what is wrapped.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator, Sequence
from contextlib import aclosing, contextmanager
from typing import TypeVar

from headrace.core.block import BlockHash, BlockHeader, CacheSource, Chain, HolderId, NamespaceId, Tier
from headrace.core.clock import Clock, Deadline
from headrace.core.errors import IndexUnavailable
from headrace.core.generation import (
    ControlReport,
    DecodeCall,
    DecodeEvent,
    DeviceListing,
    EvictReport,
    EvictSelector,
    Finished,
    PrefillCall,
    PrefillResult,
    TokenDelta,
)
from headrace.core.members import PrefixMatch, WorkerRecord
from headrace.core.ports import (
    PLAIN_LEASE,
    BlockIndex,
    BlockSink,
    BlockSource,
    Lease,
    LeaseTerms,
    Reservation,
    ReserveOutcome,
    StoreNodes,
    WorkerCalls,
)
from headrace.core.retention import KEEP, Retention
from headrace.telemetry.metrics import EvictionReason, Metrics, Outcome, TransferDirection

Event = TypeVar("Event")


class MeteredBlockIndex:
    """A BlockIndex with time and failures of each call counted."""

    def __init__(self, index: BlockIndex, *, metrics: Metrics, clock: Clock) -> None:
        self._index = index
        self._metrics = metrics
        self._clock = clock

    async def longest_prefix(self, namespace: NamespaceId, chain: Chain) -> PrefixMatch:
        """As BlockIndex.longest_prefix."""
        with self._timed("longest_prefix"):
            return await self._index.longest_prefix(namespace, chain)

    async def register(
        self, *, holder: HolderId, incarnation: int, tier: Tier, namespace: NamespaceId, blocks: Sequence[BlockHash]
    ) -> None:
        """As BlockIndex.register."""
        with self._timed("register"):
            await self._index.register(
                holder=holder, incarnation=incarnation, tier=tier, namespace=namespace, blocks=blocks
            )

    async def deregister(
        self, *, holder: HolderId, incarnation: int, namespace: NamespaceId, blocks: Sequence[BlockHash]
    ) -> None:
        """As BlockIndex.deregister."""
        with self._timed("deregister"):
            await self._index.deregister(holder=holder, incarnation=incarnation, namespace=namespace, blocks=blocks)

    async def sweep(self, live: dict[HolderId, int], *, limit: int) -> int:
        """As BlockIndex.sweep."""
        with self._timed("sweep"):
            return await self._index.sweep(live, limit=limit)

    @contextmanager
    def _timed(self, call: str) -> Iterator[None]:
        started_s = self._clock.now_s()
        try:
            yield
        except IndexUnavailable as fault:
            self._metrics.index_failures.labels(call).inc()
            self._metrics.count_fault(fault)
            raise
        finally:
            self._metrics.index_call_seconds.labels(call).observe(self._clock.now_s() - started_s)


class MeteredBlockSource:
    """A BlockSource whose delivered payload bytes are counted under `via` (shared memory or gRPC)."""

    def __init__(self, source: BlockSource, *, metrics: Metrics, via: CacheSource) -> None:
        self._source = source
        self._bytes = metrics.kv_transfer_bytes.labels(TransferDirection.LOAD, Tier.HOST, via)

    async def held_blocks(self, namespace: NamespaceId, chain: Chain, *, deadline: Deadline) -> int:
        """As BlockSource.held_blocks."""
        return await self._source.held_blocks(namespace, chain, deadline=deadline)

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
        return await self._source.lease_prefix(
            namespace, chain, first_block=first_block, deadline=deadline, terms=terms
        )

    async def fetch_blocks(self, lease: Lease, *, deadline: Deadline) -> AsyncGenerator[memoryview, None]:
        """As BlockSource.fetch_blocks; a payload counts when the reader has asked for it."""
        async with aclosing(self._source.fetch_blocks(lease, deadline=deadline)) as payloads:
            async for payload in payloads:
                self._bytes.inc(payload.nbytes)
                yield payload

    async def release(self, lease: Lease, *, suspects: Sequence[int] = ()) -> None:
        """As BlockSource.release."""
        await self._source.release(lease, suspects=suspects)


class MeteredBlockSink:
    """A BlockSink whose committed payload bytes are counted under `via`."""

    def __init__(self, sink: BlockSink, *, metrics: Metrics, via: CacheSource) -> None:
        self._sink = sink
        self._bytes = metrics.kv_transfer_bytes.labels(TransferDirection.PUBLISH, Tier.HOST, via)

    async def reserve(
        self, headers: Sequence[BlockHeader], *, deadline: Deadline, retention: Retention = KEEP
    ) -> tuple[ReserveOutcome, ...]:
        """As BlockSink.reserve."""
        return await self._sink.reserve(headers, deadline=deadline, retention=retention)

    async def commit(self, reservation: Reservation, *, payload_xxh3: int, deadline: Deadline) -> None:
        """As BlockSink.commit; only what was committed counts."""
        await self._sink.commit(reservation, payload_xxh3=payload_xxh3, deadline=deadline)
        self._bytes.inc(reservation.header.payload_bytes)

    async def abort(self, reservation: Reservation) -> None:
        """As BlockSink.abort."""
        await self._sink.abort(reservation)


class MeteredStoreNodes:
    """StoreNodes whose sources and sinks are metered."""

    def __init__(self, nodes: StoreNodes, *, metrics: Metrics) -> None:
        self._nodes = nodes
        self._metrics = metrics

    def local(self) -> BlockSource | None:
        """As StoreNodes.local."""
        source = self._nodes.local()
        return source and MeteredBlockSource(source, metrics=self._metrics, via=CacheSource.SHARED_MEMORY)

    def remote(self, node_id: str) -> BlockSource | None:
        """As StoreNodes.remote."""
        source = self._nodes.remote(node_id)
        return source and MeteredBlockSource(source, metrics=self._metrics, via=CacheSource.GRPC)

    def sink(self) -> BlockSink | None:
        """As StoreNodes.sink. The host's own node is written to through shared memory, any other over gRPC."""
        sink = self._nodes.sink()
        is_local = self._nodes.sink_node_id() == self._nodes.local_node_id()
        via = CacheSource.SHARED_MEMORY if is_local else CacheSource.GRPC
        return sink and MeteredBlockSink(sink, metrics=self._metrics, via=via)

    def sink_at(self, node_id: str) -> BlockSink | None:
        """As StoreNodes.sink_at."""
        sink = self._nodes.sink_at(node_id)
        via = CacheSource.SHARED_MEMORY if node_id == self._nodes.local_node_id() else CacheSource.GRPC
        return sink and MeteredBlockSink(sink, metrics=self._metrics, via=via)

    def local_node_id(self) -> str:
        """As StoreNodes.local_node_id."""
        return self._nodes.local_node_id()

    def sink_node_id(self) -> str:
        """As StoreNodes.sink_node_id."""
        return self._nodes.sink_node_id()


class MeteredWorkerCalls:
    """WorkerCalls with outcome and gaps between tokens counted once per attempt that streamed."""

    def __init__(self, calls: WorkerCalls, *, metrics: Metrics, clock: Clock) -> None:
        self._calls = calls
        self._metrics = metrics
        self._clock = clock

    async def prefill(self, call: PrefillCall) -> PrefillResult:
        """As WorkerCalls.prefill."""
        return await self._calls.prefill(call)

    async def decode(self, call: DecodeCall) -> AsyncGenerator[DecodeEvent, None]:
        """As WorkerCalls.decode."""
        events = self._calls.decode(call)
        outcome, last_token_s = Outcome.FAILED, None
        try:
            async for event in events:
                if isinstance(event, TokenDelta):
                    now_s = self._clock.now_s()
                    if last_token_s is not None:
                        self._metrics.inter_token_latency_seconds.observe(now_s - last_token_s)
                    last_token_s = now_s
                elif isinstance(event, Finished):
                    outcome = Outcome.FINISHED
                yield event
        except (GeneratorExit, asyncio.CancelledError):
            # A consumer that closes the stream after its last event has not cancelled anything.
            outcome = outcome if outcome is Outcome.FINISHED else Outcome.CANCELLED
            raise
        finally:
            self._metrics.requests.labels(outcome).inc()
            await _close(events)

    async def list_device(self, worker: WorkerRecord, selector: EvictSelector, *, limit: int) -> DeviceListing:
        """As WorkerCalls.list_device."""
        return await self._calls.list_device(worker, selector, limit=limit)

    async def set_device_ttl(
        self, worker: WorkerRecord, selector: EvictSelector, *, ttl_s: float | None
    ) -> ControlReport:
        """As WorkerCalls.set_device_ttl."""
        return await self._calls.set_device_ttl(worker, selector, ttl_s=ttl_s)

    async def evict_device(self, worker: WorkerRecord, selector: EvictSelector, *, dry_run: bool) -> EvictReport:
        """As WorkerCalls.evict_device."""
        report = await self._calls.evict_device(worker, selector, dry_run=dry_run)
        if not report.dry_run and not report.error:
            self._metrics.evicted_blocks.labels(EvictionReason.ADMIN, Tier.DEVICE).inc(report.blocks)
        return report


async def _close(stream: AsyncIterator[Event]) -> None:
    """Close an async generator now rather than when it is collected: a cancelled call must end on the worker."""
    if isinstance(stream, AsyncGenerator):
        await stream.aclose()
