"""Silent calls to a real gRPC server of Serve's, made as a proxy makes it: Serve's own service, ours, reflection."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from ray.serve._private.grpc_util import enable_server_reflection, gRPCGenericServer
from ray.serve._private.proxy_request_response import gRPCStreamingType
from ray.serve.generated.serve_pb2 import HealthzRequest, HealthzResponse
from ray.serve.generated.serve_pb2_grpc import (
    RayServeAPIServiceServicer,
    RayServeAPIServiceStub,
    add_RayServeAPIServiceServicer_to_server,
)

from headrace_cluster.proxy_services import add_guarded


def replica(*, service_method: str, streaming_type: gRPCStreamingType):
    """In place of Serve's handlers: health's and Serve's own answers, as the bytes that a replica gives."""
    reply = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
    if "RayServe" in service_method:
        reply = HealthzResponse(message="success")

    async def answer(request: object, context: object) -> bytes:
        return reply.SerializeToString()

    async def stream(request: object, context: object):
        yield reply.SerializeToString()

    is_one = streaming_type in (gRPCStreamingType.UNARY_UNARY, gRPCStreamingType.STREAM_UNARY)
    return answer if is_one else stream


@asynccontextmanager
async def proxy(timeout_ms: int):
    """As Serve's `start_grpc_server`: a channel to it."""
    server = gRPCGenericServer(replica)
    port = server.add_insecure_port("127.0.0.1:0")
    add_RayServeAPIServiceServicer_to_server(RayServeAPIServiceServicer(), server)
    health_servicer = health_pb2_grpc.HealthServicer()
    add_guarded(health_pb2_grpc.add_HealthServicer_to_server, health_servicer, server, message_timeout_ms=timeout_ms)
    enable_server_reflection(server)
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(0)


async def test_calls_whose_message_comes_are_answered_by_every_service():
    async with proxy(60_000) as channel:
        serving = health_pb2.HealthCheckResponse(status=health_pb2.HealthCheckResponse.SERVING)
        health = health_pb2_grpc.HealthStub(channel)
        assert await health.Check(health_pb2.HealthCheckRequest()) == serving
        assert [reply async for reply in health.Watch(health_pb2.HealthCheckRequest())] == [serving]
        assert (await RayServeAPIServiceStub(channel).Healthz(HealthzRequest())).message == "success"
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        told = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([asked]))
        names = [service.name async for reply in told for service in reply.list_services_response.service]
        assert names == ["grpc.health.v1.Health", "grpc.reflection.v1alpha.ServerReflection"]


@pytest.mark.parametrize(
    "method",
    [
        "grpc.health.v1.Health/Check",
        "grpc.health.v1.Health/Watch",
        "ray.serve.RayServeAPIService/Healthz",
        "ray.serve.RayServeAPIService/ListApplications",
        "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
async def test_a_call_that_says_nothing_ends_whichever_service_it_is_to(method: str):
    """Fails when only ours are guarded, and somebody without a key keeps calls open at the others for ever."""
    async with proxy(50) as channel, asyncio.timeout(60):
        silent = channel.stream_stream(f"/{method}")()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await silent.read()
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
