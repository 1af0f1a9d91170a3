"""Bytes that are no request are the caller's fault and are told as such, by every method of the gateway."""

from contextlib import asynccontextmanager

import grpc
import pytest
from tiny_gateway import make_worker_record, tiny_gateway

from headrace.gateway.serve_grpc import serve_grpc
from headrace.transfer.channels import Channels
from headrace.wire.status import ERROR_KEY

BAD_UTF8 = b"\x0a\x03\xff\xfe\xfd"  # field 1, text, three bytes that are no UTF-8
CUT = b"\x0a\x50abc"  # field 1 announces 80 bytes
UNARY = ["Inference/ListModels", "CacheAdmin/ListBlocks", "CacheAdmin/Stat", "CacheAdmin/Evict", "CacheAdmin/Status"]


@asynccontextmanager
async def served(model_path):
    async with tiny_gateway(make_worker_record("d0"), model_path=model_path) as gateway:
        channels = Channels()
        server, port = await serve_grpc(gateway.service, address="127.0.0.1:0", channel_to=channels.to)
        try:
            yield channels.to(f"127.0.0.1:{port}")
        finally:
            await channels.close()
            await server.stop(grace=0)


@pytest.mark.parametrize("data", [BAD_UTF8, CUT], ids=["bad UTF-8", "cut"])
async def test_a_stream_is_refused_as_an_invalid_request(model_path, data: bytes):
    """Fails when gRPC answers by itself: UNKNOWN, which callers take for a fault of the server and try again."""
    async with served(model_path) as channel:
        call = channel.unary_stream("/headrace.v1.Inference/Generate")(data, timeout=60)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await call.read()
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (ERROR_KEY, "InvalidRequest") in tuple(refused.value.trailing_metadata())


@pytest.mark.parametrize("method", UNARY)
async def test_a_unary_call_is_refused_as_an_invalid_request(model_path, method: str):
    async with served(model_path) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary(f"/headrace.v1.{method}")(CUT, timeout=60)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert (ERROR_KEY, "InvalidRequest") in tuple(refused.value.trailing_metadata())


async def test_a_method_that_nobody_serves_is_still_unimplemented(model_path):
    async with served(model_path) as channel:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await channel.unary_unary("/headrace.v1.Inference/Nothing")(b"", timeout=60)
    assert refused.value.code() is grpc.StatusCode.UNIMPLEMENTED
