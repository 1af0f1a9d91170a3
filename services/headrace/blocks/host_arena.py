"""The arena: one memory-backed file per store node that holds blocks, and that workers of the same host map.

    | superblock (1 unit) | record per unit | unit 0 | unit 1 | ...                                  |
    slot = first unit of an extent:  | payload, page aligned ... padding ... | header bytes |

This file owns the byte layout (arena version 2), the free-space account and the crash-safe order of writes: payload,
header and terms first, the record's state last, so that a process killed at any instruction leaves a slot that is
either wholly committed or free. Each word of a record is written by one aligned store, so that terms can change in
place and are never read half written. Records are cleared before their units can be given to someone else. It does not
know what a valid header is, who leases what, or which block should go.
"""

import contextlib
import fcntl
import mmap
import os
import re
import struct
import sys
import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import xxhash

from headrace.blocks.extents import ExtentPool
from headrace.core.errors import ConfigInvalid, StoreUnavailable
from headrace.core.limits import HEADER_BYTES_MAX

ARENA_VERSION = 2
UNIT_BYTES = 4_096  # a page: payloads start on one, and a block wastes less than one
_MAGIC = b"HRARENA\0"
_SUPERBLOCK = struct.Struct("<8sIIQQ16s")  # magic, version, unit bytes, total bytes, units, arena id
_INCARNATION_AT = 64  # a word of its own: it changes at each start, the fields above never do
# One word: units u32, header bytes u16, flags u8, state u8; then three words of unix ms, 0 for no such moment.
_RECORD = struct.Struct("<IHBBQQQ")
_WORD_BYTES = 8
_EXPIRES_AT, _ORDERED_AT, _PINNED_AT = 1, 2, 3  # words of a record
_FREE, _COMMITTED = 0, 1
_NOT_ON_DISK = 1  # flag
_NODE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")


@dataclass(frozen=True, slots=True)
class SlotTerms:
    """How long, and where, what lies in a slot may stay. Moments are unix milliseconds; 0: no such moment."""

    expires_unix_ms: int = 0  # unless it is used until then
    ordered_unix_ms: int = 0  # whatever happens until then: an operator said so
    pinned_until_unix_ms: int = 0  # of a pin on this very block
    not_on_disk: bool = False  # no copy in a disk tier


@dataclass(frozen=True, slots=True)
class ArenaRecord:
    """A slot that says it is committed. Whether it is whole is for the reader to find out."""

    slot: int
    units: int
    header: bytes
    terms: SlotTerms


def arena_path(arena_dir: str | Path, node_id: str) -> Path:
    """Where a node's arena lies. Raises ConfigInvalid for a node id that is not a plain file name."""
    if not _NODE_ID.fullmatch(node_id):
        raise ConfigInvalid("node_id", "must be 1 to 64 of A-Z a-z 0-9 . _ - and start with a letter or digit")
    return Path(arena_dir) / f"headrace-{node_id}.arena"


def budgets_path(arena: Path) -> Path:
    """Where the budgets lie that were set for the node of an arena; removed with it."""
    return arena.with_name(f"{arena.name}.budgets")


def host_id(arena_dir: str | Path) -> str:
    """A name that is equal for exactly those processes that see the same memory-backed directory.

    Host names do not say it: two containers of one pod share a host name and may not share /dev/shm, two with a mounted
    one do under different names. The kernel's boot id and the file system's device number do.
    """
    boot_id = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    return f"{boot_id[:13]}-{os.stat(arena_dir).st_dev:x}"


