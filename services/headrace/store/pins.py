"""Which blocks an operator pinned, until when, and what that takes of the arena.

A pin is a mark on one block. Only leaves ever leave a node, so all before it stay as well: what pins take is the bytes
of the union of all pinned blocks' chains, and each block knows how many pinned blocks it holds up (`pin_refs`). The
marks stand in the arena's records and outlive the process. Knows nothing of selectors, of reasons or of what else would
have a block leave.
"""

from collections.abc import Iterable

from headrace.blocks.host_arena import HostArena, SlotTerms
from headrace.core.limits import PROTECTED_SHARE_MAX
from headrace.core.retention import NO_END_UNIX_MS
from headrace.store.held_blocks import BlockKey, HeldBlock, HeldBlocks


class Pins:
    """All pins of one node. `bytes_max` is what they may take together, `kept_bytes_max` what they and accounts'
    protected minima may; whoever pins or protects asks first."""

    def __init__(self, arena: HostArena, blocks: HeldBlocks, *, share: float) -> None:
        """share: of the arena's data bytes."""
        self._arena = arena
        self._blocks = blocks
        self.share = share
        self.bytes_max = int(share * arena.data_bytes)
        self.kept_bytes_max = int(max(share, PROTECTED_SHARE_MAX) * arena.data_bytes)
        self.pinned_bytes = 0
        self._pinned: dict[BlockKey, HeldBlock] = {}
        self._next_end_unix_ms = NO_END_UNIX_MS

    def pin(self, block: HeldBlock, until_unix_ms: int) -> None:
        """Mark a visible block, or give its mark another end (NO_END_UNIX_MS: none)."""
        assert block.visible, "a block that nobody can read was pinned"
        assert until_unix_ms > 0
        self._set_mark(block, until_unix_ms)
        self._next_end_unix_ms = min(self._next_end_unix_ms, until_unix_ms)
        if block.key in self._pinned:
            return
        self._pinned[block.key] = block
        for held in chain_of(block):
            if held.pin_refs == 0:
                self.pinned_bytes += held.slot_bytes
                self._blocks.accounts.pinned(held)
            held.pin_refs += 1

    def restore(self, block: HeldBlock, terms: SlotTerms) -> None:
        """Take up a mark if one was found in the arena's record, whatever the share is now."""
        if terms.pinned_until_unix_ms:
            self.pin(block, terms.pinned_until_unix_ms)

    def unpin(self, block: HeldBlock) -> list[HeldBlock]:
        """Take a mark back; returns the blocks that no pin keeps any more, tails first. What can leave is offered."""
        del self._pinned[block.key]
        self._set_mark(block, 0)
        freed = []
        for held in chain_of(block):
            held.pin_refs -= 1
            assert held.pin_refs >= 0, "a pin was taken back twice"
            if held.pin_refs == 0:
                self.pinned_bytes -= held.slot_bytes
                self._blocks.accounts.unpinned(held)
                freed.append(held)
            if held.ordered_unix_ms:
                self._blocks.expect(held)  # an order that the pin kept from being carried out
        self._blocks.offer(block)
        return freed

    def expire(self, now_unix_ms: int) -> int:
        """Take back the marks whose end has come; returns how many."""
        if now_unix_ms < self._next_end_unix_ms:
            return 0
        over = [block for block in self._pinned.values() if block.pinned_until_unix_ms <= now_unix_ms]
        for block in over:
            self.unpin(block)
        ends = (block.pinned_until_unix_ms for block in self._pinned.values())
        self._next_end_unix_ms = min(ends, default=NO_END_UNIX_MS)
        return len(over)

    def beyond(self, blocks: Iterable[HeldBlock]) -> list[HeldBlock]:
        """What pins would keep with these pinned too and do not keep now."""
        kept = {held.key: held for block in blocks for held in chain_of(block)}
        return [held for held in kept.values() if held.pin_refs == 0]

    def check_integrity(self) -> None:
        """References and bytes, counted anew from the marks, are those kept, and the records say the same."""
        refs: dict[BlockKey, int] = {}
        for key, block in self._pinned.items():
            assert self._blocks.get(*key) is block, "a pinned block is gone"
            assert block.visible
            assert block.pinned_until_unix_ms >= self._next_end_unix_ms, "the end of a pin would be missed"
            for held in chain_of(block):
                refs[held.key] = refs.get(held.key, 0) + 1
        pinned_bytes = 0
        for held in self._blocks:
            assert held.pin_refs == refs.get(held.key, 0), "pins do not match what they hold up"
            assert (held.pinned_until_unix_ms > 0) == (held.key in self._pinned), "a mark that is not a pin"
            pinned_bytes += held.slot_bytes if held.pin_refs else 0
        assert pinned_bytes == self.pinned_bytes, "pinned bytes are not those of the pinned chains"

    def _set_mark(self, block: HeldBlock, until_unix_ms: int) -> None:
        block.pinned_until_unix_ms = until_unix_ms
        self._arena.set_terms(block.slot, block.terms)


def chain_of(block: HeldBlock) -> list[HeldBlock]:
    """A block and all before it, the first one last."""
    chain = [block]
    while (above := chain[-1].parent) is not None:
        chain.append(above)
    return chain
