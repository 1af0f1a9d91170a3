"""The threads of the disk tier: what a disk that hangs may take of the node."""

import asyncio
import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from disk_kit import make_disk_kit
from store_kit import make_prompt

from headrace.blocks.disk_tier import DiskRecord, DiskTier
from headrace.core.clock import SystemClock
from headrace.core.generation import EvictSelector
from headrace.core.store_limits import DISK_PAUSE_MS, DISK_READERS
from headrace.store.disk_mover import DiskMover


def hang(directory: Path) -> Path:
    """Have the one segment's file hang whoever opens it; returns where its bytes are now."""
    (segment,) = directory.glob("segment-*")
    aside = segment.rename(directory / "aside")
    os.mkfifo(segment)  # opening it to read takes until somebody writes
    return aside


def answer(directory: Path, aside: Path) -> None:
    """Have the disk answer: reads that hang fail, later ones find the bytes."""
    (segment,) = directory.glob("segment-*")
    os.close(os.open(segment, os.O_RDWR))
    aside.rename(segment)


def keep_oldest(directory: Path) -> Callable[[], None]:
    """Have the oldest segment's file be one that cannot be deleted, until what this returns is called."""
    oldest = min(directory.glob("segment-*"))
    aside = oldest.rename(directory / "aside")
    oldest.mkdir()

    def let_go() -> None:
        oldest.rmdir()
        aside.rename(oldest)

    return let_go


class SlowDisk:
    """A tier whose reads end when a test says so."""

    def __init__(self, tier: DiskTier) -> None:
        self._tier = tier
        self.reading, self.go_on = threading.Event(), threading.Event()

    def read(self, record: DiskRecord) -> tuple[bytes, memoryview]:
        found = self._tier.read(record)
        self.reading.set()
        assert self.go_on.wait(60)
        return found


class ReadOnlyDisk:
    """A tier that takes no marks until a test says so."""

    def __init__(self, tier: DiskTier) -> None:
        self._tier = tier
        self.refuses, self.tries = True, 0

    def mark_dead(self, record: DiskRecord) -> None:
        self.tries += 1
        if self.refuses:
            raise OSError(errno.EROFS, os.strerror(errno.EROFS))
        self._tier.mark_dead(record)


class KeepingDisk:
    """A tier that lets one file not be removed."""

    def __init__(self, tier: DiskTier, kept: int) -> None:
        self._tier, self._kept = tier, kept
        self.write, self.mark_dead = tier.write, tier.mark_dead

    def remove_file(self, segment: int) -> None:
        if segment == self._kept:
            raise OSError(errno.EPERM, os.strerror(errno.EPERM))
        self._tier.remove_file(segment)


async def test_a_read_that_was_given_up_keeps_its_reader_until_the_disk_answers(tmp_path: Path) -> None:
    """Fails when giving up frees the reader: then reads pile up in memory behind a disk that hangs."""
    kit, prompt = make_disk_kit(tmp_path, blocks=2, segments=2, segment_blocks=8), make_prompt(1, 1)
    for token in range(1, 4):
        kit.store(make_prompt(token, 1), [0])
    kit.work()
    aside = hang(tmp_path)
    mover = DiskMover(kit.node, kit.tier, SystemClock())
    reads = [asyncio.create_task(mover.read(prompt.namespace, prompt.chain[0])) for _ in range(DISK_READERS)]
    async with asyncio.timeout(60):
        while not mover._reads.locked():  # noqa: ASYNC110 (a reader tells nobody that it hangs)
            await asyncio.sleep(0.01)
    for read in reads:
        read.cancel()
    await asyncio.wait(reads)
    late = asyncio.create_task(mover.read(prompt.namespace, prompt.chain[0]))
    await asyncio.sleep(0.05)
    assert mover._reads.locked()
    answer(tmp_path, aside)
    found = await late
    assert found is not None
    assert found[0].block_hash == prompt.chain[0]
    await mover.stop()
    kit.tier.close()


async def test_what_is_evicted_while_it_is_read_from_disk_does_not_come_back(tmp_path: Path) -> None:
    """Fails when a promotion under way undoes what an operator was told is done."""
    kit, prompt = make_disk_kit(tmp_path, blocks=2, segments=2, segment_blocks=8), make_prompt(1, 1)
    for token in range(1, 4):
        kit.store(make_prompt(token, 1), [0])
    kit.work()
    assert (kit.held(prompt), kit.node.disk.in_arena((prompt.namespace, prompt.chain[0]))) == (1, False)
    disk = SlowDisk(kit.tier)
    mover = DiskMover(kit.node, disk, SystemClock())  # type: ignore[arg-type]
    promoting = asyncio.create_task(mover.promote(prompt.namespace, prompt.chain, 0))
    assert await asyncio.to_thread(disk.reading.wait, 60)
    kit.node.evict(EvictSelector(block_hashes=(prompt.chain[0],)), dry_run=False)
    disk.go_on.set()
    await promoting
    assert kit.held(prompt) == 0
    await mover.stop()
    kit.tier.close()


