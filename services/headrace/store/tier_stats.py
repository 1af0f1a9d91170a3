"""A store node's books as rows for people, one per tier. Pure: reads, changes nothing."""

from headrace.blocks.host_arena import UNIT_BYTES, HostArena
from headrace.core.block import HolderId, Tier
from headrace.core.generation import HolderStat
from headrace.store.disk_blocks import DiskBlocks
from headrace.store.held_blocks import HeldBlocks
from headrace.store.node_counters import NodeCounters
from headrace.store.pins import Pins


def stat_host(
    arena: HostArena,
    blocks: HeldBlocks,
    counters: NodeCounters,
    *,
    holder: HolderId,
    incarnation: int,
    block_units: int,
    reserved_blocks: int,
    leased_blocks: int,
    pins: Pins,
) -> HolderStat:
    """The arena's row. Free room is counted in blocks of `block_units`, the size last written (0: none yet), so totals
    move when sizes mix. Passes over no blocks: it is made twice a second."""
    free = arena.fits(block_units) if block_units else 0
    return HolderStat(
        holder=holder,
        tier=Tier.HOST,
        incarnation=incarnation,
        total_blocks=free + len(blocks),
        free_blocks=free,
        committed_blocks=len(blocks) - reserved_blocks,
        reserved_blocks=reserved_blocks,
        leased_blocks=leased_blocks,
        block_bytes=block_units * UNIT_BYTES,
        lookups_tokens=counters.lookups_tokens,
        hits_tokens=counters.hits_tokens,
        evicted_blocks=counters.evicted_blocks,
        lookups=counters.lookups,
        read_bytes=counters.read_bytes,
        written_bytes=counters.committed_bytes,
        pinned_bytes=pins.pinned_bytes,
        pin_bytes_max=pins.bytes_max,
    )


def stat_disk(disk: DiskBlocks, *, holder: HolderId, incarnation: int) -> HolderStat:
    """The disk's row: blocks that wait to be written are reserved. A lookup counts in the arena's row only, since what
    the disk has is brought there first."""
    assert disk.tier is not None
    waiting = disk.waiting_blocks
    block_bytes = disk.largest_bytes
    room_bytes = max(0, disk.tier.bytes_max - disk.tier.used_bytes)
    free = min(room_bytes // block_bytes, max(0, disk.blocks_max - len(disk))) if block_bytes else 0
    return HolderStat(
        holder=holder,
        tier=Tier.DISK,
        incarnation=incarnation,
        total_blocks=free + len(disk),
        free_blocks=free,
        committed_blocks=len(disk) - waiting,
        reserved_blocks=waiting,
        leased_blocks=0,
        block_bytes=block_bytes,
        lookups_tokens=0,
        hits_tokens=0,
        evicted_blocks=disk.counters.evicted_blocks,
        read_bytes=disk.counters.promoted_bytes,
        written_bytes=disk.counters.demoted_bytes,
    )
