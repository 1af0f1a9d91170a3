"""The store machine: a real node over a real arena, driven step by step beside a model that knows what must follow.

Any rule may be the process's last: `die_soon` arms a death before some line of the next call that writes durable
state. Then memory (and disk) are opened anew, and what is found must lie between what was there before the call and
what the call was about to do. After every step the arena's own records, the node's books, the index that follows its
changes, the leased bytes and the counters are compared with the model.

`store_machine_disk.py` and `store_machine_control.py` add rules; the tests are in `test_store_machine.py`.
"""

import functools
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from crash_points import Death, ProcessDied
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from known_blocks import BLOCK_TOKENS, BLOCKS, BY_HEADER_BYTES, CHAINS, Key, KnownBlock, KnownChain
from store_kit import HandClock
from store_model import Life, ModelLease, ModelReservation, StoreModel, ancestry, closed

from headrace.blocks import disk_tier, host_arena
from headrace.blocks.claims import SlotReserved
from headrace.blocks.host_arena import HostArena, SlotTerms, open_arena
from headrace.core.block import BlockHash, BlockHeader, NamespaceId, Tier, payload_digest
from headrace.core.errors import BlockCorrupt, LeaseExpired
from headrace.core.eviction import PolicyName
from headrace.core.generation import EvictReport, EvictSelector
from headrace.core.limits import CHAIN_SHARE_MAX
from headrace.core.ports import AlreadyStored, NotStored
from headrace.core.retention import KEEP, Retention
from headrace.store.recover_arena import recover_arena
from headrace.store.store_node import StoreNode

DURABLE = (host_arena, disk_tier)  # the modules whose lines change what outlives the process
LEASE_TTL_S, RESERVATION_TTL_S = 30.0, 10.0
ANY = st.integers(0, 2**16)
CHAIN = st.sampled_from(range(len(CHAINS)))
POSITION = st.integers(0, 4)
RETENTION = st.sampled_from(
    [KEEP, KEEP, KEEP, Retention(ttl_s=20.0), Retention(ttl_s=45.0), Retention(on_disk=False), Retention(12.0, False)]
)


@dataclass(slots=True)
class Effects:
    """What a call may change that outlives the process: if it dies, anything between none and all of that is done."""

    may_add: frozenset[Key] = frozenset()
    may_lose: frozenset[Key] = frozenset()
    may_set: dict[Key, SlotTerms] = field(default_factory=dict)


class IndexView:
    """The set that an index following a node's changes would hold; parents come first and leave last."""

    def __init__(self) -> None:
        self.registered: set[Key] = set()

    def added(self, header: BlockHeader) -> None:
        key = (header.namespace, header.block_hash)
        assert key not in self.registered, "announced twice"
        parent = BLOCKS[key].parent
        assert parent is None or parent in self.registered, "announced before its prefix"
        self.registered.add(key)

    def removed(self, namespace: NamespaceId, block_hash: BlockHash) -> None:
        key = (namespace, block_hash)
        assert not any(BLOCKS[each].parent == key for each in self.registered), "gone before what stands on it"
        self.registered.remove(key)


def step(body: Callable[..., None]) -> Callable[..., None]:
    """A rule's body as a step that the process may not survive."""

    @functools.wraps(body)
    def run(self: "StoreMachine", *args: Any, **draws: Any) -> None:
        try:
            body(self, *args, **draws)
        except ProcessDied:
            self.recover_after_death()

    return run


