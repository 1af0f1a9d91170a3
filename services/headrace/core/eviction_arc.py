"""ARC over leaves: blocks used once, blocks used again, and ghosts that set how much room each kind gets.

The replacement of Megiddo and Modha (FAST 2003) with one change: of either kind the least recently used *leaf* goes. A
block is never used more often than its parent, so each kind that is not empty has a leaf, and chains leave tail first.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence

from headrace.core.eviction_order import Key, LeafHeap, LruOrder, Name


class ArcOrder(LruOrder[Key]):
    """`_heap` has the leaves used once, `_again` those used more. Each kind has at most as many ghosts as are held."""

    name = "arc"

    def __init__(self) -> None:
        super().__init__()
        self._again: LeafHeap[Key] = []
        self._num_once = 0
        self._once_target = 0.0
        self._ghosts_once: OrderedDict[Key, None] = OrderedDict()
        self._ghosts_again: OrderedDict[Key, None] = OrderedDict()

    def used(self, keys: Sequence[Key]) -> None:
        self._tick += 1
        names, tick = self._names, self._tick
        for key in keys:
            block = names[key]
            block.rank = tick
            block.uses += 1
            if block.uses == 2:
                self._num_once -= 1
                block.queue = None  # its entry among those used once is void
                if not block.children:
                    self._push(block)

    def victim(self, keep: Key | None = None, *, may_leave: Callable[[Key], bool] | None = None) -> Key | None:
        first, second = self._heap, self._again
        if self._num_once <= self._once_target:
            first, second = second, first
        found = self._least(first, keep, may_leave)
        return self._least(second, keep, may_leave) if found is None else found

    def _heap_for(self, block: Name[Key]) -> LeafHeap[Key]:
        return self._heap if block.uses == 1 else self._again

    def _rank_added(self, block: Name[Key]) -> None:
        super()._rank_added(block)
        once, again = self._ghosts_once, self._ghosts_again
        if block.key in once:  # more room for blocks used once would have kept it
            self._once_target = min(len(self._names), self._once_target + max(1.0, len(again) / len(once)))
            del once[block.key]
            block.uses = 2
        elif block.key in again:
            self._once_target = max(0.0, self._once_target - max(1.0, len(once) / len(again)))
            del again[block.key]
            block.uses = 2
        else:
            self._num_once += 1

    def _rank_removed(self, block: Name[Key]) -> None:
        super()._rank_removed(block)
        self._num_once -= block.uses == 1
        ghosts = self._ghosts_once if block.uses == 1 else self._ghosts_again
        ghosts[block.key] = None
        while len(ghosts) > len(self._names) + 1:
            ghosts.popitem(last=False)
