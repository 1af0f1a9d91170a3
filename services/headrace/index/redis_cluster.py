"""Where the index's keys lie: on one server, or by slots on those of a Redis Cluster.

The layout (`redis_keys`) puts what one script touches into one slot, so all that a cluster adds is which server to ask.
`RedisCall` asks here before each round trip, and again when replies say that a slot lies elsewhere:

- MOVED is followed, and remembered. Slots are asked for anew after that, and while a server fails, at most once in
  INDEX_PAUSE_MS: so a replica that took over is found.
- ASK (the slot is on its way, this key has gone ahead) is followed by a plain command. Not by a script: it reads keys
  that it is not told of, and would take those that have not arrived yet for keys that are not there. It is refused
  until the slot has arrived, as TRYAGAIN and CLUSTERDOWN are: that is an index that is away for those namespaces.
- Only primaries are asked. A replica knows less, and an index that has forgotten what it said is worse than one that is
  away.

Not redis-py's RedisCluster: it sends again by itself what failed, asks for all slots in the midst of a call, and raises
where its connections are all in use and we wait.
"""

import asyncio
import math
import random
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.exceptions import (
    AskError,
    ClusterCrossSlotError,
    ClusterDownError,
    MovedError,
    RedisError,
    ResponseError,
    TryAgainError,
)

from headrace.core.clock import Clock
from headrace.core.errors import IndexUnavailable
from headrace.core.index_limits import INDEX_CLUSTER_ASKED_MAX, INDEX_PAUSE_MS, INDEX_REDIRECTIONS_MAX
from headrace.index.connection_factory import Address, ClusterFactory
from headrace.index.redis_keys import SLOT_KEYS
from headrace.index.redis_server import AnswerTime, Command, RedisServer

_NOT_HERE = (AskError, TryAgainError, ClusterDownError, ClusterCrossSlotError)  # MovedError is an AskError
_SCRIPTS = ("EVAL", "EVALSHA")
_ASK_FOR_SLOTS = ("CLUSTER", "SLOTS")
_OWN_SLOTS = tuple(key_slot(key) for key in SLOT_KEYS)


class Route(NamedTuple):
    """The way that a command takes."""

    server: RedisServer
    asking: bool = False  # the slot is still on its way to that server
    redirections: int = 0  # it has had so far


Parts = dict[Route, list[int]]  # the commands of a round trip that take the same way, by their places in it


class Servers(Protocol):
    """Which server has which keys."""

    streams_lie_together: bool  # whether one command may name keys of several shards

    async def route(self, commands: Sequence[Command], time: AnswerTime) -> Parts:
        """The way of each command. Raises IndexUnavailable."""

    def redirect(self, parts: Parts, commands: Sequence[Command], replies: Sequence[Any]) -> Parts:
        """The ways of those that were sent to a wrong server; none: all is answered. Raises IndexUnavailable."""

    async def in_turn(self, time: AnswerTime) -> Sequence[RedisServer]:
        """The servers of all keys that there may be, some more than once, always the same number in the same order.
        Raises IndexUnavailable."""

    async def close(self) -> None:
        """Close the idle connections."""


class OneServer:
    """A Redis that is one server, or the primary that Sentinels name."""

    streams_lie_together = True

    def __init__(self, server: RedisServer) -> None:
        self._server = server

    async def route(self, commands: Sequence[Command], time: AnswerTime) -> Parts:
        """All there."""
        return {Route(self._server): list(range(len(commands)))} if commands else {}

    def redirect(self, parts: Parts, commands: Sequence[Command], replies: Sequence[Any]) -> Parts:
        """There is nowhere else."""
        return {}

    async def in_turn(self, time: AnswerTime) -> Sequence[RedisServer]:
        """The one."""
        return (self._server,)

    async def close(self) -> None:
        """As RedisServer."""
        await self._server.close()


