"""The disk tier's files on their own: what is found again after any cut or flipped bit, and what is never exceeded."""

import os
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


def test_what_was_written_is_found_again_with_its_bytes(tmp_path: Path) -> None:
    tier = make_tier(tmp_path / "n1")
    records = [put(tier, i) for i in range(3)]
    again, found = reopened(tier)
    assert found == list(zip(records, HEADERS[:3], strict=True))
    for index, record in enumerate(records):
        header, payload = again.read(record)
        assert (header, bytes(payload)) == (HEADERS[index], PAYLOADS[index])
    again.check_integrity(writing=False)
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
        tier.check_integrity(writing=False)
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
            tier.drop_segment(segment)
            reclaimed.append(segment)
        put(tier, index % 6)
        tier.check_integrity(writing=False)
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
    os.truncate(next(tier.directory.glob("*.blocks")), failed.offset + 100)  # half of it got there
    tier.unplace(failed)
    tier.check_integrity(writing=False)
    put(tier, 2)
    _, found = reopened(tier)
    assert [header for _, header in found] == [HEADERS[0], HEADERS[2]]


def test_reading_a_segment_that_is_gone_is_a_miss(tmp_path: Path) -> None:
    tier = make_tier(tmp_path / "n1")
    record = put(tier, 0)
    tier.drop_segment(record.segment)
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
