"""Ports with spans: each class has the interface of the port it wraps, passes every call on, and shows what passed.

Like `metered_ports.py`, and wrapped by `compose.py` only where tracing is on. The calls to workers carry their span, so
that what the worker does hangs below it (`served_calls.py`); calls to store nodes carry it as metadata.
"""

from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import cast

from headrace.core.block import BlockHash, BlockHeader, CacheSource, Chain, HolderId, NamespaceId, Tier
from headrace.core.clock import Deadline
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
)
from headrace.core.members import PrefixMatch, WorkerRecord
from headrace.core.ports import (
    PLAIN_LEASE,
    AlreadyStored,
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
from headrace.telemetry.tracing import Span, SpanKind, Tracing, Value, stream_under


def finished_attributes(finished: Finished) -> dict[str, Value]:
    """What the last event of a stream says of tokens and time."""
    usage = finished.usage
    named: dict[str, Value] = {
        "gen_ai.usage.input_tokens": usage.prompt_tokens,
        "gen_ai.usage.output_tokens": usage.completion_tokens,
        "gen_ai.usage.cache_read.input_tokens": usage.cached.total,
        "gen_ai.response.finish_reasons": [finished.reason.value],
    }
    for source, tokens in usage.cached.by_source().items():
        named[f"headrace.cached_tokens.{source}"] = tokens
    if usage.drafted_tokens:
        named["headrace.drafted_tokens"] = usage.drafted_tokens
        named["headrace.accepted_draft_tokens"] = usage.accepted_draft_tokens
    if finished.work is not None:
        named["headrace.load_seconds"] = finished.work.load_s
        named["headrace.compute_seconds"] = finished.work.compute_s
    return named


def prefill_attributes(result: PrefillResult) -> dict[str, Value]:
    """What a prefill came to."""
    named: dict[str, Value] = {
        "headrace.reused_blocks": result.reused_blocks,
        "headrace.published_blocks": result.published_blocks,
        "headrace.store_node.id": result.store_node,
    }
    if result.work is not None:
        named["headrace.load_seconds"] = result.work.load_s
        named["headrace.compute_seconds"] = result.work.compute_s
    return named


def call_attributes(call: PrefillCall | DecodeCall) -> dict[str, Value]:
    """What an attempt is."""
    return {
        "headrace.worker.id": call.worker_id,
        "headrace.attempt.id": call.attempt_id,
        "gen_ai.request.model": call.request.model,
    }


class TracedWorkerCalls:
    """WorkerCalls, each attempt a span, of which the worker is told."""

    def __init__(self, calls: WorkerCalls, *, tracing: Tracing) -> None:
        self._calls = calls
        self._tracing = tracing

    async def prefill(self, call: PrefillCall) -> PrefillResult:
        """As WorkerCalls.prefill."""
        with self._tracing.span(
            "headrace.call_prefill", kind=SpanKind.CLIENT, attributes=call_attributes(call)
        ) as span:
            result = await self._calls.prefill(replace(call, traceparent=span.context.traceparent))
            span.set(prefill_attributes(result))
            return result

    async def decode(self, call: DecodeCall) -> AsyncGenerator[DecodeEvent, None]:
        """As WorkerCalls.decode."""
        span = self._tracing.start("headrace.call_decode", kind=SpanKind.CLIENT, attributes=call_attributes(call))
        # Adapters give async generators, as `route_request.py` counts on.
        events = cast(
            AsyncGenerator[DecodeEvent, None],
            self._calls.decode(replace(call, traceparent=span.context.traceparent)),
        )
        async with aclosing(stream_under(span, events, see=lambda event: see_decoded(span, event))) as stream:
            async for event in stream:
                yield event

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
        return await self._calls.evict_device(worker, selector, dry_run=dry_run)


def see_decoded(span: Span, event: DecodeEvent) -> None:
    """Have a decode attempt's span say how it ended."""
    if isinstance(event, Finished):
        span.set(finished_attributes(event))


class TracedBlockIndex:
    """A BlockIndex whose look-ups are spans; what holders register is no request's."""

    def __init__(self, index: BlockIndex, *, tracing: Tracing) -> None:
        self._index = index
        self._tracing = tracing

    async def longest_prefix(self, namespace: NamespaceId, chain: Chain) -> PrefixMatch:
        """As BlockIndex.longest_prefix."""
        with self._tracing.span("headrace.look_up", attributes={"headrace.prompt_blocks": len(chain)}) as span:
            match = await self._index.longest_prefix(namespace, chain)
            span.set({"headrace.held_blocks": match.num_blocks})
            return match

    async def register(
        self, *, holder: HolderId, incarnation: int, tier: Tier, namespace: NamespaceId, blocks: Sequence[BlockHash]
    ) -> None:
        """As BlockIndex.register."""
        await self._index.register(
            holder=holder, incarnation=incarnation, tier=tier, namespace=namespace, blocks=blocks
        )

    async def deregister(
        self, *, holder: HolderId, incarnation: int, namespace: NamespaceId, blocks: Sequence[BlockHash]
    ) -> None:
        """As BlockIndex.deregister."""
        await self._index.deregister(holder=holder, incarnation=incarnation, namespace=namespace, blocks=blocks)

    async def sweep(self, live: dict[HolderId, int], *, limit: int) -> int:
        """As BlockIndex.sweep."""
        return await self._index.sweep(live, limit=limit)


class TracedStoreNodes:
    """StoreNodes whose sources and sinks make spans."""

    def __init__(self, nodes: StoreNodes, *, tracing: Tracing) -> None:
        self._nodes = nodes
        self._tracing = tracing

    def local(self) -> BlockSource | None:
        """As StoreNodes.local."""
        source = self._nodes.local()
        return source and TracedBlockSource(
            source, tracing=self._tracing, node_id=self._nodes.local_node_id(), via=CacheSource.SHARED_MEMORY
        )

    def remote(self, node_id: str) -> BlockSource | None:
        """As StoreNodes.remote."""
        source = self._nodes.remote(node_id)
        return source and TracedBlockSource(source, tracing=self._tracing, node_id=node_id, via=CacheSource.GRPC)

    def sink(self) -> BlockSink | None:
        """As StoreNodes.sink."""
        sink, node_id = self._nodes.sink(), self._nodes.sink_node_id()
        via = CacheSource.SHARED_MEMORY if node_id == self._nodes.local_node_id() else CacheSource.GRPC
        return sink and TracedBlockSink(sink, tracing=self._tracing, node_id=node_id, via=via)

    def sink_at(self, node_id: str) -> BlockSink | None:
        """As StoreNodes.sink_at."""
        sink = self._nodes.sink_at(node_id)
        via = CacheSource.SHARED_MEMORY if node_id == self._nodes.local_node_id() else CacheSource.GRPC
        return sink and TracedBlockSink(sink, tracing=self._tracing, node_id=node_id, via=via)

    def local_node_id(self) -> str:
        """As StoreNodes.local_node_id."""
        return self._nodes.local_node_id()

    def sink_node_id(self) -> str:
        """As StoreNodes.sink_node_id."""
        return self._nodes.sink_node_id()


class TracedBlockSource:
    """A BlockSource whose leases and fetches are spans."""

    def __init__(self, source: BlockSource, *, tracing: Tracing, node_id: str, via: CacheSource) -> None:
        self._source = source
        self._tracing = tracing
        self._named: dict[str, Value] = {"headrace.store_node.id": node_id, "headrace.via": via.value}

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
        named = self._named | {"headrace.first_block": first_block, "headrace.wanted_blocks": len(chain) - first_block}
        with self._tracing.span("headrace.lease", kind=SpanKind.CLIENT, attributes=named) as span:
            lease = await self._source.lease_prefix(
                namespace, chain, first_block=first_block, deadline=deadline, terms=terms
            )
            span.set({"headrace.blocks": len(lease.headers)})
            return lease

    async def fetch_blocks(self, lease: Lease, *, deadline: Deadline) -> AsyncGenerator[memoryview, None]:
        """As BlockSource.fetch_blocks; the span lasts as long as the reader takes them."""
        span = self._tracing.start("headrace.fetch", kind=SpanKind.CLIENT, attributes=self._named)
        blocks, num_bytes = 0, 0

        def see(payload: memoryview) -> None:
            nonlocal blocks, num_bytes
            blocks, num_bytes = blocks + 1, num_bytes + payload.nbytes
            span.set({"headrace.blocks": blocks, "headrace.bytes": num_bytes})

        fetched = self._source.fetch_blocks(lease, deadline=deadline)
        async with aclosing(stream_under(span, fetched, see=see)) as payloads:
            async for payload in payloads:
                yield payload

    async def release(self, lease: Lease, *, suspects: Sequence[int] = ()) -> None:
        """As BlockSource.release."""
        await self._source.release(lease, suspects=suspects)


class TracedBlockSink:
    """A BlockSink whose reservations and commits are spans."""

    def __init__(self, sink: BlockSink, *, tracing: Tracing, node_id: str, via: CacheSource) -> None:
        self._sink = sink
        self._tracing = tracing
        self._named: dict[str, Value] = {"headrace.store_node.id": node_id, "headrace.via": via.value}

    async def reserve(
        self, headers: Sequence[BlockHeader], *, deadline: Deadline, retention: Retention = KEEP
    ) -> tuple[ReserveOutcome, ...]:
        """As BlockSink.reserve."""
        named = self._named | {"headrace.blocks": len(headers)}
        with self._tracing.span("headrace.reserve", kind=SpanKind.CLIENT, attributes=named) as span:
            outcomes = await self._sink.reserve(headers, deadline=deadline, retention=retention)
            span.set(
                {
                    "headrace.reserved_blocks": sum(isinstance(outcome, Reservation) for outcome in outcomes),
                    "headrace.stored_blocks": sum(isinstance(outcome, AlreadyStored) for outcome in outcomes),
                }
            )
            return outcomes

    async def commit(self, reservation: Reservation, *, payload_xxh3: int, deadline: Deadline) -> None:
        """As BlockSink.commit."""
        named = self._named | {"headrace.bytes": reservation.header.payload_bytes}
        with self._tracing.span("headrace.commit", kind=SpanKind.CLIENT, attributes=named):
            await self._sink.commit(reservation, payload_xxh3=payload_xxh3, deadline=deadline)

    async def abort(self, reservation: Reservation) -> None:
        """As BlockSink.abort."""
        await self._sink.abort(reservation)
