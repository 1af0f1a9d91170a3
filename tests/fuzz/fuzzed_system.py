"""A whole system (`attack/attacked_system.py`) for fuzzers, which are no coroutines: one event loop that runs while
they wait for something, and what must hold after each example whatever was sent."""

import asyncio
import logging
import resource
from collections.abc import Awaitable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

import h11
import uvicorn
from attacked_system import OPERATOR, AttackedSystem, attacked_system

from headrace.gateway.openai_http import build_http_app
from headrace_cluster.bounded_http import BoundedHttp
from headrace_cluster.proxy_http import TryAgainWhenDied

Result = TypeVar("Result")

# Half requests are given up, and connections without one are closed, as soon as possible: an example ends by itself.
# A request that is to be answered has as long as the slowest machine takes.
WAIT_MS, GOOD_WAIT_MS = 20, 60_000
GROWTH_BYTES_MAX = 512 * 1024 * 1024


class FuzzedSystem:
    """The system and its loop."""

    def __init__(self, system: AttackedSystem, loop: asyncio.AbstractEventLoop, front_door: "FrontDoor") -> None:
        self.system = system
        self.loop = loop
        self._front_door = front_door
        self._state = front_door.server.server_state
        self._errors = _Errors()
        self._peak_bytes = _peak_bytes()

    def run(self, work: Awaitable[Result]) -> Result:
        """Have the system work until this is done."""

        async def in_time() -> Result:
            async with asyncio.timeout(120):
                return await work

        return self.loop.run_until_complete(in_time())

    async def exchange(self, pieces: list[bytes]) -> list[int]:
        """Send these to the HTTP port; the statuses that come back until it closes the connection."""
        reader, writer = await asyncio.open_connection("127.0.0.1", self._front_door.port)
        answer, own_port = b"", writer.get_extra_info("sockname")[1]
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
        return statuses_of(answer, self._front_door.port_to_methods.pop(own_port, []))

    async def serves(self) -> None:
        """Whatever came before: nothing is left of it, nothing broke, and a good request is answered."""
        while self._state.connections or self._state.tasks:  # noqa: ASYNC110 - nobody tells when a server has noticed
            await asyncio.sleep(0.001)
        await self.system.at_rest()
        self._front_door.port_to_methods.clear()  # of connections that were reset
        head = f"GET /v1/models HTTP/1.1\r\nhost: x\r\nauthorization: {self.system.as_(OPERATOR)['authorization']}\r\n"
        with self._front_door.patient():
            assert await self.exchange([head.encode() + b"connection: close\r\n\r\n"]) == [200]
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
        front_door = loop.run_until_complete(stack.enter_async_context(_served(system)))
        fuzzed = FuzzedSystem(system, loop, front_door)
        logging.getLogger().addHandler(fuzzed._errors)
        stack.callback(logging.getLogger().removeHandler, fuzzed._errors)
        yield fuzzed
    finally:
        loop.run_until_complete(stack.aclose())
        asyncio.set_event_loop(None)
        loop.close()


class FrontDoor:
    """The HTTP front door as Serve's proxies have it, which notes what methods it was asked for by whom."""

    def __init__(self, system: AttackedSystem) -> None:
        self.port_to_methods: dict[int, list[str]] = {}  # of requests that are answered, by their client's port
        self._app: Any = TryAgainWhenDied(build_http_app(system.gateway.service))
        self._protocol = type("Fuzzed", (BoundedHttp,), {"head_timeout_ms": WAIT_MS, "body_timeout_ms": WAIT_MS})
        options = {"log_config": None, "lifespan": "off", "interface": "asgi3", "timeout_keep_alive": 0}
        self.server = uvicorn.Server(uvicorn.Config(self._noted, port=0, http=self._protocol, **options))
        self.server.install_signal_handlers = lambda: None  # type: ignore[attr-defined]

    @property
    def port(self) -> int:
        return self.server.servers[0].sockets[0].getsockname()[1]

    @contextmanager
    def patient(self) -> Iterator[None]:
        """For what comes while the scope lasts."""
        self._protocol.head_timeout_ms = self._protocol.body_timeout_ms = GOOD_WAIT_MS
        try:
            yield
        finally:
            self._protocol.head_timeout_ms = self._protocol.body_timeout_ms = WAIT_MS

    async def _noted(self, scope: Any, receive: Any, send: Any) -> None:
        self.port_to_methods.setdefault(scope["client"][1], []).append(scope["method"])
        await self._app(scope, receive, send)


@asynccontextmanager
async def _served(system: AttackedSystem) -> Any:
    front_door = FrontDoor(system)
    server = front_door.server
    serving = asyncio.create_task(server.serve())
    async with asyncio.timeout(60):
        while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
            await asyncio.sleep(0.01)
    try:
        yield front_door
    finally:
        server.should_exit = server.force_exit = True
        with suppress(asyncio.CancelledError):
            await serving


def statuses_of(answer: bytes, methods: list[str]) -> list[int]:
    """Of the responses in these bytes, as a client reads them that sent these requests and then others; the last one
    may be cut off. What is no response, or a fault of the server's, is an AssertionError."""
    rest, statuses, asked = answer, [], iter(methods)
    while rest:
        client = h11.Connection(h11.CLIENT)
        client.send(h11.Request(method=next(asked, "GET"), target="/", headers=[("host", "x")]))
        client.send(h11.EndOfMessage())
        client.receive_data(rest)
        event: Any = None
        while not isinstance(event, h11.EndOfMessage):
            try:
                event = client.next_event()
            except h11.RemoteProtocolError as error:
                raise AssertionError(f"{error}: {rest!r} to {methods}, of {answer!r}") from error
            if event is h11.NEED_DATA:
                return statuses
            if isinstance(event, h11.Response):
                statuses.append(event.status_code)
                assert event.status_code < 500 or event.status_code == 503, answer
        rest = client.trailing_data[0]
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