class ClusterServers:
    """The primaries of a cluster, as one of its servers told last. Nothing is asked before the first command."""

    streams_lie_together = False

    def __init__(self, factory: ClusterFactory, *, connections_max: int, clock: Clock) -> None:
        """connections_max: to each server, beside one to ask where slots lie."""
        self._factory = factory
        self._connections_max = connections_max
        self._clock = clock
        self._slot_to_address: list[Address | None] = []  # empty: not known yet
        self._address_to_server: dict[Address, RedisServer] = {}
        self._asking = asyncio.Lock()
        self._asked_s = -math.inf  # when slots were last asked for, answered or not
        self._is_doubted = False  # somebody said that a slot lies elsewhere
        self._why_unknown = ""

    async def route(self, commands: Sequence[Command], time: AnswerTime) -> Parts:
        """By the slot of each command's keys."""
        await self._know_slots(time)
        parts: Parts = {}
        for at, command in enumerate(commands):
            parts.setdefault(Route(self._server_of(key_slot(_key_of(command)))), []).append(at)
        return parts

    def redirect(self, parts: Parts, commands: Sequence[Command], replies: Sequence[Any]) -> Parts:
        """Whither MOVED and ASK point; what else a cluster says of slots is raised, lest it pass for an answer."""
        onward: Parts = {}
        for route, places in parts.items():
            for at in places:
                refusal = replies[at]
                if isinstance(refusal, _NOT_HERE):
                    onward.setdefault(self._onward(route, commands[at], refusal), []).append(at)
        return onward

    async def in_turn(self, time: AnswerTime) -> Sequence[RedisServer]:
        """Those of the members and of each shard. Other servers of the cluster have no key of ours."""
        await self._know_slots(time)
        return [self._server_of(slot) for slot in _OWN_SLOTS]

    async def close(self) -> None:
        """As RedisServer."""
        for server in list(self._address_to_server.values()):
            await server.close()

    def _server_of(self, slot: int) -> RedisServer:
        address = self._slot_to_address[slot]
        if address is None:
            self._is_doubted = True
            raise IndexUnavailable(f"no server of the cluster has slot {slot}")
        return self._server_at(address)

    def _server_at(self, address: Address) -> RedisServer:
        server = self._address_to_server.get(address)
        if server is None:
            server = self._address_to_server[address] = RedisServer(
                self._factory.server(address),
                name=f"Redis at {address.host}:{address.port}",
                connections_max=self._connections_max,
                clock=self._clock,
            )
        return server

    def _onward(self, route: Route, command: Command, refusal: ResponseError) -> Route:
        if isinstance(refusal, MovedError | ClusterDownError):
            self._is_doubted = True
        if not isinstance(refusal, AskError):
            raise IndexUnavailable(f"{route.server.name} refuses: {refusal}")
        if route.redirections == INDEX_REDIRECTIONS_MAX:
            raise IndexUnavailable(f"servers of the cluster disagree about slot {refusal.slot_id}")
        address = Address(refusal.host or self._address_of(route.server).host, refusal.port)
        if isinstance(refusal, MovedError):
            self._slot_to_address[refusal.slot_id] = address
            return Route(self._server_at(address), redirections=route.redirections + 1)
        if command[0] in _SCRIPTS:
            raise IndexUnavailable(f"slot {refusal.slot_id} is on its way to another server")
        return Route(self._server_at(address), asking=True, redirections=route.redirections + 1)

    def _address_of(self, server: RedisServer) -> Address:
        for address, known in self._address_to_server.items():
            if known is server:
                return address
        # Another call has heard in the meantime that it is none of them any more.
        raise IndexUnavailable(f"{server.name} left the cluster")

    async def _know_slots(self, time: AnswerTime) -> None:
        """Ask where slots lie, if that is not known or may have changed. Who has an answer does not wait for another's
        asking. Raises IndexUnavailable while it is not known at all."""
        if self._slot_to_address and (not self._is_due() or self._asking.locked()):
            return
        try:
            async with time.limit(), self._asking:
                if self._is_due():
                    await self._ask_for_slots(time)
        except TimeoutError:
            raise IndexUnavailable(f"no answer in {time.timeout_ms} ms") from None
        if not self._slot_to_address:
            raise IndexUnavailable(f"no server of the cluster tells where keys lie: {self._why_unknown}")

    def _is_due(self) -> bool:
        if self._clock.now_s() - self._asked_s < INDEX_PAUSE_MS / 1000:
            return False
        is_failing = any(server.fails for server in self._address_to_server.values())
        return not self._slot_to_address or self._is_doubted or is_failing

    async def _ask_for_slots(self, time: AnswerTime) -> None:
        """Ask a few servers in turn until one answers. One that hangs takes a share of the time only."""
        asked = self._most_promising()
        for address in asked:
            try:
                async with asyncio.timeout(time.timeout_ms / 1000 / (1 + len(asked))):
                    slot_to_address = await self._slots_told_by(address)
                break
            except (TimeoutError, RedisError, OSError) as error:
                self._why_unknown = f"{error}" or f"{address.host}:{address.port} does not answer"
        else:
            self._asked_s = self._clock.now_s()
            return
        self._asked_s = self._clock.now_s()
        self._slot_to_address, self._is_doubted = slot_to_address, False
        for address in self._address_to_server.keys() - set(slot_to_address):
            await self._address_to_server.pop(address).retire()

    def _most_promising(self) -> list[Address]:
        """Servers that may know; those that fail come last, and otherwise the order is by lot, so that a hundred
        processes do not all ask the same one."""
        known = self._address_to_server
        addresses = {*known, *self._factory.seeds}
        by_hope = sorted(addresses, key=lambda each: (each in known and known[each].fails, random.random()))
        return by_hope[:INDEX_CLUSTER_ASKED_MAX]

    async def _slots_told_by(self, address: Address) -> list[Address | None]:
        """The primary of each slot. Raises RedisError or OSError. By a connection for this question alone: the server
        may be none that has keys."""
        connection = self._factory.server(address).make_connection()  # type: ignore[no-untyped-call]
        try:
            await connection.connect()
            await connection.send_packed_command(connection.pack_command(*_ASK_FOR_SLOTS), check_health=False)
            ranges = await connection.read_response(disable_decoding=True)
        finally:
            await connection.disconnect(nowait=True)
        if not ranges:
            raise ResponseError(f"{address.host}:{address.port} knows of no slots")
        return _slot_to_address(ranges, told_by=address)


def _slot_to_address(ranges: Iterable[Any], *, told_by: Address) -> list[Address | None]:
    """From {first slot, last slot, primary {host, port, ...}, replica, ...}. A server that does not know by which name
    it is reached leaves it out: by the one that it was asked by."""
    slot_to_address: list[Address | None] = [None] * REDIS_CLUSTER_HASH_SLOTS
    for first, last, primary, *_ in ranges:
        host = primary[0].decode() if primary[0] else told_by.host
        if host != "?":  # not known yet
            slot_to_address[first : last + 1] = [Address(host, primary[1])] * (last + 1 - first)
    return slot_to_address


def _key_of(command: Command) -> bytes:
    """The first key that a command of ours names; all that it names lie in one slot."""
    word = command[0]
    if word in _SCRIPTS:
        key = command[3]
    elif word == "XREAD":
        key = command[list(command).index("STREAMS") + 1]
    else:
        key = command[2 if word == "XINFO" else 1]
    assert isinstance(key, bytes), command[0]
    return key
