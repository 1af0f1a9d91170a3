"""What happened in a store node since it started; only ever rising. Kept apart from the books, which say what is."""

from dataclasses import dataclass, field

from headrace.core.block import NamespaceId
from headrace.core.limits import STORE_NAMESPACES_MAX


@dataclass(slots=True)
class _NamespaceLookups:
    """Lookups of one namespace, in blocks; in tokens once a block told how many tokens one has."""

    asked_blocks: int = 0
    hit_blocks: int = 0
    block_tokens: int = 0


@dataclass(slots=True)
class NodeCounters:
    """Counters of one node; owned and changed by it."""

    evicted_for_room: int = 0
    evicted_for_quota: int = 0
    evicted_by_operator: int = 0
    dropped_corrupt: int = 0
    dropped_orphans: int = 0
    dropped_pins: int = 0  # their blocks' bytes were broken
    refused_pins: int = 0
    expired_blocks: int = 0  # their time to live was over, by use or by order
    expired_leases: int = 0
    expired_reservations: int = 0
    refused_blocks: int = 0
    committed_blocks: int = 0
    committed_bytes: int = 0
    lookups: int = 0
    read_bytes: int = 0  # of payloads that were leased, once for each lease
    _lookups: dict[NamespaceId, _NamespaceLookups] = field(default_factory=dict)

    @property
    def evicted_blocks(self) -> int:
        """Blocks that left before anybody asked for their return: for room or a quota, by an operator, because their
        time was over, or broken."""
        evicted = self.evicted_for_room + self.evicted_for_quota + self.evicted_by_operator
        return evicted + self.expired_blocks + self.dropped_corrupt

    @property
    def lookups_tokens(self) -> int:
        """Tokens of blocks that were asked for; namespaces of which no block was ever seen here count as nothing."""
        return sum(each.asked_blocks * each.block_tokens for each in self._lookups.values())

    @property
    def hits_tokens(self) -> int:
        """Of those, tokens of blocks that were leased. Never more than `lookups_tokens`."""
        return sum(each.hit_blocks * each.block_tokens for each in self._lookups.values())

    def looked_up(self, namespace: NamespaceId, *, asked_blocks: int, hit_blocks: int, hit_bytes: int) -> None:
        """Count one lookup."""
        assert hit_blocks <= asked_blocks
        self.lookups += 1
        self.read_bytes += hit_bytes
        lookups = self._of(namespace)
        lookups.asked_blocks += asked_blocks
        lookups.hit_blocks += hit_blocks

    def saw_block(self, namespace: NamespaceId, block_tokens: int) -> None:
        """Learn how many tokens a block of this namespace has."""
        self._of(namespace).block_tokens = block_tokens

    def _of(self, namespace: NamespaceId) -> _NamespaceLookups:
        if namespace not in self._lookups:
            if len(self._lookups) >= STORE_NAMESPACES_MAX:
                del self._lookups[next(iter(self._lookups))]
            self._lookups[namespace] = _NamespaceLookups()
        return self._lookups[namespace]
