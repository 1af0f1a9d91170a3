"""A slot for a new block: by what rules a block is admitted, and which ones leave so that it fits.

Knows the arena's account and the eviction order. What leaving takes (the index, the disk, the record) is the node's:
it hands that in as `remove`.
"""

from collections.abc import Callable

from headrace.blocks.host_arena import HostArena, units_for
from headrace.core.block import BlockHeader
from headrace.core.limits import CHAIN_SHARE_MAX
from headrace.store.disk_blocks import DiskBlocks
from headrace.store.held_blocks import HeldBlock, HeldBlocks
from headrace.store.node_counters import NodeCounters


class RoomMaker:
    """Admission and eviction over one arena. `remove(block)` takes a block out of the node's books, slot included."""

    def __init__(
        self,
        arena: HostArena,
        blocks: HeldBlocks,
        disk: DiskBlocks,
        counters: NodeCounters,
        *,
        remove: Callable[[HeldBlock], None],
    ) -> None:
        self._arena = arena
        self._blocks = blocks
        self._disk = disk
        self._counters = counters
        self._remove = remove

    def slot_for(self, header: BlockHeader, header_bytes: bytes) -> int | None:
        """A slot for a block that is not held, when its parent is and its chain takes no more than its share."""
        units = units_for(header.payload_bytes, len(header_bytes))
        fair = (header.position + 1) * units <= CHAIN_SHARE_MAX * self._arena.num_units
        occupied = self._blocks.occupied(header.namespace, header.block_hash)
        if occupied or not fair or not self._blocks.has_parent_for(header):
            return None
        return self._make_room(units, header)

    def _make_room(self, units: int, header: BlockHeader) -> int | None:
        """A slot of that size, evicting the policy's choice of leaves one by one until one fits; None when none can.

        One eviction makes room for one block of the same size. The new block's parent stays, and thereby its chain.
        """
        parent = self._blocks.get(header.namespace, header.parent_hash) if header.position > 0 else None
        while (slot := self._arena.allocate(units)) is None:
            victim = self._blocks.oldest_leaf(keep=parent)
            if victim is None:
                return None
            self._evict(victim)
        return slot

    def _evict(self, victim: HeldBlock) -> None:
        if victim.visible:
            self._disk.demote(victim, self._arena.payload(victim.slot, victim.header.payload_bytes))
        self._remove(victim)
        self._counters.evicted_for_room += 1
