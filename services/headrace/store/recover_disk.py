"""Find again which blocks a node's disk holds after it was stopped or killed.

Reads record prefixes and headers, not payloads: those are checked when they are read. Every header is treated as if it
came from outside. What several copies mean, and which blocks still hang together, is for `DiskBlocks` to say.
"""

from collections import Counter
from dataclasses import dataclass

from headrace.blocks.block_codec import decode_header, verify_identity
from headrace.blocks.disk_tier import DiskRecord, DiskTier
from headrace.core.block import BlockHeader
from headrace.core.errors import BlockCorrupt, ConfigInvalid


@dataclass(frozen=True, slots=True)
class RecoveredDisk:
    """A disk tier, the records in it whose headers hold, oldest first, and what was given up, by reason."""

    tier: DiskTier
    found: tuple[tuple[DiskRecord, BlockHeader], ...]
    broken: tuple[DiskRecord, ...]
    freed: dict[str, int]


def recover_disk(tier: DiskTier) -> RecoveredDisk:
    """List a tier's records once, after `open_disk`; cuts what a killed writer left behind the last whole one.

    Raises ConfigInvalid when its files cannot be read or cut: what a node cannot read it must not write beside.
    """
    found: list[tuple[DiskRecord, BlockHeader]] = []
    broken: list[DiskRecord] = []
    freed: Counter[str] = Counter()
    try:
        records = tier.find_records()
    except OSError as error:
        named = error.filename or tier.directory
        raise ConfigInvalid("disk_dir", f"cannot use what lies there, {named}: {error.strerror}") from error
    for record, header_bytes in records:
        try:
            header = decode_header(header_bytes)
            verify_identity(header)
            if header.payload_bytes != record.payload_bytes:
                raise BlockCorrupt(header.block_hash, "record size does not match the header")
            found.append((record, header))
        except BlockCorrupt as fault:
            broken.append(record)
            freed[fault.why.split(":")[0]] += 1
    return RecoveredDisk(tier=tier, found=tuple(found), broken=tuple(broken), freed=dict(freed))
