"""Request bytes that are not the message they should be are refused by a typed error, on every server of ours.

gRPC's own answer is UNKNOWN with the parser's words, which a caller takes for a fault of the server and tries again.
Owns how the failure gets from the deserializer, which can only raise, to the handler, which can answer. Knows no
message and no service.
"""

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio

from headrace.core.errors import InvalidRequest
from headrace.wire.abort_call import Tell, abort_call, unheard

Behaviour = Callable[[Any, Any], Any]


def refuse_undecodable(handler: grpc.RpcMethodHandler, *, tell: Tell = unheard) -> grpc.RpcMethodHandler:
    """The same handler, which ends a call with INVALID_ARGUMENT when the bytes of its one request do not decode, and
    tells of it.

    Handlers that take raw bytes or a stream of requests are returned as they are."""
    decode = handler.request_deserializer
    if decode is None or handler.request_streaming:
        return handler
    side = "unary_stream" if handler.response_streaming else "unary_unary"
    guarded = refusing(getattr(handler, side), tell=tell)
    return handler._replace(request_deserializer=_never_raising(decode), **{side: guarded})


def refusing(behaviour: Behaviour, *, tell: Tell = unheard) -> Behaviour:
    """The same behaviour of a grpc.aio server (a coroutine or an async generator function), guarded."""
    if inspect.isasyncgenfunction(behaviour):

        async def stream(request: Any, context: Any) -> AsyncGenerator[Any, None]:
            await _check(request, context, tell)
            async for message in behaviour(request, context):
                yield message

        return stream

    async def answer(request: Any, context: Any) -> Any:
        await _check(request, context, tell)
        return await behaviour(request, context)

    return answer


class UndecodableRefused(grpc.aio.ServerInterceptor):  # type: ignore[misc]
    """`refuse_undecodable` for every handler of a grpc.aio server that is made with this interceptor."""

    def __init__(self, tell: Tell = unheard) -> None:
        self._tell = tell

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[grpc.RpcMethodHandler | None]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> grpc.RpcMethodHandler | None:
        """None, as gRPC has it, for a method that nobody serves."""
        handler = await continuation(handler_call_details)
        return None if handler is None else refuse_undecodable(handler, tell=self._tell)


@dataclass(frozen=True, slots=True)
class _Undecodable:
    """Stands for a request that could not be read."""

    error: InvalidRequest


def _never_raising(decode: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def decode_or_explain(data: bytes) -> Any:
        try:
            return decode(data)
        except Exception as error:  # protobuf's runtimes raise different classes, ValueError among them
            return _Undecodable(InvalidRequest(f"the request's bytes are not the message of this call: {error}"))

    return decode_or_explain


async def _check(request: Any, context: Any, tell: Tell) -> None:
    if isinstance(request, _Undecodable):
        await abort_call(context, request.error, tell=tell)
