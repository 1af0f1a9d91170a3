"""A gRPC call whose message does not come is ended: by itself gRPC waits for it without end, before any code of ours
runs, and whoever opens calls and says nothing, with no key, takes the places of all others.

Owns the wait, how many may wait, and how a call of one message gets a wait: it is served as one of a stream of
messages, which is the same on the wire. A call of many messages has as long in all. Knows no message and no service.
"""

import asyncio
import inspect
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from headrace.core.errors import DeadlineExceeded, HeadraceError, InvalidRequest, Overloaded
from headrace.core.front_door_limits import GRPC_MESSAGE_TIMEOUT_MS, GRPC_SILENT_CALLS_MAX
from headrace.core.limits import RETRY_AFTER_MS
from headrace.wire.abort_call import Tell, abort_call, unheard

Behaviour = Callable[[Any, Any], Any]


class SilentCalls:
    """The calls of one server whose message has not come, and those that may send several.

    Each has its time. There are `calls_max` of them: beyond that the one that has waited longest is ended, since a
    message comes with its call, so that it is hardly an honest one. `tell` hears of each that is ended.
    """

    def __init__(
        self,
        *,
        timeout_ms: int = GRPC_MESSAGE_TIMEOUT_MS,
        calls_max: int = GRPC_SILENT_CALLS_MAX,
        tell: Tell = unheard,
    ) -> None:
        self._timeout_s = timeout_ms / 1_000
        self._calls_max = calls_max
        self._tell = tell
        self._timers: dict[asyncio.Timeout, None] = {}  # the one that has waited longest is first

    def await_message(self, handler: grpc.RpcMethodHandler) -> grpc.RpcMethodHandler:
        """The same handler, which ends a call with DEADLINE_EXCEEDED when its one request has not come in time. One
        that takes a stream of requests ends a call that is not over by then, whatever came: a message now and then
        would keep a place as well as silence."""
        if handler.request_streaming:
            side = "stream_stream" if handler.response_streaming else "stream_unary"
            return handler._replace(**{side: self._ending(getattr(handler, side))})
        one, many = ("unary_stream", "stream_stream") if handler.response_streaming else ("unary_unary", "stream_unary")
        awaited = self._awaiting(getattr(handler, one))
        return handler._replace(request_streaming=True, **{one: None, many: awaited})

    def tell_unserved(self, method: str) -> None:
        """Somebody calls a method that nobody serves; gRPC itself answers."""
        self._tell(InvalidRequest(f"no method {method[:200]!r} here"), "")

    def _awaiting(self, behaviour: Behaviour) -> Behaviour:
        """A behaviour of grpc.aio that takes one request (a coroutine or an async generator function) as one that takes
        a stream of them, of which it reads the first."""
        if inspect.isasyncgenfunction(behaviour):

            async def stream(requests: AsyncIterator[Any], context: Any) -> AsyncGenerator[Any, None]:
                request = await self._first(requests, context)
                async for message in behaviour(request, context):
                    yield message

            return stream

        async def answer(requests: AsyncIterator[Any], context: Any) -> Any:
            return await behaviour(await self._first(requests, context), context)

        return answer

    async def _first(self, requests: AsyncIterator[Any], context: Any) -> Any:
        error: HeadraceError = InvalidRequest("the call ended without a message")
        try:
            async with self._timed():
                request = await anext(aiter(requests), None)
                if request is not None:
                    return request
        except (DeadlineExceeded, Overloaded) as over:
            error = over
        return await abort_call(context, error, tell=self._tell)

    def _ending(self, behaviour: Behaviour) -> Behaviour:
        """The same behaviour of a stream of requests, as a coroutine that writes what the generator gives."""
        makes_messages = inspect.isasyncgenfunction(behaviour)

        async def write(requests: AsyncIterator[Any], context: Any) -> None:
            async with aclosing(behaviour(requests, context)) as messages:
                async for message in messages:
                    await context.write(message)

        async def handle(requests: AsyncIterator[Any], context: Any) -> Any:
            try:
                async with self._timed():
                    return await (write if makes_messages else behaviour)(requests, context)
            except (DeadlineExceeded, Overloaded) as over:
                return await abort_call(context, over, tell=self._tell)

        return handle

    @asynccontextmanager
    async def _timed(self) -> AsyncGenerator[None, None]:
        """One of these calls, for as long as the scope lasts. Raises DeadlineExceeded when its time is over, Overloaded
        when it has to make room for another one."""
        while len(self._timers) >= self._calls_max:
            longest = next(iter(self._timers))
            del self._timers[longest]
            if not longest.expired():
                longest.reschedule(asyncio.get_running_loop().time())
        timer = asyncio.timeout(self._timeout_s)
        self._timers[timer] = None
        try:
            async with timer:
                yield
        except TimeoutError:
            if not timer.expired():
                raise
            if timer not in self._timers:
                many = f"{self._calls_max} other calls wait for their message"
                raise Overloaded(many, retry_after_ms=RETRY_AFTER_MS) from None
            raise DeadlineExceeded(f"a call says what it wants within {self._timeout_s:g} s") from None
        finally:
            self._timers.pop(timer, None)


class MessagesAwaited(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """`await_message` for every handler of a grpc.aio server that is made with this interceptor."""

    def __init__(self, calls: SilentCalls) -> None:
        self._calls = calls

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """None, as gRPC has it, for a method that nobody serves."""
        handler = await continuation(handler_call_details)
        if handler is None:
            self._calls.tell_unserved(handler_call_details.method)
            return None
        return self._calls.await_message(handler)
