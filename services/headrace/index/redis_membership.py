"""Who is alive, in Redis: implements `Membership`. The layout is in `redis_keys`, the races in `scripts/*.lua`.

A missing record says that its member is dead only when Redis would have it otherwise. A Redis that came back empty, was
flushed, evicts records or takes no writes (a replica after a failover) lacks the living too, and so does a replica that
took over before it had heard of them. So every reader leaves a mark of its own with each listing, numbered, under the
members' TTL: whatever has the last mark has all that was announced before it. While the mark cannot be left, and for
one TTL after it was lost (the living announce themselves again meanwhile), a listing that lacks somebody is
IndexUnavailable: the caller keeps what it knew.
"""

import secrets
from collections.abc import Sequence
from typing import Any

from redis.exceptions import ResponseError

from headrace.core.block import HolderId
from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import IndexUnavailable
from headrace.core.index_limits import (
    FORGET_MEMBERS_PER_ANNOUNCE,
    INDEX_TIMEOUT_MS,
    MEMBER_RECORD_BYTES_MAX,
    MEMBERS_MAX,
    MEMBERSHIP_CONNECTIONS_MAX,
)
from headrace.core.limits import MEMBER_TTL_MS
from headrace.core.members import GatewayRecord, MemberRecord, StoreNodeRecord, WorkerRecord
from headrace.index.junk_count import JunkCount
from headrace.index.member_records import JunkRecord, decode_record, encode_record
from headrace.index.redis_connections import RedisConnections, Script
from headrace.index.redis_keys import (
    INCARNATION_DIGITS,
    MEMBER_IDS_KEY,
    MEMBER_KEY_PREFIX,
    incarnation_text,
    mark_key,
    member_key,
    parse_incarnation,
)

_ANNOUNCE = Script("announce")
_WITHDRAW = Script("withdraw")
_READ_MEMBERS = Script("read_members")
_PROBE = Script("probe")


