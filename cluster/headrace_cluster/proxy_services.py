"""Registers our gRPC services in Serve's proxies: a client that leaves ends the work it asked for, and request bytes
that do not decode, or do not come, are refused as such (`wire/refuse_undecodable.py`, `wire/await_message.py`).

Runs inside Serve's proxy processes, by way of `grpc_servicer_functions`. Serve 2.60 passes a client's leaving on to the
replica only when it comes while the proxy waits for the replica's next message. When it comes while the proxy waits for
the network to take a message, Serve's nested generators are dropped as they are, and the worker generates for nobody
until the end. Here the next message is always waited for, also while one is written. A stream also names this proxy's
presence, so that it ends when the proxy dies. A stream whose gateway died before it said anything is asked for once
more, and Serve's code for a gateway that died is put right.
"""

import asyncio
import functools
import inspect
import logging
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any

import grpc
import ray
from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from ray.exceptions import ActorDiedError
from ray.serve._private.proxy_request_response import gRPCStreamingType
from ray.serve.exceptions import RequestCancelledError
from ray.util.metrics import Counter

from headrace.core.errors import DeadlineExceeded, HeadraceError
from headrace.core.front_door_limits import GRPC_MESSAGE_TIMEOUT_MS, UNREAD_TIMEOUT_MS
from headrace.gateway.message_writer import MessageWriter
from headrace.telemetry.refused_calls import reason_of
from headrace.wire.abort_call import say_nothing_of_undelivered
from headrace.wire.await_message import SilentCalls
from headrace.wire.refuse_undecodable import refuse_undecodable, refusing
from headrace.wire.status import message_of, status_of
from headrace.wire.v1.admin_pb2_grpc import add_CacheAdminServicer_to_server
from headrace.wire.v1.inference_pb2_grpc import add_InferenceServicer_to_server
from headrace_cluster.caller_presence import CALLER_KEY, Presence
from headrace_cluster.proxy_http import CALL_ATTEMPTS
from headrace_cluster.proxy_tls import check_opened_here

Handler = Callable[[Any, Any], Any]
HandlerFactory = Callable[..., Handler]

# How Serve spells INTERNAL and a replica's death in a call's end.
INTERNAL = (grpc.StatusCode.INTERNAL, grpc.StatusCode.INTERNAL.value[0])
GATEWAY_DIED = ActorDiedError.BASE_ERROR_MSG


def add_inference(servicer: Any, server: Any) -> None:
    """headrace.v1.Inference."""
    add_guarded(add_InferenceServicer_to_server, servicer, server)


def add_cache_admin(servicer: Any, server: Any) -> None:
    """headrace.v1.CacheAdmin."""
    add_guarded(add_CacheAdminServicer_to_server, servicer, server)


def add_health(servicer: Any, server: Any) -> None:
    """grpc.health.v1.Health, whose Watch is a stream without end."""
    add_guarded(add_HealthServicer_to_server, servicer, server)


def add_guarded(
    add: Callable[[Any, Any], None], servicer: Any, server: Any, *, message_timeout_ms: int = GRPC_MESSAGE_TIMEOUT_MS
) -> None:
    """Register a service while the server's factory of handlers gives ours: streams that can be cancelled, and calls
    that refuse what could not be decoded. With the first one, all services of the server wait so long for messages."""
    check_opened_here(server)
    _await_messages(server, SilentCalls(timeout_ms=message_timeout_ms, tell=count_ended))
    say_nothing_of_undelivered()
    logging.getLogger("asyncio").addFilter(is_worth_a_line)
    factory = server.service_handler_factory
    server.service_handler_factory = _guarded(factory, Presence(ray.util.get_node_ip_address()))
    try:
        add(servicer, _Registration(server))
    finally:
        server.service_handler_factory = factory


def is_worth_a_line(record: logging.LogRecord) -> bool:
    """Not worth one: that a call which Serve itself cancelled ended as cancelled. It leaves that to be logged with a
    traceback for every client that goes."""
    return not (record.exc_info and isinstance(record.exc_info[1], RequestCancelledError))


def count_ended(error: HeadraceError, peer: str) -> None:
    """A proxy ended a call before a gateway heard of it."""
    _ended_calls().inc(tags={"reason": reason_of(error)})


@functools.cache
def _ended_calls() -> Counter:
    return Counter(
        "headrace_grpc_calls_ended",
        description="gRPC calls that a proxy ended because their message did not come, or was none.",
        tag_keys=("reason",),
    )


