"""Which blocks of the pool a sequence has, and which of them its windows have passed.

Owns the table's books: from which block on it begins, and which of its blocks have near parts (`core/part_ids.py`).
Blocks are taken from the pool and given back by whoever has the table.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from headrace.core.key_window import KeyWindow
from headrace.core.part_ids import PartIds


@dataclass(frozen=True, slots=True)
class TableWindows:
    """What is read of a sequence's blocks, the same for all sequences of a pool."""

    window: KeyWindow  # of what the model reads
    near_window: KeyWindow  # of what the layers read whose KV is in near parts, if blocks have some
    parts: PartIds


@dataclass(slots=True, eq=False, kw_only=True)
class BlockTable:
    """`block_ids`: the sequence's blocks from its block `first_block` on. Of a pool of two parts, blocks
    [first_near, end_near) have near ones."""

    block_ids: list[int] = field(default_factory=list)
    first_block: int = 0
    first_near: int = 0
    end_near: int = 0

    def clear(self) -> list[int]:
        """Have no blocks any more; the caller gives back what is returned."""
        block_ids = list(self.block_ids)
        self.block_ids.clear()  # in place: others look at this list
        self.first_block = self.first_near = self.end_near = 0
        return block_ids

    def add_near(self, near: Sequence[int], parts: PartIds) -> None:
        """Near parts were taken for the next blocks that have none."""
        for part in near:
            self.block_ids[self.end_near] = parts.join(self.block_ids[self.end_near], part)
            self.end_near += 1

    def pass_windows(self, position: int, windows: TableWindows) -> list[int]:
        """Take out of the table what is read neither for `position` nor for any later one, for the caller to give back:
        blocks that the model's window has passed, or near parts that the window of their layers has."""
        passed, parts = list[int](), windows.parts
        num_passed = windows.window.first_block(position) - self.first_block
        if num_passed > 0 and self.block_ids:
            passed = self.block_ids[:num_passed]
            del self.block_ids[:num_passed]
            self.first_block += num_passed
        first, end = self.first_near, min(windows.near_window.first_block(position), self.end_near)
        if first < end and self.block_ids:
            passed += [parts.near_alone(near) for near in parts.split(self.block_ids[first:end])[1]]
            self.block_ids[first:end] = parts.place(self.block_ids[first:end], (), first=0)
            self.first_near = end
        return passed
