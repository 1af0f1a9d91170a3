"""Moving blocks between a store node's arena and its disk, off the event loop.

Owns the threads, the order of writes, and the bounds on promotion. Decides nothing: `DiskBlocks` says what is to be
written, marked and removed, `StoreNode` takes in what was read. Writers never wait for it, and readers at most
PROMOTE_TIMEOUT_MS: a disk that is slower than that costs hits, not answers.
"""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from headrace.blocks.block_codec import decode_header, verify_identity
from headrace.blocks.disk_tier import DiskRecord, DiskTier
from headrace.core.block import BlockHash, BlockHeader, Chain, NamespaceId, payload_digest
from headrace.core.clock import Clock, Deadline
from headrace.core.errors import BlockCorrupt, DeadlineExceeded, StoreUnavailable
from headrace.core.store_limits import (
    DISK_PAUSE_MS,
    DISK_READERS,
    DISK_SETTLE_TIMEOUT_MS,
    PROMOTE_BATCH_BYTES,
    PROMOTE_TIMEOUT_MS,
)
from headrace.store.disk_block import DiskBlock, WriteJob
from headrace.store.store_node import StoreNode

_log = logging.getLogger(__name__)


class DiskMover:
    """The threads of one node's disk tier. One event loop; `run` as a task for as long as the node serves."""

    def __init__(self, node: StoreNode, tier: DiskTier, clock: Clock) -> None:
        self._node = node
        self._tier = tier
        self._clock = clock
        self._disk = node.disk
        self._work = asyncio.Event()
        self._disk.wake = self._work.set
        self._work.set()  # recovery may have left records to mark
        self._settled = asyncio.Event()
        self._reads = asyncio.Semaphore(DISK_READERS)
        self._paused_until_s = 0.0
        self._remove_at_s = 0.0  # when to try again what the disk did not remove
        self._mark_at_s = 0.0  # likewise, what it did not mark
        self._refuses_writes = False  # the last write failed: said once, however many follow
        self._refuses_marks = False  # likewise; a full disk takes marks, one that is read-only neither
        self._keeps_files = False  # likewise, whether it was said of files that were given up
        self._reader = ThreadPoolExecutor(DISK_READERS, thread_name_prefix="disk read")
        self._writer = ThreadPoolExecutor(1, thread_name_prefix="disk write")

    async def run(self) -> None:
        """Remove files, mark what is dead and write what was demoted, one after the other, until cancelled."""
        while True:
            self._work.clear()
            await self._remove_files()
            await self._mark_dead()
            job = self._disk.next_write()
            if job is not None:
                self._disk.written(job, well=await self._write(job))
                continue
            if not self._disk.removable:
                self._disk.drop_waiting()  # if anything waits still, kept files have its room
            if self._disk.is_settled:
                self._settled.set()
            await self._wait_for_work()

    async def settle(self) -> None:
        """Return when everything decided so far is on disk. Raises StoreUnavailable when that takes too long."""
        self._work.set()
        self._settled.clear()
        try:
            async with Deadline.after(DISK_SETTLE_TIMEOUT_MS / 1_000, self._clock).scope("settle the disk tier"):
                while not self._disk.is_settled:
                    await self._settled.wait()
                    self._settled.clear()
        except DeadlineExceeded as late:
            raise StoreUnavailable(self._node.node_id, "its disk does not take what was removed; ask again") from late

    async def promote(self, namespace: NamespaceId, chain: Chain, first_block: int) -> None:
        """Have as much of a chain as the disk holds in the arena, for a reader that wants blocks from `first_block` on.

        Ends within PROMOTE_TIMEOUT_MS with what was brought in until then; never raises but for cancellation. Requests
        for the same chain at the same time read it once: what to read is decided anew for each batch.
        """
        deadline = Deadline.after(PROMOTE_TIMEOUT_MS / 1_000, self._clock)
        try:
            async with deadline.scope("promote blocks from disk"):
                while self._clock.now_s() >= self._paused_until_s:
                    if not self._node.plan_promotion(namespace, chain, first_block):
                        return
                    batch, copies = await self._read(lambda: self._next_batch(namespace, chain, first_block))
                    if not self._take_in(batch, copies):
                        return
        except DeadlineExceeded:
            self._paused_until_s = self._clock.now_s() + DISK_PAUSE_MS / 1_000

    async def read(self, namespace: NamespaceId, block_hash: BlockHash) -> tuple[BlockHeader, memoryview] | None:
        """A block's copy on disk, whole, without bringing it into the arena; None when there is none that is whole, or
        none came within PROMOTE_TIMEOUT_MS. Takes its turn among the readers, so that it slows promotion little."""
        try:
            async with Deadline.after(PROMOTE_TIMEOUT_MS / 1_000, self._clock).scope("read a block from disk"):
                batch, copies = await self._read(lambda: self._batch_of(namespace, block_hash))
        except DeadlineExceeded:
            return None
        for read, copy in zip(batch, copies, strict=True):
            if copy is not None:
                return copy.header, copy.payload
            self._disk.drop_broken(read.block, read.record)
        return None

    async def stop(self) -> None:
        """Let a write under way end, then end the threads. Nothing is promoted after this."""
        self._paused_until_s = float("inf")
        self._disk.wake = lambda: None
        for threads in (self._reader, self._writer):
            await asyncio.get_running_loop().run_in_executor(None, threads.shutdown)

    def _next_batch(self, namespace: NamespaceId, chain: Chain, first_block: int) -> "list[_Read]":
        """Leading blocks of what is missing now, as many as a batch takes (one at least)."""
        batch: list[_Read] = []
        total = 0
        for block in self._node.plan_promotion(namespace, chain, first_block):
            total += block.total_bytes
            if batch and total > PROMOTE_BATCH_BYTES:
                break
            batch.append(_Read(block, block.waiting, block.record))
        return batch

    def _batch_of(self, namespace: NamespaceId, block_hash: BlockHash) -> "list[_Read]":
        block = self._disk.get((namespace, block_hash))
        return [] if block is None else [_Read(block, block.waiting, block.record)]

    async def _read(self, choose: "Callable[[], list[_Read]]") -> "tuple[list[_Read], list[_Copy | None]]":
        """Wait for a reader, choose what it reads, and read that. Whoever waits may give up at any moment."""
        await self._reads.acquire()
        batch = choose()
        reading = asyncio.get_running_loop().run_in_executor(self._reader, _read_all, self._tier, batch)
        # Freed when the thread is done, which giving up does not hasten: readers bound what is in memory.
        reading.add_done_callback(lambda _: self._reads.release())
        return batch, await asyncio.shield(reading)

    def _take_in(self, batch: "list[_Read]", copies: "list[_Copy | None]") -> bool:
        """Hand what was read to the node; False when the run ends here. One copy per block, on the event loop. What the
        disk gave up while it was read must not come back: an operator may have evicted it."""
        for read, copy in zip(batch, copies, strict=False):  # there are fewer copies when one is broken
            if self._disk.get(read.block.key) is not read.block:
                return False
            if copy is None:
                self._disk.drop_broken(read.block, read.record)
                return False
            if not self._node.promote(copy.header, copy.header_bytes, copy.payload):
                return False
        return bool(batch)

    async def _write(self, job: WriteJob) -> bool:
        assert job.record is not None
        loop = asyncio.get_running_loop()
        writing = loop.run_in_executor(self._writer, self._tier.write, job.record, job.header_bytes, job.payload)
        try:
            await asyncio.shield(writing)
        except OSError as error:
            if not self._refuses_writes:
                _log.warning("blocks are not written to disk, and so lost when the arena is full: %s", error.strerror)
            self._refuses_writes = True
            return False
        except asyncio.CancelledError:
            await asyncio.wait([writing])
            self._disk.written(job, well=writing.exception() is None)
            raise
        if self._refuses_writes:
            _log.warning("the disk takes blocks again")
        self._refuses_writes = False
        return True

    async def _wait_for_work(self) -> None:
        """Return when there is something to do; of what the disk refused, when it is tried again."""
        now_s = self._clock.now_s()
        later = [at_s - now_s for at_s in (self._remove_at_s, self._mark_at_s) if at_s > now_s]
        wait_s = min(later, default=0.0) if self._disk.has_work else None
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(wait_s):
                await self._work.wait()

    async def _remove_files(self) -> None:
        """Remove the files that were given up; what the disk keeps is tried again after DISK_PAUSE_MS."""
        is_due = self._clock.now_s() >= self._remove_at_s
        kept: OSError | None = None
        for segment in self._disk.given_up if is_due else self._disk.removable:
            try:
                await asyncio.get_running_loop().run_in_executor(self._writer, self._tier.remove_file, segment)
            except OSError as error:
                kept = error
                self._disk.keeps(segment)
            else:
                self._disk.removed(segment)
        if kept is not None and is_due:
            self._remove_at_s = self._clock.now_s() + DISK_PAUSE_MS / 1_000
        if kept is not None and not self._keeps_files:
            _log.warning("files that were given up cannot be removed and go on taking room: %s", kept.strerror)
        elif self._keeps_files and not self._disk.keeps_files:
            _log.warning("files that were given up are removed now")
        self._keeps_files = self._disk.keeps_files

    async def _mark_dead(self) -> None:
        """Mark what must not come back where its file stays. A disk that refuses is tried again after DISK_PAUSE_MS;
        until it takes the marks nothing is settled."""
        if self._clock.now_s() < self._mark_at_s:
            return
        dead = self._disk.take_dead()
        if not dead:
            return
        try:
            await asyncio.get_running_loop().run_in_executor(self._writer, _mark_all, self._tier, dead)
        except OSError as error:
            if not self._refuses_marks:
                _log.warning("%d blocks are not marked as removed on disk yet: %s", len(dead), error.strerror)
            self._refuses_marks = True
            self._mark_at_s = self._clock.now_s() + DISK_PAUSE_MS / 1_000
            self._disk.marked(well=False)
        else:
            if self._refuses_marks:
                _log.warning("what was removed is marked on disk now")
            self._refuses_marks = False
            self._disk.marked(well=True)


