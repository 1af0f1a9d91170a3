"""A worker's calls, each within its request: its log lines name it, and its spans hang below the gateway's."""

from collections.abc import AsyncGenerator, Awaitable
from contextlib import aclosing

from headrace.core.generation import DecodeCall, DecodeEvent, PrefillCall, PrefillResult
from headrace.telemetry.request_context import RequestContext, stream_within, within
from headrace.telemetry.traced_ports import call_attributes, prefill_attributes, see_decoded
from headrace.telemetry.tracing import SpanKind, Tracing, stream_under


async def served_prefill(
    call: PrefillCall, work: Awaitable[PrefillResult], *, tracing: Tracing | None
) -> PrefillResult:
    """Await the work of this call, which must not have begun, within its request."""
    context = _context_of(call)
    if tracing is None:
        with within(context):
            return await work
    span = tracing.start("headrace.prefill", kind=SpanKind.SERVER, attributes=call_attributes(call), under=context)
    with span.ended(), within(span.context):
        result = await work
        span.set(prefill_attributes(result))
        return result


async def served_decode(
    call: DecodeCall, events: AsyncGenerator[DecodeEvent, None], *, tracing: Tracing | None
) -> AsyncGenerator[DecodeEvent, None]:
    """The events of this call, each step of them within its request. Closing it closes them."""
    context = _context_of(call)
    if tracing is None:
        steps = stream_within(context, events)
    else:
        span = tracing.start("headrace.decode", kind=SpanKind.SERVER, attributes=call_attributes(call), under=context)
        steps = stream_under(span, events, see=lambda event: see_decoded(span, event))
    async with aclosing(steps):
        async for event in steps:
            yield event


def _context_of(call: PrefillCall | DecodeCall) -> RequestContext:
    return RequestContext(request_id=call.request.request_id, traceparent=call.traceparent)
