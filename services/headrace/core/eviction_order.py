"""Which leaf goes first, by a rank that only grows: least recent, least used with ageing, or least worth per byte.

Owns the tree of names as far as eviction needs it (parent, number of children) and a lazy heap of leaves. Knows nothing
of payloads, readers or time: an event is the only clock. What a policy holds is closed under prefixes, since only
leaves are ever chosen.

Cost: an event costs O(1), or O(log n) when it makes a leaf; a victim costs amortised O(log n). A heap is never larger
than twice the tree.
"""

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from heapq import heapify, heappop, heappush, heapreplace
from typing import Generic, TypeVar

from headrace.core.limits import EVICTION_GHOSTS_PER_BLOCK

Key = TypeVar("Key", bound=Hashable)

# Heaps shorter than this are not worth a rebuild.
HEAP_SLACK = 64


class Name(Generic[Key]):
    """What a policy knows of one block. Mutable; owned by its policy, never handed out."""

    __slots__ = ("children", "key", "parent", "queue", "rank", "recompute_s", "size_bytes", "uses")

    def __init__(self, key: Key, parent: "Name[Key] | None", size_bytes: int, recompute_s: float) -> None:
        self.key = key
        self.parent = parent
        self.size_bytes = size_bytes
        self.recompute_s = recompute_s
        self.children = 0
        self.uses = 1
        self.rank = 0.0
        self.queue: LeafHeap[Key] | None = None  # the heap that has its one valid entry


LeafHeap = list[tuple[float, int, Name[Key]]]  # (rank when pushed, serial, leaf)


class LeafOrder(Generic[Key]):
    """What all policies share: events in, the leaf of least rank out. A policy says how events rank a block.

    Ranks only grow while a block is held, so an entry in the heap is a lower bound, and looking at the top suffices.
    """

    name = ""

    def __init__(self) -> None:
        self._names: dict[Key, Name[Key]] = {}
        self._heap: LeafHeap[Key] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._names)

    def __contains__(self, key: Key) -> bool:
        return key in self._names

    def __iter__(self) -> Iterator[Key]:
        return iter(self._names)

    def num_leading(self, keys: Sequence[Key]) -> int:
        """How many of a chain's leading blocks are held."""
        names, found = self._names, 0
        for key in keys:
            if key not in names:
                break
            found += 1
        return found

    def size_of(self, key: Key) -> int:
        """Bytes of a block that is held."""
        return self._names[key].size_bytes

    def added(self, key: Key, parent: Key | None, *, size_bytes: int, recompute_s: float) -> None:
        """A block takes room, under a parent that is held (None: the first of a chain)."""
        assert key not in self._names, "a block was added twice"
        assert size_bytes > 0
        above = None if parent is None else self._names[parent]
        block = Name(key, above, size_bytes, recompute_s)
        if above is not None:
            above.children += 1
        self._names[key] = block
        self._rank_added(block)
        self._push(block)

    def used(self, keys: Sequence[Key]) -> None:
        """One request reads these blocks: a chain from its first block on. Ends a request's look-up."""
        raise NotImplementedError

    def removed(self, key: Key) -> None:
        """A block that nothing stands on left, for whatever reason; its parent may be a leaf now."""
        block = self._names.pop(key)
        assert not block.children, "a block left before the blocks that stand on it"
        block.queue = None
        self._rank_removed(block)
        above = block.parent
        if above is not None:
            block.parent = None
            above.children -= 1
            if not above.children:
                self._push(above)

    def offer(self, key: Key) -> None:
        """A block that `victim` may have found in use can be taken from now on."""
        block = self._names[key]
        if not block.children:
            self._push(block)

    def victim(self, keep: Key | None = None, *, may_leave: Callable[[Key], bool] | None = None) -> Key | None:
        """The leaf to evict, never `keep`; None when there is none. It stays until `removed` says that it left.

        A leaf that `may_leave` refuses is forgotten until it is offered again: blocks in use are looked at once.
        """
        return self._least(self._heap, keep, may_leave)

    def check_integrity(self, may_leave: Callable[[Key], bool]) -> None:
        """Children are counted right, and every leaf that may leave is in a heap."""
        children: dict[Key, int] = {}
        for block in self._names.values():
            if block.parent is not None:
                assert self._names.get(block.parent.key) is block.parent, "the parent of a held block is gone"
                children[block.parent.key] = children.get(block.parent.key, 0) + 1
        for key, block in self._names.items():
            assert block.children == children.get(key, 0), "children are miscounted"
            if not block.children and may_leave(key):
                assert block.queue is not None, "a block that may leave is not in the eviction order"

    def _least(self, heap: LeafHeap[Key], keep: Key | None, may_leave: Callable[[Key], bool] | None) -> Key | None:
        kept, found = None, None
        while heap:
            rank, _, block = heap[0]
            if block.queue is not heap:  # left, or moved to another heap
                heappop(heap)
            elif block.children:
                heappop(heap)
                block.queue = None
            elif block.rank > rank:  # used since it was pushed
                self._serial += 1
                heapreplace(heap, (block.rank, self._serial, block))
            elif block.key == keep:
                kept = heappop(heap)
            elif may_leave is not None and not may_leave(block.key):
                heappop(heap)
                block.queue = None
            else:
                found = block.key
                break
        if kept is not None:
            heappush(heap, kept)
        return found

    def _heap_for(self, block: Name[Key]) -> LeafHeap[Key]:
        """The heap that a leaf belongs in."""
        return self._heap

    def _push(self, leaf: Name[Key]) -> None:
        if leaf.queue is not None:
            return
        heap = self._heap_for(leaf)
        if len(heap) > HEAP_SLACK + 2 * len(self._names):  # entries of blocks that left by other ways
            heap[:] = [entry for entry in {id(e[2]): e for e in heap}.values() if entry[2].queue is heap]
            heapify(heap)
        leaf.queue = heap
        self._serial += 1
        heappush(heap, (leaf.rank, self._serial, leaf))

    def _rank_added(self, block: Name[Key]) -> None:
        raise NotImplementedError

    def _rank_removed(self, block: Name[Key]) -> None:
        raise NotImplementedError