class StoreMachine(RuleBasedStateMachine):
    """Rules of readers, writers, time, broken bytes, operators' evictions and crashes."""

    steps_run = 0  # of all machines of this process: a test asserts that there are enough

    def __init__(self) -> None:
        super().__init__()
        self.clock = HandClock()
        self.model = StoreModel(self.clock)
        self.index = IndexView()
        self.directory: Path | None = None
        self.arena: HostArena | None = None
        self.deaths = 0
        self.died_after = 0  # lines that the next call lives to run; 0: it lives on
        self.effects = Effects()  # of the call in progress
        self.may_lose_in_step: set[Key] = set()
        self.gone_by_time: set[Key] = set()  # in this step
        self.terms_before: dict[Key, SlotTerms] = {}  # this step
        self.reserved: list[SlotReserved] = []  # given out and not yet used, live or not
        self.leased: list[str] = []
        self.ended: list[str] = []
        self.asked: dict[NamespaceId, list[int]] = {}  # namespace -> blocks asked for and found, in this process's time
        self.seen_namespaces: set[NamespaceId] = set()  # of which it knows how many tokens a block has
        self.incarnations: list[int] = []

    @initialize(units=st.integers(6, 14), policy=st.sampled_from(PolicyName), in_file=st.integers(0, 7))
    def start(self, units: int, policy: PolicyName, in_file: int) -> None:
        self.policy = policy
        total_bytes = (units + 2) * host_arena.UNIT_BYTES
        if in_file == 7:
            self.directory = Path(tempfile.mkdtemp(prefix="store-machine-"))
            self.arena = open_arena(self.directory / "n1.arena", total_bytes)
        else:
            self.arena = HostArena.in_memory(total_bytes)
        assert self.arena.num_units == units
        self.open_node()
        self.fill_some()

    def fill_some(self) -> None:
        """What other runs left: an empty node has little to get wrong."""
        for chain in CHAINS[::3]:
            self.do_store(chain, 3)

    # Life and death

    def open_node(self) -> None:
        """Start the node's process on what lies in the arena."""
        self.index = IndexView()
        self.node = StoreNode(
            self.arena,
            node_id="n1",
            clock=self.clock,
            changes=self.index,
            recovered=recover_arena(self.arena),
            lease_ttl_ms=int(LEASE_TTL_S * 1_000),
            reservation_ttl_ms=int(RESERVATION_TTL_S * 1_000),
            eviction_policy=self.policy,
        )
        self.incarnations.append(self.node.incarnation)

    def reopen_storage(self) -> None:
        """What a new process does first: attach the memory that the dead one left.

        A file is copied first: the dead process's mapping, and with it the lock, lives on in this one.
        """
        if self.arena.path is None:
            self.arena = self.arena.reattached()
        else:
            self.deaths += 1
            left, path = self.arena, self.arena.path.with_suffix(f".arena{self.deaths}")
            shutil.copyfile(left.path, path)
            left.close()
            self.arena = open_arena(path, left.total_bytes)

    @contextmanager
    def call(
        self,
        may_add: set[Key] | None = None,
        may_lose: set[Key] | None = None,
        may_set: dict[Key, SlotTerms] | None = None,
    ) -> Iterator[None]:
        """Every call of the node is made within this; it raises ProcessDied where a death was armed."""
        self.effects = Effects(frozenset(may_add or ()), frozenset(may_lose or ()), may_set or {})
        self.may_lose_in_step |= self.effects.may_lose
        with self.mortal():
            yield

    def mortal(self) -> AbstractContextManager[None]:
        """The armed death, once."""
        lines, self.died_after = self.died_after, 0
        return Death(lines, DURABLE) if lines else nullcontext()

    def recover_after_death(self) -> None:
        """The next process: it may die while it recovers, too."""
        bounds = self.what_must_survive()
        self.clock.seconds += 1
        while True:
            self.reopen_storage()
            try:
                with self.mortal():
                    self.open_node()
                break
            except ProcessDied:
                continue
        self.ended += [reserved.reservation_id for reserved in self.reserved] + self.leased
        self.reserved, self.leased, self.asked = [], [], {}
        self.check_recovered(*bounds)
        known_terms = [self.terms_before, {key: block.terms for key, block in self.model.blocks.items()}]
        known_terms += [
            self.effects.may_set,
            dict.fromkeys(self.effects.may_add - set(self.effects.may_set), SlotTerms()),
        ]
        self.model = StoreModel(self.clock)
        for record in sorted(
            self.arena.records(), key=lambda each: BLOCKS[BY_HEADER_BYTES[each.header]].header.position
        ):
            key = BY_HEADER_BYTES[record.header]
            block = self.model.add(BLOCKS[key], Life.COMMITTED)
            block.payload = block.known.payload
            block.order_waits = record.terms.ordered_unix_ms > 0
            check_terms(record.terms, [terms[key] for terms in known_terms if key in terms])
            block.terms = record.terms
        self.seen_namespaces = {key[0] for key in self.model.blocks}
        assert self.incarnations == sorted(set(self.incarnations)), "an incarnation was given out again"
        self.took_over()

    def took_over(self) -> None:
        """The next process runs; for what else it has to be told."""

    def what_must_survive(self) -> tuple[set[Key], set[Key]]:
        """The least and the most that may be readable after a death in this very call."""
        readable = self.model.visible()
        whole = {key for key in readable if not any(self.model.blocks[each].is_broken for each in ancestry(key))}
        least = {key for key in whole if not self.effects.may_lose & set(ancestry(key))}
        hidden = {key for key in self.model.committed() if not self.model.blocks[key].is_broken}
        gone_by_time = self.gone_by_time & set(self.terms_before)
        return least, whole | hidden | gone_by_time | self.effects.may_add

    def check_recovered(self, least: set[Key], most: set[Key]) -> None:
        """Whole blocks only, closed under prefixes, nothing lost without need and nothing back that had gone."""
        found = set(self.node.inventory())
        assert closed(found), "a block came back without its prefix"
        assert found <= most, "a block is readable that was evicted, broken or never committed"
        assert least <= found, "a whole block was lost"
        for record in self.arena.records():
            known = BLOCKS[BY_HEADER_BYTES[record.header]]
            with self.arena.payload(record.slot, len(known.payload)) as memory:
                assert memory == known.payload, "what came back is not what was written"
        self.node.check_integrity()

    def readable_chain(self, pick: int) -> KnownChain:
        """One of the chains of which there is something to read; any when there is none."""
        readable = [chain for chain in CHAINS if chain.blocks[0].key in self.index.registered]
        return (readable or CHAINS)[pick % len(readable or CHAINS)]

    def readable_place(self, pick: int, position: int) -> tuple[KnownChain, int]:
        """A chain and, unless `position` is 4, a block of it that can be read."""
        chain = self.readable_chain(pick)
        leading = sum(block.key in self.index.registered for block in chain.blocks)
        return chain, position if position == 4 or not leading else position % leading

    @rule(lines=st.integers(1, 60))
    def die_soon(self, lines: int) -> None:
        """The next call is this process's last; or its recovery is the next one's."""
        self.died_after = lines

    @rule(again=st.integers(0, 40))
    @step
    def die_now(self, again: int) -> None:
        """Killed between two calls; for `again` > 0 killed once more while it recovers."""
        self.effects = Effects()
        self.died_after = again
        raise ProcessDied

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

    def time_passed(self) -> None:
        """What every call of the node starts with: whatever is over, ends."""
        gone = self.model.expire()
        self.gone_by_time |= gone
        self.may_lose_in_step |= gone

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

    # The clock, operators

    @rule(seconds=st.sampled_from([0.5, 1.0, 6.0, 10.0, 20.0, 30.0]))
    @step
    def pass_time(self, seconds: float) -> None:
        self.clock.seconds += seconds
        self.do_expire()

    def do_expire(self) -> None:
        """What the node's background scan does."""
        self.time_passed()
        with self.call():
            self.node.expire()
        assert not self.node.has_due

    @rule(seconds=st.sampled_from([0.25, 1.0, 10.0]))
    @step
    def pass_time_unseen(self, seconds: float) -> None:
        """Time goes by and nobody has looked yet: what is over is over all the same."""
        self.clock.seconds += seconds
        for lease_id in self.leased[-2:]:
            lease = self.model.leases.get(lease_id)
            assert self.node.holds_lease(lease_id) == (lease is not None and lease.expires_at_s > self.clock.seconds)

    @rule(pick=ANY, position=POSITION, how=st.integers(0, 9), free_units=st.integers(0, 4), dry=st.booleans())
    @step
    def evict(self, pick: int, position: int, how: int, free_units: int, dry: bool) -> None:
        free_bytes = (free_units or 1) * host_arena.UNIT_BYTES if how < 2 else None
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

    @rule()
    @step
    def renew_incarnation(self) -> None:
        with self.call():
            self.incarnations.append(self.node.renew_incarnation())
        assert self.incarnations[-1] > self.incarnations[-2] or len(self.incarnations) < 2

    # What must hold after every step

    def in_memory(self) -> set[Key]:
        """Blocks that the arena's own records show as committed."""
        return {BY_HEADER_BYTES[record.header] for record in self.arena.records()}

    @invariant()
    def what_the_node_says_is_what_the_model_says(self) -> None:
        if self.arena is None:
            return
        StoreMachine.steps_run += 1
        self.node.check_integrity()
        assert self.in_memory() == self.model.committed()
        assert len(self.arena.slot_units()) == len(self.model.blocks), "a slot is held for nothing, or a block has none"
        used = sum(block.known.slot_bytes for block in self.model.blocks.values())
        assert self.arena.free_bytes + used == self.arena.data_bytes
        self.check_readable()
        visible = self.model.visible()
        for record in self.arena.records():
            key = BY_HEADER_BYTES[record.header]
            assert key not in visible or record.terms == self.model.blocks[key].terms
        self.may_lose_in_step, self.gone_by_time = set(), set()
        self.terms_before = {key: block.terms for key, block in self.model.blocks.items()}
        counters = self.node.counters
        assert (counters.lookups_tokens, counters.hits_tokens) == self.expected_lookups()

    def check_readable(self) -> None:
        """What can be read is what is visible, and what the index was told."""
        readable = set(self.node.inventory())
        assert readable == self.model.visible()
        assert readable == self.index.registered, "the index would say something else"
        for chain in CHAINS:
            present = [(chain.namespace, block_hash) in readable for block_hash in chain.hashes]
            assert present == sorted(present, reverse=True)
            assert self.node.lookup(chain.namespace, chain.hashes) == sum(present)

    def expected_lookups(self) -> tuple[int, int]:
        """Asked and hit tokens of namespaces of which this process has seen a block."""
        seen = [asked for namespace, asked in self.asked.items() if namespace in self.seen_namespaces]
        return sum(each[0] for each in seen) * BLOCK_TOKENS, sum(each[1] for each in seen) * BLOCK_TOKENS

    @invariant()
    def leased_bytes_do_not_change(self) -> None:
        for lease in self.model.leases.values():
            for block, slot in zip(lease.blocks, lease.slots, strict=True):
                assert self.model.blocks.get(block.key) is block, "a block went under its reader"
                with self.arena.payload(slot, len(block.payload)) as memory:
                    assert memory == block.payload, "bytes changed under a lease"

    @invariant()
    def what_has_ended_stays_ended(self) -> None:
        for ended in self.ended[-2:]:
            assert not self.node.holds_lease(ended)
            self.node.release(ended)
            self.node.abort(ended)

    def teardown(self) -> None:
        """At rest everything can go: nothing is held for ever."""
        if self.arena is None:
            return
        try:
            self.check_at_rest()
        finally:
            self.arena.close()
            if self.directory is not None:
                shutil.rmtree(self.directory)

    def check_at_rest(self) -> None:
        """Nobody holds anything any more, and an operator clears the node."""
        self.died_after = 0
        self.clock.seconds += 1_000
        self.do_expire()
        self.do_evict(EvictSelector(), dry=False)
        assert not self.model.blocks
        assert self.arena.free_bytes == self.arena.data_bytes
        self.node.check_integrity()


def fits(slots: dict[int, int], num_units: int, units: int) -> bool:
    """Whether a run of `units` free units lies between slots (first unit -> units)."""
    at = 0
    for slot, taken in sorted(slots.items()):
        if slot - at >= units:
            return True
        at = slot + taken
    return num_units - at >= units


def check_terms(found: SlotTerms, known: list[SlotTerms]) -> None:
    """What a record says after a death is word by word what it said before the call, or what the call wrote there."""
    assert found.expires_unix_ms in {terms.expires_unix_ms for terms in known}
    assert found.ordered_unix_ms in {terms.ordered_unix_ms for terms in known}
    assert found.pinned_until_unix_ms in {terms.pinned_until_unix_ms for terms in known}
    assert found.not_on_disk in {terms.not_on_disk for terms in known}
