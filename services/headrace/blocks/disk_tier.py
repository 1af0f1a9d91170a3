"""The disk tier's files: append-only segments of block records in one directory per node, never above its bound.

    segment-<serial>.blocks:  | record | record | ... |         oldest serial = written first, reclaimed first
    record:                   | prefix, 32 bytes | header bytes | payload |

This file owns the bytes on disk (record version 1), the account of segments, and the lock on the directory. A record
is whole when its prefix checks out and the file reaches to its end; what a killed writer left behind the last whole one
is cut at the next start. The payload's checksum is in the header and is checked on every read, so finding the records
again reads prefixes and headers only. Nothing is synced: after a power cut a record may be missing or broken, which is
a miss. It does not know which blocks matter, who asks for them, or what stands on what.

A segment that is given up takes room until its file is gone: a disk that keeps it must not be filled beyond the bound.

`write`, `read`, `mark_dead` and `remove_file` block and may run in threads, one writer at a time; everything else is
the owner's, and does not touch the disk.
"""

import contextlib
import fcntl
import os
import re
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from headrace.blocks.host_arena import arena_path
from headrace.core.errors import BlockCorrupt, ConfigInvalid
from headrace.core.limits import HEADER_BYTES_MAX
from headrace.core.store_limits import DISK_KEPT_MAX, DISK_SEGMENT_RECORDS_MAX, DISK_SEGMENTS

_MAGIC = b"HRBLOCK\x01"  # the last byte is the record's version
_PREFIX = struct.Struct("<8sIQ")  # magic, header bytes, payload bytes
_SEALED = struct.Struct("<QI")  # xxh3-64 of the prefix, state
PREFIX_BYTES = _PREFIX.size + _SEALED.size
_STATE_AT = PREFIX_BYTES - 4
_DEAD, _LIVE = 0, 1
_SEGMENT_NAME = re.compile(r"segment-[0-9a-f]{16}\.blocks")
DEFAULT_DISK_DIR = "~/.cache/headrace/blocks"


