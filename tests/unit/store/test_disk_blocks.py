"""The books of the disk tier: which copy of a block counts, and what goes with one that is given up."""

from contextlib import suppress
from pathlib import Path

from disk_kit import DiskKit, make_disk_kit
from store_kit import make_prompt

from headrace.core.generation import EvictSelector
from headrace.core.store_limits import DISK_KEPT_MAX

CHAIN = make_prompt(1, 2)


def demoted_twice(path: Path) -> DiskKit:
    """A disk of six segments, one block in each, the oldest two of which have CHAIN, its end first. It waits to be
    written again, since it was read and evicted once more from an arena of four blocks, of which readers have two."""
    kit = make_disk_kit(path, blocks=4, segments=6, segment_blocks=1)
    kit.store(CHAIN, range(2))
    read = make_prompt(2, 2)
    kit.store(read, range(2))
    kit.node.lease(read.namespace, read.chain, first_block=0)
    kit.store(make_prompt(3, 2), range(2))
    kit.work()
    assert kit.promote(CHAIN) == 2
    kit.work()
    kit.store(make_prompt(4, 2), range(2))
    kept = kit.node.disk.run(CHAIN.namespace, CHAIN.chain, first_block=0)
    assert all(block.waiting for block in kept)
    return kit


def work_beside_kept_files(kit: DiskKit) -> None:
    """As `DiskKit.work`, on a disk that does not let all files be removed nor be marked."""
    disk, is_done = kit.node.disk, False
    while not is_done:
        for segment in disk.removable:
            try:
                kit.tier.remove_file(segment)
                disk.removed(segment)
            except OSError:
                disk.keeps(segment)
        for record in disk.take_dead():
            with suppress(IsADirectoryError):
                kit.tier.mark_dead(record)
        disk.marked(well=True)
        job = disk.next_write()
        if job is not None:
            kit.tier.write(job.record, job.header_bytes, job.payload)
            disk.written(job, well=True)
        is_done = job is None and not disk.removable


def test_a_copy_that_is_to_be_written_again_is_good_until_it_is_written(tmp_path: Path) -> None:
    """Fails when the old record is given up as soon as the new one is queued: a death in between costs the block."""
    kit = demoted_twice(tmp_path)
    for record in kit.node.disk.take_dead():
        kit.tier.mark_dead(record)
    kit.restart(lose_arena=True)
    assert kit.held(CHAIN) == 2
    kit.check()


def test_a_segment_that_is_reclaimed_takes_along_what_stands_on_its_blocks_elsewhere(tmp_path: Path) -> None:
    """Fails when a block stays without its prefix, because that was in an older segment than the block itself."""
    kit = demoted_twice(tmp_path)
    disk = kit.node.disk
    end = disk.next_write()
    kit.tier.write(end.record, end.header_bytes, end.payload)
    disk.written(end, well=True)
    first = disk.next_write()
    assert (end.block.header.position, first.block.header.position) == (1, 0)
    disk.written(first, well=False)  # so that its only copy is the old one
    kit.work()
    assert kit.held(CHAIN) == 2
    for token in range(5, 8):
        kit.store(make_prompt(token, 2), range(2))
        kit.work()
        kit.check()
        if disk.get(first.block.key) is None:
            break
    assert disk.get(first.block.key) is None
    assert disk.get(end.block.key) is None
    assert kit.held(CHAIN) == 0


def test_nothing_is_settled_while_a_removed_block_is_not_marked_on_disk(tmp_path: Path) -> None:
    """Fails when an eviction is answered as done while its marks are under way: a death would bring the block back."""
    kit = make_disk_kit(tmp_path, blocks=2, segments=2, segment_blocks=8)
    for token in range(1, 5):
        kit.store(make_prompt(token, 1), [0])
    kit.work()
    kit.node.evict(EvictSelector(block_hashes=make_prompt(1, 1).chain), dry_run=False)
    assert kit.node.disk.take_dead()
    assert not kit.node.disk.is_settled
    kit.check()
    kit.node.disk.marked(well=False)
    assert not kit.node.disk.is_settled
    assert kit.work() == 0
    assert kit.node.disk.is_settled
    kit.check()


def test_a_disk_that_lets_no_file_be_deleted_does_not_end_the_node_nor_bring_back_what_was_evicted(
    tmp_path: Path,
) -> None:
    """Fails when a disk that became read-only takes the arena's node with it, or an eviction counts as done whose block
    would be found again at the next start."""
    kit, evicted = make_disk_kit(tmp_path, blocks=2, segments=4, segment_blocks=1), make_prompt(1, 1)
    for token in range(1, 5):
        kit.store(make_prompt(token, 1), [0])
    kit.work()
    oldest = min(tmp_path.glob("segment-*"))
    aside = oldest.rename(tmp_path / "aside")
    oldest.mkdir()  # which cannot be deleted as a file can
    used_bytes = kit.tier.used_bytes
    kit.node.evict(EvictSelector(block_hashes=(evicted.chain[0],)), dry_run=False)
    assert kit.held(evicted) == 0
    assert kit.tier.used_bytes == used_bytes, "the file takes its room until it is gone"
    assert not kit.node.disk.is_settled, "nobody may be told yet that it is gone for good"
    oldest.rmdir()
    aside.rename(oldest)
    kit.work()
    kit.restart()
    assert (kit.held(evicted), kit.held(make_prompt(2, 1))) == (0, 1)
    kit.check()


