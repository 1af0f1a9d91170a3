"""Header bytes of a whole run to headers, without parsing again what is the same in all of them.

The headers of a run differ in hash, parent, position, tokens, checksum and time; everything else is spelled alike. So
the first one is parsed strictly and becomes the mould of those after it: one that is as long and has the same bytes in
all other places is read field by field from fixed offsets, its own checksum included, and any other one is parsed
strictly again. What is accepted is exactly what `decode_header` accepts. Owns no rule of the format.
"""

import struct
from collections.abc import Iterable

from headrace.blocks.block_codec import decode_header, pack_fields, seal
from headrace.core.block import BlockHash, BlockHeader

_SEAL_BYTES = 8
# How an integer is spelled, by its packed length: the struct letter behind the tag, and the values spelled so.
_LENGTH_TO_SPELLING = {
    1: ("B", range(0, 1 << 7)),  # no tag
    2: ("B", range(1 << 7, 1 << 8)),
    3: ("H", range(1 << 8, 1 << 16)),
    5: ("I", range(1 << 16, 1 << 32)),
    9: ("Q", range(1 << 32, 1 << 64)),
}


def decode_headers(spelled: Iterable[bytes]) -> tuple[BlockHeader, ...]:
    """`decode_header` for each, in order. Raises BlockCorrupt for the first that is none."""
    headers: list[BlockHeader] = []
    mould: _Mould | None = None
    for data in spelled:
        header = None if mould is None else mould.read(data)
        if header is None:
            header = decode_header(data)
            mould = _Mould(header, data)
        headers.append(header)
    return tuple(headers)


class _Mould:
    """Where the fields of one header lie, and the bytes around those that may differ."""

    def __init__(self, header: BlockHeader, data: bytes) -> None:
        packed = pack_fields(header)
        head, (block_hash, parent, position, tokens) = packed[:3], packed[3:7]
        middle, digest, producer, created, tail = packed[7:9], packed[9], packed[10], packed[11], packed[12:]
        hash_bytes, parent_bytes, tokens_bytes = (
            len(header.block_hash),
            len(header.parent_hash),
            4 * len(header.token_ids),
        )
        at_position, self._positions = _LENGTH_TO_SPELLING[len(position)]
        if hash_bytes != parent_bytes:  # only block 0 has a parent of another length: the namespace's root
            self._positions = range(1)
        elif parent_bytes != 16:
            self._positions = range(max(1, self._positions.start), self._positions.stop)
        at_created, self._created = _LENGTH_TO_SPELLING[len(created)]
        # Bytes that must be equal (s) and fields, in turn; the first byte is the array's own tag.
        self._struct = struct.Struct(
            f">{1 + _length(head) + len(block_hash) - hash_bytes}s{hash_bytes}s"
            f"{len(parent) - parent_bytes}s{parent_bytes}s"
            f"{min(1, len(position) - 1)}s{at_position}"
            f"{len(tokens) - tokens_bytes}s{tokens_bytes}s"
            f"{_length(middle) + len(digest) - 8}s8s"
            f"{len(producer) + min(1, len(created) - 1)}s{at_created}"
            f"{_length(tail) - _SEAL_BYTES}s{_SEAL_BYTES}s"
        )
        self._tokens = struct.Struct(f"<{len(header.token_ids)}I")
        self._equal = self._struct.unpack(data)[::2]
        self._header = header

    def read(self, data: bytes) -> BlockHeader | None:
        """The header that these bytes spell; None when they are not of this mould."""
        if len(data) != self._struct.size or seal(data[:-_SEAL_BYTES]) != data:
            return None
        found = self._struct.unpack(data)
        position, created_unix_ms = found[5], found[11]
        if found[::2] != self._equal or position not in self._positions or created_unix_ms not in self._created:
            return None
        like = self._header
        return BlockHeader(
            namespace=like.namespace,
            block_hash=BlockHash(found[1]),
            parent_hash=BlockHash(found[3]),
            position=position,
            token_ids=self._tokens.unpack(found[7]),
            layout=like.layout,
            payload_bytes=like.payload_bytes,
            payload_xxh3=int.from_bytes(found[9], "little"),
            producer=like.producer,
            created_unix_ms=created_unix_ms,
            narrowed_from=like.narrowed_from,
            format_version=like.format_version,
        )


def _length(fields: list[bytes]) -> int:
    return sum(map(len, fields))
