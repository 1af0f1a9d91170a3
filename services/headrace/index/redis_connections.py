"""One Redis as this process sees it: few connections, one deadline per call, typed errors, scripts.

Rules kept here, so that `redis_index` and `redis_membership` are only about their keys:

- Every call ends within INDEX_TIMEOUT_MS, or what else was asked for, waiting for a connection and connecting included.
  Nothing is retried. When our own event loop stood still, that is not Redis being slow: the call gets
  INDEX_STALL_GRACE_MS more.
- Every failure of Redis leaves as IndexUnavailable; after a timeout or a lost connection a circuit breaker answers for
  a while. A refusal (out of memory, read-only replica) comes at once and therefore does not open it.
- A connection with an unread reply is closed, whoever was cancelled where: nobody can get another caller's reply.
- At most `connections_max` connections. A semaphore and a list do that, and not redis-py's BlockingConnectionPool:
  giving a connection back there awaits a lock, and a cancellation at that point loses the connection for good; here
  nothing is awaited on the way back.

One instance serves one event loop (connections belong to the loop that opened them).
"""

import asyncio
import hashlib
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any

from redis.asyncio.connection import AbstractConnection
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import NoScriptError, ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from headrace.core.clock import Clock
from headrace.core.errors import IndexUnavailable
from headrace.core.index_limits import INDEX_PAUSE_MS, INDEX_STALL_GRACE_MS, INDEX_TIMEOUT_MS
from headrace.index.circuit_breaker import CircuitBreaker, Ticket
from headrace.index.connection_factory import connection_factory

_log = logging.getLogger(__name__)

Argument = bytes | str | int


class Script:
    """A Lua script of `index/scripts`, by file name without the ending."""

    def __init__(self, name: str, *, after: str = "") -> None:
        """after: another file, whose functions the script uses."""
        flags, _, body = _lua_of(name).partition(b"\n")  # the server wants the flags on the first line
        self.text = flags + b"\n" + (_lua_of(after) if after else b"") + body
        self.sha1 = hashlib.sha1(self.text, usedforsecurity=False).hexdigest()


def _lua_of(name: str) -> bytes:
    return (resources.files("headrace.index") / "scripts" / f"{name}.lua").read_bytes()


class RedisCall:
    """One connection for the length of one call. Made by `RedisConnections.call` only."""

    def __init__(self, connection: AbstractConnection) -> None:
        self._connection = connection
        self.unread_replies = 0

    async def round_trip(self, *commands: Sequence[Argument]) -> list[Any]:
        """Send all commands in one write and read their replies, in order; an error reply is a value in the list."""
        self.unread_replies += len(commands)
        await self._connection.send_packed_command(self._connection.pack_commands(commands), check_health=False)
        replies: list[Any] = []
        for _ in commands:
            try:
                replies.append(await self._connection.read_response(disable_decoding=True))
            except ResponseError as refusal:
                replies.append(refusal)
            self.unread_replies -= 1
        return replies

    async def run_script(self, script: Script, *, keys: Sequence[bytes], arguments: Sequence[Argument]) -> Any:
        """Run a script in one round trip; in two when the server does not know it (it was restarted empty)."""
        operands = (len(keys), *keys, *arguments)
        [reply] = await self.round_trip(("EVALSHA", script.sha1, *operands))
        if isinstance(reply, NoScriptError):
            [reply] = await self.round_trip(("EVAL", script.text, *operands))
        if isinstance(reply, ResponseError):
            raise reply
        return reply

    async def run_script_for_each(
        self, script: Script, operands: Sequence[tuple[bytes, Sequence[Argument]]]
    ) -> list[Any]:
        """Run a script once for each (key, arguments), all in one round trip; in two when the server does not know it.
        An error reply is a value in the list."""
        for command in (("EVALSHA", script.sha1), ("EVAL", script.text)):
            replies = await self.round_trip(*((*command, 1, key, *arguments) for key, arguments in operands))
            if not any(isinstance(reply, NoScriptError) for reply in replies):
                break
        return replies


class RedisConnections:
    """Owner of this process's connections to one Redis for one purpose."""

    def __init__(
        self, redis_url: str, *, connections_max: int, clock: Clock, timeout_ms: int = INDEX_TIMEOUT_MS
    ) -> None:
        """Connects when first used. timeout_ms: of each call. Raises ConfigInvalid when the URL cannot be read."""
        self._factory = connection_factory(redis_url, timeout_ms=timeout_ms)
        self._breaker = CircuitBreaker(pause_s=INDEX_PAUSE_MS / 1000, clock=clock)
        self._slots = asyncio.Semaphore(connections_max)
        self._idle: list[AbstractConnection] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timeout_ms = timeout_ms

    @asynccontextmanager
    async def call(self) -> AsyncIterator[RedisCall]:
        """Everything inside the block shares one connection and one deadline. Raises IndexUnavailable."""
        self._check_loop()
        ticket = self._breaker.admit()
        if ticket is None:
            raise IndexUnavailable("Redis failed a moment ago and is left alone for now")
        try:
            async with _answer_time(self._timeout_ms), self._slots:
                connection = self._idle.pop() if self._idle else self._factory.make_connection()
                call, is_ready = RedisCall(connection), False
                try:
                    await self._factory.ensure_connection(connection)
                    is_ready = True
                    yield call
                finally:
                    if is_ready and call.unread_replies == 0:
                        self._idle.append(connection)
                    else:
                        await connection.disconnect(nowait=True)
        except (TimeoutError, RedisConnectionError, RedisTimeoutError, OSError) as error:
            if isinstance(error, RedisConnectionError):
                await self.close()  # the others lead to the same server, which is gone or no primary any more
            raise self._failed(ticket, error) from error
        except RedisError as error:
            self._succeeded(ticket)
            if isinstance(error, ReadOnlyError):
                await self.close()  # there was a failover: new connections may find the new primary
            raise IndexUnavailable(f"Redis refuses: {error}") from error
        except BaseException:
            self._breaker.abandoned(ticket)
            raise
        else:
            self._succeeded(ticket)

    async def close(self) -> None:
        """Close the idle connections. Those under way are closed or kept by the call that uses them."""
        while self._idle:
            await self._idle.pop().disconnect(nowait=True)

    def _succeeded(self, ticket: Ticket) -> None:
        if self._breaker.succeeded(ticket):
            _log.warning("Redis answers again")

    def _failed(self, ticket: Ticket, error: Exception) -> IndexUnavailable:
        why = f"no answer in {self._timeout_ms} ms" if isinstance(error, TimeoutError) else f"{error}"
        if self._breaker.failed(ticket):
            _log.warning("Redis is unavailable (%s); requests go on without reuse until it answers again", why)
        return IndexUnavailable(why)

    def _check_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        assert self._loop is loop, "made for another event loop; make one per loop"


@asynccontextmanager
async def _answer_time(timeout_ms: int) -> AsyncIterator[None]:
    """Raises TimeoutError when the block takes longer than that.

    A plain `asyncio.timeout` would also fire when the loop was blocked for that long and the reply has been in the
    socket all the while: the timer runs before the task that would read it.
    """
    loop = asyncio.get_running_loop()
    due_s = loop.time() + timeout_ms / 1000
    grace_s = INDEX_STALL_GRACE_MS / 1000
    async with asyncio.timeout(None) as timeout:

        def expire() -> None:
            loop_stood_still = loop.time() - due_s > grace_s
            timeout.reschedule(loop.time() + (grace_s if loop_stood_still else 0.0))

        timer = loop.call_at(due_s, expire)
        try:
            yield
        finally:
            timer.cancel()