def test_a_segment_whose_file_cannot_be_deleted_for_room_brings_nothing_back(tmp_path: Path) -> None:
    """Fails when what it had is found again at the next start, although all was evicted since."""
    kit = make_disk_kit(tmp_path, blocks=2, segments=4, segment_blocks=1)
    for token in range(1, 7):
        kit.store(make_prompt(token, 1), [0])
    kit.work()
    kit.store(make_prompt(7, 1), [0])
    oldest = min(tmp_path.glob("segment-*"))
    aside = oldest.rename(tmp_path / "aside")
    oldest.mkdir()  # which cannot be deleted as a file can
    disk = kit.node.disk
    for _ in range(3):
        assert disk.next_write() is None, "there is no room as long as the file is there"
    assert [token for token in range(1, 8) if not kit.held(make_prompt(token, 1))] == [1], "one segment was given up"
    assert disk.given_up
    oldest.rmdir()
    aside.rename(oldest)
    assert kit.work() == 1
    kit.check()
    kit.node.evict(EvictSelector(), dry_run=False)
    kit.work()
    kit.restart()
    assert [token for token in range(1, 8) if kit.held(make_prompt(token, 1))] == []
    kit.check()


def test_a_disk_that_has_as_many_blocks_as_it_may_gives_up_its_oldest_for_new_ones(tmp_path: Path) -> None:
    """Fails when a large disk of small blocks is full of its first ones for ever, since it has room left in bytes."""
    kit = make_disk_kit(tmp_path, blocks=2, segments=16, segment_blocks=2)
    kit.node.disk.blocks_max = 6
    for token in range(1, 21):
        kit.store(make_prompt(token, 1), [0])
        kit.work()
        kit.check()
        assert len(kit.node.disk) <= 6
        assert kit.node.stats()[1].total_blocks in (0, 6), "it says that it has room for more than it may have"
    assert [token for token in range(1, 21) if kit.held(make_prompt(token, 1))] == list(range(13, 21))
    assert kit.node.disk.counters.dropped_demotions == 0


def test_a_disk_whose_blocks_all_lie_in_one_full_segment_gives_that_up_for_new_ones(tmp_path: Path) -> None:
    """Fails when a disk that an earlier version filled takes nothing ever after."""
    kit = make_disk_kit(tmp_path, blocks=2, segments=4, segment_blocks=8)
    for token in range(1, 7):
        kit.store(make_prompt(token, 1), [0])
    kit.work()
    kit.restart()
    kit.tier.segment_records_max = kit.node.disk.blocks_max = 4
    kit.store(make_prompt(7, 1), [0])
    kit.work()
    kit.check()
    assert [token for token in range(1, 8) if kit.held(make_prompt(token, 1))] == [5, 6, 7]


def test_a_full_segment_is_not_given_up_while_its_last_record_is_written(tmp_path: Path) -> None:
    """Fails when its file is removed below the write, or when what is written into it counts in a file that is gone."""
    kit = make_disk_kit(tmp_path, blocks=2, segments=4, segment_blocks=8)
    kit.tier.segment_records_max = 2
    kit.node.disk.blocks_max = 3
    for token in range(1, 5):
        kit.store(make_prompt(token, 1), [0])
    first = kit.node.disk.next_write()
    kit.tier.write(first.record, first.header_bytes, first.payload)
    kit.node.disk.written(first, well=True)
    last = kit.node.disk.next_write()
    assert (last.record.segment, kit.tier.is_open(last.record.segment)) == (first.record.segment, False)
    for token in (5, 6):  # as many as may be are kept then
        kit.store(make_prompt(token, 1), [0])
    kit.node.evict(EvictSelector(block_hashes=(first.block.header.block_hash,)), dry_run=False)
    assert kit.node.disk.given_up == []
    kit.tier.write(last.record, last.header_bytes, last.payload)
    kit.node.disk.written(last, well=True)
    kit.work()
    kit.check()
    assert kit.held(make_prompt(2, 1)) == 1


def test_a_file_that_cannot_be_removed_takes_its_own_room_only(tmp_path: Path) -> None:
    """Fails when one such file stops the whole tier: nothing more is given up, and nothing more written."""
    kit = make_disk_kit(tmp_path, blocks=2, segments=8, segment_blocks=1)
    for token in range(1, 11):
        kit.store(make_prompt(token, 1), [0])
    kit.work()
    kept = min(tmp_path.glob("segment-*"))
    aside, disk = kept.rename(tmp_path / "aside"), kit.node.disk
    kept.mkdir()  # which cannot be deleted as a file can
    for token in range(11, 31):
        kit.store(make_prompt(token, 1), [0])
        work_beside_kept_files(kit)
        assert kit.tier.used_bytes <= kit.tier.bytes_max
    assert [token for token in range(1, 31) if kit.held(make_prompt(token, 1))] == list(range(22, 31))
    assert disk.given_up == sorted(kit.tier.kept) == [1]
    kept.rmdir()
    aside.rename(kept)
    kit.work()
    kit.check()


def test_a_disk_that_removes_nothing_keeps_most_of_what_it_has(tmp_path: Path) -> None:
    """Fails when each block that comes costs a segment whose room does not come free."""
    kit = make_disk_kit(tmp_path, blocks=2, segments=8, segment_blocks=1)
    for token in range(1, 11):
        kit.store(make_prompt(token, 1), [0])
    kit.work()
    for file in tmp_path.glob("segment-*"):
        file.rename(tmp_path / f"aside-{file.name}")
        file.mkdir()
    for token in range(11, 31):
        kit.store(make_prompt(token, 1), [0])
        work_beside_kept_files(kit)
        kit.node.disk.drop_waiting()
    assert len(kit.tier.kept) == DISK_KEPT_MAX
    assert [token for token in range(1, 31) if kit.held(make_prompt(token, 1))] == [5, 6, 7, 8, 29, 30]
    kit.node.check_integrity()
