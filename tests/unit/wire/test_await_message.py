"""Calls whose messages never come, to a real server."""

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager, suppress

import grpc
import grpc.aio
import pytest

from headrace.core.errors import DeadlineExceeded, InvalidRequest
from headrace.wire.await_message import MessagesAwaited, SilentCalls


async def double(request: bytes, context) -> bytes:
    return request * 2


async def each(request: bytes, context):
    for byte in request:
        yield bytes([byte])


async def echo(requests, context):
    async for request in requests:
        yield request


async def total(requests, context) -> bytes:
    return b"".join([request async for request in requests])


@asynccontextmanager
async def served(timeout_ms: int, *, places: int = 1, told: list | None = None, **bounds):
    heard = [] if told is None else told
    calls = SilentCalls(timeout_ms=timeout_ms, tell=lambda error, peer: heard.append((error, peer)), **bounds)
    server = grpc.aio.server(interceptors=(MessagesAwaited(calls),), maximum_concurrent_rpcs=places)
    handlers = {
        "Double": grpc.unary_unary_rpc_method_handler(double),
        "Each": grpc.unary_stream_rpc_method_handler(each),
        "Echo": grpc.stream_stream_rpc_method_handler(echo),
        "Total": grpc.stream_unary_rpc_method_handler(total),
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
        echoed = channel.stream_stream("/t.T/Echo")(iter([b"a", b"b"]))
        assert [message async for message in echoed] == [b"a", b"b"]
        assert await channel.stream_unary("/t.T/Total")(iter([b"a", b"b"])) == b"ab"


async def code_of(call) -> grpc.StatusCode:
    try:
        await call
    except grpc.aio.AioRpcError as failed:
        return failed.code()
    return grpc.StatusCode.OK


@pytest.mark.parametrize("method", ["Double", "Each", "Echo", "Total"])
async def test_a_call_whose_message_does_not_come_gives_its_place_back(method):
    """The server has one place. Fails when whoever says nothing keeps it."""
    async with served(50) as channel:
        silent = channel.stream_stream(f"/t.T/{method}")()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await silent.read()
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await has_room(channel)


async def has_room(channel: grpc.aio.Channel) -> None:
    async with asyncio.timeout(60):
        while await code_of(channel.unary_unary("/t.T/Double")(b"x")) is not grpc.StatusCode.OK:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # the caller hears of the end before the server has counted it


@pytest.mark.parametrize("method", ["Echo", "Total"])
async def test_a_call_that_says_something_now_and_then_gives_its_place_back(method):
    """Fails when each message begins the time anew: one of a byte would keep a place for as long as silence may."""
    async with served(200) as channel:
        trickling = channel.stream_stream(f"/t.T/{method}")()

        async def trickle() -> None:
            with suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):  # however a write hears of the end
                while True:
                    await trickling.write(b"x")
                    await asyncio.sleep(0.01)

        async with asyncio.timeout(60), asyncio.TaskGroup() as tasks:
            tasks.create_task(trickle())
            with suppress(grpc.aio.AioRpcError):
                async for _ in trickling:
                    pass
        await has_room(channel)


@pytest.mark.parametrize("method", ["Double", "Echo"])
async def test_calls_that_say_nothing_make_room_for_whoever_comes_then(method):
    """Fails when silent calls are kept without end while each of them has its time, which is an hour here."""
    async with served(3_600_000, places=100, calls_max=4) as channel, AsyncExitStack() as stack:
        silent = []
        for _ in range(20):
            call = channel.stream_stream(f"/t.T/{method}")()
            stack.callback(call.cancel)
            silent.append(asyncio.create_task(code_of(call.read())))
        await ended(silent, 16)
        assert await channel.unary_unary("/t.T/Double")(b"x") == b"xx"
        await ended(silent, 17)
        assert {task.result() for task in silent if task.done()} == {grpc.StatusCode.RESOURCE_EXHAUSTED}


async def ended(calls: list[asyncio.Task], number: int) -> None:
    """Wait until so many are over, and no more."""
    async with asyncio.timeout(60):
        while sum(call.done() for call in calls) < number:
            await asyncio.wait([call for call in calls if not call.done()], return_when=asyncio.FIRST_COMPLETED)
    assert sum(call.done() for call in calls) == number


async def test_calls_that_are_ended_are_told_of():
    told = []
    async with served(50, told=told) as channel:
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.stream_stream("/t.T/Double")().read()
        with pytest.raises(grpc.aio.AioRpcError):
            await channel.unary_unary("/t.T/Nothing")(b"")
    assert [type(error) for error, _ in told] == [DeadlineExceeded, InvalidRequest]
    assert told[0][1].startswith("ipv4:127.0.0.1:")


@pytest.mark.parametrize("method", ["Double", "Each"])
async def test_a_call_that_ends_without_a_message_is_the_callers_fault(method):
    async with served(60_000) as channel:
        empty = channel.stream_stream(f"/t.T/{method}")()
        await empty.done_writing()
        with pytest.raises(grpc.aio.AioRpcError) as ended:
            await empty.read()
        assert ended.value.code() is grpc.StatusCode.INVALID_ARGUMENT
