"""The threads of the disk tier: what a disk that hangs may take of the node."""

import asyncio
import os
from pathlib import Path

from disk_kit import make_disk_kit
from store_kit import make_prompt

from headrace.core.clock import SystemClock
from headrace.core.limits import DISK_READERS
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
