"""Find again what an arena holds after its node was stopped or killed.

Every slot that says it is committed is checked as if it came from outside: header, identity, checksum, overlap; then
only what is reachable from a chain's first block is kept. The rest is freed. After this nothing half written is visible
and no unit is lost, wherever the process died.
"""

from collections import Counter
from dataclasses import dataclass

from headrace.blocks.block_codec import decode_header, verify_identity
from headrace.blocks.host_arena import ArenaRecord, HostArena, SlotTerms, units_for
from headrace.core.block import BlockHash, BlockHeader, NamespaceId, payload_digest
from headrace.core.errors import BlockCorrupt


@dataclass(frozen=True, slots=True)
class RecoveredBlock:
    """A whole block found in the arena, its slot adopted."""

    slot: int
    header: BlockHeader
    header_bytes: bytes
    terms: SlotTerms


@dataclass(frozen=True, slots=True)
class RecoveredArena:
    """What recovery kept, parents before children, and what it freed, by reason."""

    blocks: tuple[RecoveredBlock, ...]
    freed: dict[str, int]


def recover_arena(arena: HostArena) -> RecoveredArena:
    """Check every committed slot, adopt those that are whole and prefix-closed, clear the records of the rest.

    Reads every payload once (several GB/s), so it belongs before serving, not beside it.
    """
    freed: Counter[str] = Counter()
    whole: list[RecoveredBlock] = []
    for record in list(arena.records()):
        try:
            whole.append(_check_record(arena, record))
        except BlockCorrupt as fault:
            freed[fault.why.split(":")[0]] += 1
            arena.clear_record(record.slot)
    kept: dict[tuple[NamespaceId, BlockHash], RecoveredBlock] = {}
    for block in sorted(whole, key=lambda b: b.header.position):
        header = block.header
        parent = kept.get((header.namespace, header.parent_hash))
        if header.position > 0 and (parent is None or parent.header.position != header.position - 1):
            reason = "its parent is gone"
        elif (header.namespace, header.block_hash) in kept:
            reason = "stored twice"
        elif not arena.adopt(block.slot, units_for(header.payload_bytes, len(block.header_bytes))):
            reason = "overlaps another slot"
        else:
            kept[(header.namespace, header.block_hash)] = block
            continue
        freed[reason] += 1
        arena.clear_record(block.slot)
    return RecoveredArena(blocks=tuple(kept.values()), freed=dict(freed))


def _check_record(arena: HostArena, record: ArenaRecord) -> RecoveredBlock:
    header = decode_header(record.header)
    verify_identity(header)
    if units_for(header.payload_bytes, len(record.header)) != record.units:
        raise BlockCorrupt(header.block_hash, "slot size does not match the header")
    with arena.payload(record.slot, header.payload_bytes) as payload:
        if payload_digest(payload) != header.payload_xxh3:
            raise BlockCorrupt(header.block_hash, "payload checksum does not match")
    return RecoveredBlock(slot=record.slot, header=header, header_bytes=record.header, terms=record.terms)
