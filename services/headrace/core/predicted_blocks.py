"""Placements that were decided and whose blocks are not there yet: counted as held until they are, or ought to be.

Without this, requests with one new prefix that come within a prefill's time of each other are sent to as many workers,
each of which computes it. A prediction ends by itself: the real index says the rest.
"""

import heapq
from collections.abc import Hashable, Sequence
from typing import Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from headrace.core.prefix_map import PrefixMap

Key = TypeVar("Key", bound=Hashable)


class PredictedBlocks(Generic[Key]):
    """Chains that holders (small numbers) will have, each until its own time. At most `chains_max` at once."""

    def __init__(self, *, chains_max: int) -> None:
        self._chains_max = chains_max
        self._map = PrefixMap[Key]()
        self._counts: dict[tuple[int, Key], int] = {}
        self._ends: list[tuple[float, int, int, Sequence[Key]]] = []
        self._serial = 0

    def __len__(self) -> int:
        return len(self._ends)

    def add(self, holder: int, chain: Sequence[Key], *, until_s: float) -> None:
        """The holder will have the chain; believed until `until_s`."""
        for block in chain:
            self._counts[(holder, block)] = self._counts.get((holder, block), 0) + 1
        self._map.add(holder, chain)
        self._serial += 1
        heapq.heappush(self._ends, (until_s, self._serial, holder, chain))
        if len(self._ends) > self._chains_max:
            self._end_first()

    def depths(self, chain: Sequence[Key], num_holders: int, *, now_s: float) -> NDArray[np.int32]:
        """As `PrefixMap.depths`, of what is believed now."""
        while self._ends and self._ends[0][0] <= now_s:
            self._end_first()
        return self._map.depths(chain, num_holders)

    def _end_first(self) -> None:
        _, _, holder, chain = heapq.heappop(self._ends)
        gone = []
        for block in chain:
            self._counts[(holder, block)] -= 1
            if not self._counts[(holder, block)]:
                del self._counts[(holder, block)]
                gone.append(block)
        self._map.remove(holder, gone)
