"""Spans of requests, sent to an OpenTelemetry collector by OTLP over gRPC. Off unless `otlp_endpoint` is set.

Everything that knows OpenTelemetry is here, and it is imported only when tracing is started. Rules: a span is part of a
request or is not made; the sampling that the caller's `traceparent` asks for is kept; no prompt, no answer, no key is
an attribute. Names are those of OpenTelemetry's conventions for generative AI and for RPC where they fit, else begin
with `headrace.`.

A collector that is slow or away costs no request anything: spans wait in a bounded queue, leave from a thread of their
own, and are dropped when there is no room. One line says that it began, another that it is over.
"""

import asyncio
import importlib.util
import logging
import socket
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping, Sequence
from contextlib import aclosing, contextmanager
from dataclasses import replace
from enum import StrEnum
from typing import Any, TypeVar

from headrace.core.errors import ConfigInvalid, HeadraceError, InvalidRequest, Overloaded
from headrace.core.telemetry_limits import (
    TRACE_BATCH_SPANS,
    TRACE_EXPORT_EVERY_MS,
    TRACE_EXPORT_TIMEOUT_MS,
    TRACE_FLUSH_MS,
    TRACE_QUEUE_SPANS,
)
from headrace.telemetry.request_context import RequestContext, current, stream_within, within

log = logging.getLogger(__name__)

Event = TypeVar("Event")
Value = str | bool | int | float | Sequence[str]

# Loggers of the library that repeat themselves for as long as a collector is away; `_Telling` says it once.
_NOISY_LOGGERS = ("opentelemetry.exporter.otlp", "opentelemetry.sdk._shared_internal", "opentelemetry.sdk.trace.export")


class SpanKind(StrEnum):
    """Which side of a call a span is."""

    SERVER = "SERVER"
    CLIENT = "CLIENT"
    INTERNAL = "INTERNAL"


class Span:
    """One span; `context` is what work under it runs in."""

    def __init__(self, span: Any, context: RequestContext, *, error_status: Any) -> None:
        self._span = span
        self._error_status = error_status
        self.context = context

    def set(self, attributes: Mapping[str, Value]) -> None:
        """Say more of it."""
        self._span.set_attributes(attributes)

    def rename(self, name: str) -> None:
        """Call it otherwise, now that more is known."""
        self._span.update_name(name)

    @contextmanager
    def ended(self) -> Iterator["Span"]:
        """End it with the scope, by how that ends: what is raised is the span's status, and passes through."""
        try:
            yield self
        except (GeneratorExit, asyncio.CancelledError):
            self.set({"headrace.cancelled": True})  # nobody wanted the rest: no fault
            raise
        except Exception as error:
            self.fail(error)
            raise
        finally:
            self._span.end()

    def fail(self, error: Exception) -> None:
        """It came to nothing. A caller's own mistake has a type, but is no failure of ours."""
        self.set({"error.type": type(error).__name__})
        if not isinstance(error, InvalidRequest):
            self._span.set_status(self._error_status, _safe_text(error))


class Tracing:
    """Makes the spans of one process. `start_tracing` makes one, `close` ends it."""

    def __init__(self, tracer: Any, parts: Any, close: Callable[[], None], flush: Callable[[], object]) -> None:
        """parts: the library's names that spans need; only `start_tracing` knows where they come from."""
        self._tracer = tracer
        self._parts = parts
        self._close = close
        self._flush = flush

    def start(
        self,
        name: str,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        attributes: Mapping[str, Value] | None = None,
        under: RequestContext | None = None,
        begins: bool = False,
    ) -> Span:
        """Begin a span under the running code's own, or `under` what another process said. End it by `Span.ended`.

        begins: a trace may begin here. Elsewhere what belongs to no traced request gets a span that records nothing.
        """
        parent = current() if under is None else under
        parts = self._parts
        if not parent.traceparent and not begins:
            return Span(parts.no_span, parent, error_status=parts.error_status)
        # With nothing to extract from, the empty context: what other libraries trace in this process is not ours.
        outer = parts.propagator.extract({"traceparent": parent.traceparent}, context=parts.Context())
        span = self._tracer.start_span(name, context=outer, kind=parts.kinds[kind], attributes=attributes)
        if parent.request_id:
            span.set_attribute("headrace.request.id", parent.request_id)
        ids = span.get_span_context()
        traceparent = f"00-{ids.trace_id:032x}-{ids.span_id:016x}-{int(ids.trace_flags):02x}"
        return Span(span, replace(parent, traceparent=traceparent), error_status=parts.error_status)

    @contextmanager
    def span(
        self, name: str, *, kind: SpanKind = SpanKind.INTERNAL, attributes: Mapping[str, Value] | None = None
    ) -> Iterator[Span]:
        """A span around the scope, in which the code in it runs. Not around a `yield` of an async generator."""
        span = self.start(name, kind=kind, attributes=attributes)
        with span.ended(), within(span.context):
            yield span

    async def flush(self) -> None:
        """Have what is ended leave now; for tests, and for `close`."""
        await asyncio.to_thread(self._flush)

    async def close(self) -> None:
        """Let the last spans leave, for TRACE_FLUSH_MS at most, and end. Idempotent."""
        flushing = asyncio.ensure_future(self.flush())
        await asyncio.wait([flushing], timeout=TRACE_FLUSH_MS / 1000)
        await asyncio.to_thread(self._close)  # ends what still tries, so that the flush ends too
        await asyncio.wait([flushing])


