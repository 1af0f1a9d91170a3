"""Block hash to holders, in Redis: implements `BlockIndex`.

The layout of keys and values is in `redis_keys`, the races that each script prevents are in `scripts/*.lua`.

An entry counts only while the membership record of its holder stands under the entry's incarnation; this file reads
those records and never writes them. What a holder registers under one incarnation must be prefix-closed (parents before
children, removed tail before head); where it is not (Redis evicted an entry by itself), a match may be too long or too
short. It is a hint either way: loading verifies.
"""

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from redis.exceptions import ResponseError

from headrace.core.block import BlockHash, Chain, HolderId, NamespaceId, Tier, shard_of
from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import IndexUnavailable
from headrace.core.index_limits import (
    INDEX_BATCH_BLOCKS,
    INDEX_CONNECTIONS_MAX,
    INDEX_EVENT_BLOCKS_MAX,
    INDEX_EVENTS_MAX,
    INDEX_HOLDERS_MAX,
    INDEX_TIMEOUT_MS,
    SWEEP_PAGE_KEYS,
    SWEEP_PAGES_MAX,
)
from headrace.core.limits import CHAIN_BLOCKS_MAX
from headrace.core.members import NO_MATCH, PrefixMatch
from headrace.index.junk_count import JunkCount
from headrace.index.redis_connections import RedisCall, RedisConnections, Script
from headrace.index.redis_keys import (
    ALL_KEYS_PATTERN,
    INCARNATION_DIGITS,
    BlockKey,
    NumbersKey,
    block_key_prefix,
    events_key,
    incarnation_text,
    member_key,
    numbers_key,
    pack_hashes,
    parse_incarnation,
    parse_key,
    parse_numbers,
)

_LONGEST_PREFIX = Script("longest_prefix")
_REGISTER = Script("register", after="append_event")
_DEREGISTER = Script("deregister", after="append_event")
_REMOVE_DEAD = Script("remove_dead", after="append_event")


