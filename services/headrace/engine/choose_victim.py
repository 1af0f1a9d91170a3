"""Who gives its blocks back when they run short: whoever is there again soonest, for each block that this frees.

Pure. What coming back takes (computing again, or reading back what a store has) is the caller's to predict.
"""

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class BlockHolder:
    """One sequence that could give way."""

    key: int  # grows in the order of admission
    num_freed: int  # blocks that could be taken by others then: those that nobody else holds
    comeback_s: float  # predicted, until it is where it is now


def choose_victim(holders: Sequence[BlockHolder], *, num_missing: int) -> int:
    """The key of the one that gives way when `num_missing` blocks are missing. May have to be asked again.

    The oldest never does while there is another one: it gets on whatever happens, ends, and then there is a new oldest;
    so every sequence ends. Of those that cost the same, the newest goes.
    """
    assert holders
    assert num_missing > 0
    oldest = min(holder.key for holder in holders)
    others = [holder for holder in holders if holder.key != oldest] or list(holders)
    # One whose blocks are all shared with somebody frees nothing, and is taken only when there is nobody else.
    useful = [holder for holder in others if holder.num_freed > 0] or others
    return min(useful, key=lambda holder: _rank(holder, num_missing)).key


def _rank(holder: BlockHolder, num_missing: int) -> tuple[float, int]:
    return holder.comeback_s / max(1, min(holder.num_freed, num_missing)), -holder.key
