"""Index and membership in one process's memory: the second implementation of both ports.

Same answers as Redis for everything a holder may say (`tests/conformance` holds both to it). Time comes from the
injected clock, so that records expire on virtual time in simulations. Nothing here awaits anything; the methods are
coroutines because the ports are.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.block import BlockHash, Chain, HolderId, NamespaceId, Tier
from headrace.core.clock import Clock
from headrace.core.limits import CHAIN_BLOCKS_MAX
from headrace.core.members import (
    NO_MATCH,
    GatewayRecord,
    MemberRecord,
    PrefixMatch,
    StoreNodeRecord,
    WorkerRecord,
)


@dataclass(frozen=True, slots=True)
class _Announced:
    record: MemberRecord
    expires_at_s: float


class MemoryMembership:
    """Records under a TTL, in a dictionary. Implements `Membership`."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._announced: dict[HolderId, _Announced] = {}

    async def announce(self, record: MemberRecord, *, ttl_ms: int) -> bool:
        """Put or refresh a record; True when it did not stand before. A newer incarnation's record is left alone."""
        standing = self.live_incarnation(record.holder_id)
        if standing is not None and standing > record.incarnation:
            return False
        self._announced[record.holder_id] = _Announced(record, self._clock.now_s() + ttl_ms / 1000)
        return standing != record.incarnation

    async def withdraw(self, record: MemberRecord) -> None:
        """Remove a record now, unless a newer incarnation has replaced it."""
        standing = self.live_incarnation(record.holder_id)
        if standing is not None and standing <= record.incarnation:
            del self._announced[record.holder_id]

    async def store_nodes(self) -> tuple[StoreNodeRecord, ...]:
        """Live store nodes, by holder id."""
        return tuple(record for record in self._live() if isinstance(record, StoreNodeRecord))

    async def workers(self) -> tuple[WorkerRecord, ...]:
        """Live workers, by holder id."""
        return tuple(record for record in self._live() if isinstance(record, WorkerRecord))

    async def gateways(self) -> tuple[GatewayRecord, ...]:
        """Live gateways, by holder id."""
        return tuple(record for record in self._live() if isinstance(record, GatewayRecord))

    def live_incarnation(self, holder: HolderId) -> int | None:
        """The incarnation under which a holder is alive now; None when it is not."""
        announced = self._announced.get(holder)
        if announced is None:
            return None
        if announced.expires_at_s <= self._clock.now_s():
            del self._announced[holder]
            return None
        return announced.record.incarnation

    def _live(self) -> list[MemberRecord]:
        return [
            self._announced[holder].record
            for holder in sorted(self._announced)
            if self.live_incarnation(holder) is not None
        ]


@dataclass(frozen=True, slots=True)
class _Entry:
    incarnation: int
    tier: Tier


class MemoryIndex:
    """Block hash to holders, in dictionaries. Implements `BlockIndex`; asks `membership` who is alive."""

    def __init__(self, membership: MemoryMembership) -> None:
        self._membership = membership
        self._entries: dict[tuple[NamespaceId, BlockHash], dict[HolderId, _Entry]] = {}

    async def longest_prefix(self, namespace: NamespaceId, chain: Chain) -> PrefixMatch:
        """For every live holder, the length of its leading run; blocks past CHAIN_BLOCKS_MAX are not looked at."""
        if not chain:
            return NO_MATCH
        running = self._live_holders(namespace, chain[0])
        num_blocks_by_holder: dict[HolderId, int] = {}
        for depth, block_hash in enumerate(chain[:CHAIN_BLOCKS_MAX], start=1):
            here = self._entries.get((namespace, block_hash), {})
            running = {h: inc for h, inc in running.items() if h in here and here[h].incarnation == inc}
            if not running:
                break
            num_blocks_by_holder.update(dict.fromkeys(running, depth))
        return PrefixMatch(num_blocks_by_holder=num_blocks_by_holder)

    async def register(
        self, *, holder: HolderId, incarnation: int, tier: Tier, namespace: NamespaceId, blocks: Sequence[BlockHash]
    ) -> None:
        """Add or renew entries; an entry of a newer incarnation stays as it is."""
        for block_hash in blocks:
            holders = self._entries.setdefault((namespace, block_hash), {})
            standing = holders.get(holder)
            if standing is None or standing.incarnation <= incarnation:
                holders[holder] = _Entry(incarnation, tier)

    async def deregister(
        self, *, holder: HolderId, incarnation: int, namespace: NamespaceId, blocks: Sequence[BlockHash]
    ) -> None:
        """Remove entries, except those of a newer incarnation."""
        for block_hash in blocks:
            standing = self._entries.get((namespace, block_hash), {}).get(holder)
            if standing is not None and standing.incarnation <= incarnation:
                self._remove(namespace, block_hash, holder)

    async def sweep(self, live: dict[HolderId, int], *, limit: int) -> int:
        """Remove up to `limit` entries that neither `live` nor a standing record vouches for; returns how many."""
        dead = [
            (namespace, block_hash, holder)
            for (namespace, block_hash), holders in self._entries.items()
            for holder, entry in holders.items()
            if entry.incarnation not in (live.get(holder), self._membership.live_incarnation(holder))
        ][:limit]
        for namespace, block_hash, holder in dead:
            self._remove(namespace, block_hash, holder)
        return len(dead)

    def _live_holders(self, namespace: NamespaceId, block_hash: BlockHash) -> dict[HolderId, int]:
        """Holders of one block whose entry is of the incarnation that is alive."""
        return {
            holder: entry.incarnation
            for holder, entry in self._entries.get((namespace, block_hash), {}).items()
            if entry.incarnation == self._membership.live_incarnation(holder)
        }

    def _remove(self, namespace: NamespaceId, block_hash: BlockHash, holder: HolderId) -> None:
        holders = self._entries[namespace, block_hash]
        del holders[holder]
        if not holders:
            del self._entries[namespace, block_hash]
