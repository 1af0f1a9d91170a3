"""What a stranger's connection may cost a proxy: real uvicorn, real sockets, and bounds that are met by being small.

No test waits for a bound that it does not want to meet: those are as large as in production.
"""

import asyncio
import inspect
import tomllib
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path

import pytest
from bounded_server import GET, POST, answer_of, connected, echo, served, until
from packaging.requirements import Requirement
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace_cluster.bounded_http import BoundedHttp

PYPROJECT = Path(__file__).parents[3] / "pyproject.toml"

# What BoundedHttp has in place of uvicorn's, and uvicorn or the parser calls.
OVERRIDDEN = {
    "__init__",
    "connection_made",
    "connection_lost",
    "data_received",
    "on_message_begin",
    "on_header",
    "on_headers_complete",
    "_should_upgrade",
    "_start_asgi_task",
    "on_body",
    "on_message_complete",
    "pause_writing",
    "resume_writing",
}


def test_what_is_overridden_is_there_in_the_uvicorn_that_is_installed():
    """Fails when uvicorn renames a method or gives it other arguments: ours would never be called, or not as it is."""
    own = {name: method for name, method in vars(BoundedHttp).items() if inspect.isfunction(method)}
    assert {name for name in own if name in vars(HttpToolsProtocol)} == OVERRIDDEN
    for name in OVERRIDDEN - {"__init__"}:
        theirs = vars(HttpToolsProtocol)[name]
        assert [*inspect.signature(own[name]).parameters] == [*inspect.signature(theirs).parameters], name
    assert callable(vars(HttpToolsProtocol)["_unset_keepalive_if_required"])  # is called


