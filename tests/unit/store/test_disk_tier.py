"""The disk tier's files on their own: what is found again after any cut or flipped bit, and what is never exceeded."""

import errno
import os
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from disk_kit import RECORD_BYTES
from store_kit import make_header, make_prompt, payload_of

from headrace.blocks.block_codec import encode_header
from headrace.blocks.disk_tier import PREFIX_BYTES, DiskRecord, DiskTier, disk_path, open_disk, remove_disk
from headrace.core.errors import BlockCorrupt, ConfigInvalid
from headrace.store.recover_disk import recover_disk

PROMPT = make_prompt(1, 6)
HEADERS = [encode_header(make_header(PROMPT, i)) for i in range(6)]
PAYLOADS = [payload_of(make_header(PROMPT, i)) for i in range(6)]


def make_tier(path: Path, *, blocks: int = 32, segments: int = 4) -> DiskTier:
    return open_disk(path, blocks * RECORD_BYTES, segments=segments)


def put(tier: DiskTier, index: int) -> DiskRecord:
    record = tier.place(len(HEADERS[index]), len(PAYLOADS[index]))
    tier.write(record, HEADERS[index], PAYLOADS[index])
    return record


def reopened(tier: DiskTier) -> tuple[DiskTier, list[tuple[DiskRecord, bytes]]]:
    tier.close()
    again = open_disk(tier.directory, tier.bytes_max, segments=4)
    return again, again.find_records()


def remove(tier: DiskTier, segment: int) -> None:
    tier.give_up(segment)
    tier.remove_file(segment)
    tier.removed(segment)


