"""Calls of one message that never comes, to a real server."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import grpc.aio
import pytest

from headrace.wire.await_message import MessagesAwaited


async def double(request: bytes, context) -> bytes:
    return request * 2


async def each(request: bytes, context):
    for byte in request:
        yield bytes([byte])


@asynccontextmanager
async def served(timeout_ms: int):
    server = grpc.aio.server(interceptors=(MessagesAwaited(timeout_ms=timeout_ms),), maximum_concurrent_rpcs=1)
    handlers = {
        "Double": grpc.unary_unary_rpc_method_handler(double),
        "Each": grpc.unary_stream_rpc_method_handler(each),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("t.T", handlers),))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    try:
        async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            yield channel
    finally:
        await server.stop(0)


async def test_calls_whose_message_comes_are_answered_as_ever():
    async with served(60_000) as channel:
        assert await channel.unary_unary("/t.T/Double")(b"ab") == b"abab"
        assert [message async for message in channel.unary_stream("/t.T/Each")(b"ab")] == [b"a", b"b"]


async def code_of(call) -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as failed:
        return failed.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("method", ["Double", "Each"])
async def test_a_call_whose_message_does_not_come_gives_its_place_back(method):
    """The server has one place. Fails when whoever says nothing keeps it."""
    async with served(50) as channel:
        silent = channel.stream_stream(f"/t.T/{method}")()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await silent.read()
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        async with asyncio.timeout(60):
            while await code_of(channel.unary_unary("/t.T/Double")(b"x")) is not grpc.StatusCode.OK:  # noqa: ASYNC110
                await asyncio.sleep(0.01)  # the caller hears of the end before the server has counted it


@pytest.mark.parametrize("method", ["Double", "Each"])
async def test_a_call_that_ends_without_a_message_is_the_callers_fault(method):
    async with served(60_000) as channel:
        empty = channel.stream_stream(f"/t.T/{method}")()
        await empty.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await empty.read()
        assert ended.value.code() is grpc.StatusCode.INVALID_ARGUMENT
