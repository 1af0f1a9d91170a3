"""What a mirror reads from Redis: all entries page by page, the changes since, who is alive, and whether any were lost.

Every method is a bounded piece of work under one deadline and raises IndexUnavailable; asked again after that, it goes
on where it was. Owns a connection of its own, so that a reading that waits for events holds nobody up. What does not
parse is skipped and counted.
"""

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import islice
from typing import Any

from redis.exceptions import ResponseError

from headrace.core.block import BlockHash, HolderId, NamespaceId
from headrace.core.clock import Clock
from headrace.core.errors import IndexUnavailable
from headrace.core.index_limits import (
    INDEX_HOLDERS_MAX,
    INDEX_MIRROR_EVENTS,
    INDEX_MIRROR_PAGE_ENTRIES,
    INDEX_MIRROR_PAGE_KEYS,
    INDEX_MIRROR_POLL_MS,
    INDEX_SHARDS,
    INDEX_TIMEOUT_MS,
    MEMBERS_MAX,
)
from headrace.core.limits import MEMBER_TTL_MS
from headrace.index.junk_count import JunkCount
from headrace.index.mirrored_blocks import Alive, Owner
from headrace.index.redis_connections import RedisConnections, Script
from headrace.index.redis_keys import (
    BLOCK_KEYS_PATTERN,
    MEMBER_IDS_KEY,
    MEMBER_KEY_PREFIX,
    BlockKey,
    Event,
    block_key_prefix,
    events_key,
    numbers_key,
    parse_event,
    parse_incarnation,
    parse_key,
    parse_numbers,
)
from headrace.index.redis_server import Argument

_READ_MARKS = Script("read_marks")
_READ_LIVENESS = Script("read_liveness")
_READ_ENTRIES = Script("read_entries")

# Namespaces whose blocks are asked for in one round trip: a page may have one of each block.
_NAMESPACES_TOGETHER = 16
_SHARDS = range(INDEX_SHARDS)
_STREAMS = [events_key(shard) for shard in _SHARDS]

EventId = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Mark:
    """Where one shard's events stand: the newest one's id, and how many there were ever."""

    newest: EventId
    events: int


@dataclass(frozen=True, slots=True)
class Marks:
    """Where everything stands on one run of one server, or of those that share the shards."""

    run_id: bytes  # as RedisCall.run_id
    shards: tuple[Mark, ...]


@dataclass(frozen=True, slots=True)
class BlockEntries:
    """All entries of one block."""

    namespace: NamespaceId
    block_hash: BlockHash
    owners: list[Owner]


@dataclass(frozen=True, slots=True)
class Happened:
    """An event and where it lies; None for one that does not parse."""

    shard: int
    event_id: EventId
    event: Event | None


