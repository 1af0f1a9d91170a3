"""What a stranger's connection may cost a proxy: real uvicorn, real sockets, and bounds that are met by being small.

No test waits for a bound that it does not want to meet: those are as large as in production.
"""

import asyncio
from contextlib import asynccontextmanager

import pytest
import uvicorn

from headrace_cluster.bounded_http import REASONS, BoundedHttp


@asynccontextmanager
async def served(app, **bounds):
    """The app on a free port, behind these bounds: (port, reasons for which connections were ended)."""
    ended = []
    protocol = type("Bounded", (BoundedHttp,), {**bounds, "ended": staticmethod(ended.append)})
    server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="critical", lifespan="off", http=protocol))
    server.install_signal_handlers = lambda: None
    serving = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started)
        yield server.servers[0].sockets[0].getsockname()[1], ended
    finally:
        server.should_exit = True
        server.force_exit = True
        await serving
    assert set(ended) <= set(REASONS)


async def until(condition):
    async with asyncio.timeout(30):
        while not condition():  # noqa: ASYNC110 - the far side of a socket tells nobody here
            await asyncio.sleep(0.01)


@asynccontextmanager
async def connected(port):
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def answer_of(reader):
    """All that comes until the server closes."""
    async with asyncio.timeout(30):
        return (await reader.read()).decode()


async def echo(scope, receive, send):
    """Reads the body, and answers with its length."""
    length, more = 0, True
    while more:
        message = await receive()
        if message["type"] == "http.disconnect":
            return
        length, more = length + len(message["body"]), message["more_body"]
    body = str(length).encode()
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"%d" % len(body))]})
    await send({"type": "http.response.body", "body": body})


POST = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"


async def test_a_request_within_the_bounds_is_answered_also_on_a_connection_that_was_kept():
    """Fails when the bounds see a request where there is none, or forget to begin anew."""
    async with served(echo) as (port, ended), connected(port) as (reader, writer):
        for _ in range(3):
            writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\nhello")
            assert b"200" in await reader.readline()
            while (await reader.readline()).strip():
                pass
            assert await reader.readexactly(1) == b"5"
        writer.write(POST % 3 + b"end")
        assert (await answer_of(reader)).endswith("3")
        assert not ended


@pytest.mark.parametrize("whole", [False, True], ids=["without end", "whole"])
async def test_a_head_that_is_too_long_is_refused_before_it_is_kept(whole):
    """Fails when headers are collected without end."""
    async with served(echo, head_bytes_max=4_000) as (port, ended), connected(port) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\n" + b"".join(b"x-%d: %s\r\n" % (n, b"v" * 100) for n in range(50)))
        writer.write(b"\r\n" if whole else b"x-more: ")
        answer = await answer_of(reader)
        assert answer.startswith("HTTP/1.1 431")
        assert "invalid_request_error" in answer
        assert ended == ["head_bytes"]


async def test_a_large_body_does_not_count_as_a_head():
    """Fails when what comes with the headers in one packet is taken for them."""
    async with served(echo, head_bytes_max=500) as (port, ended), connected(port) as (reader, writer):
        writer.write(POST % 20_000 + b"x" * 20_000)
        assert (await answer_of(reader)).endswith("20000")
        assert not ended


@pytest.mark.parametrize(
    ("bounds", "sent", "status", "reason"),
    [
        ({"head_timeout_ms": 50}, b"GET / HTTP/1.1\r\nx: ", "HTTP/1.1 408", "head_time"),
        ({"head_timeout_ms": 50}, b"", "", "head_time"),
        ({"body_timeout_ms": 50}, POST % 10 + b"half", "HTTP/1.1 408", "body_time"),
    ],
    ids=["half a head", "nothing", "half a body"],
)
async def test_a_request_that_does_not_arrive_is_ended(bounds, sent, status, reason):
    """Fails when a connection that sends nothing more is waited for, with what it holds."""
    async with served(echo, **bounds) as (port, ended), connected(port) as (reader, writer):
        writer.write(sent)
        try:
            assert (await answer_of(reader)).startswith(status)
        except ConnectionResetError:
            assert not sent  # nothing was asked, so nothing was answered
        assert ended == [reason]


async def test_a_client_that_never_reads_is_ended_and_the_work_for_it_with_bounded_memory():
    """Fails when an answer waits for its reader for ever, or is kept whole for one that does not come."""
    sent, left = [], asyncio.Event()

    async def endless(scope, receive, send):
        await receive()
        watching = asyncio.create_task(receive())
        await send({"type": "http.response.start", "status": 200, "headers": []})
        while not watching.done():
            await send({"type": "http.response.body", "body": b"x" * 65_536, "more_body": True})
            sent.append(65_536)
            await asyncio.sleep(0)
        assert watching.result()["type"] == "http.disconnect"
        left.set()

    async with served(endless, unread_timeout_ms=100) as (port, ended), connected(port) as (_, writer):
        writer.transport.pause_reading()
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        async with asyncio.timeout(30):
            await left.wait()
        assert ended == ["unread"]
        # What the kernels of both sides take (some MB), and one message more.
        assert sum(sent) < 64 * 1024 * 1024


async def test_connections_beyond_the_bound_are_told_to_come_back():
    """Fails when every connection is let in."""
    async with served(echo, connections_max=1) as (port, ended), connected(port) as (reader, writer):
        async with connected(port) as (second, _):
            answer = await answer_of(second)
        assert answer.startswith("HTTP/1.1 503")
        assert "retry-after: 1" in answer
        writer.write(POST % 2 + b"ok")
        assert (await answer_of(reader)).endswith("2")
        assert ended == ["connections"]


async def test_what_comes_behind_a_request_that_is_being_answered_does_not_end_it():
    """Fails when half of a next head, which nobody waits for yet, costs the caller the answer that is on its way."""
    may_answer = asyncio.Event()

    async def slow(scope, receive, send):
        await may_answer.wait()
        await echo(scope, receive, send)

    async with served(slow, head_timeout_ms=50) as (port, ended), connected(port) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 4\r\n\r\nwhat")
        await writer.drain()
        await asyncio.sleep(0.05)  # so that the rest is a packet of its own
        writer.write(b"GET / HT")
        await asyncio.sleep(0.2)
        assert not ended
        may_answer.set()
        assert (await answer_of(reader)).startswith("HTTP/1.1 200")
        assert ended == ["head_time"]
