"""A payload of two parts, each with a checksum of its own, so that the first can be read without the second.

    | wide part | check | near part | check |      a check is the part's xxh3-64, tied to the block's hash

The header's checksum is of all of it, and is what store nodes look at. A reader may take the wide part alone, and must
still know that it is this block's and whole: so a check is mixed with the block's hash, and what a part gives when it
is mixed with its check again says whose it is. Owns that arithmetic; where parts come from is the pools'.
"""

from headrace.core.block import PART_CHECK_BYTES, BlockHash, KvLayout, payload_digest
from headrace.core.ports import PrefixPool


class TwoPartPool:
    """A PrefixPool of blocks of two parts over one pool for each. Thread-safe as they are.

    Block ids are `PartIds`' of `num_wide`: one that has no near part takes and gives the wide part only.
    """

    def __init__(self, layout: KvLayout, wide: PrefixPool, near: PrefixPool, *, num_wide: int) -> None:
        assert layout.near_layers
        self.layout = layout
        self._wide = wide
        self._near = near
        self._num_wide = num_wide

    def write_block(self, block_id: int, payload: memoryview) -> int:
        """Copy a payload, or its wide part, into a block the caller owns; a payload's rest is not looked at where the
        block has no near part. Returns `block_word` of the block that all of it is of; another number otherwise."""
        near, wide = divmod(block_id, self._num_wide)
        wide_payload, rest = payload[: self.layout.wide_bytes], payload[self.layout.wide_bytes :]
        word = self._write_part(self._wide, wide, wide_payload)
        if near and self._write_part(self._near, near - 1, rest) != word:
            return ~word
        return word

    def read_block(self, block_id: int, out: memoryview) -> int:
        """Copy a block of both parts out, its checks not tied to it yet (`tie_parts`); returns xxh3-64 of it."""
        near, wide = divmod(block_id, self._num_wide)
        assert near, "a block without its near part is read"
        assert out.nbytes == self.layout.block_bytes
        self._read_part(self._wide, wide, out[: self.layout.wide_bytes])
        self._read_part(self._near, near - 1, out[self.layout.wide_bytes :])
        return payload_digest(out)

    def _write_part(self, pool: PrefixPool, part_id: int, payload: memoryview) -> int:
        numbers, check = payload[:-PART_CHECK_BYTES], payload[-PART_CHECK_BYTES:]
        return pool.write_block(part_id, numbers) ^ int.from_bytes(check, "little")

    def _read_part(self, pool: PrefixPool, part_id: int, out: memoryview) -> None:
        digest = pool.read_block(part_id, out[:-PART_CHECK_BYTES])
        out[-PART_CHECK_BYTES:] = digest.to_bytes(PART_CHECK_BYTES, "little")


def block_word(block_hash: BlockHash) -> int:
    """What a part of this block gives with its check: the hash's first 8 bytes."""
    return int.from_bytes(block_hash[:PART_CHECK_BYTES], "little")


def tie_parts(payload: memoryview, layout: KvLayout, block_hash: BlockHash) -> int:
    """Make the checks of a payload that `read_block` gave this block's, in place; returns the payload's xxh3-64."""
    for end in (layout.wide_bytes, layout.block_bytes):
        check = payload[end - PART_CHECK_BYTES : end]
        mixed = int.from_bytes(check, "little") ^ block_word(block_hash)
        check[:] = mixed.to_bytes(PART_CHECK_BYTES, "little")
    return payload_digest(payload)
