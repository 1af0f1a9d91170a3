"""Which units of an arena are free: contiguous extents, best fit, neighbours merged at once.

Owns the account only; knows nothing of bytes or blocks. Why extents and not slabs: a node usually serves one model, so
all blocks have one size, and then every freed extent fits the next block exactly: the behaviour of a slab, without
segments to carve, and with no unit lost to a size class that nobody uses any more. When models with other block sizes
share the node, evicting in LRU order frees neighbours (they were allocated together), which merge into what is needed.
"""

from bisect import bisect_left, bisect_right, insort


class ExtentPool:
    """Free extents of `[0, num_units)`. Single owner; O(log n) search, O(n) worst case insert into sorted lists."""

    def __init__(self, num_units: int) -> None:
        assert num_units > 0
        self.num_units = num_units
        self.free_units = num_units
        self._start_to_units: dict[int, int] = {}
        self._end_to_start: dict[int, int] = {}
        self._by_size: list[tuple[int, int]] = []  # (units, start), sorted
        self._starts: list[int] = []  # sorted
        self._add(0, num_units)

    def allocate(self, units: int) -> int | None:
        """Take `units` contiguous units from the smallest extent that fits, lowest first; None when none fits."""
        assert units > 0
        found = bisect_left(self._by_size, (units, 0))
        if found == len(self._by_size):
            return None
        size, start = self._by_size[found]
        self._drop(start)
        if size > units:
            self._add(start + units, size - units)
        self.free_units -= units
        return start

    def take(self, start: int, units: int) -> bool:
        """Take exactly `[start, start + units)`; False when any part is taken or out of range (used by recovery)."""
        if units <= 0 or start < 0 or start + units > self.num_units:
            return False
        at = bisect_right(self._starts, start) - 1
        if at < 0:
            return False
        free_start = self._starts[at]
        size = self._start_to_units[free_start]
        if start + units > free_start + size:
            return False
        self._drop(free_start)
        if start > free_start:
            self._add(free_start, start - free_start)
        if free_start + size > start + units:
            self._add(start + units, free_start + size - start - units)
        self.free_units -= units
        return True

    def release(self, start: int, units: int) -> None:
        """Give an extent back and merge it with free neighbours."""
        assert units > 0
        assert start >= 0
        assert start + units <= self.num_units
        self.free_units += units
        if start in self._end_to_start:  # an extent ends where this one starts
            before = self._end_to_start[start]
            units += self._drop(before)
            start = before
        if start + units in self._start_to_units:
            units += self._drop(start + units)
        self._add(start, units)

    def fits(self, units: int) -> int:
        """How many more extents of `units` could be taken now, with no eviction."""
        return sum(size // units for size, _ in self._by_size)

    def check_integrity(self) -> None:
        """Free extents are disjoint, merged, in range, and sum up to `free_units`."""
        ordered = sorted(self._start_to_units.items())
        end_before = -1
        for start, size in ordered:
            assert size > 0
            assert start > end_before, "free extents overlap or were not merged"
            end_before = start + size
        assert end_before <= self.num_units
        assert sum(size for _, size in ordered) == self.free_units
        assert self._by_size == sorted((size, start) for start, size in ordered)
        assert self._starts == [start for start, _ in ordered]
        assert self._end_to_start == {start + size: start for start, size in ordered}

    def _add(self, start: int, units: int) -> None:
        self._start_to_units[start] = units
        self._end_to_start[start + units] = start
        insort(self._by_size, (units, start))
        insort(self._starts, start)

    def _drop(self, start: int) -> int:
        units = self._start_to_units.pop(start)
        del self._end_to_start[start + units]
        del self._by_size[bisect_left(self._by_size, (units, start))]
        del self._starts[bisect_left(self._starts, start)]
        return units