def _await_messages(server: Any, calls: SilentCalls) -> None:
    """`await_message` for all that a server of Serve's has: its own service, which is registered before ours, ours, and
    reflection, which comes last and which no key is asked for either. Serve gives its server no interceptor."""
    if "add_generic_rpc_handlers" in vars(server):
        return
    add = server.add_generic_rpc_handlers

    def add_awaited(handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        add(handlers)
        await_those_of(handlers)

    def await_those_of(handlers: Sequence[Any]) -> None:
        # After Serve has put its own behaviours into the same mapping, and as it does.
        (service,) = handlers
        service._method_handlers = {
            name: calls.await_message(handler) for name, handler in service._method_handlers.items()
        }

    for handlers in server.generic_rpc_handlers:
        await_those_of(handlers)
    server.add_generic_rpc_handlers = add_awaited
    # The second way by which generated code registers the same methods; it would come before the first, not awaited.
    server.add_registered_method_handlers = lambda service, handlers: None


class _Registration:
    """Takes a generated `add_..._to_server`'s handlers and gives them to Serve's server with deserializers that do not
    raise. Serve keeps the deserializers and replaces what handles the call by its factory's handlers."""

    def __init__(self, server: Any) -> None:
        self._server = server

    def add_generic_rpc_handlers(self, handlers: Sequence[grpc.GenericRpcHandler]) -> None:
        """Nothing yet: the same handlers come again, by name, with the service's name."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, grpc.RpcMethodHandler]) -> None:
        """Register them once."""
        ours = {name: refuse_undecodable(handler) for name, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, ours),))


def _guarded(factory: HandlerFactory, presence: Presence) -> HandlerFactory:
    def make(service_method: str, streaming_type: gRPCStreamingType) -> Handler:
        handler = unavailable_when_died(factory(service_method=service_method, streaming_type=streaming_type))
        if streaming_type is gRPCStreamingType.UNARY_STREAM:
            handler = write_stream(naming_caller(handler, presence))
        return refusing(handler, tell=count_ended)

    return make


def unavailable_when_died(handler: Handler) -> Handler:
    """The same handler of Serve's, but a gateway that died under a call is UNAVAILABLE, which a client tries again, and
    not INTERNAL, which it does not. Serve keeps of the failure its text alone. A stream of which nothing has come goes
    to another gateway, or to the one that takes the dead one's place: no client has heard of it, and no worker."""
    if inspect.isasyncgenfunction(handler):

        async def stream(request: Any, context: Any) -> AsyncGenerator[Any, None]:
            for attempts_left in reversed(range(CALL_ATTEMPTS)):
                begun = False
                async with aclosing(handler(request, context)) as messages:
                    async for message in messages:
                        begun = True
                        yield message
                if not _died(context) or begun or not attempts_left:
                    break
                # As a call that has not ended: Serve leaves alone what is set already.
                context.set_code(0)
                context.set_details("")
            _correct_code(context)

        return stream

    async def answer(request: Any, context: Any) -> Any:
        reply = await handler(request, context)
        _correct_code(context)
        return reply

    return answer


def _died(context: Any) -> bool:
    details = context.details() or ""
    text = details if isinstance(details, str) else details.decode()
    return context.code() in INTERNAL and text.startswith(GATEWAY_DIED)


def _correct_code(context: Any) -> None:
    if _died(context):
        context.set_code(grpc.StatusCode.UNAVAILABLE)
        context.set_details("the gateway died while it served this call; another one takes its place")


def naming_caller(stream: Handler, presence: Presence) -> Handler:
    """The same handler, whose call tells the gateway who must live for it to go on (`caller_presence.py`)."""

    async def handle(request: Any, context: Any) -> AsyncGenerator[Any, None]:
        named = _NamingContext(context, await presence.address())
        async with aclosing(stream(request, named)) as messages:
            async for message in messages:
                yield message

    return handle


class _NamingContext:
    """A gRPC context with one more entry of metadata, which no client can send itself."""

    def __init__(self, context: Any, address: str) -> None:
        self._context = context
        self._address = address

    def invocation_metadata(self) -> list[tuple[str, Any]]:
        """What the client sent, and the proxy's presence."""
        sent = [(key, value) for key, value in self._context.invocation_metadata() or () if key != CALLER_KEY]
        return [*sent, (CALLER_KEY, self._address)]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._context, name)


def write_stream(
    stream: Callable[[Any, Any], AsyncGenerator[Any, None]], *, unread_timeout_ms: int = UNREAD_TIMEOUT_MS
) -> Handler:
    """The same handler as a coroutine that writes; cancelling it at any await cancels inside `stream`'s own await, and
    so does a client that takes nothing for `unread_timeout_ms`."""

    async def handle(request: Any, context: Any) -> None:
        messages, writer = stream(request, context), MessageWriter(context, timeout_ms=unread_timeout_ms)
        coming = asyncio.create_task(anext(messages, None))
        try:
            while (message := await coming) is not None:
                coming = asyncio.create_task(anext(messages, None))
                await writer.write(message)
        except DeadlineExceeded as unread:
            context.set_code(status_of(unread).grpc_code)
            context.set_details(message_of(unread))
        finally:
            await _cancel_inside(messages, coming)

    return handle


async def _cancel_inside(messages: AsyncGenerator[Any, None], coming: "asyncio.Task[Any]") -> None:
    """End the generator by a CancelledError at the await that it stands at; no other way reaches the replica."""
    outcome: Any
    while True:
        await asyncio.sleep(0)  # a task that has not begun would be cancelled outside the generator
        coming.cancel()
        (outcome,) = await asyncio.gather(coming, return_exceptions=True)
        if outcome is None or isinstance(outcome, BaseException):
            return
        coming = asyncio.create_task(anext(messages, None))