def units_for(payload_bytes: int, header_bytes: int) -> int:
    """Units that a block takes: payload and header together, rounded up. Exact: this is what is accounted."""
    return -(-(payload_bytes + header_bytes) // UNIT_BYTES)


class ArenaView:
    """An arena's memory as anyone may see it: the superblock's facts, and payloads by slot. No account, no locks."""

    def __init__(self, memory: mmap.mmap, name: str) -> None:
        """Raises StoreUnavailable when the memory is not an arena of this version."""
        self._memory = memory
        self._view = memoryview(memory)
        magic, version, unit_bytes, total_bytes, units, arena_id = _SUPERBLOCK.unpack_from(memory, 0)
        (digest,) = struct.unpack_from("<Q", memory, _SUPERBLOCK.size)
        whole = digest == xxhash.xxh3_64_intdigest(memory[: _SUPERBLOCK.size])
        if magic != _MAGIC or version != ARENA_VERSION or unit_bytes != UNIT_BYTES or not whole:
            raise StoreUnavailable(name, "the arena file is not of a format that this build knows")
        if total_bytes != len(memory) or units != _data_units(total_bytes):
            raise StoreUnavailable(name, "the arena file has another size than its superblock says")
        self.num_units: int = units
        self.total_bytes: int = total_bytes
        self.arena_id: bytes = arena_id
        self._data_at = _data_offset(units)

    @property
    def incarnation(self) -> int:
        """The owner's incarnation as the superblock has it now."""
        return int(struct.unpack_from("<Q", self._memory, _INCARNATION_AT)[0])

    def payload(self, slot: int, payload_bytes: int) -> memoryview:
        """The payload's bytes in place, writable. ValueError when they would lie outside of the arena."""
        start = self._data_at + slot * UNIT_BYTES
        if not (0 <= slot < self.num_units and 0 < payload_bytes <= self.total_bytes - start):
            raise ValueError(f"slot {slot} with {payload_bytes} bytes lies outside of the arena")
        return self._view[start : start + payload_bytes]

    def close(self) -> None:
        """Unmap, unless views of payloads are still alive: then the mapping goes with the last of them."""
        with contextlib.suppress(BufferError):
            self._view.release()
            self._memory.close()


def map_arena(path: str | Path) -> ArenaView:
    """Map a node's arena for reading and filling. Raises StoreUnavailable when there is none or it is not whole.

    The owner never shrinks or rewrites the file in place (it renames a new one over it), so that a mapping stays good.
    """
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise StoreUnavailable(Path(path).name, f"cannot open the arena: {error.strerror}") from error
    try:
        size = os.fstat(fd).st_size
        if size < UNIT_BYTES:
            raise StoreUnavailable(Path(path).name, "the arena file is empty")
        memory = mmap.mmap(fd, size)
    finally:
        os.close(fd)
    return ArenaView(memory, Path(path).name)


class HostArena(ArenaView):
    """The owner's side: allocate, commit and free slots. One process, one thread. Open with `open_arena`."""

    def __init__(self, memory: mmap.mmap, *, name: str, fd: int | None = None, path: Path | None = None) -> None:
        super().__init__(memory, name)
        assert sys.byteorder == "little", "records are written as native words"
        self._words = self._view.cast("Q")  # one store each, which `struct` does not promise
        self.path = path
        self._fd = fd
        self._extents = ExtentPool(self.num_units)
        self._slot_to_units: dict[int, int] = {}
        self._backed_units = 0  # leading units whose pages are known to exist

    @classmethod
    def in_memory(cls, total_bytes: int) -> "HostArena":
        """An arena without a file, for simulation and tests; the same layout in private memory."""
        memory = mmap.mmap(-1, total_bytes)
        _format(memory, total_bytes)
        return cls(memory, name="memory")

    def reattached(self) -> "HostArena":
        """A second owner over the same memory, as after a crash of this one, which must not be used any more."""
        return HostArena(self._memory, name="memory", fd=self._fd, path=self.path)

    @property
    def free_bytes(self) -> int:
        """Bytes in no slot."""
        return self._extents.free_units * UNIT_BYTES

    @property
    def data_bytes(self) -> int:
        """Bytes that slots can take in all: the arena less superblock and records."""
        return self.num_units * UNIT_BYTES

    def begin_incarnation(self, unix_ms: int) -> int:
        """A number larger than any before it on this arena, kept in the superblock: `max(old + 1, unix ms)`."""
        incarnation = max(self.incarnation + 1, unix_ms)
        struct.pack_into("<Q", self._memory, _INCARNATION_AT, incarnation)
        return incarnation

    def fits(self, units: int) -> int:
        """How many more slots of that size there is room for now."""
        return self._extents.fits(units)

    def allocate(self, units: int) -> int | None:
        """A slot of `units`; None when no free extent is long enough or the host is out of memory for it."""
        slot = self._extents.allocate(units)
        if slot is None:
            return None
        if not self._back(slot + units):
            self._extents.release(slot, units)
            return None
        self._slot_to_units[slot] = units
        return slot

    def adopt(self, slot: int, units: int) -> bool:
        """Claim the slot of a record found at start; False when it overlaps another or leaves the arena."""
        if not self._extents.take(slot, units):
            return False
        self._back(slot + units)  # its pages exist: now, before the node serves, looking at them costs nobody time
        self._slot_to_units[slot] = units
        return True

    def free(self, slot: int) -> None:
        """Clear the record, then give the units back: never the other way round."""
        units = self._slot_to_units.pop(slot)
        self.clear_record(slot)
        self._extents.release(slot, units)

    def commit(self, slot: int, header: bytes, terms: SlotTerms = SlotTerms()) -> None:
        """Make a filled slot durable against a crash of this process: header and terms, then what says committed."""
        units = self._slot_to_units[slot]
        assert len(header) <= HEADER_BYTES_MAX
        end = self._data_at + (slot + units) * UNIT_BYTES
        self._view[end - len(header) : end] = header
        at = _record_offset(slot) // _WORD_BYTES
        assert self._words[at] >> 56 == _FREE, "a slot was committed twice"
        self._words[at + _EXPIRES_AT] = terms.expires_unix_ms
        self._words[at + _ORDERED_AT] = terms.ordered_unix_ms
        self._words[at + _PINNED_AT] = terms.pinned_until_unix_ms
        self._words[at] = _first_word(units, len(header), terms)

    def set_terms(self, slot: int, terms: SlotTerms) -> None:
        """Change the terms of a committed slot in place: word by word, each of which is the old one or the new one."""
        at = _record_offset(slot) // _WORD_BYTES
        first = self._words[at]
        assert first >> 56 == _COMMITTED, "terms of a slot that is not committed"
        self._words[at + _EXPIRES_AT] = terms.expires_unix_ms
        self._words[at + _ORDERED_AT] = terms.ordered_unix_ms
        self._words[at + _PINNED_AT] = terms.pinned_until_unix_ms
        self._words[at] = _first_word(first & 0xFFFFFFFF, first >> 32 & 0xFFFF, terms)

    def set_expiry(self, slot: int, unix_ms: int) -> None:
        """Change one of a committed slot's terms: what each use of a block with a time to live does."""
        at = _record_offset(slot) // _WORD_BYTES
        assert self._words[at] >> 56 == _COMMITTED, "terms of a slot that is not committed"
        self._words[at + _EXPIRES_AT] = unix_ms

    def clear_record(self, slot: int) -> None:
        """Say that nothing is committed at a slot."""
        self._words[_record_offset(slot) // _WORD_BYTES] = 0

    def records(self) -> Iterator[ArenaRecord]:
        """Every slot that says it is committed, by slot. Lengths are checked, nothing else."""
        table = bytes(self._view[UNIT_BYTES : UNIT_BYTES + self.num_units * _RECORD.size])
        for slot, record in enumerate(_RECORD.iter_unpack(table)):
            units, header_bytes, flags, state, expires, ordered, pinned = record
            if state == _FREE:
                continue
            end = self._data_at + (slot + units) * UNIT_BYTES
            in_range = 0 < units <= self.num_units - slot and header_bytes <= min(HEADER_BYTES_MAX, units * UNIT_BYTES)
            header = bytes(self._view[end - header_bytes : end]) if state == _COMMITTED and in_range else b""
            terms = SlotTerms(expires, ordered, pinned, bool(flags & _NOT_ON_DISK))
            yield ArenaRecord(slot=slot, units=units if in_range else 0, header=header, terms=terms)

    def slot_units(self) -> dict[int, int]:
        """Every slot in use and its units: a copy, for checks."""
        return dict(self._slot_to_units)

    def check_integrity(self) -> None:
        """Free units + units of slots == all units; slots do not overlap; committed records belong to slots."""
        self._extents.check_integrity()
        used = sum(self._slot_to_units.values())
        assert used + self._extents.free_units == self.num_units
        end_before = 0
        for slot, units in sorted(self._slot_to_units.items()):
            assert slot >= end_before, "slots overlap"
            end_before = slot + units
        assert end_before <= self.num_units
        for record in self.records():
            assert self._slot_to_units.get(record.slot) == record.units, "a committed record has no slot"

    def remove(self) -> None:
        """Delete the file; mappings of it stay good until they are dropped."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)

    def close(self) -> None:
        """Unmap and give up the lock; the file stays and can be attached again."""
        self._words.release()
        super().close()
        if self._fd is not None:
            fcntl.flock(self._fd, fcntl.LOCK_UN)  # the mapping has a copy of the descriptor, which may outlive this
            os.close(self._fd)
            self._fd = None

    def _back(self, end_unit: int) -> bool:
        """Have pages behind every unit below `end_unit`. Without it, a full /dev/shm kills the writer by SIGBUS."""
        if self._fd is None or end_unit <= self._backed_units:
            return True
        start = self._data_at + self._backed_units * UNIT_BYTES
        try:
            os.posix_fallocate(self._fd, start, (end_unit - self._backed_units) * UNIT_BYTES)
        except OSError:
            return False
        self._backed_units = end_unit
        return True


def open_arena(path: Path, total_bytes: int) -> HostArena:
    """Open a node's arena as its one owner: attach what is there, or make a new one when none of that size is.

    Raises ConfigInvalid when another process owns it, or the directory has no room. The lock is an flock on the file
    and ends with the process, however that ends.
    """
    total_bytes -= total_bytes % UNIT_BYTES
    if total_bytes < 4 * UNIT_BYTES:
        raise ConfigInvalid("arena_mb", "is too small for one block")
    fd = _lock(path)
    try:
        if os.fstat(fd).st_size == total_bytes:
            with contextlib.suppress(StoreUnavailable):
                return HostArena(mmap.mmap(fd, total_bytes), name=path.name, fd=fd, path=path)
        fd = _replace(path, fd, total_bytes)
        return HostArena(mmap.mmap(fd, total_bytes), name=path.name, fd=fd, path=path)
    except BaseException:
        os.close(fd)
        raise


def remove_arena(arena_dir: str | Path, node_id: str) -> bool:
    """Delete a stopped node's arena file; False when there is none. Raises ConfigInvalid while a process owns it."""
    path = arena_path(arena_dir, node_id)
    if not path.exists():
        return False
    fd = _lock(path)
    try:
        _scratch_of(path).unlink(missing_ok=True)  # of a process that was killed while it made a new arena
        budgets_path(path).unlink(missing_ok=True)
        path.unlink(missing_ok=True)
    finally:
        os.close(fd)
    return True


def _lock(path: Path) -> int:
    """An exclusive lock on the file that the path names; a new empty file when there is none."""
    while True:
        try:
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        except OSError as error:
            raise ConfigInvalid("arena_dir", f"cannot open {path}: {error.strerror}") from error
        if os.fstat(fd).st_uid != os.geteuid():  # in /dev/shm anybody may make a file, and read what is put there
            os.close(fd)
            raise ConfigInvalid("arena_dir", f"{path} belongs to another user; remove it, or choose another node_id")
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(fd)
            raise ConfigInvalid("node_id", f"{path} is in use by another process") from None
        held = os.fstat(fd)
        with contextlib.suppress(FileNotFoundError):
            named = os.stat(path)
            if (held.st_dev, held.st_ino) == (named.st_dev, named.st_ino):
                return fd
        os.close(fd)  # replaced or removed between open and lock: the lock is on a file that nobody can find


def _replace(path: Path, old_fd: int, total_bytes: int) -> int:
    """Put a fresh arena at `path` by rename, so that whoever still maps the old one keeps valid memory."""
    file_system = os.statvfs(path.parent)
    reusable = os.fstat(old_fd).st_blocks * 512
    room = file_system.f_bavail * file_system.f_frsize + reusable
    if room < total_bytes:
        if os.fstat(old_fd).st_size == 0:
            path.unlink(missing_ok=True)  # made by taking the lock just now
        need, have = total_bytes >> 20, room >> 20
        raise ConfigInvalid(
            "arena_mb", f"{need} MiB do not fit: {path.parent} has {have} MiB free; lower arena_mb or enlarge it"
        )
    scratch = _scratch_of(path)
    scratch.unlink(missing_ok=True)
    fd = os.open(scratch, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(fd, total_bytes)
        os.posix_fallocate(fd, 0, _data_offset(_data_units(total_bytes)))
        with mmap.mmap(fd, total_bytes) as memory:
            _format(memory, total_bytes)
            struct.pack_into("<Q", memory, _INCARNATION_AT, _last_incarnation(old_fd, path.name))
        os.rename(scratch, path)
    except BaseException:
        os.close(fd)
        scratch.unlink(missing_ok=True)
        raise
    os.close(old_fd)
    return fd


def _scratch_of(path: Path) -> Path:
    return path.with_name(f"{path.name}.new")


def _last_incarnation(fd: int, name: str) -> int:
    """The incarnation of the arena that is being replaced, so that numbers rise across it; 0 when it is none."""
    size = os.fstat(fd).st_size
    if size < UNIT_BYTES:
        return 0
    try:
        old = ArenaView(mmap.mmap(fd, size), name)
    except StoreUnavailable:
        return 0
    incarnation = old.incarnation
    old.close()
    return incarnation


def _format(memory: mmap.mmap, total_bytes: int) -> None:
    """Write the superblock of an empty arena; the records are zero, which is free."""
    superblock = _SUPERBLOCK.pack(
        _MAGIC, ARENA_VERSION, UNIT_BYTES, total_bytes, _data_units(total_bytes), uuid.uuid4().bytes
    )
    assert _SUPERBLOCK.size + 8 <= _INCARNATION_AT
    memory[: _SUPERBLOCK.size + 8] = superblock + struct.pack("<Q", xxhash.xxh3_64_intdigest(superblock))


def _data_units(total_bytes: int) -> int:
    """Units left for slots: each costs its own bytes and a record; the superblock takes one, rounding at most one."""
    units = (total_bytes - UNIT_BYTES) // (UNIT_BYTES + _RECORD.size)
    while _data_offset(units) + units * UNIT_BYTES > total_bytes:
        units -= 1
    return units


def _data_offset(units: int) -> int:
    return UNIT_BYTES + -(-units * _RECORD.size // UNIT_BYTES) * UNIT_BYTES


def _record_offset(slot: int) -> int:
    return UNIT_BYTES + slot * _RECORD.size


def _first_word(units: int, header_bytes: int, terms: SlotTerms) -> int:
    """The word that says committed: written last, and as a whole."""
    flags = _NOT_ON_DISK if terms.not_on_disk else 0
    return units | header_bytes << 32 | flags << 48 | _COMMITTED << 56
