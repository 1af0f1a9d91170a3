"""The gateway as a Serve ingress: HTTP by an ASGI app, gRPC by methods that Serve's proxies find by the RPC's name.

Owns the replica's life and how an error's status passes Serve's gRPC proxy. What a gateway does is in `gateway/`.
"""

from collections.abc import AsyncIterator
from typing import Any

from ray import serve
from ray.serve.handle import DeploymentHandle

from headrace.config import load_config
from headrace.core.clock import SystemClock
from headrace.gateway.refuse_call import CallRefused
from headrace.wire.v1 import admin_pb2, inference_pb2
from headrace_cluster.ray_worker_calls import RayWorkerCalls


@serve.ingress()
class GatewayReplica:
    """One gateway.

    A refused call ends with an empty message instead of an exception: Serve's proxy takes code, message and trailing
    metadata from the context that comes with a message, while of an exception it keeps code and message only. The
    metadata is what lets a client raise the same error with its fields (`wire/status.py`). The status is not OK, so a
    unary caller never sees the message; a streaming one sees an event without content before the error.
    """

    async def __init__(
        self, settings: dict[str, Any], decode: DeploymentHandle, prefill: DeploymentHandle | None
    ) -> None:
        from headrace.compose import build_gateway

        calls = RayWorkerCalls(prefill=prefill, decode=decode, clock=SystemClock())
        self._gateway = build_gateway(load_config(settings, environ={}), calls=calls)
        await self._gateway.start()

    def __serve_build_asgi_app__(self) -> Any:
        return self._gateway.http_app

    async def Generate(self, request: Any, grpc_context: Any) -> AsyncIterator[Any]:
        """inference.proto."""
        try:
            async for event in self._gateway.inference.Generate(request, grpc_context):
                yield event
        except CallRefused:
            yield inference_pb2.GenerateEvent()

    async def ListModels(self, request: Any, grpc_context: Any) -> Any:
        """inference.proto."""
        try:
            return await self._gateway.inference.ListModels(request, grpc_context)
        except CallRefused:
            return inference_pb2.ListModelsReply()

    async def ListBlocks(self, request: Any, grpc_context: Any) -> Any:
        """admin.proto."""
        try:
            return await self._gateway.admin.ListBlocks(request, grpc_context)
        except CallRefused:
            return admin_pb2.ListBlocksReply()

    async def Stat(self, request: Any, grpc_context: Any) -> Any:
        """admin.proto."""
        try:
            return await self._gateway.admin.Stat(request, grpc_context)
        except CallRefused:
            return admin_pb2.StatReply()

    async def Evict(self, request: Any, grpc_context: Any) -> Any:
        """admin.proto."""
        try:
            return await self._gateway.admin.Evict(request, grpc_context)
        except CallRefused:
            return admin_pb2.EvictReply()

    async def Status(self, request: Any, grpc_context: Any) -> Any:
        """admin.proto."""
        try:
            return await self._gateway.admin.Status(request, grpc_context)
        except CallRefused:
            return admin_pb2.StatusReply()

    async def WhyMiss(self, request: Any, grpc_context: Any) -> Any:
        """admin.proto."""
        try:
            return await self._gateway.admin.WhyMiss(request, grpc_context)
        except CallRefused:
            return admin_pb2.WhyMissReply()

    async def ReadBlock(self, request: Any, grpc_context: Any) -> Any:
        """admin.proto."""
        try:
            return await self._gateway.admin.ReadBlock(request, grpc_context)
        except CallRefused:
            return admin_pb2.StoredBlock()

    async def WriteBlock(self, request: Any, grpc_context: Any) -> Any:
        """admin.proto."""
        try:
            return await self._gateway.admin.WriteBlock(request, grpc_context)
        except CallRefused:
            return admin_pb2.WriteBlockReply()

    async def Doctor(self, request: Any, grpc_context: Any) -> Any:
        """admin.proto."""
        try:
            return await self._gateway.admin.Doctor(request, grpc_context)
        except CallRefused:
            return admin_pb2.DoctorReply()

    async def Check(self, request: Any, grpc_context: Any) -> Any:
        """grpc.health.v1."""
        return await self._gateway.health.Check(request, grpc_context)

    async def Watch(self, request: Any, grpc_context: Any) -> AsyncIterator[Any]:
        """grpc.health.v1."""
        async for status in self._gateway.health.Watch(request, grpc_context):
            yield status

    async def __del__(self) -> None:
        """Serve calls this once, after the last request has ended or the grace period is over."""
        gateway = getattr(self, "_gateway", None)
        if gateway is not None:
            await gateway.stop()
