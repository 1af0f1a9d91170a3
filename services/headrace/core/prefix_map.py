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

# Sets that are remembered so that equal ones are one object: a set for each place where somebody's run of a chain ends.
_SHARED_SETS_MAX = 4_096


class PrefixMap(Generic[Key]):
    """Blocks and their holders. Adding what is there and removing what is not are harmless."""

    def __init__(self) -> None:
        self._block_to_holders: dict[Key, int] = {}
        self._shared: dict[int, int] = {}

    def __len__(self) -> int:
        return len(self._block_to_holders)

    def add(self, holder: int, blocks: Iterable[Key]) -> None:
        """The holder has these blocks now."""
        bit, holders = 1 << holder, self._block_to_holders
        before, after = 0, self._share(bit)
        for block in blocks:
            known = holders.get(block, 0)
            if known is not before:
                before, after = known, self._share(known | bit)
            holders[block] = after

    def remove(self, holder: int, blocks: Iterable[Key]) -> None:
        """The holder does not have them any more."""
        keep, holders = ~(1 << holder), self._block_to_holders
        before = after = 0
        for block in blocks:
            known = holders.get(block, 0)
            if known is not before:
                before, after = known, self._share(known & keep)
            if after:
                holders[block] = after
            else:
                holders.pop(block, None)

    def _share(self, holders: int) -> int:
        """The one object for a set. Most blocks of a chain are held by just those who hold the next one: so they share
        its memory, and `levels` sees that nothing changes without reading it."""
        if len(self._shared) >= _SHARED_SETS_MAX:
            self._shared.clear()
        return self._shared.setdefault(holders, holders)

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
        # Where do the sets of blocks `low` and `high` part? `still`: who has all up to `low`, as far as we have looked.
        between = [(0, len(chain) - 1, first, first, last)] if first & ~last else []
        while between:
            low, high, still, at_low, at_high = between.pop()
            while high - low > 1:
                middle = (low + high) // 2
                at_middle = get(chain[middle], 0)
                if at_middle is at_low:
                    low = middle
                elif at_middle is at_high:
                    high = middle
                elif (both := still & at_middle) == both & at_high:
                    high, at_high = middle, at_middle
                else:
                    if both != still:
                        between.append((low, middle, still, at_low, at_middle))
                    low, still, at_low = middle, both, at_middle
            yield high, still & ~at_high

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
        number = holders.bit_length() - 1
        found[number] = depth
        holders ^= 1 << number
