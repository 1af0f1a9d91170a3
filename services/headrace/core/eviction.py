"""Which block goes when room is needed: the events that a policy sees, what it answers, and the policies by name.

A policy is told what the store holds and what is read, and names the next leaf to go. It does no I/O, keeps no
payloads and never looks at a clock, so the simulator replays traces through the same objects that the store runs.
"""

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Any, Protocol

from headrace.core.eviction_adaptive import AdaptiveOrder
from headrace.core.eviction_arc import ArcOrder
from headrace.core.eviction_order import GdsfOrder, Key, LfuOrder, LruOrder


class PolicyName(StrEnum):
    """What `--eviction-policy` takes."""

    ADAPTIVE = "adaptive"
    LRU = "lru"
    GDSF = "gdsf"
    LFU = "lfu"
    ARC = "arc"


DEFAULT_POLICY = PolicyName.ADAPTIVE

POLICY_CLASSES: dict[PolicyName, Callable[[], "EvictionPolicy[Any]"]] = {
    PolicyName.ADAPTIVE: AdaptiveOrder,
    PolicyName.LRU: LruOrder,
    PolicyName.GDSF: GdsfOrder,
    PolicyName.LFU: LfuOrder,
    PolicyName.ARC: ArcOrder,
}


class EvictionPolicy(Protocol[Key]):
    """A tree of block names, closed under prefixes, with an opinion on which leaf is worth least.

    Keys are whatever names a block for good: a block that comes back must come back under the same key.
    """

    def added(self, key: Key, parent: Key | None, *, size_bytes: int, recompute_s: float) -> None:
        """A block takes room under a parent that is held; `recompute_s` is what computing it again would cost."""

    def used(self, keys: Sequence[Key]) -> None:
        """One request reads these blocks: a chain from its first block on."""

    def removed(self, key: Key) -> None:
        """A block that nothing stands on left, for whatever reason."""

    def offer(self, key: Key) -> None:
        """A block that was in use can leave again."""

    def victim(self, keep: Key | None = None, *, may_leave: Callable[[Key], bool] | None = None) -> Key | None:
        """A leaf to evict that may leave and is not `keep`, or None. It stays until `removed` is told."""

    def check_integrity(self, may_leave: Callable[[Key], bool]) -> None:
        """Assert that the tree is whole and every leaf that may leave can be found."""

    def __len__(self) -> int: ...

    def __contains__(self, key: Key) -> bool: ...


def make_policy(name: PolicyName) -> EvictionPolicy[Any]:
    """A policy that holds nothing yet."""
    return POLICY_CLASSES[name]()
