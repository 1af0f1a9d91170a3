"""The blocks that a store node keeps on disk beside those in its arena: which, where, and which go for room.

    arena --evicted for room--> waiting (in memory, queued) --written--> on disk --segment given up--> gone
                                     '------------- promoted: a copy in the arena -------------'

A block may be in both tiers: promoting it leaves its record, so that evicting it again costs no write. A block is
*resident* when it is visible in the arena or kept here, and residency is closed under prefixes: whoever loses a block's
last copy here loses all that stand on it, tails first. To lose nothing that way in the usual case, a block is never
left in an older segment than a block that stands on it: `demote` has it written again instead. Books only: what is
to be written, marked or removed is handed out as plain jobs, and whoever does that work says how it ended.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field

from headrace.blocks.disk_tier import DiskRecord, DiskTier, record_bytes
from headrace.core.block import BlockHeader, Chain, NamespaceId
from headrace.core.store_limits import DEMOTE_QUEUE_BYTES_MAX, DISK_BLOCKS_MAX
from headrace.store.block_changes import BlockChanges
from headrace.store.disk_block import DiskBlock, HeaderBrief, WriteJob
from headrace.store.disk_counters import DiskCounters
from headrace.store.held_blocks import BlockKey, HeldBlock, HeldBlocks
from headrace.store.recover_disk import RecoveredDisk
from headrace.store.removal_log import BROKEN_ON_DISK, MADE_ROOM_ON_DISK, NOT_WRITTEN


@dataclass(slots=True)
class DiskBlocks:
    """All blocks of one node's disk tier. Without a tier it keeps nothing and every call has no effect."""

    tier: DiskTier | None
    arena_blocks: HeldBlocks
    changes: BlockChanges
    wake: Callable[[], None] = lambda: None  # called when there is work to do
    because: Callable[[str], AbstractContextManager[None]] = lambda reason: nullcontext()  # as of `RoomMaker`
    blocks_max: int = DISK_BLOCKS_MAX
    counters: DiskCounters = field(default_factory=DiskCounters)
    largest_bytes: int = 0  # of any block that was kept here
    _blocks: dict[BlockKey, DiskBlock] = field(default_factory=dict)
    _children: dict[BlockKey, dict[BlockKey, DiskBlock]] = field(default_factory=dict)
    _segments: dict[int, dict[BlockKey, DiskBlock]] = field(default_factory=dict)
    _queue: deque[WriteJob] = field(default_factory=deque)
    _writing: WriteJob | None = None
    _waiting_bytes: int = 0
    _dead: list[DiskRecord] = field(default_factory=list)
    _marking: list[DiskRecord] = field(default_factory=list)  # dead ones that somebody marks now

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[DiskBlock]:
        return iter(self._blocks.values())

    def get(self, key: BlockKey) -> DiskBlock | None:
        """The block of that name, written or waiting to be."""
        return self._blocks.get(key)

    def in_arena(self, key: BlockKey) -> bool:
        """Whether the block can be read from the arena, so that its copy here is a second one."""
        held = self.arena_blocks.get(*key)
        return held is not None and held.visible

    def run(self, namespace: NamespaceId, chain: Chain, *, first_block: int) -> list[DiskBlock]:
        """Kept blocks of a chain from `first_block` on, without a gap, each at its own position."""
        found = []
        for position in range(first_block, len(chain)):
            block = self._blocks.get((namespace, chain[position]))
            if block is None or block.header.position != position:
                break
            found.append(block)
        return found

    # Coming

    def demote(self, held: HeldBlock, payload: memoryview) -> None:
        """Keep a block that is about to leave the arena, if there is room for it. Copies, never waits."""
        if self.tier is None:
            return
        block = self._blocks.get(held.key)
        if block is not None:
            block.used_s, block.hits = held.used_s, block.hits + held.hits
            if block.waiting is not None or not self._should_move(block):
                return
        total = record_bytes(len(held.header_bytes), len(payload))
        if self._waiting_bytes + total > DEMOTE_QUEUE_BYTES_MAX or total > self.tier.segment_bytes:
            self.counters.dropped_demotions += 1
            return
        if block is None:
            if not self.arena_blocks.accounts.has_disk_room(held.header, total):
                return
            if not self._has_place():
                self.counters.dropped_demotions += 1
                return
            block = DiskBlock(HeaderBrief.of(held.header), total, held.used_s, held.hits)
            self._link(block)
        self._resize(block, total)
        block.waiting = WriteJob(block, held.header_bytes, bytes(payload))
        self._waiting_bytes += total
        self._queue.append(block.waiting)
        self.counters.demoted_blocks += 1
        self.counters.demoted_bytes += len(payload)
        self.wake()

    def adopt(self, recovered: RecoveredDisk, *, now_s: float) -> None:
        """Keep what recovery found: of several copies the newest, and only what is reachable from a chain's first block
        over both tiers. Announces what is not in the arena, parents before children."""
        assert self.tier is recovered.tier
        self._dead += recovered.broken
        newest: dict[BlockKey, tuple[DiskRecord, BlockHeader]] = {}
        for record, header in recovered.found:
            key = (header.namespace, header.block_hash)
            if key in newest:
                self._dead.append(newest[key][0])
            newest[key] = (record, header)
        for record, header in sorted(newest.values(), key=lambda each: each[1].position):
            block = DiskBlock(HeaderBrief.of(header), record.total_bytes, now_s, record=record)
            if len(self._blocks) >= self.blocks_max or not self._has_parent(block):
                self._dead.append(record)
                continue
            self._link(block)
            self._segments.setdefault(record.segment, {})[block.key] = block
            if not self.in_arena(block.key):
                self.changes.added(header)
        while (segment := self.tier.segment_to_reclaim(0)) is not None:
            self._reclaim(segment)

    # Going

    def orphan(self, key: BlockKey) -> None:
        """A block's last copy is about to go: forget all here that stand on it, tails first."""
        family = self.descendants(key)
        for member in reversed(family):
            self._forget(member)
        self.counters.dropped_orphans += len(family)

    def drop_broken(self, block: DiskBlock, record: DiskRecord | None) -> None:
        """A copy here does not check out. Without one in the arena the block is gone, and what stands on it."""
        if self._blocks.get(block.key) is block and block.record is record:
            self.counters.dropped_corrupt += 1
            with self.because(BROKEN_ON_DISK):
                self._lose(block)

    def descendants(self, key: BlockKey) -> list[DiskBlock]:
        """Blocks kept here alone that stand on a block, parents first."""
        found = list(self._children.get(key, {}).values())
        for block in found:  # grows while walked
            found.extend(self._children.get(block.key, {}).values())
        return [block for block in found if not self.in_arena(block.key)]

    def remove(self, victims: Iterable[DiskBlock]) -> None:
        """Forget what an operator's plan names; it is closed under descendants and ordered tails first."""
        for block in victims:
            self._forget(block)
            self.counters.evicted_by_operator += 1

    # Work for whoever writes

    def next_write(self) -> WriteJob | None:
        """The next block to write, its record placed, making room for it; None when none waits, or not until files that
        were given up are gone."""
        assert self._writing is None, "one write at a time"
        while self._queue:
            job = self._queue[0]
            assert self.tier is not None
            if job.block.waiting is job:
                while (segment := self.tier.segment_to_reclaim(job.total_bytes)) is not None:
                    self._reclaim(segment)
            if job.block.waiting is not job:  # forgotten meanwhile, or with the segment of a block that it stands on
                self._queue.popleft()
                continue
            if not self.tier.has_room(job.total_bytes):
                return None
            self._queue.popleft()
            job.record = self.tier.place(len(job.header_bytes), len(job.payload))
            self._writing = job
            return job
        return None

    def written(self, job: WriteJob, *, well: bool) -> None:
        """How a write ended. A block that could not be written and has no other copy is lost."""
        assert self.tier is not None
        assert job is self._writing
        assert job.record is not None
        self._writing = None
        block = job.block
        if not well:
            self.tier.unplace(job.record)
            self._not_written(job)
            return
        if block.waiting is not job:  # forgotten meanwhile
            self._bury(job.record)
            return
        self._stop_waiting(block)
        old, block.record = block.record, job.record
        if old is not None:
            del self._segments[old.segment][block.key]
        self._segments.setdefault(job.record.segment, {})[block.key] = block
        if old is not None:
            self._bury(old)

    def drop_waiting(self) -> None:
        """There is no room for now, since files that were given up stay: what waits counts as not written."""
        while self._queue:
            self._not_written(self._queue.popleft())

    def take_dead(self) -> list[DiskRecord]:
        """Records that must not be found again at the next start; the caller marks them and says how it ended."""
        assert not self._marking, "records are marked by one at a time"
        self._marking, self._dead = self._dead, []
        return self._marking

    def marked(self, *, well: bool) -> None:
        """How marking ended. What could not be marked is tried again; marking one twice is harmless."""
        self._dead += [] if well else self._marking
        self._marking = []

    @property
    def given_up(self) -> list[int]:
        """Segments whose files are to be removed; the caller says of each that it is `removed`."""
        return [] if self.tier is None else self.tier.given_up

    def removed(self, segment: int) -> None:
        """A given up segment's file is gone, and with it what was to be marked there."""
        assert self.tier is not None
        self.tier.removed(segment)
        self._dead = [dead for dead in self._dead if dead.segment != segment]

    def can_queue(self, num_bytes: int) -> bool:
        """Whether the queue of blocks to be written takes so much more now; without a tier nothing is queued."""
        return self.tier is None or self._waiting_bytes + num_bytes <= DEMOTE_QUEUE_BYTES_MAX

    @property
    def removable(self) -> list[int]:
        """Those of the given up whose files the disk was not asked for yet."""
        kept = frozenset[int]() if self.tier is None else self.tier.kept
        return [segment for segment in self.given_up if segment not in kept]

    @property
    def keeps_files(self) -> bool:
        """Whether there are given up ones that could not be removed."""
        return self.tier is not None and bool(self.tier.kept)

    def keeps(self, segment: int) -> None:
        """A given up segment's file could not be removed; others make room instead of it."""
        assert self.tier is not None
        self.tier.keeps(segment)

    @property
    def is_settled(self) -> bool:
        """Whether nothing waits to be written, and what was removed stays removed, whether or not its file is gone."""
        return not self._queue and self._writing is None and not self._dead and not self._marking

    @property
    def has_work(self) -> bool:
        """Whether there is something to write, to mark or to remove."""
        return not self.is_settled or bool(self.given_up)

    @property
    def waiting_blocks(self) -> int:
        """Blocks that are kept here and not written yet."""
        return len(self._blocks) - sum(len(blocks) for blocks in self._segments.values())

    def check_integrity(self) -> None:
        """Bytes are accounted, and residency over both tiers is closed. Does not touch the disk."""
        if self.tier is None:
            assert not self._blocks
            return
        self.tier.check_integrity()
        self.arena_blocks.accounts.check_disk(self)
        waiting_bytes, queued = 0, {id(job) for job in self._queue}
        for key, block in self._blocks.items():
            assert block.key == key
            assert block.record is not None or block.waiting is not None
            assert self._has_parent(block), "a block on disk has lost its prefix"
            parent_key = block.header.parent_key
            assert parent_key is None or self._children[parent_key][key] is block
            if block.record is not None:
                assert self._segments[block.record.segment][key] is block
            if block.waiting is not None:
                assert block.waiting is self._writing or id(block.waiting) in queued
                waiting_bytes += block.waiting.total_bytes
                assert block.total_bytes == block.waiting.total_bytes
            else:
                assert block.record is not None
                assert block.total_bytes == block.record.total_bytes
        assert waiting_bytes == self._waiting_bytes <= DEMOTE_QUEUE_BYTES_MAX
        assert len(self._indexed()) == sum(len(blocks) for blocks in self._segments.values())
        assert sum(len(children) for children in self._children.values()) == sum(
            1 for block in self._blocks.values() if block.header.position > 0
        )

    def check_files(self) -> None:
        """The index is what the files say. Blocks, for as long as it takes to read them: for tests."""
        if self.tier is None:
            return
        self.tier.check_files(writing=self._writing is not None)
        if self._writing is None and not self._dead and not self._marking:
            on_disk = {(record.segment, record.offset) for record in self.tier.live_records()}
            assert on_disk == self._indexed(), "the index is not what the files hold"

    # Steps

    def _indexed(self) -> set[tuple[int, int]]:
        return {(b.record.segment, b.record.offset) for b in self._blocks.values() if b.record is not None}

    def _is_in_use(self, segment: int) -> bool:
        """Whether a record may still come into a segment, or is being written there."""
        assert self.tier is not None
        record = None if self._writing is None else self._writing.record
        return self.tier.is_open(segment) or (record is not None and record.segment == segment)

    def _should_move(self, block: DiskBlock) -> bool:
        """Whether a block's copy would be reclaimed too early: in the older half, or before one that stands on it."""
        assert self.tier is not None
        assert block.record is not None
        ours = block.record.segment
        children = self._children.get(block.key, {}).values()
        later = any(child.record is None or child.waiting or child.record.segment > ours for child in children)
        return later or self.tier.is_old(ours)

    def _has_parent(self, block: DiskBlock) -> bool:
        """Whether a block stands on a resident one at the position before its own."""
        key, before = block.header.parent_key, block.header.position - 1
        if key is None:
            return True
        kept, held = self._blocks.get(key), self.arena_blocks.get(*key)
        if kept is not None:
            return kept.header.position == before
        return held is not None and held.visible and held.header.position == before

    def _has_place(self) -> bool:
        """Whether one more block may be kept; where there are as many as may be, the oldest segment goes for it."""
        assert self.tier is not None
        oldest = self.tier.oldest_segment
        if len(self._blocks) >= self.blocks_max and oldest is not None and not self._is_in_use(oldest):
            self._reclaim(oldest)
        return len(self._blocks) < self.blocks_max

    def _reclaim(self, segment: int) -> None:
        """Give up the oldest segment. What the arena holds too, or what waits to be written again, is no loss."""
        lost = []
        for block in list(self._segments.get(segment, {}).values()):
            assert block.record is not None
            self._dead.append(block.record)
            block.record = None
            if block.waiting is not None:
                continue
            if self.in_arena(block.key):
                self._unlink(block)
            else:
                lost.append(block)
        with self.because(MADE_ROOM_ON_DISK):
            for block in sorted(lost, key=lambda each: -each.header.position):
                self.counters.evicted_for_room += 1
                self._lose(block)
        self._give_up(segment)

    def _lose(self, block: DiskBlock) -> None:
        """Forget a block whose copy here is no good any more; what stands on it goes first, unless the arena has it."""
        if not self.in_arena(block.key):
            self.orphan(block.key)
        self._forget(block)

    def _forget(self, block: DiskBlock) -> None:
        """Remove one block that nothing here depends on any more."""
        if not self.in_arena(block.key):
            self.changes.removed(*block.key)
        self._unlink(block)
        self._stop_waiting(block)
        record, block.record = block.record, None
        if record is not None:
            del self._segments[record.segment][block.key]
            self._bury(record)

    def _bury(self, record: DiskRecord) -> None:
        """A record is dead and must not come back; where nothing lives in its segment that goes as a whole."""
        assert self.tier is not None
        self._dead.append(record)
        if self._segments.get(record.segment) or self._is_in_use(record.segment):
            self.wake()
        else:
            self._give_up(record.segment)

    def _give_up(self, segment: int) -> None:
        """Nothing in a segment lives: have its file removed, or its records marked where that cannot be."""
        assert self.tier is not None
        self._segments.pop(segment, None)
        self.tier.give_up(segment)
        self.wake()

    def _not_written(self, job: WriteJob) -> None:
        """Without a copy elsewhere the block is lost."""
        block = job.block
        if block.waiting is not job:
            return  # forgotten meanwhile
        self.counters.write_failures += 1
        self._stop_waiting(block)
        if block.record is None:
            with self.because(NOT_WRITTEN):
                self._lose(block)
        else:
            self._resize(block, block.record.total_bytes)

    def _stop_waiting(self, block: DiskBlock) -> None:
        if block.waiting is not None:
            self._waiting_bytes -= block.waiting.total_bytes
            block.waiting = None

    def _resize(self, block: DiskBlock, total_bytes: int) -> None:
        self.largest_bytes = max(self.largest_bytes, total_bytes)
        change = total_bytes - block.total_bytes
        self.arena_blocks.accounts.disk_changed(block.header, blocks=0, num_bytes=change)
        block.total_bytes = total_bytes

    def _link(self, block: DiskBlock) -> None:
        assert block.key not in self._blocks
        self._blocks[block.key] = block
        self.largest_bytes = max(self.largest_bytes, block.total_bytes)
        self.arena_blocks.accounts.disk_changed(block.header, blocks=1, num_bytes=block.total_bytes)
        parent_key = block.header.parent_key
        if parent_key is not None:
            self._children.setdefault(parent_key, {})[block.key] = block

    def _unlink(self, block: DiskBlock) -> None:
        del self._blocks[block.key]
        self.arena_blocks.accounts.disk_changed(block.header, blocks=-1, num_bytes=-block.total_bytes)
        parent_key = block.header.parent_key
        if parent_key is not None:
            siblings = self._children[parent_key]
            del siblings[block.key]
            if not siblings:
                del self._children[parent_key]
