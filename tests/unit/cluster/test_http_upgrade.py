"""Requests that ask for another protocol are served in this one: real uvicorn and real sockets."""

import asyncio

import pytest
from bounded_server import GET, POST, answer_of, connected, echo, served

UPGRADE = b"connection: upgrade\r\nupgrade: %s\r\n"


def asking(protocol, *lines):
    """The head of a request with a body that asks for an upgrade."""
    return b"POST /1 HTTP/1.1\r\nhost: x\r\n" + UPGRADE % protocol + b"\r\n".join([*lines, b"", b""])


async def send_in(writer, packets):
    for packet in packets:
        writer.write(packet)
        await writer.drain()
        await asyncio.sleep(0.001)  # so that the server, which has the same loop, reads each by itself


@pytest.mark.parametrize("cut", ["one packet", "head and body", "single bytes"])
@pytest.mark.parametrize(
    ("framing", "body"),
    [(b"content-length: 5", b"hello"), (b"transfer-encoding: chunked", b"2\r\nhe\r\n3\r\nllo\r\n0\r\nx: y\r\n\r\n")],
    ids=["length", "chunks"],
)
async def test_a_request_of_javas_client_is_served_also_on_a_connection_that_was_kept(framing, body, cut):
    """It asks for HTTP/2 with every request. Fails when that is refused, or what comes behind it is lost."""
    java = [b"connection: Upgrade, HTTP2-Settings", b"HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABkAAQBAAAAAAUAAEAA"]
    head = b"POST / HTTP/1.1\r\nhost: x\r\nupgrade: h2c\r\n" + b"\r\n".join([*java, framing, b"", b""])
    last = POST % 3 + b"end"
    packets = {
        "one packet": [head + body + head + body + last],
        "head and body": [head, body, head, body, last],
        "single bytes": [bytes([byte]) for byte in head + body + head + body + last],
    }[cut]
    async with served(echo) as (port, ended), connected(port) as (reader, writer):
        await send_in(writer, packets)
        answers = (await answer_of(reader)).split("HTTP/1.1 200 OK\r\n")[1:]
        assert [answer.rpartition("\r\n\r\n")[2] for answer in answers] == ["5", "5", "3"]
        assert not ended


async def test_a_request_that_asks_for_an_upgrade_has_all_its_other_headers():
    """Fails when one of them is lost as the head is read again."""
    seen = []

    async def noting(scope, receive, send):
        seen.append((scope["method"], scope["path"], scope["query_string"], scope["headers"]))
        await echo(scope, receive, send)

    async with served(noting) as (port, _), connected(port) as (reader, writer):
        lines = [b"Upgrade: h2c", b"connection: close, Upgrade", b"x:", b"Y: a: \xff", b"content-length: 0", b"", b""]
        writer.write(b"PUT /a%20b?c=d HTTP/1.1\r\n" + b"\r\n".join(lines))
        assert (await answer_of(reader)).endswith("\r\n\r\n0")
    headers = [(b"connection", b"close, Upgrade"), (b"x", b""), (b"y", b"a: \xff"), (b"content-length", b"0")]
    assert seen == [("PUT", "/a b", b"c=d", headers)]


async def test_what_comes_behind_the_last_request_of_a_connection_does_not_cost_it_its_answer():
    """Fails when the head is read more strictly the second time."""
    async with served(echo) as (port, ended), connected(port) as (reader, writer):
        writer.write(asking(b"h2c", b"connection: close", b"content-length: 2") + b"ok" + GET % 2)
        answer = await answer_of(reader)
        assert answer.startswith("HTTP/1.1 200 OK")
        assert answer.endswith("\r\n\r\n2")
        assert not ended


@pytest.mark.parametrize("apart", [True, False], ids=["apart", "at once"])
@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
async def test_a_body_behind_an_upgrade_is_not_taken_for_a_request(protocol, apart):
    """The parser passes over the body of a request that asks for an upgrade, and would read it as the next one, which a
    proxy before us took for a body. Fails when that is served."""
    begun = []

    async def noting(scope, receive, send):
        begun.append(scope["path"])
        await echo(scope, receive, send)

    smuggled = GET % 2
    head = asking(protocol, b"content-length: %d" % len(smuggled))
    async with served(noting) as (port, ended), connected(port) as (reader, writer):
        await send_in(writer, [head, smuggled, POST % 0] if apart else [head + smuggled + POST % 0])
        answer = await answer_of(reader)
        assert answer.count("HTTP/1.1 200 OK") == answer.count("HTTP/1.1") == 2
        assert f"\r\n\r\n{len(smuggled)}HTTP/1.1" in answer
        assert begun == ["/1", "/"]
        assert not ended


@pytest.mark.parametrize(
    "head",
    [
        asking(b"h2c", b"transfer-encoding: identity"),
        asking(b"h2c", b"content-length: 5", b"transfer-encoding: chunked"),
        asking(b"h2c", b"content-length: 5", b"content-length: 6"),
        b"CONNECT http://x/ HTTP/1.1\r\nhost: x\r\ncontent-length: 5\r\n\r\n",
        b"CONNECT http://x/ HTTP/1.1\r\nhost: x\r\n" + UPGRADE % b"h2c" + b"content-length: 5\r\n\r\n",
    ],
    ids=["no chunks", "both", "two lengths", "CONNECT", "CONNECT and upgrade"],
)
async def test_a_body_whose_end_is_not_clear_is_refused_also_behind_an_upgrade(head):
    """Fails when a head is read less strictly the second time."""
    async with served(echo) as (port, ended), connected(port) as (reader, writer):
        writer.write(head + GET % 2)
        answer = await answer_of(reader)
        assert answer.startswith("HTTP/1.1 400")
        assert answer.count("\r\n\r\n") == 1
        assert ended == ["malformed"]


@pytest.mark.parametrize("protocol", [b"websocket", b"h2c"])
async def test_an_upgrade_that_is_asked_for_is_passed_over(protocol):
    """Fails when a connection leaves these bounds for those of another protocol."""
    async with served(echo) as (port, ended), connected(port) as (reader, writer):
        key = b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\nsec-websocket-version: 13\r\n"
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\n" + UPGRADE % protocol + key + b"\r\n")
        answer = await answer_of(reader)
        assert answer.startswith("HTTP/1.1 200")
        assert "connection: close" in answer
        assert not ended
