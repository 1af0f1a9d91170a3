"""The file of `cache export`: blocks as nodes store them, portable between systems. Version 1, docs/cli.md.

    "HREXPORT" | u32 version | record ... | end | xxh3-64 of all before
    record: u8 1 | u32 header bytes | u32 payload bytes | header | payload
    first:  u8 0 | u32 JSON bytes  | u32 0 | {"model", "namespace_fields"}        end: u8 2 | u32 records | u32 0

Integers are little-endian. Nothing is trusted: the checksum is compared before the first block is handed out, and
nodes check each header and payload again.
"""

import json
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from headrace.client import StoredBlock
from headrace.core.errors import InvalidRequest
from headrace.core.limits import GRPC_MESSAGE_BYTES_MAX, HEADER_BYTES_MAX

MAGIC = b"HREXPORT" + struct.pack("<I", 1)
_RECORD = struct.Struct("<BII")
_HEAD, _BLOCK, _END = 0, 1, 2


class ExportWriter:
    """Writes one file; `close` makes it whole. A file that was not closed is refused by readers."""

    def __init__(self, file: BinaryIO, *, model: str, namespace_fields: dict[str, str]) -> None:
        self._file = file
        self._digest = xxhash.xxh3_64()
        self._num_blocks = 0
        head = json.dumps({"model": model, "namespace_fields": namespace_fields}).encode()
        self._write(MAGIC + _RECORD.pack(_HEAD, len(head), 0) + head)

    def add(self, block: StoredBlock) -> None:
        """Append one block; parents come before children."""
        self._write(_RECORD.pack(_BLOCK, len(block.header), len(block.payload)))
        self._write(block.header)
        self._write(block.payload)
        self._num_blocks += 1

    def close(self) -> None:
        """Append the end and the checksum."""
        self._write(_RECORD.pack(_END, self._num_blocks, 0))
        self._file.write(self._digest.digest())

    def _write(self, data: bytes) -> None:
        self._digest.update(data)
        self._file.write(data)


@dataclass(frozen=True, slots=True)
class ExportHead:
    """What a file says of itself."""

    model: str
    namespace_fields: dict[str, str]
    num_blocks: int


def check_export(path: Path) -> ExportHead:
    """Read all of a file and compare its checksum. Raises InvalidRequest for what is not a whole file of version 1."""
    digest, num_blocks, head = xxhash.xxh3_64(), 0, None
    with path.open("rb") as file:
        _expect(file.read(len(MAGIC)) == MAGIC, path, "it is not an export of version 1")
        digest.update(MAGIC)
        while True:
            frame = file.read(_RECORD.size)
            _expect(len(frame) == _RECORD.size, path, "it ends too early")
            digest.update(frame)
            kind, first, second = _RECORD.unpack(frame)
            if kind == _END:
                _expect(first == num_blocks and head is not None, path, "its number of blocks is another")
                _expect(file.read(8) == digest.digest() and not file.read(1), path, "its checksum does not match")
                break
            _expect(kind in (_HEAD, _BLOCK) and first <= GRPC_MESSAGE_BYTES_MAX, path, "a record is not understood")
            _expect(second <= GRPC_MESSAGE_BYTES_MAX, path, "a record is too large")
            data = file.read(first + second)
            _expect(len(data) == first + second, path, "it ends too early")
            digest.update(data)
            if kind == _HEAD:
                head = _parse_head(data, path)
            else:
                _expect(head is not None and first <= HEADER_BYTES_MAX, path, "a record is not understood")
                num_blocks += 1
    assert head is not None
    return ExportHead(head["model"], head["namespace_fields"], num_blocks)


def read_export(path: Path, head: ExportHead) -> Iterator[StoredBlock]:
    """The blocks of a file that `check_export` has accepted."""
    with path.open("rb") as file:
        file.seek(len(MAGIC))
        while True:
            kind, first, second = _RECORD.unpack(file.read(_RECORD.size))
            if kind == _END:
                return
            header, payload = file.read(first), file.read(second)
            if kind == _BLOCK:
                yield StoredBlock(header, payload, head.namespace_fields)


def _parse_head(data: bytes, path: Path) -> dict[str, Any]:
    try:
        head = json.loads(data)
    except (ValueError, RecursionError):
        head = None
    whole = isinstance(head, dict) and isinstance(head.get("model"), str)
    whole = whole and isinstance(head.get("namespace_fields"), dict)
    _expect(whole, path, "its head is not understood")
    return dict(head)


def _expect(holds: bool, path: Path, why: str) -> None:
    if not holds:
        raise InvalidRequest(f"{path.name} is refused: {why}; nothing was stored", param="file")
