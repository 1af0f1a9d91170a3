"""How blocks leave a store node's arena: in which order, and what leaves with them.

Keeps the promise of `store_node.py`: deregistered first, then the record is cleared, then the units are given away.
What may not be on disk takes its copy there along; what loses its last copy takes along what stands on it there.
Decides nothing about who leaves, or why.
"""

from headrace.blocks.host_arena import HostArena
from headrace.store.block_changes import BlockChanges
from headrace.store.disk_blocks import DiskBlocks
from headrace.store.held_blocks import HeldBlock, HeldBlocks, SlotState
from headrace.store.held_claims import HeldClaims
from headrace.store.node_counters import NodeCounters
from headrace.store.pins import Pins


class Departures:
    """The ways out of one arena. Reservations of what leaves are struck off the node's `claims`."""

    def __init__(
        self,
        arena: HostArena,
        blocks: HeldBlocks,
        disk: DiskBlocks,
        claims: HeldClaims,
        *,
        changes: BlockChanges,
        pins: Pins,
        counters: NodeCounters,
    ) -> None:
        self._arena = arena
        self._blocks = blocks
        self._disk = disk
        self._changes = changes
        self._pins = pins
        self._counters = counters
        self._reservations = claims.reservations

    def remove(self, block: HeldBlock) -> None:
        """A block that can leave leaves: deregister, clear the record, free."""
        assert not block.pin_refs, "a pinned block left"
        if block.visible:
            self._deregister(block)
        self._blocks.remove(block)
        self._arena.free(block.slot)

    def drop_reserved(self, block: HeldBlock) -> None:
        """End a reservation. What stands on it (reserved, or committed but not yet visible) has lost its prefix."""
        family = self._blocks.with_descendants(block)
        for member in reversed(family):
            self._reservations.pop(member.reservation_id, None)
            self.remove(member)
        self._counters.dropped_orphans += len(family) - 1

    def drain(self, block: HeldBlock) -> None:
        """Take a broken block and its descendants out of sight now, and out of memory as their leases end."""
        for member in reversed(self._blocks.with_descendants(block)):
            self._hide(member)

    def drain_unpinned(self, root: HeldBlock, *, blocks_max: int) -> int:
        """The same, of a block whose ordered moment has come, tails first and no more than so many at once; what a pin
        keeps stays. Copies on disk go as soon as the arena has none before them. Returns how many blocks were hidden;
        fewer than `blocks_max`: all that can."""
        hidden = 0
        path = [(root, iter(list(root.children.values())))]
        while path and hidden < blocks_max:
            member, children = path[-1]
            child = next(children, None)
            if child is not None:
                if child.state is not SlotState.DRAINING:
                    path.append((child, iter(list(child.children.values()))))
                continue
            path.pop()
            if member.pin_refs:
                self._disk.orphan(member.key)
            else:
                self._hide(member)
                hidden += 1
        return hidden

    def free_if_drained(self, block: HeldBlock | None) -> None:
        """Free a draining block without readers or children, then its parent if that waited for it."""
        while block is not None and block.state is SlotState.DRAINING and not block.leases and not block.children:
            parent = block.parent
            self.remove(block)
            block = parent

    def _hide(self, member: HeldBlock) -> None:
        """Nobody finds or leases it from now on; it is freed when nobody reads it and nothing stands on it."""
        if member.state is SlotState.RESERVED:
            self._reservations.pop(member.reservation_id, None)
            self.remove(member)
            return
        if member.pinned_until_unix_ms:
            self._pins.unpin(member)
            self._counters.dropped_pins += 1
        if member.visible:
            self._deregister(member)
            member.visible = False
        self._arena.clear_record(member.slot)
        member.state = SlotState.DRAINING
        self.free_if_drained(member)

    def _deregister(self, block: HeldBlock) -> None:
        """A block is about to be unreadable in the arena; unless the disk has it, it is deregistered."""
        if not block.may_go_to_disk:
            self._drop_copy(block)
        if self._disk.get(block.key) is None:
            self._disk.orphan(block.key)
            self._changes.removed(*block.key)

    def _drop_copy(self, block: HeldBlock) -> None:
        """Forget a copy on disk, which is a second one as long as the arena's can be read."""
        copy = self._disk.get(block.key)
        if copy is not None:
            self._disk.remove([copy])
