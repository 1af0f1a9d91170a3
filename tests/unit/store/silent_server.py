"""A server that takes connections and answers no call, as a paused process or a host behind a black hole does."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

# An empty HTTP/2 SETTINGS frame. Without it gRPC gives the connection up after a second, and calls would end by that.
SETTINGS = bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


@asynccontextmanager
async def silent_server() -> AsyncIterator[int]:
    """Its port on this host."""
    opened: list[asyncio.StreamWriter] = []

    def connected(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        opened.append(writer)
        writer.write(SETTINGS)

    server = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield int(server.sockets[0].getsockname()[1])
    finally:
        for writer in opened:
            writer.close()
        server.close()
