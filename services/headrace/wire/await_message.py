"""A gRPC call whose message does not come is ended: by itself gRPC waits for it without end, before any code of ours
runs, and whoever opens calls and says nothing, with no key, takes the places of all others.

Owns the wait, and how a call of one message gets one: it is served as one of a stream of messages, which is the same on
the wire. A call of many messages has as long in all. Knows no message and no service.
"""

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
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
    """The same handler, which ends a call with DEADLINE_EXCEEDED when its one request has not come by then. One that
    takes a stream of requests ends a call that is not over by then, whatever came: a message now and then would keep a
    place as well as silence."""
    if handler.request_streaming:
        side = "stream_stream" if handler.response_streaming else "stream_unary"
        return handler._replace(**{side: _ending(getattr(handler, side), timeout_ms)})
    one, many = ("unary_stream", "stream_stream") if handler.response_streaming else ("unary_unary", "stream_unary")
    awaited = _awaiting(getattr(handler, one), timeout_ms)
    return handler._replace(request_streaming=True, **{one: None, many: awaited})


def _awaiting(behaviour: Behaviour, timeout_ms: int) -> Behaviour:
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


def _ending(behaviour: Behaviour, timeout_ms: int) -> Behaviour:
    """The same behaviour of a stream of requests, as a coroutine that writes what the generator gives."""
    makes_messages = inspect.isasyncgenfunction(behaviour)

    async def write(requests: AsyncIterator[Any], context: Any) -> None:
        async with aclosing(behaviour(requests, context)) as messages:
            async for message in messages:
                await context.write(message)

    async def handle(requests: AsyncIterator[Any], context: Any) -> Any:
        timer = asyncio.timeout(timeout_ms / 1_000)
        try:
            async with timer:
                return await (write if makes_messages else behaviour)(requests, context)
        except TimeoutError:
            if not timer.expired():
                raise
        return await _abort(context, DeadlineExceeded(f"a call of many messages may take {timeout_ms / 1_000:g} s"))

    return handle


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
    return await _abort(context, error)


async def _abort(context: Any, error: HeadraceError) -> Any:
    await context.abort(status_of(error).grpc_code, message_of(error), trailing_metadata(error))
    raise AssertionError("abort raises")
