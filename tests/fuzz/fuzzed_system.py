"""A whole system (`attack/attacked_system.py`) for fuzzers, which are no coroutines: one event loop that runs while
they wait for something, and what must hold after each example whatever was sent."""

import asyncio
import logging
import resource
from collections.abc import Awaitable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import httptools
import uvicorn
from attacked_system import OPERATOR, AttackedSystem, attacked_system

from headrace.gateway.openai_http import build_http_app
from headrace_cluster.bounded_http import BoundedHttp
from headrace_cluster.proxy_http import TryAgainWhenDied

Result = TypeVar("Result")

# Half requests are given up, and connections without one are closed, as soon as possible: an example ends by itself.
WAIT_MS = 20
GROWTH_BYTES_MAX = 512 * 1024 * 1024


class FuzzedSystem:
    """The system and its loop."""

    def __init__(self, system: AttackedSystem, loop: asyncio.AbstractEventLoop, server: uvicorn.Server) -> None:
        self.system = system
        self.loop = loop
        self.port = server.servers[0].sockets[0].getsockname()[1]
        self._state = server.server_state
        self._errors = _Errors()
        self._peak_bytes = _peak_bytes()

    def run(self, work: Awaitable[Result]) -> Result:
        """Have the system work until this is done."""

        async def in_time() -> Result:
            async with asyncio.timeout(120):
                return await work

        return self.loop.run_until_complete(in_time())

    async def exchange(self, pieces: list[bytes], *, port: int = 0) -> list[int]:
        """Send these to the HTTP port; the statuses that come back until it closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", port or self.port)
        answer = b""
        try:
            with suppress(ConnectionError):
                for piece in pieces:
                    writer.write(piece)
                    await writer.drain()
                    await asyncio.sleep(0)
                while some := await reader.read(1 << 16):
                    answer += some
        finally:
            writer.transport.abort()
        return statuses_of(answer)

    async def serves(self) -> None:
        """Whatever came before: nothing is left of it, nothing broke, and a good request is answered."""
        while self._state.connections or self._state.tasks:  # noqa: ASYNC110 - nobody tells when a server has noticed
            await asyncio.sleep(0.001)
        await self.system.at_rest()
        head = f"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: {self.system.as_(OPERATOR)['authorization']}\r\n"
        good = [head.encode() + b"connection: close\r\n\r\n"]
        # 408, or closed before anything of it was read: the machine is slower than this port waits. The next one waits.
        assert await self.exchange(good) in ([200], [408], [])
        assert await self.exchange(good, port=int(self.system.url.rpartition(":")[2])) == [200]
        assert not self._errors.said, self._errors.said
        assert _peak_bytes() - self._peak_bytes < GROWTH_BYTES_MAX


@contextmanager
def fuzzed_system(model_path: str, directory: Path) -> Iterator[FuzzedSystem]:
    """The system, started."""
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    stack = AsyncExitStack()
    try:
        system = loop.run_until_complete(stack.enter_async_context(attacked_system(model_path, directory)))
        server = loop.run_until_complete(stack.enter_async_context(_served(system)))
        fuzzed = FuzzedSystem(system, loop, server)
        logging.getLogger().addHandler(fuzzed._errors)
        stack.callback(logging.getLogger().removeHandler, fuzzed._errors)
        yield fuzzed
    finally:
        loop.run_until_complete(stack.aclose())
        asyncio.set_event_loop(None)
        loop.close()


@asynccontextmanager
async def _served(system: AttackedSystem) -> Any:
    """The HTTP front door as Serve's proxies have it."""
    app: Any = TryAgainWhenDied(build_http_app(system.gateway.service))
    protocol = type("Fuzzed", (BoundedHttp,), {"head_timeout_ms": WAIT_MS, "body_timeout_ms": WAIT_MS})
    config = uvicorn.Config(app, port=0, log_config=None, lifespan="off", http=protocol, timeout_keep_alive=0)
    server = uvicorn.Server(config)
    server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]
    serving = asyncio.create_task(server.serve())
    async with asyncio.timeout(60):
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
    try:
        yield server
    finally:
        server.should_exit = server.force_exit = True
        with suppress(asyncio.CancelledError):
            await serving


def statuses_of(answer: bytes) -> list[int]:
    """Of the responses in these bytes, which are nothing but responses. The last one may be cut off."""
    statuses: list[int] = []

    class Seen:
        def on_headers_complete(self) -> None:
            statuses.append(parser.get_status_code())

    parser = httptools.HttpResponseParser(Seen())
    parser.feed_data(answer)
    assert all(status < 500 or status == 503 for status in statuses), answer
    return statuses


class _Errors(logging.Handler):
    """What the system says of itself when something of it breaks."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(self.format(record))


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