@dataclass(frozen=True, slots=True)
class DiskRecord:
    """Where one block lies on disk. Whether it is whole is for `read` to find out."""

    segment: int
    offset: int
    header_bytes: int
    payload_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of the file that the record takes."""
        return record_bytes(self.header_bytes, self.payload_bytes)


def record_bytes(header_bytes: int, payload_bytes: int) -> int:
    """Bytes that a block takes on disk: exact, this is what is accounted."""
    return PREFIX_BYTES + header_bytes + payload_bytes


class DiskTier:
    """One node's directory of segments. One owner, by an flock that ends with the process. Make it with `open_disk`."""

    def __init__(self, directory: Path, bytes_max: int, *, segments: int, lock_fd: int) -> None:
        self.directory = directory
        self.bytes_max = bytes_max
        self.segment_bytes = bytes_max // segments
        self._segments_in_half = segments // 2
        self._lock_fd = lock_fd
        self.segment_records_max = DISK_SEGMENT_RECORDS_MAX
        self._segment_to_bytes: dict[int, int] = {}  # by serial, oldest first
        self._given_up: dict[int, int] = {}  # likewise, of those whose files are still to be removed
        self._kept: set[int] = set()  # of those, the ones whose files the disk did not let go when asked last
        self._serial = 0  # of the newest segment ever: no serial is used twice in a process
        self._newest_records = 0  # in that segment

    @property
    def used_bytes(self) -> int:
        """Bytes of all segment files, a record that is being written and those that were given up included."""
        return sum(self._segment_to_bytes.values()) + sum(self._given_up.values())

    @property
    def oldest_segment(self) -> int | None:
        """The one to give up first; None when there is none, or only that into which the next record may go."""
        oldest = next(iter(self._segment_to_bytes), None)
        return None if oldest is None or self.is_open(oldest) else oldest

    @property
    def given_up(self) -> list[int]:
        """Segments whose files are to be removed: `remove_file`, then `removed`."""
        return list(self._given_up)

    @property
    def kept(self) -> frozenset[int]:
        """Those of the given up whose files the disk did not let go."""
        return frozenset(self._kept)

    def is_open(self, segment: int) -> bool:
        """Whether the next record may go into that segment."""
        return segment == self._serial and self._newest_records < self.segment_records_max

    def is_old(self, segment: int) -> bool:
        """Whether a segment belongs to the older half, which will be reclaimed first, once the tier is half full, be it
        in bytes or in records."""
        newer = [size for serial, size in self._segment_to_bytes.items() if serial > segment]
        return sum(newer) >= self.bytes_max // 2 or len(newer) > max(1, self._segments_in_half)

    def find_records(self) -> list[tuple[DiskRecord, bytes]]:
        """Every live record with its header's bytes, oldest segment first: called once, at start. Cuts torn tails and
        removes files in which nothing lives."""
        found: list[tuple[DiskRecord, bytes]] = []
        for path in _segment_files(self.directory):
            self._serial = serial = int(path.stem.removeprefix("segment-"), 16)
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
            try:
                records = list(_scan(fd, serial))
                end = max((record.offset + record.total_bytes for record, _, _ in records), default=0)
                os.ftruncate(fd, end)
            finally:
                os.close(fd)
            live = [(record, header) for record, header, state in records if state == _LIVE]
            if not live:
                try:
                    self.remove_file(serial)
                except OSError:  # it is tried again while the node runs
                    self._given_up[serial] = end
                continue
            self._segment_to_bytes[serial], self._newest_records = end, len(records)
            found += live
        return found

    def live_records(self) -> list[DiskRecord]:
        """What `find_records` would find now, without changing anything. Blocks, and reads all prefixes: for tests."""
        found: list[DiskRecord] = []
        for serial in self._segment_to_bytes:
            fd = os.open(self._path(serial), os.O_RDONLY | os.O_CLOEXEC)
            try:
                found += [record for record, _, state in _scan(fd, serial) if state == _LIVE]
            finally:
                os.close(fd)
        return found

    def segment_to_reclaim(self, more_bytes: int) -> int | None:
        """The oldest segment when so much more would not fit under the bound even with the given up ones gone, but for
        those that the disk keeps. One that keeps DISK_KEPT_MAX of them is left what it has."""
        assert more_bytes <= self.segment_bytes
        kept_bytes = sum(self._given_up[segment] for segment in self._kept) if len(self._kept) < DISK_KEPT_MAX else 0
        if sum(self._segment_to_bytes.values()) + kept_bytes + more_bytes <= self.bytes_max:
            return None
        return next(iter(self._segment_to_bytes), None)

    def has_room(self, more_bytes: int) -> bool:
        """Whether so much more fits under the bound now."""
        return self.used_bytes + more_bytes <= self.bytes_max

    def place(self, header_bytes: int, payload_bytes: int) -> DiskRecord:
        """Account for a record at the end of the newest segment, or of a new one; `write` it next, or `unplace` it."""
        total = record_bytes(header_bytes, payload_bytes)
        assert self.has_room(total), "a record was placed above the bound"
        is_full = self._segment_to_bytes.get(self._serial, self.segment_bytes) + total > self.segment_bytes
        if is_full or self._newest_records >= self.segment_records_max:
            self._serial += 1
            self._segment_to_bytes[self._serial] = self._newest_records = 0
        offset = self._segment_to_bytes[self._serial]
        self._segment_to_bytes[self._serial] = offset + total
        self._newest_records += 1
        return DiskRecord(self._serial, offset, header_bytes=header_bytes, payload_bytes=payload_bytes)

    def unplace(self, record: DiskRecord) -> None:
        """Take back the record placed last, which could not be written."""
        assert self._segment_to_bytes.get(record.segment) == record.offset + record.total_bytes
        self._newest_records -= 1
        if record.offset == 0:
            self.give_up(record.segment)
        else:
            self._segment_to_bytes[record.segment] = record.offset

    def give_up(self, segment: int) -> None:
        """Nothing in a segment counts any more, but its file takes room until it is removed."""
        self._given_up[segment] = self._segment_to_bytes.pop(segment)

    def remove_file(self, segment: int) -> None:
        """Delete the file of a segment that was given up. A read under way of it fails or ends well. Blocks. Raises
        OSError where the disk refuses: what is live in the file would be found again at the next start."""
        self._path(segment).unlink(missing_ok=True)

    def removed(self, segment: int) -> None:
        """The file of a segment that was given up is gone: its bytes are free."""
        del self._given_up[segment]
        self._kept.discard(segment)

    def keeps(self, segment: int) -> None:
        """The file of a segment that was given up could not be removed: what it takes is not free soon."""
        assert segment in self._given_up
        self._kept.add(segment)

    def write(self, record: DiskRecord, header: bytes, payload: bytes) -> None:
        """Write a placed record. Blocks. Raises OSError (no space, a broken disk); what got there of it is cut off."""
        assert (len(header), len(payload)) == (record.header_bytes, record.payload_bytes)
        fd = os.open(self._path(record.segment), os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            at = record.offset
            for part in (_prefix(len(header), len(payload)) + header, payload):
                view = memoryview(part)
                while view:
                    written = os.pwrite(fd, view, at)
                    at, view = at + written, view[written:]
        except OSError:
            with contextlib.suppress(OSError):  # a tail that cannot be cut is overwritten by the next record
                os.ftruncate(fd, record.offset)
            raise
        finally:
            os.close(fd)

    def read(self, record: DiskRecord) -> tuple[bytes, memoryview]:
        """A record's header bytes and payload as they lie there, to be checked like anything from outside. Blocks.

        Raises BlockCorrupt when the file is gone or too short.
        """
        try:
            fd = os.open(self._path(record.segment), os.O_RDONLY | os.O_CLOEXEC)
            try:
                raw = os.pread(fd, record.total_bytes - PREFIX_BYTES, record.offset + PREFIX_BYTES)
            finally:
                os.close(fd)
        except OSError as error:
            raise BlockCorrupt(b"", f"cannot be read from disk: {error.strerror}") from error
        if len(raw) != record.header_bytes + record.payload_bytes:
            raise BlockCorrupt(b"", "its record on disk is cut off")
        return raw[: record.header_bytes], memoryview(raw)[record.header_bytes :]

    def mark_dead(self, record: DiskRecord) -> None:
        """Have a record not found again at the next start. Blocks. Raises OSError; a segment that is gone is fine."""
        try:
            fd = os.open(self._path(record.segment), os.O_WRONLY | os.O_CLOEXEC)
        except FileNotFoundError:
            return
        try:
            os.pwrite(fd, struct.pack("<I", _DEAD), record.offset + _STATE_AT)
        finally:
            os.close(fd)

    def check_integrity(self) -> None:
        """What counts is never above the bound, and no segment counts twice. Does not touch the disk."""
        assert sum(self._segment_to_bytes.values()) <= self.bytes_max, "the disk tier is above its bound"
        assert not self._segment_to_bytes.keys() & self._given_up.keys()
        assert self._kept <= self._given_up.keys()

    def check_files(self, *, writing: bool) -> None:
        """Bytes accounted == bytes of the files; no file is unaccounted. Blocks: for tests.

        writing: a record is placed whose write has not ended, so the newest file may be shorter than its account. The
        files of given up segments may be gone already, or never have been there.
        """
        self.check_integrity()
        files: dict[str, int] = {}
        for path in _segment_files(self.directory):
            with contextlib.suppress(FileNotFoundError):  # the writer's thread has removed it since it was listed
                files[path.name] = path.stat().st_size
        for segment, accounted in self._segment_to_bytes.items():
            size = files.pop(self._path(segment).name, 0)
            assert size == accounted or (writing and segment == self._serial and size < accounted), (
                "bytes are unaccounted"
            )
        for segment, accounted in self._given_up.items():
            assert files.pop(self._path(segment).name, 0) <= accounted, "a given up file is larger than its account"
        assert not files, "a segment file has no account"

    def close(self) -> None:
        """Give up the lock; the files stay. Idempotent."""
        if self._lock_fd >= 0:
            os.close(self._lock_fd)
            self._lock_fd = -1

    def _path(self, segment: int) -> Path:
        return self.directory / f"segment-{segment:016x}.blocks"


def disk_path(disk_dir: str | Path, node_id: str) -> Path:
    """A node's own directory below `disk_dir` (DEFAULT_DISK_DIR for ""). Raises ConfigInvalid for a node id that is not
    a plain file name."""
    return Path(disk_dir or DEFAULT_DISK_DIR).expanduser() / arena_path("", node_id).with_suffix(".disk").name


def open_disk(path: Path, bytes_max: int, *, segments: int = DISK_SEGMENTS) -> DiskTier:
    """Own a node's directory, making it when there is none. Raises ConfigInvalid when that cannot be."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock_fd = os.open(path / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ConfigInvalid("disk_dir", f"cannot use {path}: {error.strerror}") from error
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock_fd)
        raise ConfigInvalid("disk_dir", f"{path} is in use by another process") from None
    return DiskTier(path, bytes_max, segments=segments, lock_fd=lock_fd)


def remove_disk(path: Path) -> bool:
    """Delete a stopped node's directory, its own files only; False when there is none. Raises ConfigInvalid while a
    process owns it."""
    if not path.is_dir():
        return False
    tier = open_disk(path, 0)
    try:
        for file in (*_segment_files(path), path / "lock"):
            file.unlink(missing_ok=True)
        with contextlib.suppress(OSError):  # something that is not ours lies there
            path.rmdir()
    finally:
        tier.close()
    return True


def _segment_files(directory: Path) -> list[Path]:
    """Ours only, oldest first."""
    return sorted(path for path in directory.iterdir() if _SEGMENT_NAME.fullmatch(path.name))


def _prefix(header_bytes: int, payload_bytes: int) -> bytes:
    packed = _PREFIX.pack(_MAGIC, header_bytes, payload_bytes)
    return packed + _SEALED.pack(xxhash.xxh3_64_intdigest(packed), _LIVE)


def _scan(fd: int, segment: int) -> Iterator[tuple[DiskRecord, bytes, int]]:
    """Every whole record, its header's bytes and its state; ends at the first that is not whole.

    Records are found one behind the other, so a broken prefix hides those behind it: rare, and only a loss.
    """
    size, offset = os.fstat(fd).st_size, 0
    while offset + PREFIX_BYTES <= size:
        raw = os.pread(fd, PREFIX_BYTES + HEADER_BYTES_MAX, offset)
        magic, header_bytes, payload_bytes = _PREFIX.unpack_from(raw)
        digest, state = _SEALED.unpack_from(raw, _PREFIX.size)
        record = DiskRecord(segment, offset, header_bytes=header_bytes, payload_bytes=payload_bytes)
        if magic != _MAGIC or digest != xxhash.xxh3_64_intdigest(raw[: _PREFIX.size]):
            return
        if offset + record.total_bytes > size:
            return
        yield record, raw[PREFIX_BYTES : PREFIX_BYTES + header_bytes], state
        offset += record.total_bytes
