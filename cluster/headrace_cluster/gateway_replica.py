"""The gateway as a Serve ingress: HTTP by an ASGI app, gRPC by methods that Serve's proxies find by the RPC's name.

Owns the replica's life and how an error's status passes Serve's gRPC proxy. What a gateway does is in `gateway/`.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from contextlib import aclosing
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from headrace.core.clock import SystemClock
from headrace.gateway.refuse_call import CallRefused
from headrace.wire.v1 import admin_pb2, inference_pb2
from headrace_cluster.caller_presence import CALLER_KEY, CallerGone, CallersPresent
from headrace_cluster.ray_worker_calls import RayWorkerCalls
from headrace_cluster.store_actor import config_here, ray_cluster_here


def without_request_id(app: Callable[[Any, Any, Any], Awaitable[None]]) -> Callable[[Any, Any, Any], Awaitable[None]]:
    """The same ASGI app, whose answers carry no `x-request-id`: Serve's proxy adds the caller's, or one of its own, to
    every answer without looking whether one is there."""

    async def answer(scope: Any, receive: Any, send: Any) -> None:
        async def send_without(message: Any) -> None:
            if message["type"] == "http.response.start":
                kept = [(name, value) for name, value in message["headers"] if name.lower() != b"x-request-id"]
                message = message | {"headers": kept}
            await send(message)

        await app(scope, receive, send_without)

    return answer


def _admin_call(name: str, empty: Callable[[], Any]) -> Callable[..., Awaitable[Any]]:
    """The replica's method for one unary RPC of CacheAdmin; `empty` makes what a refused call ends with."""

    async def call(self: "GatewayReplica", request: Any, grpc_context: Any) -> Any:
        try:
            return await getattr(self._gateway.admin, name)(request, grpc_context)
        except CallRefused:
            return empty()

    call.__name__ = name
    return call


@serve.ingress()
class GatewayReplica:
    """One gateway.

    A refused call ends with an empty message instead of an exception: Serve's proxy takes code, message and trailing
    metadata from the context that comes with a message, while of an exception it keeps code and message only. The
    metadata is what lets a client raise the same error with its fields (`wire/status.py`). The status is not OK, so a
    unary caller never sees the message; a streaming one sees an event without content before the error.
    """

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self, settings: dict[str, Any], decode: DeploymentHandle, prefill: DeploymentHandle | None
    ) -> None:
        from headrace.compose import build_gateway
        from headrace.telemetry.logs import set_up_logs

        self._callers = CallersPresent()
        calls = RayWorkerCalls(prefill=prefill, decode=decode, clock=SystemClock())
        gateway_id = serve.get_replica_context().replica_id.unique_id
        config = config_here(settings)
        set_up_logs(config.telemetry.log_format, part="gateway", instance_id=gateway_id)
        self._gateway = build_gateway(config, calls=calls, gateway_id=gateway_id, ray_cluster=ray_cluster_here())
        await self._gateway.start()

    def __serve_build_asgi_app__(self) -> Any:
        return without_request_id(self._gateway.http_app)

    async def Generate(self, request: Any, grpc_context: Any) -> AsyncIterator[Any]:
        """inference.proto."""
        refused = inference_pb2.GenerateEvent()
        async with aclosing(self._stream(self._gateway.inference.Generate, request, grpc_context, refused)) as events:
            async for event in events:
                yield event

    async def ListModels(self, request: Any, grpc_context: Any) -> Any:
        """inference.proto."""
        try:
            return await self._gateway.inference.ListModels(request, grpc_context)
        except CallRefused:
            return inference_pb2.ListModelsReply()

    # admin.proto's CacheAdmin: Serve finds a method by the RPC's name.
    ListBlocks = _admin_call("ListBlocks", admin_pb2.ListBlocksReply)
    Stat = _admin_call("Stat", admin_pb2.StatReply)
    Evict = _admin_call("Evict", admin_pb2.EvictReply)
    Status = _admin_call("Status", admin_pb2.StatusReply)
    WhyMiss = _admin_call("WhyMiss", admin_pb2.WhyMissReply)
    ExplainRoute = _admin_call("ExplainRoute", admin_pb2.ExplainRouteReply)
    ReadBlock = _admin_call("ReadBlock", admin_pb2.StoredBlock)
    WriteBlock = _admin_call("WriteBlock", admin_pb2.WriteBlockReply)
    Doctor = _admin_call("Doctor", admin_pb2.DoctorReply)
    Pin = _admin_call("Pin", admin_pb2.ControlReply)
    Unpin = _admin_call("Unpin", admin_pb2.ControlReply)
    SetTtl = _admin_call("SetTtl", admin_pb2.ControlReply)
    ListTenants = _admin_call("ListTenants", admin_pb2.ListTenantsReply)
    SetQuota = _admin_call("SetQuota", admin_pb2.SetQuotaReply)

    async def DrainNode(self, request: Any, grpc_context: Any) -> AsyncIterator[Any]:
        """admin.proto."""
        refused = admin_pb2.DrainNodeProgress()
        async with aclosing(self._stream(self._gateway.admin.DrainNode, request, grpc_context, refused)) as events:
            async for progress in events:
                yield progress

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises. It runs where calls run: where that stands still, no answer
        comes, and without it Serve would not notice for a quarter of an hour."""
        if not self._gateway.healthy():
            raise RuntimeError("this gateway follows the workers, or what they hold, no more")

    async def Check(self, request: Any, grpc_context: Any) -> Any:
        """grpc.health.v1."""
        return await self._gateway.health.Check(request, grpc_context)

    async def Watch(self, request: Any, grpc_context: Any) -> AsyncIterator[Any]:
        """grpc.health.v1."""
        async with aclosing(self._stream(self._gateway.health.Watch, request, grpc_context, None)) as statuses:
            async for status in statuses:
                yield status

    async def _stream(
        self, method: Callable[[Any, Any], AsyncGenerator[Any, None]], request: Any, grpc_context: Any, refused: Any
    ) -> AsyncGenerator[Any, None]:
        """A streaming RPC's messages for as long as its proxy lives, and `refused` at the end of a refused one."""
        caller = dict(grpc_context.invocation_metadata()).get(CALLER_KEY, "")
        async with (
            aclosing(method(request, grpc_context)) as messages,
            aclosing(self._callers.while_present(caller, messages)) as present,
        ):
            try:
                async for message in present:
                    yield message
            except CallRefused:
                yield refused
            except CallerGone:
                return

    async def __del__(self) -> None:
        """Serve calls this once, after the last request has ended or the grace period is over."""
        gateway = getattr(self, "_gateway", None)
        if gateway is not None:
            await gateway.stop()
            self._callers.close()
