"""One number for a block of which a pool keeps two parts in two places.

Of a model some of whose layers have a window, a block has a *wide* part (the layers that see everything) and a *near*
part (the others), each in a pool of its own. A sequence needs all its wide parts, and near parts of its last window
only:

    block             0   1   2   3   4   5   6   7
    wide part         w   w   w   w   w   w   w   w
    near part                         n   n   n          passed by the window | read | not computed yet

A table names each block by one number, so that whoever hands blocks around need not know of parts:

    wide                             the wide part alone
    wide + num_wide * (near + 1)     both
    -1 - near                        the near part alone

A pool of blocks of one part has their ids alone, which are the same as wide parts. Pure.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PartIds:
    """How the numbers are made, in a pool of `num_wide` wide parts."""

    num_wide: int

    def join(self, wide: int, near: int | None) -> int:
        """The block of these parts."""
        assert 0 <= wide < self.num_wide
        return wide if near is None else wide + self.num_wide * (near + 1)

    def near_alone(self, near: int) -> int:
        """A near part without its block, to be given back."""
        return -1 - near

    def wide_of(self, block_id: int) -> int:
        """The block's wide part."""
        assert block_id >= 0, "a near part alone has no wide one"
        return block_id % self.num_wide

    def near_of(self, block_id: int) -> int | None:
        """The block's near part, if it has one."""
        if block_id < 0:
            return -1 - block_id
        return block_id // self.num_wide - 1 if block_id >= self.num_wide else None

    def split(self, block_ids: Iterable[int]) -> tuple[list[int], list[int]]:
        """All wide parts and all near parts, each in order."""
        wide, near = [], []
        for block_id in block_ids:
            if block_id >= 0:
                wide.append(block_id % self.num_wide)
            part = self.near_of(block_id)
            if part is not None:
                near.append(part)
        return wide, near

    def place(self, block_ids: Sequence[int], near: Sequence[int], *, first: int) -> list[int]:
        """The same blocks with these near parts, on blocks [first, first + len(near)), and on no others."""
        assert 0 <= first <= first + len(near) <= len(block_ids)
        placed = [self.wide_of(block_id) for block_id in block_ids]
        for index, part in enumerate(near, start=first):
            placed[index] = self.join(placed[index], part)
        return placed
