"""How long blocks may stay: what uses and operators' orders make of the moments that a block carries.

A use moves the end of a block's time, and that of all before it, to the longest that anybody asked for; so no block
outlasts what it stands on. An order is a moment that no use moves. Both stand in the arena's records, on the wall
clock, and outlive the process. Knows nothing of how a block leaves.
"""

from headrace.blocks.host_arena import HostArena, SlotTerms
from headrace.core.block import BlockHash
from headrace.core.clock import Clock
from headrace.core.retention import Retention
from headrace.store.held_blocks import HeldBlock, HeldBlocks, SlotState
from headrace.store.pins import chain_of


class BlockTerms:
    """Changes `HeldBlock`'s moments and its record's together."""

    def __init__(self, arena: HostArena, blocks: HeldBlocks, clock: Clock) -> None:
        self._arena = arena
        self._blocks = blocks
        self._clock = clock
        self._ordered = False  # whether any order was ever given here: most nodes have none to look for

    def begin(self, block: HeldBlock, retention: Retention) -> None:
        """Terms of a new block, before it is committed."""
        block.expires_unix_ms = self._end_of(retention)
        block.not_on_disk = not retention.on_disk

    def restore(self, block: HeldBlock, terms: SlotTerms) -> None:
        """Take up what was found in the arena's record."""
        block.expires_unix_ms, block.ordered_unix_ms = terms.expires_unix_ms, terms.ordered_unix_ms
        block.not_on_disk = terms.not_on_disk
        if terms.ordered_unix_ms:
            self._ordered = True
            self._blocks.expect_order(block)

    def use(self, block: HeldBlock, retention: Retention) -> None:
        """A request used a block and all before it. O(1) where it asks for no more than they have."""
        self._raise(block, self._end_of(retention), on_disk=retention.on_disk)

    def settle(self, block: HeldBlock) -> None:
        """A block became readable: what it stands on stays at least as long."""
        if block.parent is not None:
            self._raise(block.parent, block.expires_unix_ms, on_disk=not block.not_on_disk)

    def order(self, block: HeldBlock, unix_ms: int) -> None:
        """Have a block and all that stand on it go at a moment; 0 takes an earlier order back."""
        block.ordered_unix_ms = unix_ms
        self._ordered = True
        self._write(block)
        self._blocks.expect(block)

    def ends_ms(self, block: HeldBlock) -> tuple[tuple[BlockHash, int], ...]:
        """Orders that are to come on a block and on all before it, with the milliseconds until then."""
        now_unix_ms = self._clock.unix_ms()
        return tuple(
            (held.header.block_hash, held.ordered_unix_ms - now_unix_ms)
            for held in (chain_of(block) if self._ordered else ())
            if held.ordered_unix_ms > now_unix_ms
        )

    def _end_of(self, retention: Retention) -> int:
        """When the time of what is used now would be over; 0: never."""
        return 0 if retention.ttl_s is None else self._clock.unix_ms() + int(retention.ttl_s * 1_000)

    def _raise(self, block: HeldBlock, until_unix_ms: int, *, on_disk: bool) -> None:
        """Up the chain, to the first block that has as much: all before that have as much, too."""
        walked: HeldBlock | None = block
        while walked is not None:
            longer = walked.expires_unix_ms and (not until_unix_ms or until_unix_ms > walked.expires_unix_ms)
            wider = walked.not_on_disk and on_disk
            if not longer and not wider:
                return
            if longer:
                walked.expires_unix_ms = until_unix_ms
                if walked.state is SlotState.COMMITTED:
                    self._arena.set_expiry(walked.slot, until_unix_ms)
            if wider:
                walked.not_on_disk = False
                self._write(walked)
            walked = walked.parent

    def _write(self, block: HeldBlock) -> None:
        if block.state is SlotState.COMMITTED:  # one that is reserved has no record yet
            self._arena.set_terms(block.slot, block.terms)
