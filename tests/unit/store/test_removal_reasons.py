"""Why a block left, as a node remembers it: each cause by its own name."""

from pathlib import Path

from disk_kit import DiskKit, make_disk_kit
from store_kit import HandClock, make_kit, make_prompt

from headrace.core.block import HashedPrompt
from headrace.store.block_changes import TellEach
from headrace.store.removal_log import BROKEN, BROKEN_ON_DISK, MADE_ROOM, MADE_ROOM_ON_DISK, NOT_WRITTEN, RemovalLog


def remembering(kit: DiskKit) -> RemovalLog:
    """A log that follows what the kit's disk gives up."""
    removals = RemovalLog(kit.clock)
    kit.node.disk.changes = TellEach(kit.changes, removals)
    kit.node.disk.because = removals.because
    return removals


def reasons(removals: RemovalLog, prompt: HashedPrompt) -> list[str]:
    found = [removals.find(prompt.namespace, block_hash) for block_hash in prompt.chain]
    return [removal.reason for removal in found if removal is not None]


def test_a_segment_that_is_reclaimed_gives_the_disk_as_the_reason(tmp_path: Path) -> None:
    """Fails when an operator is told that the arena was too small although the disk was."""
    kit = make_disk_kit(tmp_path / "d", blocks=4, segments=2, segment_blocks=3)
    removals = remembering(kit)
    prompts = [make_prompt(number, 3) for number in range(6)]
    for prompt in prompts:
        kit.store(prompt, range(3))
        kit.work()
    assert reasons(removals, prompts[0]) == [MADE_ROOM_ON_DISK] * 3


def test_broken_bytes_on_disk_are_a_reason_of_their_own(tmp_path: Path) -> None:
    """Fails when a dying disk looks like a full one."""
    kit = make_disk_kit(tmp_path / "d")
    removals = remembering(kit)
    broken = make_prompt(1, 3)
    kit.store(broken, range(3))
    kit.store(make_prompt(2, 3), range(3))
    kit.store(make_prompt(3, 3), range(3))
    kit.work()
    record = kit.node.disk.get((broken.namespace, broken.chain[0])).record
    with (tmp_path / "d" / f"segment-{record.segment:016x}.blocks").open("r+b") as file:
        file.seek(record.offset + record.total_bytes - 1)
        file.write(b"\xff")
    assert kit.promote(broken) == 0
    assert reasons(removals, broken) == [BROKEN_ON_DISK] * 3


def test_a_block_that_the_disk_did_not_take_says_so(tmp_path: Path) -> None:
    """Fails when a disk without space is not told apart from an arena without room."""
    kit = make_disk_kit(tmp_path / "d")
    removals = remembering(kit)
    lost = make_prompt(1, 3)
    kit.store(lost, range(3))
    kit.store(make_prompt(2, 3), range(3))
    kit.store(make_prompt(3, 3), range(3))
    while (job := kit.node.disk.next_write()) is not None:
        kit.node.disk.written(job, well=False)
    assert reasons(removals, lost) == [NOT_WRITTEN] * 3


def test_eviction_and_broken_bytes_in_the_arena_are_told_apart() -> None:
    """Fails when corruption of memory hides behind eviction."""
    removals = RemovalLog(HandClock())
    kit = make_kit(blocks=4, follower=removals)
    kit.node.room.because = removals.because
    evicted, broken = make_prompt(1, 2), make_prompt(2, 4)
    kit.store(evicted, range(2))
    kit.store(broken, range(2))
    kit.store(make_prompt(3, 2), range(2))
    assert set(reasons(removals, evicted) + reasons(removals, broken)) == {MADE_ROOM}
    kit = make_kit(follower=removals)
    kit.node.room.because = removals.because
    kit.store(broken, range(4))
    lease = kit.node.lease(broken.namespace, broken.chain, first_block=2)
    kit.arena.payload(lease.blocks[0].slot, 1)[0] ^= 1
    kit.node.release(lease.lease_id, suspects=[0])
    assert reasons(removals, broken) == [BROKEN] * 2
