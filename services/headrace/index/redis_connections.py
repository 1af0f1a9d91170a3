"""Redis as this process sees it: calls with one deadline each, typed errors, scripts.

Every call ends within INDEX_TIMEOUT_MS, or what else was asked for, waiting for a connection and connecting included,
and every failure leaves as IndexUnavailable, so that `redis_index` and `redis_membership` are only about their keys.
What a server is asked with is `redis_server.py`; which one has a key, where there are several, `redis_cluster.py`.

One instance serves one event loop (connections belong to the loop that opened them).
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from importlib import resources
from typing import Any

from redis.exceptions import MovedError, NoScriptError, RedisError, ResponseError

from headrace.core.clock import Clock
from headrace.core.errors import IndexUnavailable
from headrace.core.index_limits import INDEX_TIMEOUT_MS
from headrace.index.connection_factory import ClusterFactory, connection_factory
from headrace.index.redis_cluster import ClusterServers, OneServer, Parts, Route, Servers
from headrace.index.redis_server import AnswerTime, Argument, Command, RedisServer


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
    """Round trips that share one deadline. Made by `RedisConnections.call` only.

    Commands of one server go in one write, in order; several servers are asked at the same time. A command that is
    refused is a value in the list of replies, except where a cluster says that a key is not to be had now: that is
    raised.
    """

    def __init__(self, servers: Servers, time: AnswerTime) -> None:
        self._servers = servers
        self._time = time

    async def round_trip(self, *commands: Command) -> list[Any]:
        """Send all commands and read their replies, in order. Each names keys of one shard, or of the members."""
        replies: list[Any] = [None] * len(commands)
        parts = await self._servers.route(commands, self._time)
        while parts:
            await self._send(parts, commands, replies)
            parts = self._servers.redirect(parts, commands, replies)
        return replies

    async def run_script(self, script: Script, *, keys: Sequence[bytes], arguments: Sequence[Argument]) -> Any:
        """Run a script in one round trip; in two when the server does not know it (it was restarted empty)."""
        [reply] = await self.run_scripts((script, keys, arguments))
        if isinstance(reply, ResponseError):
            raise reply
        return reply

    async def run_scripts(self, *runs: tuple[Script, Sequence[bytes], Sequence[Argument]]) -> list[Any]:
        """Run scripts, each with its keys and arguments, all in one round trip; all again in a second one when a server
        does not know one of them, so the others run twice. The replies are of one round trip: what one server runs, it
        runs in order and by one connection. An error reply is a value in the list."""
        replies = await self.round_trip(*(("EVALSHA", run[0].sha1, *_operands(run)) for run in runs))
        if any(isinstance(reply, NoScriptError) for reply in replies):
            replies = await self.round_trip(*(("EVAL", run[0].text, *_operands(run)) for run in runs))
        return replies

    async def scan(self, cursor: int, *, pattern: bytes, count: int) -> tuple[int, list[bytes]]:
        """Some keys that match, after a look at about `count`, and the cursor that leads to the next; 0 begins and
        ends. Servers come one after the other. When slots change hands meanwhile, keys may be missed. Raises
        ResponseError."""
        servers = await self._servers.in_turn(self._time)
        theirs, turn = divmod(cursor, len(servers))
        [reply] = await servers[turn].exchange([("SCAN", theirs, "MATCH", pattern, "COUNT", count)], self._time)
        if isinstance(reply, ResponseError):
            raise reply
        following = int(reply[0])
        if following == 0:
            turn = _next_turn(servers, turn)
        return following * len(servers) + turn, reply[1]

    async def pass_over(self, cursor: int) -> int:
        """The cursor that leads to the keys of the next server; the same where there is only one."""
        servers = await self._servers.in_turn(self._time)
        return cursor if len(set(servers)) == 1 else _next_turn(servers, cursor % len(servers))

    async def run_id(self) -> bytes:
        """Changes whenever a server of our keys starts anew or another one takes its place, for any of the keys; of a
        server that does not tell it is empty."""
        servers = await self._servers.in_turn(self._time)
        asked = list(dict.fromkeys(servers))
        infos: list[Any] = [None] * len(asked)
        await self._send(
            {Route(server): [at] for at, server in enumerate(asked)}, [("INFO", "server")] * len(asked), infos
        )
        told = {server: _run_id(info) for server, info in zip(asked, infos, strict=True)}
        return b" ".join(told[server] for server in servers)

    async def _send(self, parts: Parts, commands: Sequence[Command], replies: list[Any]) -> None:
        """Put the replies in their places. Waits for all servers, also when one fails. Raises IndexUnavailable."""
        failures: list[IndexUnavailable] = []

        async def send_part(route: Route, places: Sequence[int]) -> None:
            try:
                told = await _exchange(route, [commands[at] for at in places], self._time)
            except IndexUnavailable as failure:
                failures.append(failure)
            else:
                for at, reply in zip(places, told, strict=True):
                    replies[at] = reply

        if len(parts) == 1:
            [(route, places)] = parts.items()
            await send_part(route, places)
        else:
            async with asyncio.TaskGroup() as group:
                for route, places in parts.items():
                    group.create_task(send_part(route, places))
        if failures:
            raise failures[0]


class RedisConnections:
    """Owner of this process's connections to one Redis for one purpose."""

    def __init__(
        self, redis_url: str, *, connections_max: int, clock: Clock, timeout_ms: int = INDEX_TIMEOUT_MS
    ) -> None:
        """Connects when first used. connections_max: to each server. timeout_ms: of each call. Raises ConfigInvalid
        when the URL cannot be read."""
        factory = connection_factory(redis_url, timeout_ms=timeout_ms)
        self._servers: Servers
        if isinstance(factory, ClusterFactory):
            self._servers = ClusterServers(factory, connections_max=connections_max, clock=clock)
        else:
            self._servers = OneServer(RedisServer(factory, name="Redis", connections_max=connections_max, clock=clock))
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timeout_ms = timeout_ms

    @property
    def streams_lie_together(self) -> bool:
        """Whether one command may name keys of several shards."""
        return self._servers.streams_lie_together

    @asynccontextmanager
    async def call(self) -> AsyncIterator[RedisCall]:
        """Everything inside the block shares one deadline. Raises IndexUnavailable, also for what Redis refuses."""
        self._check_loop()
        try:
            yield RedisCall(self._servers, AnswerTime(self._timeout_ms))
        except MovedError as error:
            raise IndexUnavailable("Redis is one server of a cluster; name it by redis+cluster://") from error
        except RedisError as error:
            raise IndexUnavailable(f"Redis refuses: {error}") from error

    async def close(self) -> None:
        """Close the idle connections. Those under way are closed or kept by the call that uses them."""
        await self._servers.close()

    def _check_loop(self) -> None:
        loop = asyncio.get_running_loop()
        if self._loop is None:
            self._loop = loop
        assert self._loop is loop, "made for another event loop; make one per loop"


def _next_turn(servers: Sequence[RedisServer], turn: int) -> int:
    """Of the next server that was not asked yet in this round; 0 when there is none."""
    return next((at for at in range(turn + 1, len(servers)) if servers[at] not in servers[:at]), 0)


def _operands(run: tuple[Script, Sequence[bytes], Sequence[Argument]]) -> Sequence[Argument]:
    _, keys, arguments = run
    return (len(keys), *keys, *arguments)


async def _exchange(route: Route, commands: Sequence[Command], time: AnswerTime) -> list[Any]:
    """Replies of one server."""
    if not route.asking:
        return await route.server.exchange(commands, time)
    told = await route.server.exchange([each for command in commands for each in (("ASKING",), command)], time)
    return told[1::2]


def _run_id(info: object) -> bytes:
    lines = info.splitlines() if isinstance(info, bytes) else []
    return next((line.removeprefix(b"run_id:") for line in lines if line.startswith(b"run_id:")), b"")
