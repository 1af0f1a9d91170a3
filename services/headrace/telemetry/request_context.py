"""For which request the code that runs now works, and in which span: log lines and calls to other parts name it.

Travels by a contextvar, which tasks inherit when they are made. An async generator runs in the context of whoever asks
it for the next item, so one that belongs to a request is stepped by `stream_within`, whoever reads it. Between
processes it goes as W3C trace context, and the request's id beside it. Knows nothing of OpenTelemetry.
"""

import re
from collections.abc import AsyncGenerator, Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import TypeVar

Event = TypeVar("Event")

TRACEPARENT = "traceparent"  # as HTTP header and as gRPC metadata: https://www.w3.org/TR/trace-context/
# Only what is one is kept: it stands in log lines and goes on to other parts.
_TRACEPARENT = re.compile(r"[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
REQUEST_ID = "headrace-request-id"  # between our own parts only; a caller's is not taken over


@dataclass(frozen=True, slots=True)
class RequestContext:
    """Either may be "": not known yet, or nothing is traced."""

    request_id: str = ""
    traceparent: str = ""


NO_REQUEST = RequestContext()
_current: ContextVar[RequestContext] = ContextVar("headrace_request", default=NO_REQUEST)


def current() -> RequestContext:
    """What the running code works for."""
    return _current.get()


@contextmanager
def within(context: RequestContext) -> Iterator[None]:
    """Work for this request while the scope lasts. Never around a `yield` of an async generator: see stream_within."""
    token = _current.set(context)
    try:
        yield
    finally:
        _current.reset(token)


async def stream_within(context: RequestContext, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    """The same events, each step of them within the context, and their end too; the reader's own is left alone."""
    try:
        while True:
            token = _current.set(context)
            try:
                event = await anext(events)
            except StopAsyncIteration:
                return
            finally:
                _current.reset(token)
            yield event
    finally:
        with within(context):
            await events.aclose()


def outgoing_metadata() -> tuple[tuple[str, str], ...] | None:
    """What a call to another part carries: None where nothing is traced, so that nothing is paid for it."""
    context = _current.get()
    if not context.traceparent:
        return None
    return ((TRACEPARENT, context.traceparent), (REQUEST_ID, context.request_id))


def incoming_context(metadata: Iterable[tuple[str, str | bytes]] | None) -> RequestContext:
    """What a call of another part of ours carries."""
    named = dict(metadata or ())
    return RequestContext(request_id=str(named.get(REQUEST_ID, "")), traceparent=str(named.get(TRACEPARENT, "")))


def within_callers_trace(traceparent: str | None, events: AsyncGenerator[Event, None]) -> AsyncGenerator[Event, None]:
    """The same events, as part of the trace that a client says it is in; its request gets an id of ours."""
    if traceparent is None or not _TRACEPARENT.fullmatch(traceparent):
        return events
    return stream_within(RequestContext(traceparent=traceparent), events)
