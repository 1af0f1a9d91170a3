"""A caller that dies ends its calls: Ray itself lets the streams of a dead caller run on to their end, for nobody.

Every process that makes calls, a proxy or a gateway, keeps a socket open (`Presence`) and names its address in each of
them. Who serves calls holds one connection to each caller that has some under way (`CallersPresent`), and takes the end
of that connection for the end of the caller: a killed process closes it at once, a dead host within some seconds, by
TCP's keepalive. Nothing is sent. A caller that cannot be reached from the beginning is taken to be there, since a call
came from it just now.

Knows neither what the calls are nor Ray.
"""

import asyncio
import logging
import socket
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import TypeVar

Item = TypeVar("Item")

log = logging.getLogger(__name__)

# Where a proxy writes its address in a call's metadata.
CALLER_KEY = "headrace-caller"

# A host that is gone without a word is noticed after 2 + 3 x 2 s, as late as a member's record runs out.
KEEPALIVE_IDLE_S = 2
KEEPALIVE_PROBES = 3

# A connection inside one cluster takes a few milliseconds; beyond this the caller is taken to be there.
CONNECT_TIMEOUT_S = 5.0


class CallerGone(Exception):
    """Whom this is done for has died."""


class Presence:
    """The caller's end. `address` opens it on first use; it closes with the process, or by `close`."""

    def __init__(self, host: str) -> None:
        """host: this node's address, where others reach it."""
        self._host = host
        self._server: asyncio.Server | None = None
        self._writers: set[asyncio.StreamWriter] = set()
        self._opening = asyncio.Lock()

    async def address(self) -> str:
        """`host:port` to be named in calls."""
        async with self._opening:
            if self._server is None:
                self._server = await asyncio.start_server(self._hold, self._host, 0)
        return f"{self._host}:{self._server.sockets[0].getsockname()[1]}"

    async def close(self) -> None:
        """Be gone for everybody. Idempotent."""
        if self._server is not None:
            self._server.close()
            for writer in tuple(self._writers):
                writer.close()

    async def _hold(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Keep one connection open until the other side closes it."""
        self._writers.add(writer)
        try:
            with suppress(ConnectionError):
                await reader.read(1)
        finally:
            self._writers.discard(writer)
            writer.close()


@dataclass(slots=True)
class _Caller:
    """One caller as who serves it knows it."""

    gone: bool = False
    calls: int = 0
    waits: set[asyncio.Timeout] = field(default_factory=set)  # of its calls, at this moment
    following: "asyncio.Task[None] | None" = None


class CallersPresent:
    """The other end: one connection to each caller that has calls here. All methods belong to one event loop."""

    def __init__(self) -> None:
        self._callers: dict[str, _Caller] = {}

    async def while_present(self, address: str, items: AsyncIterator[Item]) -> AsyncGenerator[Item, None]:
        """The items, for as long as the caller at `address` lives ("": for ever). Raises CallerGone in the midst of the
        wait for the next one; closing `items` is the business of whoever made them."""
        with self._call_from(address) as caller:
            while True:
                try:
                    async with asyncio.timeout(None) as wait:
                        caller.waits.add(wait)
                        if caller.gone:
                            wait.reschedule(0)
                        try:
                            item = await anext(items)
                        finally:
                            caller.waits.discard(wait)
                except StopAsyncIteration:
                    return
                except TimeoutError:
                    if wait.expired():
                        raise CallerGone(address) from None
                    raise
                yield item

    def close(self) -> None:
        """Follow nobody any more. Idempotent."""
        for caller in self._callers.values():
            if caller.following is not None:
                caller.following.cancel()
        self._callers.clear()

    @contextmanager
    def _call_from(self, address: str) -> Iterator[_Caller]:
        """Count a call; the connection is there while one runs, and opened anew for the next."""
        if not address:
            yield _Caller()
            return
        caller = self._callers.get(address)
        if caller is None or caller.gone:
            caller = self._callers[address] = _Caller()
            caller.following = asyncio.create_task(self._follow(address, caller), name=f"the caller at {address}")
        caller.calls += 1
        try:
            yield caller
        finally:
            caller.calls -= 1
            if caller.calls == 0 and caller.following is not None:
                caller.following.cancel()
                if self._callers.get(address) is caller:
                    del self._callers[address]

    async def _follow(self, address: str, caller: _Caller) -> None:
        """Wait for the end of a caller, and end the waits of its calls."""
        host, _, port = address.rpartition(":")
        try:
            async with asyncio.timeout(CONNECT_TIMEOUT_S):
                reader, writer = await asyncio.open_connection(host, int(port))
        except (OSError, TimeoutError) as error:
            log.warning(
                "the caller at %s cannot be followed (%s): its calls end by their deadlines only", address, error
            )
            return
        try:
            _keep_alive(writer.get_extra_info("socket"))
            with suppress(OSError):  # however the connection ends, it has ended
                await reader.read(1)
            caller.gone = True
            log.warning("the caller at %s is gone; its %d calls end here", address, caller.calls)
            for wait in tuple(caller.waits):
                wait.reschedule(0)
        finally:
            writer.close()


def _keep_alive(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_KEEPIDLE, KEEPALIVE_IDLE_S),
        (socket.TCP_KEEPINTVL, KEEPALIVE_IDLE_S),
        (socket.TCP_KEEPCNT, KEEPALIVE_PROBES),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