@contextmanager
def full_after(file_bytes: int) -> Iterator[None]:
    """No file may be larger than that: a write gets so far and fails."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (file_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_what_was_written_is_found_again_with_its_bytes(tmp_path: Path) -> None:
    tier = make_tier(tmp_path / "n1")
    records = [put(tier, i) for i in range(3)]
    again, found = reopened(tier)
    assert found == list(zip(records, HEADERS[:3], strict=True))
    for index, record in enumerate(records):
        header, payload = again.read(record)
        assert (header, bytes(payload)) == (HEADERS[index], PAYLOADS[index])
    again.check_files(writing=False)
    assert again.used_bytes == 3 * RECORD_BYTES


def test_a_last_record_cut_at_any_byte_is_not_found_and_all_before_it_are(tmp_path: Path) -> None:
    """Fails when a torn tail is offered, hides what is before it, or is left in the way of the next record."""
    tier = make_tier(tmp_path / "n1")
    for index in range(3):
        last = put(tier, index)
    (file,) = (path for path in tier.directory.iterdir() if path.suffix == ".blocks")
    whole = file.read_bytes()
    assert len(whole) == 3 * RECORD_BYTES
    for cut in range(last.offset, len(whole)):
        file.write_bytes(whole[:cut])
        tier, found = reopened(tier)
        assert [header for _, header in found] == HEADERS[:2], f"cut at {cut}"
        tier.check_files(writing=False)
        if cut % 97 == 0:
            put(tier, 3)
            tier, found = reopened(tier)
            assert [header for _, header in found] == [*HEADERS[:2], HEADERS[3]]


@pytest.mark.parametrize("part", ["prefix", "header", "payload"])
def test_a_flipped_bit_is_never_read_as_a_block(tmp_path: Path, part: str) -> None:
    at = {"prefix": 9, "header": PREFIX_BYTES + 40, "payload": RECORD_BYTES - 5}[part]
    tier = make_tier(tmp_path / "n1")
    put(tier, 0)
    damaged = put(tier, 1)
    put(tier, 2)
    (file,) = (path for path in tier.directory.iterdir() if path.suffix == ".blocks")
    with file.open("r+b") as opened:
        opened.seek(damaged.offset + at)
        byte = opened.read(1)[0]
        opened.seek(damaged.offset + at)
        opened.write(bytes([byte ^ 4]))
    tier.close()
    recovered = recover_disk(open_disk(tier.directory, tier.bytes_max, segments=4))
    positions = [header.position for _, header in recovered.found]
    # A broken prefix hides what is behind it; a broken header only its own block; a broken payload shows when read.
    assert positions == {"prefix": [0], "header": [0, 2], "payload": [0, 1, 2]}[part]
    assert len(recovered.broken) == (part == "header")
    for record, header in recovered.found:
        _, payload = recovered.tier.read(record)
        assert (bytes(payload) == PAYLOADS[header.position]) == (part != "payload" or header.position != 1)


def test_the_bound_holds_by_giving_up_the_oldest_segment(tmp_path: Path) -> None:
    tier = make_tier(tmp_path / "n1", blocks=8, segments=4)
    reclaimed = []
    for index in range(40):
        while (segment := tier.segment_to_reclaim(RECORD_BYTES)) is not None:
            remove(tier, segment)
            reclaimed.append(segment)
        put(tier, index % 6)
        tier.check_files(writing=False)
        assert sum(path.stat().st_size for path in tier.directory.glob("*.blocks")) <= 8 * RECORD_BYTES
    assert reclaimed == sorted(reclaimed) == list(range(1, 17))


def test_a_dead_record_is_not_found_again_and_an_empty_file_is_deleted(tmp_path: Path) -> None:
    tier = make_tier(tmp_path / "n1")
    records = [put(tier, i) for i in range(3)]
    tier.mark_dead(records[1])
    tier, found = reopened(tier)
    assert [header for _, header in found] == [HEADERS[0], HEADERS[2]]
    for record in (records[0], records[2]):
        tier.mark_dead(record)
    tier, found = reopened(tier)
    assert found == []
    assert list(tier.directory.glob("*.blocks")) == []


def test_a_write_that_failed_leaves_no_hole(tmp_path: Path) -> None:
    tier = make_tier(tmp_path / "n1")
    put(tier, 0)
    failed = tier.place(len(HEADERS[1]), len(PAYLOADS[1]))
    with full_after(failed.offset + 100), pytest.raises(OSError, match="too large"):
        tier.write(failed, HEADERS[1], PAYLOADS[1])
    tier.unplace(failed)
    tier.check_files(writing=False)
    put(tier, 2)
    _, found = reopened(tier)
    assert [header for _, header in found] == [HEADERS[0], HEADERS[2]]


def test_a_segment_that_was_given_up_takes_room_until_its_file_is_gone(tmp_path: Path) -> None:
    """Fails when a disk that keeps a file is filled beyond the tier's bound."""
    tier = make_tier(tmp_path / "n1", blocks=4)
    records = [put(tier, index) for index in range(4)]
    oldest = tier.segment_to_reclaim(RECORD_BYTES)
    assert oldest == records[0].segment
    tier.give_up(oldest)
    assert (tier.used_bytes, tier.has_room(RECORD_BYTES)) == (4 * RECORD_BYTES, False)
    assert tier.segment_to_reclaim(RECORD_BYTES) is None, "one is enough"
    tier.check_files(writing=False)
    tier.remove_file(oldest)
    assert not tier.has_room(RECORD_BYTES), "nobody has said yet that it is gone"
    tier.check_files(writing=False)
    tier.removed(oldest)
    assert (tier.used_bytes, tier.has_room(RECORD_BYTES)) == (3 * RECORD_BYTES, True)
    put(tier, 4)
    tier.check_files(writing=False)


def test_a_segment_has_no_more_records_than_it_may_also_after_a_restart(tmp_path: Path) -> None:
    """Fails when small blocks all come to lie in one segment, so that giving it up is all of the tier."""
    tier = make_tier(tmp_path / "n1")
    tier.segment_records_max = 3
    assert [put(tier, index).segment for index in range(5)] == [1, 1, 1, 2, 2]
    tier, _ = reopened(tier)
    tier.segment_records_max = 3
    assert [put(tier, index).segment for index in range(3)] == [2, 3, 3]
    failed = tier.place(len(HEADERS[1]), len(PAYLOADS[1]))
    tier.unplace(failed)
    assert [put(tier, index).segment for index in range(2)] == [3, 4]
    tier.check_files(writing=False)


def test_the_older_half_is_that_of_the_segments_where_records_are_what_there_may_be_no_more_of(tmp_path: Path) -> None:
    """Fails when blocks in use are not written again in a tier of small blocks, and go with its oldest segment."""
    tier = make_tier(tmp_path / "n1", blocks=1_000)
    tier.segment_records_max = 2
    first = put(tier, 0).segment
    olds = []
    for index in range(9):
        put(tier, index % 6)
        olds.append(tier.is_old(first))
    assert olds == [False] * 5 + [True] * 4  # since it has two whole ones and one more after it


