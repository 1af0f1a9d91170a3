"""Which of many holders has which blocks, and how deep each one's run of a chain goes, in a handful of look-ups.

Holders are small numbers; a block's holders are one integer with a bit for each. What a holder has is closed under
prefixes (eviction takes tails first), so along a chain the sets only shrink, and where they do is found by bisection:
O(levels x log n) look-ups for a chain of n blocks whose set changes at few places. A set that is out of date may be
wrong in any way; a depth is a hint, which the node that is asked confirms or not.
"""

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Key = TypeVar("Key", bound=Hashable)

# From this many bits on, numpy spreads a set faster than a loop over its bits.
_SPREAD_BITS = 24


class PrefixMap(Generic[Key]):
    """Blocks and their holders. Adding what is there and removing what is not are harmless."""

    def __init__(self) -> None:
        self._block_to_holders: dict[Key, int] = {}

    def __len__(self) -> int:
        return len(self._block_to_holders)

    def add(self, holder: int, blocks: Iterable[Key]) -> None:
        """The holder has these blocks now."""
        bit, holders = 1 << holder, self._block_to_holders
        for block in blocks:
            holders[block] = holders.get(block, 0) | bit

    def remove(self, holder: int, blocks: Iterable[Key]) -> None:
        """The holder does not have them any more."""
        keep, holders = ~(1 << holder), self._block_to_holders
        for block in blocks:
            left = holders.get(block, 0) & keep
            if left:
                holders[block] = left
            else:
                holders.pop(block, None)

    def drop_holder(self, holder: int) -> None:
        """The holder has nothing any more. Walks all blocks."""
        self.remove(holder, list(self.blocks_of(holder)))

    def blocks_of(self, holder: int) -> Iterator[Key]:
        """Every block of one holder. Walks all blocks."""
        bit = 1 << holder
        return (block for block, holders in self._block_to_holders.items() if holders & bit)

    def blocks(self) -> list[Key]:
        """All blocks, in a list of its own that may be walked while the map changes."""
        return list(self._block_to_holders)

    def depths(self, chain: Sequence[Key], num_holders: int) -> NDArray[np.int32]:
        """Leading blocks of the chain that each holder has: [num_holders], 0 for those that lack the first."""
        found = np.zeros(num_holders, dtype=np.int32)
        for depth, holders in self.levels(chain):
            _spread(found, holders, depth)
        return found

    def levels(self, chain: Sequence[Key]) -> Iterator[tuple[int, int]]:
        """(depth, set of holders whose run ends exactly there), for depth > 0, in no particular order."""
        if not chain:
            return
        get = self._block_to_holders.get
        first, last = get(chain[0], 0), get(chain[-1], 0)
        if first & last:
            yield len(chain), first & last
        # An entry: the set at block `low` is `at_low`, at `high` it is `at_high`; where do they part?
        between = [(0, len(chain) - 1, first, first & last)]
        while between:
            low, high, at_low, at_high = between.pop()
            if at_low == at_high:
                continue
            if high - low == 1:
                yield high, at_low & ~at_high
                continue
            middle = (low + high) // 2
            at_middle = get(chain[middle], 0) & at_low
            between.append((low, middle, at_low, at_middle))
            between.append((middle, high, at_middle, at_high & at_middle))

    def check_integrity(self) -> None:
        """No block is kept without a holder."""
        assert all(self._block_to_holders.values())


def _spread(found: NDArray[np.int32], holders: int, depth: int) -> None:
    """Set `found[i] = depth` for every bit i."""
    if holders.bit_count() >= _SPREAD_BITS:
        packed = np.frombuffer(holders.to_bytes(-(-len(found) // 8), "little"), dtype=np.uint8)
        found[np.unpackbits(packed, bitorder="little")[: len(found)].astype(bool)] = depth
        return
    while holders:
        bit = holders & -holders
        found[bit.bit_length() - 1] = depth
        holders ^= bit
