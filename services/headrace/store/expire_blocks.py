"""Take out of a store node what has outlived its time, in bounded steps."""

from headrace.core.store_limits import BACKGROUND_REMOVALS_MAX
from headrace.store.departures import Departures
from headrace.store.held_blocks import HeldBlocks


def expire_blocks(blocks: HeldBlocks, departures: Departures, *, now_unix_ms: int) -> int:
    """One step: at most BACKGROUND_REMOVALS_MAX blocks leave; returns how many. Call it again while `blocks.is_due`.

    Where nobody used a block for its time to live, it goes alone, as a leaf; one that is read, pinned or stood on waits
    until it is offered again. Where an ordered moment has come, the whole subtree goes, but for what a pin keeps: out
    of sight at once, so that its readers are the last.
    """
    gone = 0
    while gone < BACKGROUND_REMOVALS_MAX and (block := blocks.next_due(now_unix_ms)) is not None:
        if 0 < block.ordered_unix_ms <= now_unix_ms:
            blocks_max = BACKGROUND_REMOVALS_MAX - gone
            hidden = departures.drain_unpinned(block, blocks_max=blocks_max)
            gone += hidden
            if hidden == blocks_max and block.visible:
                blocks.expect(block)  # there may be more of it
        elif block.can_leave:
            departures.remove(block)
            gone += 1
        elif block.ordered_unix_ms:
            blocks.expect_order(block)
    return gone