async def test_a_disk_that_takes_nothing_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Fails when a full disk fills the log with a line for each block."""
    caplog.set_level(logging.WARNING, logger="headrace.store.disk_mover")
    kit = make_disk_kit(tmp_path / "disk", blocks=2)
    aside = (tmp_path / "disk").rename(tmp_path / "aside")
    mover = DiskMover(kit.node, kit.tier, SystemClock())
    running = asyncio.create_task(mover.run())

    async def until_settled() -> None:
        async with asyncio.timeout(60):
            while not kit.node.disk.is_settled:  # noqa: ASYNC110 (the tier has no event for this)
                await asyncio.sleep(0.01)

    for token in range(1, 8):
        kit.store(make_prompt(token, 1), [0])
        await until_settled()
    assert kit.node.disk.counters.write_failures == 5
    assert [record.message for record in caplog.records] == [
        "blocks are not written to disk, and so lost when the arena is full: No such file or directory"
    ]
    aside.rename(tmp_path / "disk")
    for token in range(8, 11):
        kit.store(make_prompt(token, 1), [0])
        await until_settled()
    assert [record.message for record in caplog.records][1:] == ["the disk takes blocks again"]
    running.cancel()
    await asyncio.wait([running])
    await mover.stop()
    kit.tier.close()


async def test_a_disk_that_takes_no_marks_is_told_of_once(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Fails when a read-only disk fills the log with a line for each try."""
    caplog.set_level(logging.WARNING, logger="headrace.store.disk_mover")
    kit = make_disk_kit(tmp_path, blocks=2, segments=2, segment_blocks=8)
    for token in range(1, 4):
        kit.store(make_prompt(token, 1), [0])
    kit.work()
    kit.node.evict(EvictSelector(block_hashes=make_prompt(1, 1).chain), dry_run=False)
    disk = ReadOnlyDisk(kit.tier)
    mover = DiskMover(kit.node, disk, kit.clock)  # type: ignore[arg-type]

    async def marked(*, tries: int) -> None:
        """Have it try once more: after a failure it pauses, which nobody waits for here."""
        kit.clock.seconds += DISK_PAUSE_MS / 1_000
        kit.node.disk.wake()
        running = asyncio.create_task(mover.run())
        async with asyncio.timeout(60):
            while disk.tries < tries or kit.node.disk._marking:  # noqa: ASYNC110 (the tier has no event for this)
                await asyncio.sleep(0.01)
        running.cancel()
        await asyncio.wait([running])

    for tries in (1, 2, 3):
        await marked(tries=tries)
        assert not kit.node.disk.is_settled
    assert [record.message for record in caplog.records] == [
        "1 blocks are not marked as removed on disk yet: Read-only file system"
    ]
    disk.refuses = False
    await marked(tries=4)
    assert kit.node.disk.is_settled
    assert [record.message for record in caplog.records][1:] == ["what was removed is marked on disk now"]
    await mover.stop()
    kit.tier.close()


async def test_a_file_that_the_disk_keeps_is_tried_again_and_costs_only_its_own_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Fails when its room counts as free, when it is forgotten, or when blocks wait for that room."""
    caplog.set_level(logging.WARNING, logger="headrace.store.disk_mover")
    kit = make_disk_kit(tmp_path, blocks=2, segments=4, segment_blocks=1)
    for token in range(1, 7):
        kit.store(make_prompt(token, 1), [0])
    kit.work()
    let_go = keep_oldest(tmp_path)
    mover = DiskMover(kit.node, kit.tier, kit.clock)
    running, disk = asyncio.create_task(mover.run()), kit.node.disk

    async def until_done(*, keeps: bool) -> None:
        async with asyncio.timeout(60):
            while disk.waiting_blocks or bool(disk.given_up) != keeps:  # noqa: ASYNC110 (the tier has no event)
                await asyncio.sleep(0.01)

    for token in (7, 8):
        kit.store(make_prompt(token, 1), [0])
        await until_done(keeps=True)
    # 1 went for room that did not come free; 2 and 3 then, for 5 and 6 that left the arena.
    assert [token for token in range(1, 9) if kit.held(make_prompt(token, 1))] == [4, 5, 6, 7, 8]
    assert kit.tier.used_bytes == kit.tier.bytes_max
    assert disk.counters.write_failures == 0
    kit.node.evict(EvictSelector(block_hashes=make_prompt(4, 1).chain), dry_run=False)
    let_go()
    kit.clock.seconds += DISK_PAUSE_MS / 1_000
    disk.wake()
    await mover.settle()
    await until_done(keeps=False)
    kit.store(make_prompt(9, 1), [0])
    await until_done(keeps=False)
    assert [token for token in range(1, 10) if kit.held(make_prompt(token, 1))] == [5, 6, 7, 8, 9]
    assert [record.message for record in caplog.records if "files" in record.message] == [
        "files that were given up cannot be removed and go on taking room: Is a directory",
        "files that were given up are removed now",
    ]
    kit.check()
    running.cancel()
    await asyncio.wait([running])
    await mover.stop()
    kit.tier.close()


async def test_what_is_evicted_is_marked_while_another_file_is_kept(tmp_path: Path) -> None:
    """Fails when an operator is told that the disk does not take what it would take at once, since one pause serves
    removals and marks. The clock stands still: no pause ends."""
    kit = make_disk_kit(tmp_path, blocks=2, segments=4, segment_blocks=2)
    for token in range(1, 11):
        kit.store(make_prompt(token, 1), [0])
    kit.work()
    mover = DiskMover(kit.node, KeepingDisk(kit.tier, kept=1), kit.clock)  # type: ignore[arg-type]
    running = asyncio.create_task(mover.run())
    kit.store(make_prompt(11, 1), [0])
    await mover.settle()
    assert kit.tier.kept == {1}
    kit.node.evict(EvictSelector(block_hashes=make_prompt(6, 1).chain), dry_run=False)
    await mover.settle()
    assert kit.tier.kept == {1}
    assert [token for token in range(1, 12) if kit.held(make_prompt(token, 1))] == [5, 7, 8, 9, 10, 11]
    kit.check()
    running.cancel()
    await asyncio.wait([running])
    await mover.stop()
    kit.tier.close()