async def stream_under(
    span: Span, events: AsyncGenerator[Event, None], *, see: Callable[[Event], None] = lambda event: None
) -> AsyncGenerator[Event, None]:
    """The events, each step of them under the span, which ends with them. `see` is told each one before the reader."""
    with span.ended():
        async with aclosing(stream_within(span.context, events)) as steps:
            async for event in steps:
                see(event)
                yield event


def check_tracing(endpoint: str) -> None:
    """Refuse an endpoint for which the library is not installed, before anything starts. Raises ConfigInvalid."""
    for name in ("opentelemetry", "opentelemetry.sdk", "opentelemetry.exporter", "opentelemetry.exporter.otlp"):
        if endpoint and importlib.util.find_spec(name) is None:
            raise ConfigInvalid("otlp_endpoint", f"needs {name}; install headrace[otel]")


def start_tracing(endpoint: str, *, part: str, instance_id: str = "") -> Tracing | None:
    """Tracing to the collector at `http://host:port` (`https://` for TLS); None where the endpoint is empty.

    part: gateway, worker or store. Raises ConfigInvalid where the extra is not installed. The library's own variables
    hold: OTEL_EXPORTER_OTLP_HEADERS, OTEL_EXPORTER_OTLP_CERTIFICATE, OTEL_TRACES_SAMPLER, OTEL_RESOURCE_ATTRIBUTES.
    """
    if not endpoint:
        return None
    try:
        from opentelemetry import trace
        from opentelemetry.context import Context
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator
    except ImportError as missing:
        raise ConfigInvalid("otlp_endpoint", f"needs {missing.name}; install headrace[otel]") from missing
    from types import SimpleNamespace

    from headrace import __version__

    for name in _NOISY_LOGGERS:
        logging.getLogger(name).setLevel(logging.CRITICAL + 1)
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=TRACE_EXPORT_TIMEOUT_MS / 1000)
    processor = BatchSpanProcessor(
        _telling(exporter, endpoint),
        max_queue_size=TRACE_QUEUE_SPANS,
        max_export_batch_size=TRACE_BATCH_SPANS,
        schedule_delay_millis=TRACE_EXPORT_EVERY_MS,
    )
    named = {
        "service.namespace": "headrace",
        "service.name": f"headrace-{part}",
        "service.version": __version__,
        "service.instance.id": instance_id or socket.gethostname(),
        "host.name": socket.gethostname(),
    }
    provider = TracerProvider(resource=Resource.create(named), shutdown_on_exit=False)
    provider.add_span_processor(processor)
    parts = SimpleNamespace(
        propagator=TraceContextTextMapPropagator(),
        Context=Context,
        kinds={kind: trace.SpanKind[kind.value] for kind in SpanKind},
        error_status=trace.StatusCode.ERROR,
        no_span=trace.INVALID_SPAN,
    )

    def close() -> None:
        exporter.shutdown()  # first: a message under way to a collector that is away is given up
        processor.shutdown()

    return Tracing(provider.get_tracer("headrace", __version__), parts, close, processor.force_flush)


def _telling(exporter: Any, endpoint: str) -> Any:
    """The exporter, whose failures are told once for each time that the collector is away."""
    from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult

    class Telling(SpanExporter):  # type: ignore[misc]
        _is_away = False

        def export(self, spans: Any) -> Any:
            result = exporter.export(spans)
            is_away = result is not SpanExportResult.SUCCESS
            if is_away and not self._is_away:
                log.warning("the collector at %s takes no spans; they are dropped until it does", endpoint)
            elif self._is_away and not is_away:
                log.info("the collector at %s takes spans again", endpoint)
            self._is_away = is_away
            return result

        def shutdown(self) -> None:
            exporter.shutdown()

    return Telling()


def outcome_of(error: Exception) -> str:
    """How a request ended that raised this, in the words of `gateway/goodput.py`."""
    match error:
        case InvalidRequest():
            return "invalid"
        case Overloaded():
            return "refused"
        case _:
            return "failed"


def _safe_text(error: Exception) -> str:
    """What a status may say: our own errors name parts and times; what is not ours could quote anything."""
    return str(error)[:300] if isinstance(error, HeadraceError) else type(error).__name__
