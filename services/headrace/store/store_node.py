"""One store node's books: which blocks are held, who reads them, who writes them, and which go when room is needed.

    free --reserve--> reserved --commit--> committed --evict--> free
                         |                     |--found corrupt while read--> draining --last lease ends--> free
                         '--abort, expiry--> free

Synchronous, without I/O, on an injected clock, with one owner (the event loop of the node's process): every method is
one step, so nothing can happen between a check and the act that relies on it.

The order in which a block goes: (1) its removal is handed to `changes`, which sends removals and additions to the
index in this order; (2) its record in the arena is cleared; (3) its units may be given to a new block. The index may
lag behind by what is queued, and a reader that follows a stale entry gets a shorter lease, which is a miss.

A writer whose reservation expired may still write into memory that someone else owns by now. Nothing can stop a process
that stalled between its last check and its store; so commit checks the payload's checksum, readers check the bytes that
they copied, and a block reported as suspect is checked again and dropped. Its late commit raises LeaseExpired.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from headrace.blocks.block_codec import encode_header, verify_identity
from headrace.blocks.block_waiters import BlockWaiters
from headrace.blocks.claims import LeasedRun, SlotOutcome, SlotReserved
from headrace.blocks.host_arena import UNIT_BYTES, HostArena, units_for
from headrace.core.block import BlockHash, BlockHeader, Chain, HolderId, NamespaceId, payload_digest
from headrace.core.clock import Clock
from headrace.core.errors import BlockCorrupt
from headrace.core.generation import BlockInfo, ControlReport, EvictReport, EvictSelector, HolderStat
from headrace.core.limits import LIST_BLOCKS_MAX
from headrace.core.ports import AlreadyStored, NotStored
from headrace.core.retention import KEEP, KeptBy, Retention
from headrace.store.block_changes import BlockChanges, IgnoreChanges
from headrace.store.block_terms import BlockTerms
from headrace.store.check_books import check_books
from headrace.store.departures import Departures
from headrace.store.disk_block import DiskBlock
from headrace.store.disk_blocks import DiskBlocks
from headrace.store.expire_blocks import expire_blocks
from headrace.store.held_blocks import HeldBlock, HeldBlocks, SlotState
from headrace.store.held_claims import HeldClaims, HeldReservation
from headrace.store.list_blocks import list_blocks
from headrace.store.node_counters import NodeCounters
from headrace.store.node_rules import DEFAULT_RULES, NodeRules
from headrace.store.pins import Pins
from headrace.store.plan_eviction import plan_eviction
from headrace.store.prefix_orders import PrefixOrders
from headrace.store.readers import Readers
from headrace.store.recover_arena import RecoveredArena
from headrace.store.recover_disk import RecoveredDisk
from headrace.store.removal_log import TIME_OVER
from headrace.store.room_maker import RoomMaker
from headrace.store.select_disk_blocks import list_disk_blocks, plan_disk_eviction, report_eviction, resident_blocks
from headrace.store.tier_stats import stat_disk, stat_host


class StoreNode:
    """The owner of an arena."""

    def __init__(
        self,
        arena: HostArena,
        *,
        node_id: str,
        clock: Clock,
        changes: BlockChanges | None = None,
        recovered: RecoveredArena | None = None,
        disk: RecoveredDisk | None = None,
        rules: NodeRules = DEFAULT_RULES,
    ) -> None:
        """recovered, disk: what was found in the arena and on disk at the start; without `disk` there is no such tier.
        changes: follows what can be read, from the first block on."""
        self.node_id = node_id
        self.holder_id = HolderId(f"node:{node_id}")
        self.counters = NodeCounters()
        self.waiters = BlockWaiters()
        self._arena = arena
        self._clock = clock
        self._changes: BlockChanges = IgnoreChanges() if changes is None else changes
        self._reservation_ttl_ms = rules.reservation_ttl_ms
        self._blocks = HeldBlocks(rules.eviction_policy)
        self.disk = DiskBlocks(None if disk is None else disk.tier, self._blocks, self._changes)
        self._claims = HeldClaims(clock)
        self._terms = BlockTerms(arena, self._blocks, clock)
        self._pins = Pins(arena, self._blocks, share=rules.pin_share)
        self._departures = Departures(
            arena, self._blocks, self.disk, self._claims, changes=self._changes, pins=self._pins, counters=self.counters
        )
        self.room = RoomMaker(
            arena, self._blocks, self.disk, self.counters, pins=self._pins, remove=self._departures.remove
        )
        self._readers = Readers(
            arena,
            self._blocks,
            self._claims,
            terms=self._terms,
            departures=self._departures,
            room=self.room,
            counters=self.counters,
            clock=clock,
            ttl_ms=rules.lease_ttl_ms,
            new_id=lambda: self._new_id("l"),
        )
        self.orders = PrefixOrders(
            self.holder_id, self._blocks, self.disk, pins=self._pins, terms=self._terms, counters=self.counters
        )
        self._serial = 0
        self.draining = False  # takes no new blocks; what it holds can be read
        self._block_units = 0  # size of the last block reserved: the unit in which free room is reported
        self.incarnation = arena.begin_incarnation(clock.unix_ms())
        for found in recovered.blocks if recovered is not None else ():
            block = self._add_block(found.header, found.header_bytes, slot=found.slot, state=SlotState.COMMITTED)
            self._terms.restore(block, found.terms)
            self._show(block)
            self._pins.restore(block, found.terms)
        if disk is not None:
            self.disk.adopt(disk, now_s=clock.now_s())

    # Readers

    def lookup(self, namespace: NamespaceId, chain: Chain) -> int:
        """How many leading blocks of the chain are kept, in the arena or on disk. Takes nothing and counts nothing."""
        in_arena = len(self._blocks.run(namespace, chain, first_block=0))
        return in_arena + len(self.disk.run(namespace, chain, first_block=in_arena))

    def plan_promotion(self, namespace: NamespaceId, chain: Chain, first_block: int) -> list[DiskBlock]:
        """What has to be read from disk before blocks `first_block..` can be leased, as far as the disk holds them."""
        in_arena = len(self._blocks.run(namespace, chain, first_block=0))
        missing = self.disk.run(namespace, chain, first_block=in_arena)
        return missing if in_arena + len(missing) > first_block else []

    def lease(
        self, namespace: NamespaceId, chain: Chain, *, first_block: int, retention: KeptBy = KEEP, whole_from: int = 0
    ) -> LeasedRun:
        """Claim blocks `first_block..` as far as they are held without a gap, at most LEASE_BLOCKS_MAX of them.

        They and all before them stay for as long as `retention` asks, if that is longer than before. None: an
        operator reads, which keeps nothing longer. whole_from: as BlockSource.lease_prefix.
        """
        self.expire()
        return self._readers.lease(
            namespace,
            chain,
            first_block=first_block,
            retention=retention,
            whole_from=whole_from,
            incarnation=self.incarnation,
        )

    def leased_payloads(self, lease_id: str) -> Iterator[memoryview]:
        """The leased blocks' payloads in place, read-only, in order. Raises LeaseExpired as soon as the lease is gone.

        Each view is good until the lease ends; a caller that waits between two looks at one must ask `holds_lease`.
        """
        return self._readers.payloads(lease_id)

    def holds_lease(self, lease_id: str) -> bool:
        """Whether the lease still protects its blocks."""
        return self._readers.holds(lease_id)

    def release(self, lease_id: str, suspects: Sequence[int] = ()) -> None:
        """End a lease; unknown ones are fine.

        `suspects` are indices of leased blocks whose bytes did not check out: each (at most SUSPECTS_MAX of them) is
        checked here again, and dropped with all that stand on it when it is really broken.
        """
        self._readers.release(lease_id, suspects)

    # Writers

    def reserve(self, headers: Sequence[BlockHeader], *, retention: Retention = KEEP) -> tuple[SlotOutcome, ...]:
        """Claim a slot for each header, in chain order, making room by eviction. A block that is stored was used now,
        and stays as long as `retention` asks. Raises BlockCorrupt for a header whose hash does not follow from its
        parent and token ids: nothing is reserved then."""
        for header in headers:
            verify_identity(header)
        self.expire()
        return tuple(self._reserve_one(header, retention) for header in headers)

    def commit(self, reservation_id: str, payload_xxh3: int) -> None:
        """Make a filled block readable once its payload has the checksum that the writer claims. Idempotent only in
        effect: a second commit raises LeaseExpired, the block stays. BlockCorrupt frees the slot."""
        held = self._claims.live_reservation(reservation_id)
        block = held.block
        with self._arena.payload(block.slot, block.header.payload_bytes) as payload:
            found = payload_digest(payload)
        if found != payload_xxh3:
            self._departures.drop_reserved(block)
            why = f"payload checksum is {found:016x}, the writer says {payload_xxh3:016x}"
            raise BlockCorrupt(block.header.block_hash, why)
        del self._claims.reservations[reservation_id]
        block.header = replace(block.header, payload_xxh3=payload_xxh3)
        block.header_bytes = encode_header(block.header)
        self._terms.use(block, held.retention)
        self._arena.commit(block.slot, block.header_bytes, block.terms)
        block.state = SlotState.COMMITTED
        block.reservation_id = ""
        self.counters.committed_blocks += 1
        self.counters.committed_bytes += block.header.payload_bytes
        self._show(block)

    def promote(self, header: BlockHeader, header_bytes: bytes, payload: memoryview) -> bool:
        """Take a block that was read from disk into the arena; False when it has no parent or no room there.

        One step, copy included: no slot of ours is written to while somebody else may own it.
        """
        held = self._blocks.get(header.namespace, header.block_hash)
        if held is not None and held.visible:
            return True
        slot = self.room.slot_for(header, header_bytes)
        if slot is None:
            return False
        self._arena.payload(slot, header.payload_bytes)[:] = payload
        self._arena.commit(slot, header_bytes)
        self.disk.counters.promoted_blocks += 1
        self.disk.counters.promoted_bytes += header.payload_bytes
        self._show(self._add_block(header, header_bytes, slot=slot, state=SlotState.COMMITTED))
        return True

    def reserved_buffer(self, reservation_id: str) -> memoryview:
        """The slot of a reservation, to be filled by whoever receives a remote writer's bytes. Raises LeaseExpired."""
        held = self._claims.live_reservation(reservation_id)
        return self._arena.payload(held.block.slot, held.block.header.payload_bytes)

    def abort(self, reservation_id: str) -> None:
        """Give a slot back unwritten, with every reservation that stands on it; unknown ids are fine."""
        if (held := self._claims.reservations.get(reservation_id)) is not None:
            self._departures.drop_reserved(held.block)

    # The clock, operators

    def expire(self) -> int:
        """End every lease, reservation and pin whose time is up, and take out blocks whose time is over, one step of
        `expire_blocks`; returns how many of all."""
        ended, now_unix_ms = self._end_claims(), self._clock.unix_ms()
        ended += self._pins.expire(now_unix_ms)
        with self.room.because(TIME_OVER):
            gone = expire_blocks(self._blocks, self._departures, now_unix_ms=now_unix_ms)
        self.counters.expired_blocks += gone
        return ended + gone

    @property
    def has_due(self) -> bool:
        """Whether another `expire` now would find more: its steps are bounded."""
        return self._blocks.is_due(self._clock.unix_ms())

    def pin(self, selector: EvictSelector, *, until_unix_ms: int | None, carried: bool = False) -> ControlReport:
        """Keep the blocks that a selector names, and all before them; as `PrefixOrders.pin`."""
        self.expire()
        return self.orders.pin(selector, until_unix_ms=until_unix_ms, carried=carried)

    def unpin(self, selector: EvictSelector) -> ControlReport:
        """Take pins back; as `PrefixOrders.unpin`."""
        self.expire()
        return self.orders.unpin(selector)

    def set_ttl(self, selector: EvictSelector, *, expires_unix_ms: int | None, carried: bool = False) -> ControlReport:
        """Have a prefix go at a moment, in every tier, or take that back; as `PrefixOrders.set_ttl`."""
        self.expire()
        return self.orders.set_ttl(selector, expires_unix_ms=expires_unix_ms, carried=carried)

    def evict(self, selector: EvictSelector, *, dry_run: bool) -> EvictReport:
        """Remove what the selector means and is not in use, tails first; dry, only say what would go."""
        self.expire()
        now_s = self._clock.now_s()
        plan = plan_eviction(self._blocks, selector, now_s=now_s)
        on_disk = plan_disk_eviction(self.disk, selector, arena_victims=plan.victims, now_s=now_s)
        report = report_eviction(plan, on_disk, holder=self.holder_id, dry_run=dry_run)
        if not dry_run:
            self.disk.remove(on_disk)
            for block in plan.victims:
                self._departures.remove(block)
            self.counters.evicted_by_operator += len(plan.victims)
        return report

    def list_blocks(self, selector: EvictSelector, *, limit: int = LIST_BLOCKS_MAX) -> tuple[list[BlockInfo], int]:
        """Readable blocks that the selector means, those of the arena first, heads first, at most `limit` of them; and
        how many in all. A block that both tiers keep is listed, counted and evicted in each, as on two nodes."""
        infos, total = list_blocks(self._blocks, selector, holder=self.holder_id, clock=self._clock, limit=limit)
        left = limit - len(infos)
        on_disk = list_disk_blocks(self.disk, selector, holder=self.holder_id, clock=self._clock, limit=left)
        return infos + on_disk[0], total + on_disk[1]

    def stat(self) -> HolderStat:
        """The arena's books."""
        self.expire()
        return stat_host(
            self._arena,
            self._blocks,
            self.counters,
            holder=self.holder_id,
            incarnation=self.incarnation,
            block_units=self._block_units,
            reserved_blocks=len(self._claims.reservations),
            leased_blocks=self._readers.leased_blocks,
            pins=self._pins,
        )

    def stats(self) -> list[HolderStat]:
        """The books of every tier that this node has."""
        if self.disk.tier is None:
            return [self.stat()]
        return [self.stat(), stat_disk(self.disk, holder=self.holder_id, incarnation=self.incarnation)]

    def inventory(self) -> list[tuple[NamespaceId, BlockHash]]:
        """Every readable block, parents before children: what the index should say of this node."""
        return [block.key for block in self.residents()]

    def residents(self) -> list[HeldBlock | DiskBlock]:
        """Every readable block of either tier, each once, parents before children. To read, not to change."""
        return resident_blocks(self._blocks, self.disk)

    def copy_block(self, namespace: NamespaceId, block_hash: BlockHash) -> tuple[BlockHeader, bytes] | None:
        """A block as it lies in the arena now; None when it is not there. Counts as no use and takes no lease."""
        block = self._blocks.get(namespace, block_hash)
        if block is None or not block.visible:
            return None
        return block.header, bytes(self._arena.payload(block.slot, block.header.payload_bytes))

    def renew_incarnation(self) -> int:
        """Void everything the index says of this node at once; the caller registers the inventory anew."""
        self.incarnation = self._arena.begin_incarnation(self._clock.unix_ms())
        return self.incarnation

    def check_integrity(self) -> None:
        """Free + committed + reserved == total, in units; leases and reservations refer to live blocks; links hold."""
        check_books(
            self._arena,
            self._blocks,
            leased=[lease.blocks for lease in self._claims.leases.values()],
            reserved={reservation_id: held.block for reservation_id, held in self._claims.reservations.items()},
        )
        self._claims.check_integrity()
        self._readers.check_integrity()
        self._pins.check_integrity()
        self.disk.check_integrity()

    # Steps

    def _reserve_one(self, header: BlockHeader, retention: Retention) -> SlotOutcome:
        header = replace(header, payload_xxh3=0)
        stored = self._blocks.get(header.namespace, header.block_hash)
        if stored is not None:
            self._blocks.touch(stored, self._clock.now_s())
            self._terms.use(stored, retention)
            return AlreadyStored(header.block_hash)
        if self.disk.get((header.namespace, header.block_hash)) is not None:
            retention = KEEP  # as somebody asked who stored it before: the disk has no others
        header_bytes = encode_header(header)
        slot = None if self.draining else self.room.slot_for(header, header_bytes)
        if slot is None:
            self.counters.refused_blocks += 1
            return NotStored(header.block_hash)
        block = self._add_block(header, header_bytes, slot=slot, state=SlotState.RESERVED)
        self._terms.begin(block, retention)
        block.reservation_id = self._new_id("r")
        expires_at_s = self._clock.now_s() + self._reservation_ttl_ms / 1_000
        self._claims.reservations[block.reservation_id] = HeldReservation(block, expires_at_s, retention)
        return SlotReserved(
            reservation_id=block.reservation_id,
            slot=slot,
            header=header,
            buffer=self._arena.payload(slot, header.payload_bytes),
        )

    def _add_block(self, header: BlockHeader, header_bytes: bytes, *, slot: int, state: SlotState) -> HeldBlock:
        now_s = self._clock.now_s()
        units = units_for(header.payload_bytes, len(header_bytes))
        self._block_units = units
        self.counters.saw_block(header.namespace, header.layout.block_tokens)
        block = HeldBlock(
            header=header,
            header_bytes=header_bytes,
            slot=slot,
            slot_bytes=units * UNIT_BYTES,
            state=state,
            created_s=now_s,
            used_s=now_s,
        )
        self._blocks.add(block)
        return block

    def _show(self, block: HeldBlock) -> None:
        """A block was committed: it and committed blocks that waited for it become visible and are announced."""
        now_s = self._clock.now_s()
        shown = self._blocks.became_committed(block)
        for newly in shown:
            newly.used_s = now_s
            if newly.parent is not None:
                self._blocks.touch(newly.parent, now_s)
            self._terms.settle(newly)
            self.waiters.wake(*newly.key)
            if self.disk.get(newly.key) is None:
                self._changes.added(newly.header)
        for newly in shown or [block]:
            self._blocks.offer(newly)

    def _end_claims(self) -> int:
        ended = self._readers.end_lapsed()
        for reservation in self._claims.lapsed_reservations():
            self._departures.drop_reserved(reservation.block)
            self.counters.expired_reservations += 1
            ended += 1
        return ended

    def _new_id(self, kind: str) -> str:
        """Never given out twice, not even by a later process: the incarnation is part of it."""
        self._serial += 1
        return f"{kind}-{self.incarnation:x}-{self._serial:x}"
