"""Who reads the blocks of one store node: leases on runs of a chain, granted, looked at and ended.

A leased block stays where it is until its last lease was given back or ran out; one that is found broken meanwhile goes
out of sight at once and out of memory after that. Decides nothing about who leaves for room.
"""

from collections.abc import Callable, Iterator, Sequence

from headrace.blocks.claims import LeasedBlock, LeasedRun
from headrace.blocks.host_arena import HostArena
from headrace.core.block import Chain, NamespaceId, payload_digest
from headrace.core.clock import Clock
from headrace.core.limits import LEASE_BLOCKS_MAX, STORE_LEASES_MAX, SUSPECTS_MAX
from headrace.core.retention import KeptBy
from headrace.store.block_terms import BlockTerms
from headrace.store.departures import Departures
from headrace.store.held_blocks import HeldBlock, HeldBlocks
from headrace.store.held_claims import HeldClaims, HeldLease
from headrace.store.node_counters import NodeCounters
from headrace.store.removal_log import BROKEN
from headrace.store.room_maker import RoomMaker


class Readers:
    """The leases of one node; they stand in the node's `claims`."""

    def __init__(
        self,
        arena: HostArena,
        blocks: HeldBlocks,
        claims: HeldClaims,
        *,
        terms: BlockTerms,
        departures: Departures,
        room: RoomMaker,
        counters: NodeCounters,
        clock: Clock,
        ttl_ms: int,
        new_id: Callable[[], str],
    ) -> None:
        """ttl_ms: of a lease. new_id: draws the name of one, never the same twice."""
        self.leased_blocks = 0  # that somebody reads now
        self._arena = arena
        self._blocks = blocks
        self._claims = claims
        self._terms = terms
        self._departures = departures
        self._room = room
        self._counters = counters
        self._clock = clock
        self._ttl_ms = ttl_ms
        self._new_id = new_id

    def lease(
        self,
        namespace: NamespaceId,
        chain: Chain,
        *,
        first_block: int,
        retention: KeptBy,
        whole_from: int,
        incarnation: int,
    ) -> LeasedRun:
        """As `StoreNode.lease`. incarnation: the node's, which the reader maps its arena by."""
        run = self._blocks.run(namespace, chain, first_block=first_block)[:LEASE_BLOCKS_MAX]
        if len(self._claims.leases) >= STORE_LEASES_MAX:
            run = []
        asked_blocks, now_s = max(0, len(chain) - first_block), self._clock.now_s()
        held = HeldLease(tuple(run), now_s + self._ttl_ms / 1_000, num_wide=max(0, whole_from - first_block))
        hit_bytes = sum(map(held.read_bytes, range(len(run))))
        self._counters.looked_up(namespace, asked_blocks=asked_blocks, hit_blocks=len(run), hit_bytes=hit_bytes)
        if not run:
            return LeasedRun(lease_id="", incarnation=incarnation, expires_in_ms=0, blocks=())
        for block in run:
            self.leased_blocks += block.leases == 0
            block.leases += 1
            block.hits += 1
        self._blocks.read(run[-1], now_s)
        if retention is not None:
            self._terms.use(run[-1], retention)
        lease_id = self._new_id()
        self._claims.leases[lease_id] = held
        return LeasedRun(
            lease_id=lease_id,
            incarnation=incarnation,
            expires_in_ms=self._ttl_ms,
            blocks=tuple(LeasedBlock(b.slot, b.header, b.header_bytes) for b in run),
            ends_ms=self._terms.ends_ms(run[-1]),
        )

    def payloads(self, lease_id: str) -> Iterator[memoryview]:
        """As `StoreNode.leased_payloads`."""
        index = 0
        while True:
            held = self._claims.live_lease(lease_id)
            if index == len(held.blocks):
                return
            slot, num_bytes = held.blocks[index].slot, held.read_bytes(index)
            yield self._arena.payload(slot, num_bytes).toreadonly()
            index += 1

    def holds(self, lease_id: str) -> bool:
        """Whether the lease still protects its blocks."""
        held = self._claims.leases.get(lease_id)
        return held is not None and held.expires_at_s > self._clock.now_s()

    def release(self, lease_id: str, suspects: Sequence[int]) -> None:
        """As `StoreNode.release`."""
        if (held := self._claims.leases.pop(lease_id, None)) is None:
            return
        named = [held.blocks[i] for i in dict.fromkeys(suspects) if i < len(held.blocks)][:SUSPECTS_MAX]
        broken = [block for block in named if not self._is_whole(block)]
        self._end(held)
        for block in broken:
            if self._blocks.get(*block.key) is block:
                self._counters.dropped_corrupt += 1
                with self._room.because(BROKEN):
                    self._departures.drain(block)

    def end_lapsed(self) -> int:
        """End the leases whose time is up; how many."""
        ended = 0
        for lease in self._claims.take_lapsed_leases():
            self._end(lease)
            ended += 1
        self._counters.expired_leases += ended
        return ended

    def check_integrity(self) -> None:
        """What is counted as read is."""
        assert self.leased_blocks == sum(1 for block in self._blocks if block.leases), "leased blocks are miscounted"

    def _end(self, lease: HeldLease) -> None:
        for block in reversed(lease.blocks):
            block.leases -= 1
            assert block.leases >= 0, "a lease was ended twice"
            self.leased_blocks -= block.leases == 0
            self._departures.free_if_drained(block)
            self._blocks.offer(block)

    def _is_whole(self, block: HeldBlock) -> bool:
        with self._arena.payload(block.slot, block.header.payload_bytes) as payload:
            return payload_digest(payload) == block.header.payload_xxh3
