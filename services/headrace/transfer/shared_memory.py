"""The host's own store node: control calls by gRPC, payloads read and filled in place in the mapped arena.

Owns the mapping and its validity. Every reply of the node carries its incarnation; when that is not the mapped arena's,
the node was restarted and perhaps made a new file, so the file is mapped again. A view handed out stays readable memory
even then (a mapping lives as long as its views); whether its bytes are still the block's is for the reader's checksum.
"""

from collections.abc import AsyncGenerator, Sequence

from headrace.blocks.host_arena import ArenaView, map_arena
from headrace.core.block import BlockHeader, Chain, NamespaceId
from headrace.core.clock import Clock, Deadline
from headrace.core.errors import DeadlineExceeded, LeaseExpired, StoreUnavailable
from headrace.core.members import StoreNodeRecord
from headrace.core.ports import PLAIN_LEASE, Lease, LeaseTerms, Reservation, ReserveOutcome
from headrace.core.retention import KEEP, Retention
from headrace.transfer.channels import Channels
from headrace.transfer.store_calls import StoreCalls


class SharedMemoryStore:
    """BlockSource and BlockSink for the node of this host. One event loop."""

    def __init__(self, record: StoreNodeRecord, channels: Channels, clock: Clock) -> None:
        self.record = record
        self._clock = clock
        self._calls = StoreCalls(record, channels, clock)
        self._arena: ArenaView | None = None
        self._lease_ends_s: dict[str, float] = {}  # leases held through this adapter, by this process's clock

    async def held_blocks(self, namespace: NamespaceId, chain: Chain, *, deadline: Deadline) -> int:
        """As BlockSource.held_blocks."""
        return await self._calls.lookup(namespace, chain, deadline=deadline)

    async def lease_prefix(
        self,
        namespace: NamespaceId,
        chain: Chain,
        *,
        first_block: int,
        deadline: Deadline,
        terms: LeaseTerms = PLAIN_LEASE,
    ) -> Lease:
        """As `BlockSource.lease_prefix`."""
        asked_s = self._clock.now_s()  # before the call: our idea of the end must not be later than the node's
        lease = await self._calls.lease(namespace, chain, first_block=first_block, deadline=deadline, terms=terms)
        self._forget_ended()
        if lease.lease_id:
            self._lease_ends_s[lease.lease_id] = asked_s + lease.expires_in_ms / 1_000
        return lease

    async def fetch_blocks(self, lease: Lease, *, deadline: Deadline) -> AsyncGenerator[memoryview, None]:
        """As `BlockSource.fetch_blocks`; views of the arena itself, read-only, nothing is copied."""
        for index, (header, slot) in enumerate(zip(lease.headers, lease.slots, strict=True)):
            if deadline.left_s() <= 0:
                raise DeadlineExceeded("read blocks from shared memory")
            arena = self._mapped(lease.incarnation)
            if self._lease_ends_s.get(lease.lease_id, 0.0) <= self._clock.now_s():
                raise LeaseExpired(lease.lease_id)
            payload = self._payload(arena, slot, header).toreadonly()
            yield payload[: header.layout.wide_bytes] if index < lease.num_wide else payload

    async def release(self, lease: Lease, *, suspects: Sequence[int] = ()) -> None:
        """As `BlockSource.release`."""
        self._lease_ends_s.pop(lease.lease_id, None)
        await self._calls.release(lease.lease_id, suspects)

    async def reserve(
        self, headers: Sequence[BlockHeader], *, deadline: Deadline, retention: Retention = KEEP
    ) -> tuple[ReserveOutcome, ...]:
        """As `BlockSink.reserve`; each buffer is the slot itself."""
        incarnation, outcomes = await self._calls.reserve(headers, deadline=deadline, retention=retention)
        try:
            arena = self._mapped(incarnation)
            return tuple(
                Reservation(outcome[0], header, self._payload(arena, outcome[1], header))
                if isinstance(outcome, tuple)
                else outcome
                for header, outcome in zip(headers, outcomes, strict=True)
            )
        except StoreUnavailable:
            self._calls.give_up(outcome[0] for outcome in outcomes if isinstance(outcome, tuple))
            raise

    async def commit(self, reservation: Reservation, *, payload_xxh3: int, deadline: Deadline) -> None:
        """As `BlockSink.commit`; the node checks the bytes in place."""
        await self._calls.commit(
            reservation.reservation_id, header=reservation.header, payload_xxh3=payload_xxh3, deadline=deadline
        )

    async def abort(self, reservation: Reservation) -> None:
        """As `BlockSink.abort`."""
        await self._calls.abort(reservation.reservation_id)

    async def end_lost_claims(self) -> None:
        """As `StoreCalls.end_lost_claims`."""
        await self._calls.end_lost_claims()

    def close(self) -> None:
        """Drop the mapping; views still in use keep theirs."""
        if self._arena is not None:
            self._arena.close()
            self._arena = None

    def _forget_ended(self) -> None:
        """Leases that nobody released (their reader was cancelled) must not add up here; the node ends its side."""
        now_s = self._clock.now_s()
        for lease_id in [lease_id for lease_id, end_s in self._lease_ends_s.items() if end_s <= now_s]:
            del self._lease_ends_s[lease_id]

    def _mapped(self, incarnation: int) -> ArenaView:
        """The arena of exactly that incarnation. Raises StoreUnavailable when the file is another's by now."""
        if self._arena is None or self._arena.incarnation != incarnation:
            self.close()
            self._arena = map_arena(self.record.arena_path)
        if self._arena.incarnation != incarnation:
            raise StoreUnavailable(self.record.node_id, "was restarted meanwhile")
        return self._arena

    def _payload(self, arena: ArenaView, slot: int, header: BlockHeader) -> memoryview:
        try:
            return arena.payload(slot, header.payload_bytes)
        except ValueError as error:
            raise StoreUnavailable(self.record.node_id, str(error)) from error
