"""The index in a gateway's own memory: implements `BlockIndex`, answers `longest_prefix` without asking Redis.

    start ──► reading ──► following ──events lost──► reading ...
                │  more than INDEX_MIRROR_BLOCKS_MAX blocks
                └──► too large ──INDEX_MIRROR_RETRY_MS──► reading

It never answers worse than Redis would: by itself only while it follows and was level with Redis within
INDEX_MIRROR_FRESH_MS; else Redis is asked as if there were no mirror. When Redis does not answer, the mirror does, for
INDEX_MIRROR_KEEP_MS: hits are hints, which the nodes confirm. After that the index is unavailable. Who writes, writes
to Redis; the mirror hears of it by the events.

Nothing is lost in silence. A number that a holder's event does not carry on from, a holder that is alive again after
its blocks were dropped, a stream whose count of events is not what was read, a server that started anew: each leads to
reading all entries again (`rereads` says why). One holder's entries alone would not be cheaper to read: Redis keeps no
list of them.

Measured (two shared cores, CPython 3.11): of 100,000 blocks in one namespace each takes 101 bytes with one holder, 133
with three of 60 holders, 229 with three of 1,000 and 260 with fifty of 1,000. A lookup of 8,192 blocks that 1,000
holders have, ending at 8 different depths, takes 0.18 ms, at 64 depths 0.6 ms.

One instance per event loop. `follow` is the only task that changes anything; lookups do not wait for it.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, StrEnum

from headrace.core.block import BlockHash, Chain, HolderId, NamespaceId, Tier
from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import IndexUnavailable
from headrace.core.index_limits import (
    INDEX_MIRROR_AUDIT_MS,
    INDEX_MIRROR_BLOCKS_MAX,
    INDEX_MIRROR_EVENTS,
    INDEX_MIRROR_FRESH_MS,
    INDEX_MIRROR_GATHER_MS,
    INDEX_MIRROR_KEEP_MS,
    INDEX_MIRROR_LIVENESS_MS,
    INDEX_MIRROR_REREAD_MS,
    INDEX_MIRROR_RETRY_MS,
    INDEX_MIRROR_START_MS,
    INDEX_MIRROR_WAIT_MS,
    INDEX_RETRY_MS,
    INDEX_TIMEOUT_MS,
    MEMBERS_MAX,
)
from headrace.core.members import NO_MATCH, PrefixMatch
from headrace.core.ports import BlockIndex
from headrace.index.mirrored_blocks import NEVER_S, MirroredBlocks
from headrace.index.redis_changes import EventId, Happened, Mark, RedisChanges
from headrace.index.redis_keys import Op
from headrace.telemetry.mirror_collector import MirrorStat

_log = logging.getLogger(__name__)


class Reread(StrEnum):
    """Why all entries are read again."""

    EVENTS_LOST = "events_lost"  # a holder's number or a stream's count is not what it should be
    HOLDER_RETURNED = "holder_returned"  # alive under an incarnation whose blocks were dropped or swept
    REDIS_RESTARTED = "redis_restarted"  # another run of the server, which may be empty
    TOO_LARGE = "too_large"  # more blocks or holders than are mirrored


class _State(Enum):
    BEGINNING = "beginning"
    READING = "reading"
    FOLLOWING = "following"


@dataclass(frozen=True, slots=True)
class Pace:
    """How often things are looked at; the defaults are the limits. Tests that drive `step` look each time."""

    wait_ms: int = INDEX_MIRROR_WAIT_MS
    gather_ms: int = INDEX_MIRROR_GATHER_MS
    liveness_ms: int = INDEX_MIRROR_LIVENESS_MS
    audit_ms: int = INDEX_MIRROR_AUDIT_MS
    reread_ms: int = INDEX_MIRROR_REREAD_MS
    retry_ms: int = INDEX_MIRROR_RETRY_MS


class _Lost(Exception):
    """What is known can no longer be made true by applying changes."""

    def __init__(self, why: Reread) -> None:
        super().__init__(why)
        self.why = why


class IndexMirror:
    """A reader of the index that knows it by heart. `follow` it in a task; until then, and besides, it asks `index`."""

    def __init__(
        self,
        index: BlockIndex,
        redis_url: str,
        *,
        clock: Clock | None = None,
        blocks_max: int = INDEX_MIRROR_BLOCKS_MAX,
        pace: Pace | None = None,
        timeout_ms: int = INDEX_TIMEOUT_MS,
    ) -> None:
        """index: the same Redis, for writing and for what the mirror does not answer. timeout_ms: of each call to
        it. Raises ConfigInvalid."""
        self._index = index
        self._clock = clock or SystemClock()
        self._changes = RedisChanges(redis_url, clock=self._clock, timeout_ms=timeout_ms)
        self._pace = pace or Pace()
        self._blocks_max = blocks_max
        self._state = _State.BEGINNING
        self._blocks = MirroredBlocks({})
        self._run_id = b""
        self._cursor: int | None = 0  # None: all entries have been read
        self._read_to: list[EventId] = []  # by shard, with the number of events that lie before
        self._events_before: list[int] = []
        self._marks: dict[int, Mark] = {}  # by shard: what will be compared when the reading gets there
        self._made_s = self._clock.now_s()
        self._level_s = NEVER_S  # when it last knew all that Redis knew
        self._begin_at_s = self._audit_at_s = self._look_at_s = NEVER_S
        self._rereads: Counter[Reread] = Counter()
        self._settled = asyncio.Event()

    @property
    def answers(self) -> bool:
        """Whether lookups are answered from memory now."""
        return self._state is _State.FOLLOWING and self._behind_s() <= INDEX_MIRROR_FRESH_MS / 1_000

    def stat(self) -> MirrorStat:
        """The books as they are now; safe to call from the scraping thread."""
        return MirrorStat(
            answers=self.answers,
            blocks=self._blocks.num_blocks,
            holders=self._blocks.num_holders,
            lag_s=self._behind_s(),
            rereads={why: self._rereads[why] for why in Reread},
        )

    async def longest_prefix(self, namespace: NamespaceId, chain: Chain) -> PrefixMatch:
        """For every live holder, the length of its leading run. No round trip while the mirror answers; as the index
        otherwise. A holder whose record ran out is left out at that moment; one that withdrew, a look later."""
        if self.answers:
            return self._recall(namespace, chain)
        try:
            return await self._index.longest_prefix(namespace, chain)
        except IndexUnavailable:
            if self._state is not _State.FOLLOWING or self._behind_s() > INDEX_MIRROR_KEEP_MS / 1_000:
                raise
            return self._recall(namespace, chain)

    async def register(
        self, *, holder: HolderId, incarnation: int, tier: Tier, namespace: NamespaceId, blocks: Sequence[BlockHash]
    ) -> None:
        """As the index; known here when the event has come."""
        await self._index.register(
            holder=holder, incarnation=incarnation, tier=tier, namespace=namespace, blocks=blocks
        )

    async def deregister(
        self, *, holder: HolderId, incarnation: int, namespace: NamespaceId, blocks: Sequence[BlockHash]
    ) -> None:
        """As the index; known here when the event has come."""
        await self._index.deregister(holder=holder, incarnation=incarnation, namespace=namespace, blocks=blocks)

    async def sweep(self, live: dict[HolderId, int], *, limit: int) -> int:
        """As the index."""
        return await self._index.sweep(live, limit=limit)

    async def follow(self) -> None:
        """Read everything, then every change, until cancelled. Survives any outage of Redis."""
        while True:
            try:
                await self.step()
            except IndexUnavailable:
                self._settled.set()
                await asyncio.sleep(INDEX_RETRY_MS / 1_000)

    async def settled(self, *, timeout_ms: int = INDEX_MIRROR_START_MS) -> None:
        """Wait for the first reading of `follow`: until lookups are answered from memory, or until it shows that they
        will not be for now (Redis is away, or the index is too large), or for `timeout_ms`."""
        try:
            async with asyncio.timeout(timeout_ms / 1_000):
                await self._settled.wait()
        except TimeoutError:
            _log.warning("the mirror is not whole after %d ms; until it is, each lookup asks Redis", timeout_ms)

    async def step(self) -> None:
        """One bounded piece of following: a look at whatever is due, a page of entries while reading, and the next
        events, for which it waits a while. Raises IndexUnavailable; the next step goes on from there."""
        try:
            if self._state is _State.BEGINNING:
                await self._begin()
            else:
                await self._look_around()
                if self._state is _State.READING:
                    await self._read_page()
                await self._read_events()
        except _Lost as lost:
            self._begin_again(lost.why)
        except IndexUnavailable:
            self._audit_at_s = NEVER_S  # it may be another Redis that answers next
            raise
        await asyncio.sleep(0)

    async def close(self) -> None:
        """Close the connection; the index belongs to the caller."""
        await self._changes.close()

    def check_integrity(self) -> None:
        """As MirroredBlocks."""
        self._blocks.check_integrity()

    def _recall(self, namespace: NamespaceId, chain: Chain) -> PrefixMatch:
        if not chain:
            return NO_MATCH
        # While Redis is away no record can be renewed: who lived when it was last heard of counts as alive.
        heard_s = self._level_s + INDEX_MIRROR_FRESH_MS / 1_000
        return self._blocks.longest_prefix(namespace, chain, now_s=min(self._clock.now_s(), heard_s))

    def _behind_s(self) -> float:
        return self._clock.now_s() - max(self._level_s, self._made_s)

    async def _begin(self) -> None:
        wait_s = self._begin_at_s - self._clock.now_s()
        if wait_s > 0:
            await asyncio.sleep(min(wait_s, INDEX_MIRROR_WAIT_MS / 1_000))
            return
        marks, numbers = await self._changes.read_numbers()
        self._blocks = MirroredBlocks(numbers)
        self._run_id, self._cursor, self._marks = marks.run_id, 0, {}
        self._read_to = [mark.newest for mark in marks.shards]
        self._events_before = [mark.events for mark in marks.shards]
        self._begin_at_s = self._clock.now_s() + self._pace.reread_ms / 1_000
        self._audit_at_s = self._look_at_s = NEVER_S
        self._state = _State.READING

    def _begin_again(self, why: Reread) -> None:
        self._rereads[why] += 1
        if why is Reread.TOO_LARGE:
            self._settled.set()
            self._begin_at_s = self._clock.now_s() + self._pace.retry_ms / 1_000
            _log.warning(
                "the index has more than %d blocks or %d holders and is not mirrored: each lookup asks Redis",
                self._blocks_max,
                MEMBERS_MAX,
            )
        else:
            _log.info("the mirror reads all of the index again: %s", why)
        self._state = _State.BEGINNING
        self._blocks = MirroredBlocks({})

    async def _look_around(self) -> None:
        """Whatever is due: who lives, whether something was lost without a trace, dropping the dead."""
        now_s = self._clock.now_s()
        if now_s >= self._audit_at_s:
            await self._audit()
            self._audit_at_s = now_s + self._pace.audit_ms / 1_000
        if now_s >= self._look_at_s or self._blocks.has_unobserved:
            live = await self._changes.read_liveness(self._blocks.watched())
            if not self._blocks.observe(live, now_s=self._clock.now_s()):
                raise _Lost(Reread.HOLDER_RETURNED)
            self._look_at_s = now_s + self._pace.liveness_ms / 1_000
        if self._blocks.is_dropping:
            self._blocks.drop_some()

    async def _audit(self) -> None:
        """Note where the streams stand, to be compared with what was read up to there."""
        marks = await self._changes.read_marks()
        if marks.run_id != self._run_id:
            raise _Lost(Reread.REDIS_RESTARTED)
        for shard, mark in enumerate(marks.shards):
            self._compare(shard, mark)

    def _compare(self, shard: int, mark: Mark) -> None:
        """Compare now, or later when there are events up to the mark that have not been read yet."""
        read_to = self._read_to[shard]
        if mark.newest > read_to:
            self._marks.setdefault(shard, mark)  # an older one is reached first, however many events come
            return
        self._marks.pop(shard, None)
        if mark.newest < read_to or mark.events != self._events_before[shard]:
            raise _Lost(Reread.EVENTS_LOST)

    async def _read_page(self) -> None:
        if self._cursor is None:
            return
        cursor, entries = await self._changes.read_page(self._cursor)
        for block in entries:
            self._blocks.found(block.namespace, block.block_hash, block.owners)
        self._check_size()
        self._cursor = cursor or None

    async def _read_events(self) -> None:
        is_busy = self._state is _State.READING or self._blocks.is_dropping or self._blocks.has_unobserved
        happened = await self._changes.read_events(self._read_to, wait_ms=0 if is_busy else self._pace.wait_ms)
        for each in happened:
            self._take(each)
        self._check_size()
        shard_to_events = Counter(each.shard for each in happened)
        if any(shard_to_events[shard] < INDEX_MIRROR_EVENTS for shard in self._marks):
            raise _Lost(Reread.EVENTS_LOST)  # the shard was read to its end, and the end that was noted did not come
        is_all = max(shard_to_events.values(), default=0) < INDEX_MIRROR_EVENTS
        is_whole = self._state is _State.FOLLOWING or (self._cursor is None and not self._blocks.has_unobserved)
        if is_all and is_whole:
            self._state = _State.FOLLOWING
            self._level_s = self._clock.now_s()
            self._settled.set()
            if happened and not self._blocks.has_unobserved:
                await asyncio.sleep(self._pace.gather_ms / 1_000)

    def _take(self, each: Happened) -> None:
        if each.event is not None and not self._blocks.apply(each.shard, each.event):
            is_swept = each.event.op is Op.SWEPT
            raise _Lost(Reread.HOLDER_RETURNED if is_swept else Reread.EVENTS_LOST)
        self._read_to[each.shard] = each.event_id
        self._events_before[each.shard] += 1
        mark = self._marks.get(each.shard)
        if mark is not None and each.event_id >= mark.newest:
            self._marks.pop(each.shard)
            if each.event_id != mark.newest or mark.events != self._events_before[each.shard]:
                raise _Lost(Reread.EVENTS_LOST)

    def _check_size(self) -> None:
        if self._blocks.num_blocks > self._blocks_max or self._blocks.num_holders > MEMBERS_MAX:
            raise _Lost(Reread.TOO_LARGE)