class RedisIndex:
    """The index in Redis. One instance per event loop; connects when first used."""

    def __init__(self, redis_url: str, *, clock: Clock | None = None, timeout_ms: int = INDEX_TIMEOUT_MS) -> None:
        clock = clock or SystemClock()
        self._redis = RedisConnections(
            redis_url, connections_max=INDEX_CONNECTIONS_MAX, clock=clock, timeout_ms=timeout_ms
        )
        self._junk = JunkCount(clock)
        self._sweep_cursor = 0

    @property
    def junk_entries(self) -> int:
        """Entries that were ignored so far because they do not parse."""
        return self._junk.total

    async def longest_prefix(self, namespace: NamespaceId, chain: Chain) -> PrefixMatch:
        """For every live holder, the length of its leading run. Two round trips, one when nobody has the first block.

        Blocks past CHAIN_BLOCKS_MAX are not looked at, holders past INDEX_HOLDERS_MAX neither.
        """
        if not chain:
            return NO_MATCH
        packed, width = pack_hashes(chain[:CHAIN_BLOCKS_MAX])
        async with self._redis.call() as redis:
            junk, *reply = await redis.run_script(
                _LONGEST_PREFIX, keys=[block_key_prefix(namespace)], arguments=[packed, width, INDEX_HOLDERS_MAX]
            )
            runs = [
                _Run(holder, int(incarnation), num_blocks)
                for name, incarnation, num_blocks in zip(reply[::3], reply[1::3], reply[2::3], strict=True)
                if (holder := _parse_holder(name)) is not None
            ]
            self._junk.add(junk + len(reply) // 3 - len(runs), "index entries")
            live = await _live_incarnations(redis, [run.holder for run in runs])
        return PrefixMatch({run.holder: run.num_blocks for run in runs if live.get(run.holder) == run.incarnation})

    async def register(
        self, *, holder: HolderId, incarnation: int, tier: Tier, namespace: NamespaceId, blocks: Sequence[BlockHash]
    ) -> None:
        """Add or renew entries, in order; an entry of a newer incarnation stays as it is.

        More than INDEX_BATCH_BLOCKS go in several calls. When one fails, those before it stay.
        """
        for packed, width in _batches(blocks):
            async with self._redis.call() as redis:
                await redis.run_script(
                    _REGISTER,
                    keys=_keys_of(namespace),
                    arguments=[*_changes(namespace, packed, width), holder, incarnation_text(incarnation), tier.value],
                )

    async def deregister(
        self, *, holder: HolderId, incarnation: int, namespace: NamespaceId, blocks: Sequence[BlockHash]
    ) -> None:
        """Remove entries, in order, except those of a newer incarnation."""
        for packed, width in _batches(blocks):
            async with self._redis.call() as redis:
                await redis.run_script(
                    _DEREGISTER,
                    keys=_keys_of(namespace),
                    arguments=[*_changes(namespace, packed, width), holder, incarnation_text(incarnation)],
                )

    async def sweep(self, live: dict[HolderId, int], *, limit: int) -> int:
        """Remove up to `limit` entries that neither `live` nor a standing record vouches for; returns how many.

        Looks at SWEEP_PAGE_KEYS x SWEEP_PAGES_MAX keys at most and goes on from there at the next call; stops at the
        end of the key space. How many events the gone have made is forgotten as well and not counted. A holder whose
        record ran out and comes back in the millisecond between look and removal loses those entries until it
        registers them again; that costs hits.
        """
        removed = 0
        for _ in range(SWEEP_PAGES_MAX):
            try:
                async with self._redis.call() as redis:
                    removed += await self._sweep_page(redis, live, limit - removed)
            except IndexUnavailable:
                async with self._redis.call() as redis:  # the next sweep begins with another server, if there is one
                    self._sweep_cursor = await redis.pass_over(self._sweep_cursor)
                raise
            if removed >= limit or self._sweep_cursor == 0:
                break
        return removed

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.close()

    async def _sweep_page(self, redis: RedisCall, live: dict[HolderId, int], limit: int) -> int:
        cursor, found = await redis.scan(self._sweep_cursor, pattern=ALL_KEYS_PATTERN, count=SWEEP_PAGE_KEYS)
        keys = [parse_key(key) for key in found]
        entries = await self._read_entries(redis, [key for key in keys if isinstance(key, BlockKey)])
        unvouched = [
            entry for entry in entries if entry.incarnation is None or live.get(entry.holder) != entry.incarnation
        ]
        counted = await _counted_owners(redis, [key for key in keys if isinstance(key, NumbersKey)])
        uncounted = [
            (shard, holder, incarnation) for shard, holder, incarnation in counted if live.get(holder) != incarnation
        ]
        # Asked after the entries were read: a holder announces itself before it registers, so whoever has an entry and
        # no record now is gone.
        standing = await _live_incarnations(
            redis, {entry.holder for entry in unvouched} | {holder for _, holder, _ in uncounted}
        )
        dead = [
            entry for entry in unvouched if entry.incarnation is None or standing.get(entry.holder) != entry.incarnation
        ]
        await _forget_numbers(redis, [owner for owner in uncounted if standing.get(owner[1]) != owner[2]])
        removed = await self._remove(redis, dead[:limit])
        if len(dead) <= limit:  # else the rest of this page comes first next time
            self._sweep_cursor = cursor
        return removed

    async def _read_entries(self, redis: RedisCall, keys: Sequence[BlockKey]) -> "list[_Entry]":
        """All entries of the named blocks; what cannot be read is counted and left out."""
        if not keys:
            return []
        replies = await redis.round_trip(
            *(
                ("HRANDFIELD", block_key_prefix(key.namespace) + key.block_hash, INDEX_HOLDERS_MAX, "WITHVALUES")
                for key in keys
            )
        )
        entries, junk = [], 0
        for key, reply in zip(keys, replies, strict=True):
            if isinstance(reply, ResponseError):
                junk += 1
                continue
            for name, value in zip(reply[::2], reply[1::2], strict=True):
                holder = _parse_holder(name)
                if holder is None:
                    junk += 1
                else:
                    entries.append(_Entry(key, holder, value, parse_incarnation(value)))
        self._junk.add(junk, "index entries")
        return entries

    async def _remove(self, redis: RedisCall, dead: "Sequence[_Entry]") -> int:
        namespace_to_dead: dict[NamespaceId, list[_Entry]] = defaultdict(list)
        for entry in dead:
            namespace_to_dead[entry.key.namespace].append(entry)
        removed = 0
        for namespace, entries in namespace_to_dead.items():
            for start in range(0, len(entries), INDEX_BATCH_BLOCKS):
                batch = entries[start : start + INDEX_BATCH_BLOCKS]
                named = [part for each in batch for part in (each.key.block_hash, each.holder.encode(), each.value)]
                removed += await redis.run_script(
                    _REMOVE_DEAD, keys=_keys_of(namespace), arguments=[namespace, INDEX_EVENTS_MAX, *named]
                )
        return removed


@dataclass(frozen=True, slots=True)
class _Run:
    holder: HolderId
    incarnation: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class _Entry:
    key: BlockKey
    holder: HolderId
    value: bytes
    incarnation: int | None  # None: the value is junk


async def _counted_owners(redis: RedisCall, keys: Sequence[NumbersKey]) -> list[tuple[int, HolderId, int]]:
    """(shard, holder, incarnation) of those whose changes are counted; a sample where there are very many."""
    if not keys:
        return []
    replies = await redis.round_trip(
        *(("HRANDFIELD", numbers_key(key.shard), INDEX_HOLDERS_MAX, "WITHVALUES") for key in keys)
    )
    return [
        (key.shard, holder, incarnation)
        for key, reply in zip(keys, replies, strict=True)
        if not isinstance(reply, ResponseError)
        for holder, incarnation in parse_numbers(reply)
    ]


async def _forget_numbers(redis: RedisCall, owners: Sequence[tuple[int, HolderId, int]]) -> None:
    """A holder that comes back in this very moment counts from 1 again, which its readers take for a loss."""
    if owners:
        _accepted(
            await redis.round_trip(
                *(
                    ("HDEL", numbers_key(shard), incarnation_text(incarnation) + b":" + holder.encode())
                    for shard, holder, incarnation in owners
                )
            )
        )


async def _live_incarnations(redis: RedisCall, holders: Iterable[HolderId]) -> dict[HolderId, int]:
    """The incarnation under which each holder is alive; holders that are not alive are left out. One round trip.

    Reads the first bytes of each record only: a worker's record is about 1 KB.
    """
    asked = list(holders)
    if not asked:
        return {}
    replies = await redis.round_trip(*(("GETRANGE", member_key(holder), 0, INCARNATION_DIGITS - 1) for holder in asked))
    live = {}
    for holder, reply in zip(asked, replies, strict=True):
        incarnation = None if isinstance(reply, ResponseError) else parse_incarnation(reply)
        if incarnation is not None:
            live[holder] = incarnation
    return live


def _keys_of(namespace: NamespaceId) -> list[bytes]:
    shard = shard_of(namespace)
    return [block_key_prefix(namespace), events_key(shard), numbers_key(shard)]


def _changes(namespace: NamespaceId, packed: bytes, width: int) -> list[bytes | str | int]:
    """What `register` and `deregister` are told first."""
    return [namespace, packed, width, INDEX_EVENTS_MAX, INDEX_EVENT_BLOCKS_MAX]


def _batches(blocks: Sequence[BlockHash]) -> Iterable[tuple[bytes, int]]:
    for start in range(0, len(blocks), INDEX_BATCH_BLOCKS):
        yield pack_hashes(blocks[start : start + INDEX_BATCH_BLOCKS])


def _parse_holder(name: bytes) -> HolderId | None:
    try:
        return HolderId(name.decode())
    except UnicodeDecodeError:
        return None


def _accepted(replies: list[Any]) -> list[Any]:
    """The replies, none of which may be a refusal. Raises ResponseError."""
    for reply in replies:
        if isinstance(reply, ResponseError):
            raise reply
    return replies
