"""Rules of the store machine for writers and readers, broken bytes, and operators who evict.

Late, twice and in any order are the usual ways here. Which blocks make room is the policy's choice: the machine sees
who left, and asks the model whether they were free to go, and, where a block was refused, whether anybody was.
"""

from typing import Any

from hypothesis import strategies as st
from hypothesis.stateful import rule
from known_blocks import BLOCK_TOKENS, BLOCKS, BY_HEADER_BYTES, CHAINS, Key, KnownBlock, KnownChain
from store_machine import ANY, LEASE_TTL_S, RESERVATION_TTL_S, StoreMachine, step
from store_model import Life, ModelLease, ModelReservation

from headrace.blocks.claims import SlotReserved
from headrace.blocks.host_arena import UNIT_BYTES, SlotTerms
from headrace.core.block import Tier, payload_digest
from headrace.core.errors import BlockCorrupt, LeaseExpired
from headrace.core.generation import EvictReport, EvictSelector
from headrace.core.limits import CHAIN_SHARE_MAX
from headrace.core.ports import AlreadyStored, NotStored
from headrace.core.retention import KEEP, Retention

CHAIN = st.sampled_from(range(len(CHAINS)))
POSITION = st.integers(0, 4)
RETENTION = st.sampled_from(
    [KEEP, KEEP, KEEP, Retention(ttl_s=20.0), Retention(ttl_s=45.0), Retention(on_disk=False), Retention(12.0, False)]
)