def test_a_file_of_somebody_else_is_left_alone(tmp_path: Path) -> None:
    """Fails when a node does not start because of a name that it did not give."""
    tier = make_tier(tmp_path / "n1")
    put(tier, 0)
    (tier.directory / "segment-of-a-film.blocks").write_text("not ours")
    tier, found = reopened(tier)
    assert len(found) == 1
    tier.check_files(writing=False)
    tier.close()
    assert remove_disk(tier.directory)
    assert [entry.name for entry in tier.directory.iterdir()] == ["segment-of-a-film.blocks"]


def test_reading_a_segment_that_is_gone_is_a_miss(tmp_path: Path) -> None:
    tier = make_tier(tmp_path / "n1")
    record = put(tier, 0)
    remove(tier, record.segment)
    with pytest.raises(BlockCorrupt, match="cannot be read"):
        tier.read(record)
    tier.mark_dead(record)


def test_one_process_owns_a_directory_and_removing_it_takes_only_its_own_files(tmp_path: Path) -> None:
    path = disk_path(tmp_path, "n1")
    tier = make_tier(path)
    put(tier, 0)
    with pytest.raises(ConfigInvalid, match="in use by another process"):
        make_tier(path)
    with pytest.raises(ConfigInvalid):
        remove_disk(disk_path(tmp_path, "n1"))
    tier.close()
    (path / "notes.txt").write_text("not ours")
    assert remove_disk(disk_path(tmp_path, "n1"))
    assert [entry.name for entry in path.iterdir()] == ["notes.txt"]
    (path / "notes.txt").unlink()
    assert remove_disk(disk_path(tmp_path, "n1"))
    assert not path.exists()
    assert not remove_disk(disk_path(tmp_path, "n1"))


def test_a_file_that_cannot_be_used_at_start_is_a_setting_that_is_wrong(tmp_path: Path) -> None:
    """Fails when a node dies of an OSError that does not say which directory, or starts beside what it cannot read."""
    tier = make_tier(tmp_path / "n1")
    (tier.directory / "segment-0000000000000001.blocks").mkdir()
    with pytest.raises(ConfigInvalid, match=r"segment-0000000000000001.blocks: Is a directory") as refused:
        recover_disk(tier)
    assert refused.value.key == "disk_dir"
    tier.close()


def test_a_file_in_which_nothing_lives_and_that_cannot_be_deleted_does_not_keep_a_node_from_starting(
    tmp_path: Path,
) -> None:
    """Fails when what is tolerated while a node runs is fatal at its next start, or the file's room counts as free."""

    class KeepsFiles(DiskTier):
        def remove_file(self, segment: int) -> None:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    tier = make_tier(tmp_path / "n1")
    tier.mark_dead(put(tier, 0))
    tier.close()
    again = KeepsFiles(tier.directory, tier.bytes_max, segments=4, lock_fd=-1)
    assert recover_disk(again).found == ()
    assert (again.given_up, again.used_bytes) == ([1], RECORD_BYTES)
    put(again, 1)
    again.check_files(writing=False)


def test_a_file_that_is_removed_while_the_books_are_checked_is_no_fault(tmp_path: Path) -> None:
    """Fails when the check dies of a file that the writer's thread has removed since it was listed."""
    tier = make_tier(tmp_path / "n1")
    put(tier, 0)
    (tier.directory / "segment-00000000000000ff.blocks").symlink_to("gone")  # listed, and not there to be looked at
    tier.check_files(writing=False)


def test_a_tier_that_an_earlier_version_filled_gives_up_its_one_segment(tmp_path: Path) -> None:
    """Fails when a segment with more records than it may have is spared as the one into which the next record goes."""
    tier = make_tier(tmp_path / "n1")
    for index in range(4):
        put(tier, index)
    tier, _ = reopened(tier)
    assert tier.oldest_segment is None
    tier.segment_records_max = 3
    assert tier.oldest_segment == 1
    remove(tier, 1)
    assert put(tier, 0).segment == 2
    tier.check_files(writing=False)