@dataclass(frozen=True, slots=True)
class _Read:
    """A block to read, as it is known on the event loop now: the thread looks at nothing that may change."""

    block: DiskBlock
    waiting: WriteJob | None
    record: DiskRecord | None


@dataclass(frozen=True, slots=True)
class _Copy:
    """A whole block as it was read, checked."""

    header: BlockHeader
    header_bytes: bytes
    payload: memoryview


def _read_all(tier: DiskTier, batch: Sequence[_Read]) -> list[_Copy | None]:
    """Copies in order, up to the first that does not check out, which is None."""
    copies: list[_Copy | None] = []
    for read in batch:
        try:
            copies.append(_read_one(tier, read))
        except BlockCorrupt:
            return [*copies, None]
    return copies


def _read_one(tier: DiskTier, read: _Read) -> _Copy:
    """Raises BlockCorrupt when header or payload are not what was written."""
    if read.waiting is not None:
        header_bytes, payload = read.waiting.header_bytes, memoryview(read.waiting.payload)
    else:
        assert read.record is not None
        header_bytes, payload = tier.read(read.record)
    header = decode_header(header_bytes)
    verify_identity(header)
    if (header.namespace, header.block_hash) != read.block.key or len(payload) != header.payload_bytes:
        raise BlockCorrupt(header.block_hash, "header on disk is another block's")
    if payload_digest(payload) != header.payload_xxh3:
        raise BlockCorrupt(header.block_hash, "checksum of the payload on disk")
    return _Copy(header, header_bytes, payload)


def _mark_all(tier: DiskTier, dead: Sequence[DiskRecord]) -> None:
    for record in dead:
        tier.mark_dead(record)
