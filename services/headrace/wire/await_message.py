"""A gRPC call whose message does not come is ended: by itself gRPC waits for it without end, before any code of ours
runs, and whoever opens calls and says nothing, with no key, takes the places of all others.

Owns the wait, and how a call of one message gets one: it is served as one of a stream of messages, which is the same on
the wire. Knows no message and no service.
"""

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from typing import Any

import grpc
import grpc.aio

from headrace.core.errors import DeadlineExceeded, HeadraceError, InvalidRequest
from headrace.core.front_door_limits import GRPC_MESSAGE_TIMEOUT_MS
from headrace.wire.status import message_of, status_of, trailing_metadata

Behaviour = Callable[[Any, Any], Any]


def await_message(
    handler: grpc.RpcMethodHandler, *, timeout_ms: int = GRPC_MESSAGE_TIMEOUT_MS
) -> grpc.RpcMethodHandler:
    """The same handler, which ends a call with DEADLINE_EXCEEDED when its one request has not come by then. Handlers
    that take a stream of requests are returned as they are."""
    if handler.request_streaming:
        return handler
    one, many = ("unary_stream", "stream_stream") if handler.response_streaming else ("unary_unary", "stream_unary")
    awaited = awaiting(getattr(handler, one), timeout_ms=timeout_ms)
    return handler._replace(request_streaming=True, **{one: None, many: awaited})


def awaiting(behaviour: Behaviour, *, timeout_ms: int = GRPC_MESSAGE_TIMEOUT_MS) -> Behaviour:
    """A behaviour of grpc.aio that takes one request (a coroutine or an async generator function) as one that takes a
    stream of them, of which it reads the first."""
    if inspect.isasyncgenfunction(behaviour):

        async def stream(requests: AsyncIterator[Any], context: Any) -> AsyncGenerator[Any, None]:
            request = await _first(requests, context, timeout_ms)
            async for message in behaviour(request, context):
                yield message

        return stream

    async def answer(requests: AsyncIterator[Any], context: Any) -> Any:
        return await behaviour(await _first(requests, context, timeout_ms), context)

    return answer


class MessagesAwaited(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """`await_message` for every handler of a grpc.aio server that is made with this interceptor."""

    def __init__(self, *, timeout_ms: int = GRPC_MESSAGE_TIMEOUT_MS) -> None:
        self._timeout_ms = timeout_ms

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """None, as gRPC has it, for a method that nobody serves."""
        handler = await continuation(handler_call_details)
        return None if handler is None else await_message(handler, timeout_ms=self._timeout_ms)


async def _first(requests: AsyncIterator[Any], context: Any, timeout_ms: int) -> Any:
    error: HeadraceError
    try:
        async with asyncio.timeout(timeout_ms / 1_000):
            return await anext(aiter(requests))
    except StopAsyncIteration:
        error = InvalidRequest("the call ended without a message")
    except TimeoutError:
        error = DeadlineExceeded("the message of this call did not come")
    await context.abort(status_of(error).grpc_code, message_of(error), trailing_metadata(error))
    raise AssertionError("abort raises")
