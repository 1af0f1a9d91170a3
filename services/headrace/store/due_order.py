"""Which names come up at which moment: a lazy heap.

Moments that move later cost nothing, since an entry is a lower bound: whoever takes a name looks at its true moment and
puts it back when that is not yet. Knows nothing of what the names stand for, nor of any clock.
"""

from collections.abc import Hashable
from heapq import heapify, heappop, heappush
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)

# Heaps shorter than this are not worth a rebuild.
_SLACK = 64


class DueOrder(Generic[Key]):
    """At most one valid entry for each name; the heap is never longer than twice that and some slack."""

    def __init__(self) -> None:
        self._entries: dict[Key, tuple[int, int, Key]] = {}
        self._heap: list[tuple[int, int, Key]] = []  # (unix ms, serial, name)
        self._serial = 0

    def put(self, key: Key, unix_ms: int) -> None:
        """Have a name come up at that moment, unless it comes up earlier anyway. O(log n)."""
        known = self._entries.get(key)
        if known is not None and known[0] <= unix_ms:
            return
        self._serial += 1  # names are never compared
        entry = (unix_ms, self._serial, key)
        self._entries[key] = entry
        heappush(self._heap, entry)
        if len(self._heap) > 2 * len(self._entries) + _SLACK:
            self._heap = list(self._entries.values())
            heapify(self._heap)

    def drop(self, key: Key) -> None:
        """Forget a name; unknown ones are fine."""
        self._entries.pop(key, None)

    def pop(self, now_unix_ms: int) -> Key | None:
        """Take the earliest name whose moment has come; None when there is none."""
        while self._heap and self._heap[0][0] <= now_unix_ms:
            entry = heappop(self._heap)
            if self._entries.get(entry[2]) is entry:
                del self._entries[entry[2]]
                return entry[2]
        return None

    def is_due(self, now_unix_ms: int) -> bool:
        """Whether `pop` may have something: stale entries count."""
        return bool(self._heap) and self._heap[0][0] <= now_unix_ms

    def moment_of(self, key: Key) -> int | None:
        """When a name comes up at the latest; None when it does not."""
        entry = self._entries.get(key)
        return None if entry is None else entry[0]

    def check_integrity(self) -> None:
        """Every valid entry is in the heap, and the heap is bounded."""
        assert len(self._heap) <= 2 * len(self._entries) + _SLACK + 1
        assert {id(entry) for entry in self._entries.values()} <= {id(entry) for entry in self._heap}