class LruOrder(LeafOrder[Key]):
    """Least recently used leaf first. A block is as recent as the most recent block that ever stood on it."""

    name = "lru"

    def __init__(self) -> None:
        super().__init__()
        self._tick = 0

    def used(self, keys: Sequence[Key]) -> None:
        self._tick += 1
        names, tick = self._names, self._tick
        for key in keys:
            names[key].rank = tick

    def _rank_added(self, block: Name[Key]) -> None:
        self._tick += 1
        block.rank = self._tick

    def _rank_removed(self, block: Name[Key]) -> None:
        above = block.parent
        if above is not None and above.rank < block.rank:
            above.rank = block.rank


class LfuOrder(LeafOrder[Key]):
    """Least frequently used leaf first, with ageing: rank = L + uses, where L is the greatest rank that ever left.

    Ageing: a block that is not used keeps its rank while L rises to meet it. The uses of blocks that left are
    remembered for a while, so that a block that comes back is not taken for a new one.
    """

    name = "lfu"

    def __init__(self) -> None:
        super().__init__()
        self._floor = 0.0
        self._ghosts: OrderedDict[Key, int] = OrderedDict()  # uses of blocks that left, oldest first

    def used(self, keys: Sequence[Key]) -> None:
        names, floor = self._names, self._floor
        for key in keys:
            block = names[key]
            block.uses += 1
            block.rank = floor + block.uses

    def _rank_added(self, block: Name[Key]) -> None:
        block.uses += self._ghosts.pop(block.key, 0)
        block.rank = self._floor + block.uses

    def _rank_removed(self, block: Name[Key]) -> None:
        if block.rank > self._floor:
            self._floor = block.rank
        self._ghosts[block.key] = block.uses
        while len(self._ghosts) > EVICTION_GHOSTS_PER_BLOCK * (len(self._names) + 1):
            self._ghosts.popitem(last=False)


class GdsfOrder(LfuOrder[Key]):
    """Greedy dual by size and frequency: rank = L + uses x recompute seconds per byte."""

    name = "gdsf"

    def used(self, keys: Sequence[Key]) -> None:
        names, floor = self._names, self._floor
        for key in keys:
            block = names[key]
            block.uses += 1
            block.rank = floor + block.uses * block.recompute_s / block.size_bytes

    def _rank_added(self, block: Name[Key]) -> None:
        block.uses += self._ghosts.pop(block.key, 0)
        block.rank = self._floor + block.uses * block.recompute_s / block.size_bytes
