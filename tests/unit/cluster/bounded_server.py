"""A server of real uvicorn behind the proxies' bounds, and clients that send it bytes as they are."""

import asyncio
from contextlib import asynccontextmanager

import uvicorn

from headrace_cluster.bounded_http import REASONS, BoundedHttp

POST = b"POST / HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: %d\r\n\r\n"
GET = b"GET /%d HTTP/1.1\r\nhost: x\r\n\r\n"


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