class RedisMembership:
    """Records under a TTL in Redis. One instance per event loop; connects when first used."""

    def __init__(self, redis_url: str, *, clock: Clock | None = None, timeout_ms: int = INDEX_TIMEOUT_MS) -> None:
        self._clock = clock = clock or SystemClock()
        self._redis = RedisConnections(
            redis_url, connections_max=MEMBERSHIP_CONNECTIONS_MAX, clock=clock, timeout_ms=timeout_ms
        )
        self._junk = JunkCount(clock)
        self._unconfirmed: set[HolderId] = set()  # own records of which the last announcement's outcome is not known
        self._mark = mark_key(secrets.token_hex(8))
        self._marks_tried = self._marks_left = 0  # the last number that was sent, and the last of those that arrived
        self._listed: frozenset[HolderId] = frozenset()  # whom the last listing that was believed named
        self._asked_s: float | None = None  # when members were last asked for, answered or not
        self._mark_lost_s: float | None = None  # when the mark was last found missing, or could not be left

    @property
    def junk_records(self) -> int:
        """Records that were ignored so far because they do not parse."""
        return self._junk.total

    async def announce(self, record: MemberRecord, *, ttl_ms: int) -> bool:
        """Put or refresh a record; True when it did not stand before, or when that is not known.

        It is not known after a failed or cancelled announcement: Redis may have come back empty and taken the record,
        and only the reply was lost. Without this the owner's blocks would never be found again.
        """
        holder = record.holder_id
        is_unknown = holder in self._unconfirmed
        self._unconfirmed.add(holder)
        incarnation = incarnation_text(record.incarnation)
        value = incarnation + b":" + encode_record(record)
        async with self._redis.call() as redis:
            outcome = await redis.run_script(
                _ANNOUNCE,
                keys=[MEMBER_IDS_KEY, member_key(holder)],
                arguments=[holder, incarnation, value, ttl_ms, MEMBER_KEY_PREFIX, FORGET_MEMBERS_PER_ANNOUNCE],
            )
        self._unconfirmed.discard(holder)
        return outcome == 1 or (outcome == 0 and is_unknown)

    async def withdraw(self, record: MemberRecord) -> None:
        """Remove a record now, unless a newer incarnation has replaced it."""
        holder = record.holder_id
        async with self._redis.call() as redis:
            await redis.run_script(
                _WITHDRAW,
                keys=[MEMBER_IDS_KEY, member_key(holder)],
                arguments=[holder, incarnation_text(record.incarnation)],
            )

    async def store_nodes(self) -> tuple[StoreNodeRecord, ...]:
        """Live store nodes, by holder id."""
        return tuple(record for record in await self._read() if isinstance(record, StoreNodeRecord))

    async def workers(self) -> tuple[WorkerRecord, ...]:
        """Live workers, by holder id."""
        return tuple(record for record in await self._read() if isinstance(record, WorkerRecord))

    async def gateways(self) -> tuple[GatewayRecord, ...]:
        """Live gateways, by holder id."""
        return tuple(record for record in await self._read() if isinstance(record, GatewayRecord))

    async def close(self) -> None:
        """Close the connections."""
        await self._redis.close()

    async def _read(self) -> list[MemberRecord]:
        expected = self._expected_mark()
        (junk, *pairs), refusal = await self._ask(expected=expected)
        records = _parse_members(pairs)
        self._junk.add(junk + len(pairs) // 2 - len(records), "member records")
        named = frozenset(record.holder_id for record in records)
        if (missing := self._listed - named) and self._lost_lately():
            why = f"refuses writes ({refusal})" if refusal else "has lost records lately"
            raise IndexUnavailable(f"Redis {why}, so {len(missing)} missing members are not taken for dead")
        self._listed = named
        return sorted(records, key=lambda record: record.holder_id)

    def _expected_mark(self) -> int:
        """The number of our mark that ought to stand: 0 when none does, since we have not asked for as long as a mark
        stands. Who asks so seldom is told what stands now."""
        now_s, asked_s, self._asked_s = self._clock.now_s(), self._asked_s, self._clock.now_s()
        if asked_s is None or now_s - asked_s >= MEMBER_TTL_MS / 1000:
            self._listed, self._mark_lost_s, self._marks_left = frozenset(), None, 0
        return self._marks_left

    async def _ask(self, *, expected: int) -> tuple[list[Any], ResponseError | None]:
        """What `read_members` says, and the refusal, if Redis takes no writes. Leaves the next mark, and notes whether
        the expected one still stood."""
        self._marks_tried += 1
        number = self._marks_tried
        async with self._redis.call() as redis:
            # By one connection. Of two, one may lead to a primary from which a replica took over: the mark that stands
            # on the one would say that the other's listing is whole.
            stood, listing = await redis.run_scripts(
                (_PROBE, [self._mark], [MEMBER_TTL_MS, number]),
                (_READ_MEMBERS, [MEMBER_IDS_KEY], [MEMBER_KEY_PREFIX, MEMBERS_MAX, MEMBER_RECORD_BYTES_MAX]),
            )
            refusal = stood if isinstance(stood, ResponseError) else None
            if refusal or not _has_stood(stood, expected, number):
                self._mark_lost_s = self._clock.now_s()
            if not refusal:
                self._marks_left = max(self._marks_left, number)
            if isinstance(listing, ResponseError):
                raise listing
        return listing, refusal

    def _lost_lately(self) -> bool:
        lost_s = self._mark_lost_s
        return lost_s is not None and self._clock.now_s() - lost_s < MEMBER_TTL_MS / 1000


def _has_stood(mark: bytes, expected: int, number: int) -> bool:
    """Whether a mark, as `probe` told it, is one since before the expected number, and as high; 0: whatever it is. Our
    own `number` is there when `probe` ran twice; it hides how high the mark was, so the mark counts as lost."""
    first, _, highest = mark.partition(b":")
    return expected == 0 or (bool(highest) and int(first) <= expected <= int(highest) != number)


def _parse_members(pairs: Sequence[bytes]) -> list[MemberRecord]:
    """Records among {holder, value, holder, value, ...}; leaves out what does not parse or lies under another's key."""
    records = []
    for holder, value in zip(pairs[::2], pairs[1::2], strict=True):
        try:
            record = decode_record(value[INCARNATION_DIGITS + 1 :])
        except JunkRecord:
            continue
        if record.holder_id.encode() == holder and parse_incarnation(value) == record.incarnation:
            records.append(record)
    return records
