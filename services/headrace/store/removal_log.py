"""The store node's memory of what left it, when and why: bounded, in order, forgotten when the process ends.

A follower of the node's changes. Of each block the last removal is known, also when the block was stored again: that is
how a request is explained which missed, and stored what it missed.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from headrace.core.block import BlockHash, BlockHeader, NamespaceId
from headrace.core.clock import Clock
from headrace.core.limits import REMOVALS_REMEMBERED

# Why blocks leave but for an operator's eviction. What stood on a block goes for the same reason as the block.
MADE_ROOM = "evicted to make room"
MADE_ROOM_ON_DISK = "evicted from disk to make room"
BROKEN = "dropped because its bytes were broken"
BROKEN_ON_DISK = "dropped because its bytes on disk were broken"
NOT_WRITTEN = "evicted to make room, and the disk did not take it"
TIME_OVER = "its time to live was over"
OVER_QUOTA = "evicted for its tenant's quota"


@dataclass(frozen=True, slots=True)
class RememberedRemoval:
    """One block left."""

    reason: str
    unix_ms: int


class RemovalLog:
    """`block_changes.BlockChanges` that remembers removals."""

    def __init__(self, clock: Clock, *, removals_max: int = REMOVALS_REMEMBERED) -> None:
        self._clock = clock
        self._removals_max = removals_max
        self._removals: dict[tuple[NamespaceId, BlockHash], RememberedRemoval] = {}
        self._reason = MADE_ROOM
        self._since_unix_ms = clock.unix_ms()

    @property
    def since_unix_ms(self) -> int:
        """Removals from then on are remembered; of what left before nothing is known."""
        return self._since_unix_ms

    def added(self, header: BlockHeader) -> None:
        """As BlockChanges.added."""

    def removed(self, namespace: NamespaceId, block_hash: BlockHash) -> None:
        """As BlockChanges.removed."""
        self._removals.pop((namespace, block_hash), None)
        self._removals[(namespace, block_hash)] = RememberedRemoval(self._reason, self._clock.unix_ms())
        if len(self._removals) > self._removals_max:
            oldest = next(iter(self._removals))
            self._since_unix_ms = self._removals.pop(oldest).unix_ms

    def find(self, namespace: NamespaceId, block_hash: BlockHash) -> RememberedRemoval | None:
        """When and why that block left last; None when it did not, or longer ago than is remembered."""
        return self._removals.get((namespace, block_hash))

    @contextmanager
    def because(self, reason: str) -> Iterator[None]:
        """Give what leaves within the scope this reason. One step of the event loop: no await inside."""
        before, self._reason = self._reason, reason
        try:
            yield
        finally:
            self._reason = before