@pytest.mark.parametrize("package", ["uvicorn", "httptools"])
def test_no_other_minor_version_of_what_is_overridden_is_installed(package):
    """Fails when an installation may bring one that nobody has tried."""
    extras = tomllib.loads(PYPROJECT.read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    [pinned] = [wanted for line in extras["cluster"] if (wanted := Requirement(line)).name == package]
    major, minor, *_ = map(int, version(package).split("."))
    assert version(package) in pinned.specifier
    assert f"{major}.{minor + 1}.0" not in pinned.specifier


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


async def test_a_head_request_that_is_refused_has_no_body():
    """Fails when a client takes the error's text for its next answer, since it reads none behind this one's head."""
    async with served(echo, body_timeout_ms=50) as (port, ended), connected(port) as (reader, writer):
        writer.write(b"HEAD / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nhalf")
        answer = await answer_of(reader)
        assert answer.startswith("HTTP/1.1 408")
        assert answer.endswith("\r\n\r\n")
        assert ended == ["body_time"]


async def refuse_unread(scope, receive, send):
    """Answers in full without a look at the body."""
    await send({"type": "http.response.start", "status": 413, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"no"})


@pytest.mark.parametrize(
    ("bounds", "rest", "reason"),
    [({"body_timeout_ms": 50}, b"", "body_time"), ({"head_timeout_ms": 50}, b"ends.", "head_time")],
    ids=["that never ends", "and then nothing"],
)
async def test_a_body_behind_its_own_answer_is_ended_without_a_second_one(bounds, rest, reason):
    """Fails when a client takes the 408 for the answer to its next request, or keeps its connection for ever."""
    async with served(refuse_unread, **bounds) as (port, ended), connected(port) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 10\r\n\r\nhalf.")
        async with asyncio.timeout(30):
            assert (await reader.readuntil(b"\r\n\r\nno")).startswith(b"HTTP/1.1 413")
        with suppress(ConnectionError):
            writer.write(rest)
            assert await answer_of(reader) == ""
        await until(lambda: ended == [reason])


async def test_a_body_has_all_its_time_from_when_it_is_read():
    """Fails when the time runs out while its connection is kept back until the request before it is answered."""
    loop, may_answer = asyncio.get_running_loop(), asyncio.Event()

    async def slow(scope, receive, send):
        await may_answer.wait()
        await echo(scope, receive, send)

    async with served(slow, body_timeout_ms=500) as (port, ended), connected(port) as (reader, writer):
        writer.write(GET % 1 + POST % 10 + b"half.")
        await asyncio.sleep(0.4)
        began_s = loop.time()
        may_answer.set()
        answer = await answer_of(reader)
        assert loop.time() - began_s >= 0.5
        assert [line for line in answer.split("\r\n") if "HTTP/1.1" in line] == ["HTTP/1.1 200 OK", "0HTTP/1.1 408 "]
        assert ended == ["body_time"]


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


async def test_what_is_no_http_is_refused_in_the_apis_own_words_and_counted():
    async with served(echo) as (port, ended), connected(port) as (reader, writer):
        writer.write(b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xff" * 200)
        answer = await answer_of(reader)
        assert answer.startswith("HTTP/1.1 400")
        assert "invalid_request_error" in answer
        assert ended == ["malformed"]


async def test_requests_sent_ahead_of_their_answers_are_answered_in_order():
    async with served(echo) as (port, ended), connected(port) as (reader, writer):
        writer.write(
            b"".join(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % n + b"x" * n for n in range(5))
        )
        writer.write(POST % 5 + b"x" * 5)
        answers = (await answer_of(reader)).split("HTTP/1.1 200 OK\r\n")[1:]
        assert [int(answer.rpartition("\r\n\r\n")[2]) for answer in answers] == list(range(6))
        assert not ended


async def test_no_more_requests_wait_on_a_connection_than_the_bound_and_the_rest_is_not_begun():
    """Fails when a packet of small requests costs what thousands of requests do."""
    begun, may_answer = [], asyncio.Event()

    async def slow(scope, receive, send):
        begun.append(scope["path"])
        await may_answer.wait()
        assert (await receive())["type"] == "http.disconnect"  # its connection was ended

    async with served(slow, requests_ahead_max=4) as (port, ended), connected(port) as (reader, writer):
        writer.write(b"".join(GET % number for number in range(1_000)))
        assert (await answer_of(reader)).startswith("HTTP/1.1 400")
        may_answer.set()
        assert ended == ["requests_ahead"]
    assert set(begun) <= {"/0"}


async def test_a_client_that_leaves_ends_the_request_that_is_being_answered_also_when_another_waits_behind_it():
    """Fails when only the request that came last is told."""
    began, left = asyncio.Event(), asyncio.Event()

    async def slow(scope, receive, send):
        assert scope["path"] == "/1", "nobody is there for the second one"
        await receive()
        began.set()
        assert (await receive())["type"] == "http.disconnect"
        left.set()

    async with served(slow) as (port, _):
        async with connected(port) as (_, writer):
            writer.write(GET % 1 + GET % 2)
            async with asyncio.timeout(30):
                await began.wait()
        async with asyncio.timeout(30):
            await left.wait()


async def test_what_stands_behind_a_refused_head_is_not_begun():
    """Fails when a request is served after its connection was refused."""
    begun = []

    async def noting(scope, receive, send):
        begun.append(scope["path"])
        await echo(scope, receive, send)

    async with served(noting, head_bytes_max=500) as (port, ended), connected(port) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nx: " + b"x" * 600 + b"\r\n\r\n" + GET % 2)
        assert (await answer_of(reader)).startswith("HTTP/1.1 431")
        assert ended == ["head_bytes"]
        assert not begun


async def test_a_refusal_is_not_written_into_an_answer_that_has_begun():
    """Fails when what is no HTTP puts a second head into the middle of a body."""

    async def endless(scope, receive, send):
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"part", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass

    async with served(endless) as (port, ended), connected(port) as (reader, writer):
        writer.write(GET % 1)
        async with asyncio.timeout(30):
            assert (await reader.readuntil(b"part\r\n")).startswith(b"HTTP/1.1 200")
        writer.write(b"\x00\x01\x02")
        with suppress(ConnectionResetError):
            assert await answer_of(reader) == ""
        await until(lambda: ended == ["malformed"])


CHUNKED = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ntransfer-encoding: chunked\r\n\r\n"


async def test_trailers_are_no_headers():
    """Fails when what comes behind a body is put among the headers that were checked before it."""
    seen = []

    async def reads(scope, receive, send):
        await echo(scope, receive, send)
        seen.extend(name for name, _ in scope["headers"])

    async with served(reads) as (port, ended), connected(port) as (reader, writer):
        writer.write(CHUNKED + b"5\r\nhello\r\n0\r\nauthorization: Bearer x\r\n\r\n")
        assert (await answer_of(reader)).endswith("\r\n\r\n5")
        assert seen == [b"host", b"connection", b"transfer-encoding"]
        assert not ended


@pytest.mark.parametrize("part", [b"x: y\r\n" * 100, b"y" * 600], ids=["many", "one without end"])
async def test_trailers_without_end_are_refused(part):
    """Fails when they are kept as long as the time for a body lasts."""
    async with served(echo, head_bytes_max=4_000) as (port, ended), connected(port) as (reader, writer):
        writer.write(CHUNKED + b"5\r\nhello\r\n0\r\nx: ")
        sending = asyncio.create_task(send_without_end(writer, part))
        assert (await answer_of(reader)).startswith("HTTP/1.1 431")
        sending.cancel()
        assert ended == ["head_bytes"]


async def send_without_end(writer, part):
    while True:
        writer.write(part)
        await writer.drain()
        await asyncio.sleep(0)
