"""What must hold in a store node between any two steps. Asserts only; for tests, simulations and `doctor`."""

from collections.abc import Mapping, Sequence

from headrace.blocks.host_arena import UNIT_BYTES, HostArena
from headrace.store.held_blocks import HeldBlock, HeldBlocks, SlotState


def check_books(
    arena: HostArena,
    blocks: HeldBlocks,
    *,
    leased: Sequence[Sequence[HeldBlock]],
    reserved: Mapping[str, HeldBlock],
) -> None:
    """Free + committed + reserved == total, in units; leases and reservations refer to live blocks; links hold.

    leased: the blocks of each lease.  reserved: reservation id -> block.
    """
    arena.check_integrity()
    blocks.check_integrity()
    slots = {block.slot: block.slot_bytes // UNIT_BYTES for block in blocks}
    assert slots == arena.slot_units(), "slots in use are not exactly the blocks held"
    assert sum(b.slot_bytes for b in blocks) + arena.free_bytes == arena.data_bytes
    recorded = {record.slot: record.terms for record in arena.records()}
    committed = {b.slot: b.terms for b in blocks if b.state is SlotState.COMMITTED}
    assert recorded.keys() == committed.keys(), "the arena's records are not exactly the committed blocks"
    assert recorded == committed, "the arena's records say other terms than the books"
    lease_counts: dict[int, int] = {}
    for lease in leased:
        for block in lease:
            lease_counts[id(block)] = lease_counts.get(id(block), 0) + 1
    for block in blocks:
        assert block.leases == lease_counts.pop(id(block), 0), "lease counts do not match leases"
        is_reserved = block.state is SlotState.RESERVED
        assert is_reserved == (block.reservation_id in reserved), "a reserved block without its reservation"
        assert block.state is not SlotState.DRAINING or block.leases or block.children, "a drained slot was kept"
    assert not lease_counts, "a lease refers to a block that is gone"
    for reservation_id, block in reserved.items():
        assert block.reservation_id == reservation_id
        assert blocks.get(*block.key) is block
