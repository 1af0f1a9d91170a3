"""One Redis server as this process sees it: few connections, typed errors, and left alone for a while when it fails.

Rules kept here, so that nothing above has to think of connections:

- Nothing is retried. When our own event loop stood still, that is not Redis being slow: a call gets
  INDEX_STALL_GRACE_MS more.
- Every failure of Redis leaves as IndexUnavailable; after a timeout or a lost connection a circuit breaker answers for
  a while. A refusal (out of memory, read-only replica) comes at once and therefore does not open it.
- A connection with an unread reply is closed, whoever was cancelled where: nobody can get another caller's reply.
- At most `connections_max` connections. A semaphore and a list do that, and not redis-py's BlockingConnectionPool:
  giving a connection back there awaits a lock, and a cancellation at that point loses the connection for good; here
  nothing is awaited on the way back.
"""

import asyncio
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from redis.asyncio.connection import AbstractConnection, ConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ReadOnlyError, RedisError, ResponseError
from redis.exceptions import TimeoutError as RedisTimeoutError

from headrace.core.clock import Clock
from headrace.core.errors import IndexUnavailable
from headrace.core.index_limits import INDEX_PAUSE_MS, INDEX_STALL_GRACE_MS
from headrace.index.circuit_breaker import CircuitBreaker, Ticket

_log = logging.getLogger(__name__)

Argument = bytes | str | int
Command = Sequence[Argument]


class AnswerTime:
    """The time that one call has for everything it asks; begins when it is made."""

    def __init__(self, timeout_ms: int) -> None:
        self.timeout_ms = timeout_ms
        self._loop = asyncio.get_running_loop()
        self._due_s = self._loop.time() + timeout_ms / 1000
        self._was_extended = False

    @asynccontextmanager
    async def limit(self) -> AsyncIterator[None]:
        """Raises TimeoutError when the call's time ends before the block does.

        A plain `asyncio.timeout` would also fire when the loop was blocked for that long and the reply has been in the
        socket all the while: the timer runs before the task that would read it. So a loop that stood still has more
        time, once in a call.
        """
        grace_s = INDEX_STALL_GRACE_MS / 1000
        async with asyncio.timeout(None) as timeout:

            def expire() -> None:
                now_s = self._loop.time()
                if not self._was_extended and now_s - self._due_s > grace_s:
                    self._due_s, self._was_extended = now_s + grace_s, True
                timeout.reschedule(max(now_s, self._due_s))

            timer = self._loop.call_at(self._due_s, expire)
            try:
                yield
            finally:
                timer.cancel()


class RedisServer:
    """Owner of this process's connections to one server for one purpose. Connects when first used."""

    def __init__(self, factory: ConnectionPool, *, name: str, connections_max: int, clock: Clock) -> None:
        """name: what it is called in logs and errors."""
        self.name = name
        self._factory = factory
        self._breaker = CircuitBreaker(pause_s=INDEX_PAUSE_MS / 1000, clock=clock)
        self._free = asyncio.Semaphore(connections_max)
        self._idle: list[AbstractConnection] = []
        self._is_retired = False

    @property
    def fails(self) -> bool:
        """Whether it did not answer when it was last asked."""
        return self._breaker.is_open

    async def exchange(self, commands: Sequence[Command], time: AnswerTime) -> list[Any]:
        """Send all commands in one write and read their replies, in order; an error reply is a value in the list.

        Waiting for a connection and connecting count into the time. Raises IndexUnavailable.
        """
        ticket = self._breaker.admit()
        if ticket is None:
            raise IndexUnavailable(f"{self.name} failed a moment ago and is left alone for now")
        try:
            async with time.limit(), self._free:
                replies = await self._converse(commands)
        except (TimeoutError, RedisConnectionError, RedisTimeoutError, OSError) as error:
            if isinstance(error, RedisConnectionError):
                await self.close()  # the others lead to the same server, which is gone or no primary any more
            raise self._failed(ticket, error, time.timeout_ms) from error
        except RedisError as error:
            self._succeeded(ticket)
            raise IndexUnavailable(f"{self.name} refuses: {error}") from error
        except BaseException:
            self._breaker.abandoned(ticket)
            raise
        self._succeeded(ticket)
        return replies

    async def close(self) -> None:
        """Close the idle connections. Those under way are closed or kept by the exchange that uses them."""
        while self._idle:
            await self._idle.pop().disconnect(nowait=True)

    async def retire(self) -> None:
        """Close the idle connections, and those under way when they are done: it is not asked any more."""
        self._is_retired = True
        await self.close()

    async def _converse(self, commands: Sequence[Command]) -> list[Any]:
        connection = self._idle.pop() if self._idle else self._factory.make_connection()  # type: ignore[no-untyped-call]
        is_in_step = is_replica = False
        replies: list[Any] = []
        try:
            await self._factory.ensure_connection(connection)
            await connection.send_packed_command(connection.pack_commands(commands), check_health=False)
            for _ in commands:
                try:
                    replies.append(await connection.read_response(disable_decoding=True))
                except ResponseError as refusal:
                    replies.append(refusal)
                    is_replica = is_replica or isinstance(refusal, ReadOnlyError)
            is_in_step = True
        finally:
            if is_in_step and not is_replica and not self._is_retired:
                self._idle.append(connection)
            else:
                await connection.disconnect(nowait=True)
        if is_replica:
            await self.close()  # there was a failover: new connections may find the new primary
        return replies

    def _succeeded(self, ticket: Ticket) -> None:
        if self._breaker.succeeded(ticket):
            _log.warning("%s answers again", self.name)

    def _failed(self, ticket: Ticket, error: Exception, timeout_ms: int) -> IndexUnavailable:
        why = f"no answer in {timeout_ms} ms" if isinstance(error, TimeoutError) else f"{error}"
        if self._breaker.failed(ticket):
            _log.warning("%s is unavailable (%s); requests go on without reuse until it answers again", self.name, why)
        return IndexUnavailable(why)
