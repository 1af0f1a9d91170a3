"""Placements that were decided and whose blocks are not there yet: counted as held until they are, or ought to be.

Without this, requests with one new prefix that come within a prefill's time of each other are sent to as many workers,
each of which computes it. A prediction ends by itself: the real index says the rest.
"""

import heapq
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

Key = TypeVar("Key", bound=Hashable)


class PredictedBlocks(Generic[Key]):
    """Chains that holders (small numbers) will have, each until its own time. At most `chains_max` at once.

    A block names all before it, so two chains agree up to one place and nowhere behind it, which bisection finds: a
    chain of thousands of blocks costs a request a handful of comparisons for each placement that begins as it does.
    """

    def __init__(self, *, chains_max: int) -> None:
        self._chains_max = chains_max
        self._first_to_chains: dict[Key, dict[int, tuple[int, Sequence[Key]]]] = {}  # by serial: (holder, chain)
        self._ends: list[tuple[float, int, Key]] = []  # (until, serial, first block)
        self._serial = 0

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, holder: int, chain: Sequence[Key], *, until_s: float) -> None:
        """The holder will have the chain; believed until `until_s`."""
        if not chain:
            return
        self._serial += 1
        self._first_to_chains.setdefault(chain[0], {})[self._serial] = (holder, chain)
        heapq.heappush(self._ends, (until_s, self._serial, chain[0]))
        if len(self._ends) > self._chains_max:
            self._end_first()

    def depths(self, chain: Sequence[Key], num_holders: int, *, now_s: float) -> NDArray[np.int32]:
        """As `PrefixMap.depths`, of what is believed now."""
        while self._ends and self._ends[0][0] <= now_s:
            self._end_first()
        found = np.zeros(num_holders, dtype=np.int32)
        if chain:
            common = 1  # many chains part from this one at the same place
            for holder, predicted in self._first_to_chains.get(chain[0], {}).values():
                if not _parts_at(common, chain, predicted):
                    common = _num_common(chain, predicted)
                found[holder] = max(found[holder], common)
        return found

    def _end_first(self) -> None:
        _, serial, first = heapq.heappop(self._ends)
        chains = self._first_to_chains[first]
        del chains[serial]
        if not chains:
            del self._first_to_chains[first]


def _parts_at(common: int, chain: Sequence[Key], other: Sequence[Key]) -> bool:
    """Whether so many leading blocks of two chains are the same, and no more."""
    shorter = min(len(chain), len(other))
    if common > shorter or chain[common - 1] != other[common - 1]:
        return False
    return common == shorter or chain[common] != other[common]


def _num_common(chain: Sequence[Key], other: Sequence[Key]) -> int:
    """Leading blocks of two chains that are the same; the first is."""
    same, differs = 1, min(len(chain), len(other)) + 1
    while differs - same > 1:
        middle = (same + differs) // 2
        if chain[middle - 1] == other[middle - 1]:
            same = middle
        else:
            differs = middle
    return same
