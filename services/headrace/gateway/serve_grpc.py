"""The gateway's gRPC services on a plain grpc.aio server, for tests and for deployments without Ray."""

from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from headrace.core.errors import DeadlineExceeded
from headrace.core.front_door_limits import GRPC_MESSAGE_TIMEOUT_MS, UNREAD_TIMEOUT_MS
from headrace.core.limits import GATEWAY_INFLIGHT_MAX
from headrace.gateway.admin_grpc import CacheAdminRpc
from headrace.gateway.inference_grpc import HealthRpc, InferenceRpc
from headrace.gateway.message_writer import MessageWriter
from headrace.gateway.refuse_call import refuse_call
from headrace.gateway.service import GatewayService
from headrace.transfer.channels import FRONT_DOOR_OPTIONS, Options, bind_server, build_server
from headrace.transfer.tls_files import Tls
from headrace.wire.await_message import MessagesAwaited, SilentCalls
from headrace.wire.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc


async def serve_grpc(
    service: GatewayService,
    *,
    address: str,
    channel_to: Callable[[str], grpc.aio.Channel],
    tls: Tls | None = None,
    unread_timeout_ms: int = UNREAD_TIMEOUT_MS,
    message_timeout_ms: int = GRPC_MESSAGE_TIMEOUT_MS,
    options: Options = FRONT_DOOR_OPTIONS,
) -> tuple[grpc.aio.Server, int]:
    """Start a server for Inference, CacheAdmin, health and reflection; returns it and its port. The caller stops it."""
    # Places beyond admission, so that callers are told to wait; who says nothing never has them all.
    calls_max = GATEWAY_INFLIGHT_MAX
    silent = SilentCalls(timeout_ms=message_timeout_ms, calls_max=calls_max, tell=service.call_refused)
    server = build_server(
        rpcs_max=2 * calls_max,
        interceptors=(MessagesAwaited(silent),),
        options=options,
        tell=service.call_refused,
    )
    inference = InferenceRpc(service, refuse=refuse_call)
    admin = CacheAdminRpc(service, channel_to=channel_to, refuse=refuse_call)
    health = HealthRpc(service, refuse=refuse_call)
    registrations: list[tuple[Any, Any]] = [
        (inference_pb2_grpc.add_InferenceServicer_to_server, _Closing(inference, "Generate", unread_timeout_ms)),
        (admin_pb2_grpc.add_CacheAdminServicer_to_server, admin),
        (health_pb2_grpc.add_HealthServicer_to_server, _Closing(health, "Watch", unread_timeout_ms)),
    ]
    for register, servicer in registrations:
        register(servicer, server)
    _enable_reflection(server)
    port = bind_server(server, address, tls=tls)
    await server.start()
    return server, port


class _Closing:
    """A servicer whose streaming method closes its generator itself when the call ends, or its client stops reading.

    grpc.aio drops a generator whose call is cancelled between two messages and leaves its clean-up to the garbage
    collector; a cancelled request must end on the worker at once.
    """

    def __init__(self, servicer: Any, streaming: str, unread_timeout_ms: int) -> None:
        self._servicer = servicer
        setattr(self, streaming, _closing(getattr(servicer, streaming), unread_timeout_ms))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._servicer, name)


def _closing(
    method: Callable[[Any, Any], AsyncGenerator[Any, None]], unread_timeout_ms: int
) -> Callable[[Any, Any], Awaitable[None]]:
    async def handle(request: Any, context: Any) -> None:
        writer = MessageWriter(context, timeout_ms=unread_timeout_ms)
        try:
            async with aclosing(method(request, context)) as messages:
                async for message in messages:
                    await writer.write(message)
        except DeadlineExceeded as unread:
            await refuse_call(context, unread)

    return handle


def _enable_reflection(server: grpc.aio.Server) -> None:
    """Let generic clients list the services; the package for it is not part of every install."""
    try:
        from grpc_reflection.v1alpha import reflection
    except ImportError:
        return
    names = [
        inference_pb2.DESCRIPTOR.services_by_name["Inference"].full_name,
        admin_pb2.DESCRIPTOR.services_by_name["CacheAdmin"].full_name,
        health_pb2.DESCRIPTOR.services_by_name["Health"].full_name,
        reflection.SERVICE_NAME,
    ]
    reflection.enable_server_reflection(names, server)
