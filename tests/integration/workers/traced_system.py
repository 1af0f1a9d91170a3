"""A whole system of composed parts in one process, over a real Valkey, and a real collector that takes its spans."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
from httpx import ASGITransport, AsyncClient
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

from headrace.compose import Gateway, StoreNode, Worker, build_gateway, build_store_node, join_worker
from headrace.config import Config, load_config
from headrace.core.errors import WorkerUnavailable
from headrace.core.generation import (
    DecodeCall,
    DecodeEvent,
    DeviceListing,
    EvictSelector,
    PrefillCall,
    PrefillResult,
    WorkerId,
)
from headrace.core.members import WorkerRecord, WorkerRole
from headrace.engine.load_model import LoadedModel

from .conftest import LastingMembership

BLOCK_TOKENS = 8


@dataclass(frozen=True)
class SeenSpan:
    """One span as the collector got it."""

    name: str
    service: str
    trace_id: str
    span_id: str
    parent_id: str
    kind: str
    is_error: bool
    status: str
    attributes: dict[str, Any]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """A real OTLP collector's gRPC service. While `takes` is clear it answers nobody."""

    def __init__(self) -> None:
        self.spans: list[SeenSpan] = []
        self.raw = b""
        self.takes = asyncio.Event()
        self.takes.set()
        self.asked = asyncio.Event()
        self.refuses = False

    async def Export(self, request: Any, context: Any) -> Any:
        self.asked.set()
        await self.takes.wait()
        if self.refuses:
            await context.abort(grpc.StatusCode.PERMISSION_DENIED, "not from you")
        self.raw += request.SerializeToString()
        for resource_spans in request.resource_spans:
            service = _values(resource_spans.resource.attributes)["service.name"]
            for scope_spans in resource_spans.scope_spans:
                self.spans += [_seen(span, service) for span in scope_spans.spans]
        return trace_service_pb2.ExportTraceServiceResponse()

    def named(self, name: str, service: str = "") -> list[SeenSpan]:
        return [span for span in self.spans if span.name == name and service in ("", span.service)]


def _seen(span: Any, service: str) -> SeenSpan:
    return SeenSpan(
        name=span.name,
        service=service,
        trace_id=span.trace_id.hex(),
        span_id=span.span_id.hex(),
        parent_id=span.parent_span_id.hex(),
        kind=type(span).SpanKind.Name(span.kind).removeprefix("SPAN_KIND_"),
        is_error=span.status.code == span.status.STATUS_CODE_ERROR,
        status=span.status.message,
        attributes=_values(span.attributes),
    )


def _values(attributes: Any) -> dict[str, Any]:
    def value_of(value: Any) -> Any:
        kind = value.WhichOneof("value")
        return [value_of(each) for each in value.array_value.values] if kind == "array_value" else getattr(value, kind)

    return {attribute.key: value_of(attribute.value) for attribute in attributes}


@asynccontextmanager
async def running_collector() -> AsyncIterator[tuple[Collector, str]]:
    """A started collector and its endpoint."""
    collector, server = Collector(), grpc.aio.server()
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        yield collector, f"http://127.0.0.1:{port}"
    finally:
        collector.takes.set()
        await server.stop(None)


class CallsHere:
    """WorkerCalls to composed workers of this process."""

    def __init__(self) -> None:
        self.workers: dict[WorkerId, Worker] = {}
        self.fails = False

    async def prefill(self, call: PrefillCall) -> PrefillResult:
        return await self.workers[call.worker_id].prefill(call)

    async def decode(self, call: DecodeCall) -> AsyncIterator[DecodeEvent]:
        if self.fails:
            raise WorkerUnavailable(call.worker_id, "its process ended")
        async with aclosing(self.workers[call.worker_id].decode(call)) as events:
            async for event in events:
                yield event

    async def list_device(self, worker: WorkerRecord, selector: EvictSelector, *, limit: int) -> DeviceListing:
        return self.workers[worker.worker_id].list_device(selector, limit=limit)


@dataclass
class ComposedSystem:
    """Parts that run, and a way to ask them as a client does."""

    gateway: Gateway
    node: StoreNode
    calls: CallsHere = field(default_factory=CallsHere)

    async def complete(self, prompt: str, *, max_tokens: int = 3, control: Any = None, **headers: str) -> Any:
        """One completion through the HTTP API; the reply. control: fields of Headrace's own."""
        transport = ASGITransport(self.gateway.http_app)
        async with AsyncClient(transport=transport, base_url="http://localhost", timeout=120) as http:
            model = self.gateway._service.models()[0].name
            asked = {"max_tokens": max_tokens, "temperature": 0, "headrace": control or {}}
            body = {"model": model, "prompt": prompt, **asked}
            return await http.post("/v1/completions", json=body, headers=headers)

    async def published(self) -> None:
        """Wait until the workers have published what they have computed."""
        async with asyncio.timeout(60):
            for worker in self.calls.workers.values():
                while worker._worker.publisher.num_pending:  # noqa: ASYNC110 (a publisher has no event for this)
                    await asyncio.sleep(0.01)

    async def flushed(self) -> None:
        """Have all parts send the spans that have ended."""
        await self.published()
        await self.gateway._service._observers.tracing.flush()
        await self.node._service._tracing.flush()
        for worker in self.calls.workers.values():
            await worker._tracing.flush()


@asynccontextmanager
async def composed_system(
    models: list[LoadedModel], redis_url: str, arena_dir: Path, **settings: Any
) -> AsyncIterator[ComposedSystem]:
    """A store node, a prefill worker, a decode worker and a gateway, ready to be asked."""
    named = {"redis_url": redis_url, "arena_dir": str(arena_dir), "node_id": "node-1", "arena_mb": 8}
    engine = {"block_tokens": BLOCK_TOKENS, "prefill_chunk_tokens": 32, "local_prefill_tokens": 8}
    config: Config = load_config({**named, **engine, "load_patience_ms": 10_000, **settings}, environ={})
    calls = CallsHere()
    async with AsyncExitStack() as running:
        node = build_store_node(config)
        node._service._membership = LastingMembership(node._service._membership)
        await node.start()
        running.push_async_callback(node.stop, remove_arena=True)
        for role, model in zip((WorkerRole.PREFILL, WorkerRole.DECODE), models, strict=False):
            worker_id = WorkerId(f"{role.value}-1")
            worker = calls.workers[worker_id] = join_worker(model, config, role=role, worker_id=worker_id)
            member = worker._worker._member
            member._membership = LastingMembership(member._membership)
            await worker.start()
            running.push_async_callback(worker.stop)
        gateway = build_gateway(config, calls=calls, gateway_id="gateway-1")
        await gateway.start()
        running.push_async_callback(gateway.stop)
        system = ComposedSystem(gateway, node, calls)
        async with asyncio.timeout(60):
            # Redis has a quarter of a second for an answer, and on a busy machine the first look for nodes may fail.
            while not gateway._service.ready() or {w.store_node for w in gateway._service.table.live()} != {"node-1"}:
                await gateway._service.refresh()
                await asyncio.sleep(0.02)
        yield system
