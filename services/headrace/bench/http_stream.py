"""One HTTP request over plain asyncio streams, its answer read as it comes. A client for measuring, not for the world.

HTTP/1.1 with one connection a request: no pool whose waiting would look like the server's. Reads chunked bodies, bodies
with a length and bodies that end with the connection; follows no redirects and speaks to no proxy. All waiting is under
the caller's deadline.
"""

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache
from urllib.parse import urlsplit

from headrace.core.errors import InvalidRequest

# Larger pieces and lines are read, but not held: a server that sends a line without end must not fill this machine.
LINE_BYTES_MAX = 4 * 1024 * 1024
READ_BYTES = 65_536


class ProtocolBroken(Exception):
    """What came is no HTTP answer, or not all of one."""


@dataclass(frozen=True, slots=True)
class HttpServer:
    """Where requests go: `http://host:port/base`."""

    scheme: str
    host: str
    port: int
    base: str

    @classmethod
    def of(cls, url: str) -> "HttpServer":
        """Parse a base URL; a `/v1` at its end is taken off. Raises InvalidRequest."""
        parts = urlsplit(url if "://" in url else f"http://{url}")
        try:
            port = parts.port or (443 if parts.scheme == "https" else 80)
        except ValueError:
            port = 0
        if parts.scheme not in ("http", "https") or not parts.hostname or not port:
            raise InvalidRequest(f"{url!r} is no URL like http://127.0.0.1:8000", param="url")
        return cls(parts.scheme, parts.hostname, port, parts.path.rstrip("/").removesuffix("/v1"))

    @property
    def authority(self) -> str:
        """`host:port`, an IPv6 address in brackets."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{self.scheme}://{self.authority}{self.base}"


@dataclass(frozen=True, slots=True)
class HttpReply:
    """Status and headers; the body is still to be read, once, by one of the two."""

    status: int
    headers: dict[str, str]  # names in lower case
    reader: asyncio.StreamReader

    async def pieces(self) -> AsyncIterator[bytes]:
        """The body as it comes. Raises ProtocolBroken when it ends early."""
        try:
            if "chunked" in self.headers.get("transfer-encoding", ""):
                while size := int((await self.reader.readline()).split(b";")[0], 16):
                    yield (await self.reader.readexactly(size + 2))[:-2]
                await self.reader.readline()
            elif "content-length" in self.headers:
                left = int(self.headers["content-length"])
                while left:
                    piece = await self.reader.readexactly(min(left, READ_BYTES))
                    left -= len(piece)
                    yield piece
            else:
                while piece := await self.reader.read(READ_BYTES):
                    yield piece
        except (asyncio.IncompleteReadError, ValueError) as error:
            raise ProtocolBroken("the answer ended before its end") from error

    async def lines(self) -> AsyncIterator[bytes]:
        """The body's lines without their ends."""
        rest = b""
        async for piece in self.pieces():
            *whole, rest = (rest + piece).split(b"\n")
            if len(rest) > LINE_BYTES_MAX:
                raise ProtocolBroken(f"a line of more than {LINE_BYTES_MAX:,} bytes")
            for line in whole:
                yield line.rstrip(b"\r")
        if rest:
            yield rest

    async def whole(self) -> bytes:
        """All of a body that is not a stream, at most LINE_BYTES_MAX of it."""
        body = b""
        async for piece in self.pieces():
            body += piece
            if len(body) > LINE_BYTES_MAX:
                break
        return body


@asynccontextmanager
async def http_request(
    server: HttpServer, method: str, path: str, *, headers: dict[str, str], body: bytes = b""
) -> AsyncIterator[HttpReply]:
    """Send a request and read the answer's head; the connection ends with the scope.

    Raises OSError when there is no connection, ProtocolBroken when what comes is no answer.
    """
    context = _usual_authorities() if server.scheme == "https" else None
    reader, writer = await asyncio.open_connection(server.host, server.port, ssl=context)
    try:
        named = {
            "host": server.authority,
            "content-length": str(len(body)),
            "connection": "close",
            **headers,
        }
        head = "".join([f"{method} {server.base}{path} HTTP/1.1\r\n", *(f"{k}: {v}\r\n" for k, v in named.items())])
        writer.write(head.encode("latin-1") + b"\r\n" + body)
        await writer.drain()
        yield await _read_head(reader)
    finally:
        writer.close()


@cache
def _usual_authorities() -> ssl.SSLContext:
    """Read once: reading them takes milliseconds, in which nothing else would be sent or timed."""
    return ssl.create_default_context()


async def _read_head(reader: asyncio.StreamReader) -> HttpReply:
    try:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        version, status, *_ = lines[0].split(" ")
        if not version.startswith("HTTP/1."):
            raise ProtocolBroken("what answers does not speak HTTP/1.1")
        pairs = (line.partition(":") for line in lines[1:] if line)
        return HttpReply(int(status), {name.strip().lower(): value.strip() for name, _, value in pairs}, reader)
    except (asyncio.IncompleteReadError, asyncio.LimitOverrunError, ValueError) as error:
        raise ProtocolBroken("the connection was closed before an answer came") from error