class RedisChanges:
    """A reader of the index's events and entries. One instance per event loop; connects when first used."""

    def __init__(self, redis_url: str, *, clock: Clock, timeout_ms: int = INDEX_TIMEOUT_MS) -> None:
        self._clock = clock
        self._redis = RedisConnections(redis_url, connections_max=1, clock=clock, timeout_ms=timeout_ms)
        self._junk = JunkCount(clock)

    async def read_marks(self) -> Marks:
        """Where all shards stand, which may be at slightly different times."""
        async with self._redis.call() as redis:
            run_id = await redis.run_id()
            streams = await redis.round_trip(*(("XINFO", "STREAM", key) for key in _STREAMS))
        return Marks(run_id, tuple(_parse_mark(stream) for stream in streams))

    async def read_numbers(self) -> tuple[Marks, dict[tuple[int, Owner], int]]:
        """Where all shards stand and how many events each owner had made by then in each, exactly."""
        shards, numbers = [], {}
        async with self._redis.call() as redis:
            run_id = await redis.run_id()
            for shard in _SHARDS:
                newest, events, *pairs = await redis.run_script(
                    _READ_MARKS, keys=[events_key(shard), numbers_key(shard)], arguments=[]
                )
                shards.append(Mark(_parse_id(newest), events))
                for (holder, incarnation), number in parse_numbers(pairs).items():
                    numbers[shard, Owner(holder, incarnation)] = number
        return Marks(run_id, tuple(shards)), numbers

    async def read_events(self, after: Sequence[EventId], *, wait_ms: int) -> list[Happened]:
        """Up to INDEX_MIRROR_EVENTS events of each shard after the given ids, in order within a shard. When there are
        none, waits up to `wait_ms` (0: not at all) for the first."""
        if self._redis.streams_lie_together:
            happened = await self._read_streams(after, wait_ms=wait_ms)
        else:
            happened = await self._read_each_stream(after)
            for _ in range(wait_ms // INDEX_MIRROR_POLL_MS):
                if happened:
                    break
                await asyncio.sleep(INDEX_MIRROR_POLL_MS / 1_000)
                happened = await self._read_each_stream(after)
        self._junk.add(sum(each.event is None for each in happened), "index events")
        return happened

    async def read_page(self, cursor: int) -> tuple[int, list[BlockEntries]]:
        """Some of all entries, and the cursor that leads to the next ones; 0 begins and ends."""
        async with self._redis.call() as redis:
            following, keys = await redis.scan(cursor, pattern=BLOCK_KEYS_PATTERN, count=INDEX_MIRROR_PAGE_KEYS)
        unread: dict[tuple[NamespaceId, int], list[BlockHash]] = defaultdict(list)
        for key in map(parse_key, keys):
            if isinstance(key, BlockKey):
                unread[key.namespace, len(key.block_hash)].append(key.block_hash)
        entries: list[BlockEntries] = []
        while unread:
            some = dict(islice(unread.items(), _NAMESPACES_TOGETHER))
            async with self._redis.call() as redis:
                replies = await redis.run_scripts(*(_entries_run(name, unread[name], len(some)) for name in some))
            for name, reply in zip(some, replies, strict=True):
                read = self._parse_entries(name[0], unread[name], _accepted(reply))
                entries += read
                unread[name] = unread[name][len(read) :]
                if not unread[name]:
                    del unread[name]
        return following, entries

    async def read_liveness(self, holders: Iterable[HolderId]) -> dict[HolderId, Alive]:
        """Which of the holders are alive, by the records that stand now."""
        asked = list(holders)
        if not asked:
            return {}
        async with self._redis.call() as redis:
            asked_s = self._clock.now_s()
            reply = await redis.run_script(_READ_LIVENESS, keys=[MEMBER_IDS_KEY], arguments=[MEMBER_KEY_PREFIX, *asked])
        live = {}
        for holder, head, ttl_ms in zip(asked, reply[::2], reply[1::2], strict=True):
            incarnation = parse_incarnation(head)
            if incarnation is not None:
                live[holder] = Alive(incarnation, asked_s + (ttl_ms if ttl_ms >= 0 else MEMBER_TTL_MS) / 1_000)
        return live

    async def close(self) -> None:
        """Close the connection."""
        await self._redis.close()

    async def _read_streams(self, after: Sequence[EventId], *, wait_ms: int) -> list[Happened]:
        block = ("BLOCK", wait_ms) if wait_ms else ()
        async with self._redis.call() as redis:
            [reply] = await redis.round_trip(
                ("XREAD", "COUNT", INDEX_MIRROR_EVENTS, *block, "STREAMS", *_STREAMS, *map(_id_text, after))
            )
        if isinstance(reply, ResponseError):  # junk of another type in a stream's place
            return await self._read_each_stream(after)
        return _parse_streams(reply)

    async def _read_each_stream(self, after: Sequence[EventId]) -> list[Happened]:
        """As one command for all would answer if what is no stream were an empty one."""
        async with self._redis.call() as redis:
            replies = await redis.round_trip(
                *(
                    ("XREAD", "COUNT", INDEX_MIRROR_EVENTS, "STREAMS", key, _id_text(event_id))
                    for key, event_id in zip(_STREAMS, after, strict=True)
                )
            )
        return [each for reply in replies if isinstance(reply, list) for each in _parse_streams(reply)]

    def _parse_entries(
        self, namespace: NamespaceId, blocks: Sequence[BlockHash], reply: Sequence[Any]
    ) -> list[BlockEntries]:
        """What `read_entries` says of the first blocks; at least of one."""
        read: list[BlockEntries] = []
        at = junk = 0
        while at < len(reply):
            parts = max(0, reply[at])
            pairs = reply[at + 1 : at + 1 + parts]
            owners = [_parse_owner(name, value) for name, value in zip(pairs[::2], pairs[1::2], strict=True)]
            known = [owner for owner in owners if owner is not None]
            junk += len(owners) - len(known) + (reply[at] < 0)
            read.append(BlockEntries(namespace, blocks[len(read)], known))
            at += 1 + parts
        assert read, "read_entries answers for one block at least"
        self._junk.add(junk, "index entries")
        return read


@lru_cache(maxsize=MEMBERS_MAX)
def _parse_owner(name: bytes, value: bytes) -> Owner | None:
    """Whose entry it is. Most entries are of few owners."""
    incarnation = parse_incarnation(value)
    try:
        return None if incarnation is None else Owner(HolderId(name.decode()), incarnation)
    except UnicodeDecodeError:
        return None


def _entries_run(
    name: tuple[NamespaceId, int], blocks: Sequence[BlockHash], together: int
) -> tuple[Script, Sequence[bytes], Sequence[Argument]]:
    """`read_entries` of a namespace's blocks of one width, in one reply with so many others."""
    namespace, width = name
    most = INDEX_MIRROR_PAGE_ENTRIES // together
    return _READ_ENTRIES, [block_key_prefix(namespace)], [b"".join(blocks), width, most, INDEX_HOLDERS_MAX]


def _accepted(reply: Any) -> list[Any]:
    if isinstance(reply, ResponseError):
        raise IndexUnavailable(f"Redis refuses: {reply}")
    assert isinstance(reply, list)
    return reply


def _parse_streams(reply: Any) -> list[Happened]:
    """What XREAD says; None when there is nothing."""
    return [
        Happened(_STREAMS.index(key), _parse_id(event_id), parse_event(fields) if fields else None)
        for key, events in reply or ()
        for event_id, fields in events
    ]


def _id_text(event_id: EventId) -> bytes:
    return b"%d-%d" % event_id


def _parse_id(text: bytes) -> EventId:
    milliseconds, _, sequence = text.partition(b"-")
    return int(milliseconds), int(sequence)


def _parse_mark(stream: object) -> Mark:
    """What XINFO STREAM says; no stream, or junk in its place, has had no events."""
    if not isinstance(stream, list):
        return Mark((0, 0), 0)
    said: Mapping[bytes, object] = dict(zip(stream[::2], stream[1::2], strict=True))
    newest, events = said[b"last-generated-id"], said[b"entries-added"]
    assert isinstance(newest, bytes)
    assert isinstance(events, int)
    return Mark(_parse_id(newest), events)
