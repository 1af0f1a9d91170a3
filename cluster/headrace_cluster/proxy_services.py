"""Registers the streaming gRPC services in Serve's proxies, so that a client that leaves ends the work it asked for.

Runs inside Serve's proxy processes, by way of `grpc_servicer_functions`. Serve 2.60 passes a client's leaving on to the
replica only when it comes while the proxy waits for the replica's next message. When it comes while the proxy waits for
the network to take a message, Serve's nested generators are dropped as they are, and the worker generates for nobody
until the end. Here the next message is always waited for, also while one is written.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from typing import Any

from grpc_health.v1.health_pb2_grpc import add_HealthServicer_to_server
from ray.serve._private.proxy_request_response import gRPCStreamingType
from ray.serve.exceptions import RequestCancelledError

from headrace.wire.v1.inference_pb2_grpc import add_InferenceServicer_to_server

Handler = Callable[[Any, Any], Any]
HandlerFactory = Callable[..., Handler]


def add_inference(servicer: Any, server: Any) -> None:
    """headrace.v1.Inference."""
    _add_cancellable(add_InferenceServicer_to_server, servicer, server)


def add_health(servicer: Any, server: Any) -> None:
    """grpc.health.v1.Health, whose Watch is a stream without end."""
    _add_cancellable(add_HealthServicer_to_server, servicer, server)


def _add_cancellable(add: Callable[[Any, Any], None], servicer: Any, server: Any) -> None:
    """Register a service while the server's factory of handlers gives cancellable streams."""
    logging.getLogger("asyncio").addFilter(is_worth_a_line)
    factory = server.service_handler_factory
    server.service_handler_factory = _cancellable(factory)
    try:
        add(servicer, server)
    finally:
        server.service_handler_factory = factory


def is_worth_a_line(record: logging.LogRecord) -> bool:
    """Not worth one: that a call which Serve itself cancelled ended as cancelled. It leaves that to be logged with a
    traceback for every client that goes."""
    return not (record.exc_info and isinstance(record.exc_info[1], RequestCancelledError))


def _cancellable(factory: HandlerFactory) -> HandlerFactory:
    def make(service_method: str, streaming_type: gRPCStreamingType) -> Handler:
        handler = factory(service_method=service_method, streaming_type=streaming_type)
        return write_stream(handler) if streaming_type is gRPCStreamingType.UNARY_STREAM else handler

    return make


def write_stream(stream: Callable[[Any, Any], AsyncGenerator[Any, None]]) -> Handler:
    """The same handler as a coroutine that writes; cancelling it at any await cancels inside `stream`'s own await."""

    async def handle(request: Any, context: Any) -> None:
        messages = stream(request, context)
        coming = asyncio.create_task(anext(messages, None))
        try:
            while (message := await coming) is not None:
                coming = asyncio.create_task(anext(messages, None))
                await context.write(message)
        finally:
            await _cancel_inside(messages, coming)

    return handle


async def _cancel_inside(messages: AsyncGenerator[Any, None], coming: "asyncio.Task[Any]") -> None:
    """End the generator by a CancelledError at the await that it stands at; no other way reaches the replica."""
    while True:
        await asyncio.sleep(0)  # a task that has not begun would be cancelled outside the generator
        coming.cancel()
        (outcome,) = await asyncio.gather(coming, return_exceptions=True)
        if outcome is None or isinstance(outcome, BaseException):
            return
        coming = asyncio.create_task(anext(messages, None))