class ClaimsMachine(StoreMachine):
    """One node, its writers and its readers."""

    def fill_some(self) -> None:
        """What other runs left: an empty node has little to get wrong."""
        for chain in CHAINS[::3]:
            self.do_store(chain, 3)

    # Writers

    @rule(chain=CHAIN, first=st.integers(0, 3), count=st.integers(1, 5), retention=RETENTION)
    @step
    def reserve(self, chain: int, first: int, count: int, retention: Retention) -> None:
        self.do_reserve(CHAINS[chain], first, count, retention)

    def do_reserve(self, chain: KnownChain, first: int, count: int, retention: Retention = KEEP) -> list[SlotReserved]:
        """Reserve blocks of a chain, and account for who made room."""
        blocks = chain.blocks[first : first + count]
        self.time_passed()
        slots = self.arena.slot_units()
        used: dict[Key, SlotTerms] = {}
        for block in blocks:
            if self.model.get(block.key) is not None:
                self.model.touch(block.key)
                used |= self.model.used(block.key, retention)
        with self.call(may_lose=self.model.evictable_in_time(), may_set=used):
            outcomes = self.node.reserve([block.header for block in blocks], retention=retention)
        assert len(outcomes) == len(blocks)
        self.model.set_terms(used)
        gone = self.account_for_room(blocks[0].account if blocks else "")
        if len(gone) == 1 and len(blocks) == 1 and not self.is_short_of_quota(blocks[0], gone):
            assert not fits(slots, self.arena.num_units, blocks[0].units), "a block left though there was room"
        new = []
        for block, outcome in zip(blocks, outcomes, strict=True):
            parent_held = block.parent is None or self.model.get(block.parent) is not None
            if self.model.get(block.key) is not None:
                assert outcome == AlreadyStored(block.key[1])
            elif not parent_held or self.is_refused(block) or block.key in self.model.blocks:
                assert outcome == NotStored(block.key[1])
            elif isinstance(outcome, NotStored):
                assert not self.may_make_room(block), "refused though a block could have gone"
            else:
                assert isinstance(outcome, SlotReserved)
                kept_for = self.retention_of(block, retention)
                held = self.model.add(block, Life.RESERVED, kept_for)
                held.reservation_id = outcome.reservation_id
                expires_at_s = self.clock.seconds + RESERVATION_TTL_S
                self.model.reservations[outcome.reservation_id] = ModelReservation(held, expires_at_s, kept_for)
                new.append(outcome)
                self.seen_namespaces.add(chain.namespace)
        self.reserved += new
        return new

    def is_refused(self, block: KnownBlock) -> bool:
        """Whether a writer cannot store this block, whatever leaves."""
        return self.is_too_long(block)

    def is_too_long(self, block: KnownBlock) -> bool:
        """Whether the chain up to this block is too long for an arena of this size, or for its account."""
        return (block.header.position + 1) * block.units > CHAIN_SHARE_MAX * self.arena.num_units

    def is_short_of_quota(self, block: KnownBlock, gone: set[Key]) -> bool:
        """Whether its account had to give blocks up for this one, whatever room there was."""
        return False

    def retention_of(self, block: KnownBlock, retention: Retention) -> Retention:
        """What holds for a new block."""
        return retention

    def may_make_room(self, block: KnownBlock) -> set[Key]:
        """Blocks that could leave for this one's sake."""
        return self.model.evictable(keep=block.parent)

    def account_for_room(self, account: str) -> set[Key]:
        """Take what the node evicted for a block of an account out of the model; it must have been free to go."""
        gone = self.model.committed() - self.in_memory()
        pinned = self.model.kept_by_pins()
        for key in gone:
            assert self.model.blocks[key].leases == 0, "a block in use was evicted"
            assert key not in pinned, "a pinned block was evicted"
        self.model.remove(gone)
        return gone

    @rule(pick=ANY, how=st.sampled_from(["well", "well", "well", "wrong", "abort", "twice"]))
    @step
    def finish_write(self, pick: int, how: str) -> None:
        """In any order, also after expiry, a crash, or the loss of the parent."""
        if not self.reserved:
            self.do_reserve(CHAINS[pick % len(CHAINS)], 0, 2)
            return
        reserved = self.reserved.pop(pick % len(self.reserved))
        self.do_finish(reserved, how)
        if how == "twice" or pick % 3 == 0:
            self.do_finish(reserved, how)

    def do_finish(self, reserved: SlotReserved, how: str) -> None:
        claim = self.model.reservations.get(reserved.reservation_id)
        known = BLOCKS[(reserved.header.namespace, reserved.header.block_hash)]
        if how == "abort":
            with self.call():
                self.node.abort(reserved.reservation_id)
            if claim is not None:
                self.model.drop_reserved(claim.block)
            return
        live = claim is not None and claim.expires_at_s > self.clock.seconds
        terms = self.model.used(known.key, claim.retention) if live and how != "wrong" else {}
        if live:
            self.node.reserved_buffer(reserved.reservation_id)[:] = known.payload
        digest = 12_345 if how == "wrong" else payload_digest(known.payload)
        outcome: Any = None
        try:
            with self.call(may_add={known.key} if terms else set(), may_set=terms):
                self.node.commit(reserved.reservation_id, digest)
        except (LeaseExpired, BlockCorrupt) as error:
            outcome = type(error)
        assert outcome is (LeaseExpired if not live else BlockCorrupt if how == "wrong" else None)
        if live and how == "wrong":
            self.model.drop_reserved(claim.block)
        elif live:
            self.model.commit(claim.block, terms)

    @rule(chain=CHAIN, count=st.integers(1, 5), retention=RETENTION)
    def store(self, chain: int, count: int, retention: Retention) -> None:
        self.do_store(CHAINS[chain], count, retention)

    @rule(chain=CHAIN)
    def store_all(self, chain: int) -> None:
        self.do_store(CHAINS[chain], 5)

    @step
    def do_store(self, chain: KnownChain, count: int, retention: Retention = KEEP) -> None:
        """What a writer does when nothing goes wrong."""
        for reserved in self.do_reserve(chain, 0, count, retention):
            self.do_finish(reserved, "well")
            self.reserved.remove(reserved)

    # Readers

    @rule(pick=ANY, first=st.sampled_from([0, 0, 0, 1, 3]), retention=RETENTION)
    @step
    def lease(self, pick: int, first: int, retention: Retention) -> None:
        self.do_lease(self.readable_chain(pick), first, retention)

    @rule(pick=ANY, first=st.integers(0, 2))
    @step
    def report_broken(self, pick: int, first: int) -> None:
        """Two readers, of whom one finds a block broken: it is out of sight, and stays for the other."""
        chain = self.readable_chain(pick)
        self.do_lease(chain, 0)
        self.do_lease(chain, first)
        if len(self.leased) >= 2:
            lease = self.model.leases.get(self.leased[-1 - pick % 2])
            if lease is not None:
                self.do_break(lease.slots[pick // 2 % len(lease.slots)], pick)
            self.do_release(self.leased.pop(), report=True)

    def do_lease(self, chain: KnownChain, first: int = 0, retention: Retention | None = None) -> None:
        """Lease what is visible, and no more."""
        self.time_passed()
        held = []
        for block in chain.blocks[first:]:
            if not self.model.is_visible(block.key):
                break
            held.append(self.model.blocks[block.key])
        used = self.model.used(held[-1].key, retention) if held and retention is not None else {}
        with self.call(may_set=used):
            run = self.node.lease(chain.namespace, chain.hashes, first_block=first, retention=retention)
        self.model.set_terms(used)
        asked = self.asked.setdefault(chain.namespace, [0, 0])
        asked[0] += max(0, len(chain.hashes) - first)
        asked[1] += len(held)
        assert [block.header_bytes for block in run.blocks] == [block.known.header_bytes for block in held]
        assert bool(run.lease_id) == bool(held)
        if held:
            for block in held:
                block.leases += 1
            self.model.touch(held[-1].key)
            slots = tuple(block.slot for block in run.blocks)
            self.model.leases[run.lease_id] = ModelLease(tuple(held), slots, self.clock.seconds + LEASE_TTL_S)
            self.leased.append(run.lease_id)

    @rule(pick=ANY, report=st.integers(0, 3))
    @step
    def release(self, pick: int, report: int) -> None:
        """Once or twice, also after expiry; suspects are looked at again, and only broken ones go."""
        if not self.leased:
            self.do_lease(self.readable_chain(pick))
            return
        lease_id = self.leased.pop(pick % len(self.leased))
        self.do_release(lease_id, report=report > 0)
        if pick % 2:
            with self.call():
                self.node.release(lease_id, range(5))

    def do_release(self, lease_id: str, *, report: bool) -> None:
        """End a lease; its broken blocks leave with all that stands on them when they are reported."""
        lease = self.model.leases.get(lease_id)
        suspects = range(5) if report else ()
        broken = [block for block in lease.blocks if block.is_broken] if lease and report else []
        lost = {member.key for block in broken for member in self.model.family(block)}
        with self.call(may_lose=lost):
            self.node.release(lease_id, suspects)
        self.model.end_lease(lease_id)
        for block in broken:
            if self.model.get(block.key) is block:
                self.model.drain(block)
        self.ended.append(lease_id)

    @rule(pick=ANY)
    @step
    def break_bytes(self, pick: int) -> None:
        """A stalled writer stores into a slot that is somebody else's by now, or memory rots."""
        records = list(self.arena.records())
        if not records:
            self.do_store(CHAINS[pick % len(CHAINS)], 3)
            return
        self.do_break(records[pick % len(records)].slot, pick // 16)

    def do_break(self, slot: int, pick: int) -> None:
        (header,) = [record.header for record in self.arena.records() if record.slot == slot] or [None]
        if header is None:
            return  # it is on its way out already
        block = self.model.blocks[BY_HEADER_BYTES[header]]
        at = pick % len(block.payload)
        with self.arena.payload(slot, len(block.payload)) as memory:
            memory[at] ^= 1
            block.payload = bytes(memory)

    # Operators

    @rule(pick=ANY, position=POSITION, how=st.integers(0, 9), free_units=st.integers(0, 4), dry=st.booleans())
    @step
    def evict(self, pick: int, position: int, how: int, free_units: int, dry: bool) -> None:
        free_bytes = (free_units or 1) * UNIT_BYTES if how < 2 else None
        self.do_evict(self.selector(*self.readable_place(pick, position), how, free_bytes), dry=dry)

    def selector(self, chain: KnownChain, position: int, how: int, free_bytes: int | None = None) -> EvictSelector:
        """One of the ways to say what to evict, seldom everything."""
        position = min(position, len(chain.blocks) - 1)
        prefix = chain.token_ids[: (position + 1) * BLOCK_TOKENS + position % BLOCK_TOKENS]
        ways: list[dict[str, Any]] = [
            {"namespace": chain.namespace},
            {"created_before_unix_ms": 1_000_000 + 10_000 * position},
            {"idle_for_s": 6.0 * position},
            {"namespace": chain.namespace, "idle_for_s": 0.5},
            {"block_hashes": (chain.hashes[position],)},
            {"block_hashes": (chain.hashes[-1], chain.hashes[position])},
            {"prefix_token_ids": prefix},
            {"prefix_token_ids": prefix, "namespace": chain.namespace},
            {"block_hashes": (chain.hashes[position],), "tier": Tier.HOST},
            {"namespace": chain.namespace, "tier": Tier.DISK, "block_hashes": (chain.hashes[position],)},
        ]
        return EvictSelector(free_bytes=free_bytes, **ways[how])

    def do_evict(self, selector: EvictSelector, *, dry: bool) -> None:
        """Exactly what is meant, unread and unpinned; the report says so, dry or not."""
        self.time_passed()
        going, skipped, pinned = self.model.evicted_by(selector)
        planned = self.node.evict(selector, dry_run=True)
        assert planned.dry_run
        if dry:
            self.check_eviction(selector, planned, going, skipped, pinned)
            return
        with self.call(may_lose=set(going)):
            report = self.node.evict(selector, dry_run=False)
        assert (report.blocks, report.bytes, report.tokens) == (planned.blocks, planned.bytes, planned.tokens)
        self.check_eviction(selector, report, going, skipped, pinned)
        gone = self.model.committed() - self.in_memory()
        assert gone == going or selector.free_bytes is not None
        assert gone <= going
        self.model.remove(gone)

    def check_eviction(
        self, selector: EvictSelector, report: EvictReport, going: set[Key], skipped: set[Key], pinned: set[Key]
    ) -> None:
        """What a report says of a node whose only tier is the arena."""
        total_bytes = sum(BLOCKS[key].slot_bytes for key in going)
        if selector.free_bytes is None:
            assert (report.blocks, report.bytes) == (len(going), total_bytes)
            assert report.skipped_leased_blocks == len(skipped)
            assert report.skipped_pinned_blocks == len(pinned)
            assert {BLOCKS[key].key[1] for key in going} == set(report.block_hashes)
        else:
            assert report.bytes >= min(selector.free_bytes, total_bytes), "less was freed than could be"
            largest = max((BLOCKS[key].slot_bytes for key in going), default=0)
            assert report.bytes < selector.free_bytes + largest, "more was freed than asked for"
        assert report.tokens == report.blocks * BLOCK_TOKENS

    def check_at_rest(self) -> None:
        """Nobody holds anything any more, and an operator clears the node."""
        super().check_at_rest()
        self.clock.seconds += 1_000
        self.do_expire()
        self.do_evict(EvictSelector(), dry=False)
        assert not self.model.blocks
        assert self.arena.free_bytes == self.arena.data_bytes
        self.node.check_integrity()
        self.node.disk.check_files()


def fits(slots: dict[int, int], num_units: int, units: int) -> bool:
    """Whether a run of `units` free units lies between slots (first unit -> units)."""
    at = 0
    for slot, taken in sorted(slots.items()):
        if slot - at >= units:
            return True
        at = slot + taken
    return num_units - at >= units
