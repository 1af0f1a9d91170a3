"""Any sequence of reserve, commit, abort, lease, release, time, eviction, corruption and crash keeps the books true.

The model beside the node is a set of what was committed and not reported gone; the node's own `check_integrity` runs
after every step. Fails, for example, when a freed slot keeps its record, a lease count is not taken back, a parent
leaves before its child, or recovery forgets a unit.
"""

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from store_kit import ChangeLog, StoreKit, fill, make_branch, make_header, make_kit, make_prompt, payload_of

from headrace.blocks.claims import LeasedRun, SlotReserved
from headrace.core.block import BlockHash, payload_digest
from headrace.core.errors import BlockCorrupt, LeaseExpired
from headrace.core.generation import EvictSelector
from headrace.core.ports import AlreadyStored
from headrace.store.recover_arena import recover_arena
from headrace.store.store_node import StoreNode

# Two heads with two tails each, so that blocks have several children, and one chain on its own.
PROMPTS = [make_branch(head, tail, head_blocks=2, tail_blocks=3) for head in (1, 2) for tail in (3, 4)]
PROMPTS.append(make_prompt(9, 5))


class StoreNodeMachine(RuleBasedStateMachine):
    """Twelve slots for nineteen different blocks."""

    @initialize()
    def start(self) -> None:
        self.kit: StoreKit = make_kit(blocks=12)
        self.open: list[SlotReserved] = []
        self.leases: list[LeasedRun] = []
        self.ended: list[str] = []
        self.corrupted: set[BlockHash] = set()
        self.incarnations = [self.kit.node.incarnation]

    @rule(prompt=st.sampled_from(PROMPTS), first=st.integers(0, 4), count=st.integers(1, 5))
    def reserve(self, prompt, first, count) -> None:
        headers = [make_header(prompt, i) for i in range(first, min(5, first + count))]
        outcomes = self.kit.node.reserve(headers)
        assert len(outcomes) == len(headers)
        gap = False
        for outcome in outcomes:
            assert not (gap and isinstance(outcome, SlotReserved)), "a block was reserved behind one that was refused"
            gap = gap or not isinstance(outcome, SlotReserved | AlreadyStored)
            if isinstance(outcome, SlotReserved):
                self.open.append(outcome)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def commit(self, data) -> None:
        """In any order, also after expiry, a crash, or the loss of the parent."""
        reserved = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        try:
            # Ask for the slot as a remote writer does: a stalled local writer is `scribble`'s business.
            self.kit.node.reserved_buffer(reserved.reservation_id)
            fill(reserved)
            self.kit.node.commit(reserved.reservation_id, payload_digest(payload_of(reserved.header)))
            self.corrupted.discard(reserved.header.block_hash)
        except LeaseExpired:
            self.ended.append(reserved.reservation_id)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def commit_with_wrong_bytes(self, data) -> None:
        reserved = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        try:
            self.kit.node.commit(reserved.reservation_id, 12345)
            raise AssertionError("a wrong checksum was accepted")
        except (BlockCorrupt, LeaseExpired):
            self.ended.append(reserved.reservation_id)

    @precondition(lambda self: self.open)
    @rule(data=st.data())
    def abort(self, data) -> None:
        reserved = self.open.pop(data.draw(st.integers(0, len(self.open) - 1)))
        self.kit.node.abort(reserved.reservation_id)
        self.kit.node.abort(reserved.reservation_id)

    @rule(prompt=st.sampled_from(PROMPTS), first=st.integers(0, 4))
    def lease(self, prompt, first) -> None:
        run = self.kit.node.lease(prompt.namespace, prompt.chain, first_block=first)
        assert bool(run.lease_id) == bool(run.blocks)
        for position, block in enumerate(run.blocks, start=first):
            assert block.header.block_hash == prompt.chain[position]
            assert block.header.parent_hash == prompt.parent_of(position)
        if run.blocks:
            self.leases.append(run)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def read(self, data) -> None:
        """What a live lease protects is exactly what was written, whatever happened since."""
        run = data.draw(st.sampled_from(self.leases))
        if not self.kit.node.holds_lease(run.lease_id):
            return
        for block, payload in zip(run.blocks, self.kit.node.leased_payloads(run.lease_id), strict=True):
            if block.header.block_hash not in self.corrupted:
                assert bytes(payload) == payload_of(block.header)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), report=st.booleans())
    def release(self, data, report) -> None:
        run = self.leases.pop(data.draw(st.integers(0, len(self.leases) - 1)))
        suspects = range(len(run.blocks)) if report else ()
        held = self.kit.node.holds_lease(run.lease_id)
        self.kit.node.release(run.lease_id, suspects)
        self.kit.node.release(run.lease_id, suspects)
        self.ended.append(run.lease_id)
        if report and held:
            for block in run.blocks:
                if block.header.block_hash in self.corrupted:
                    assert (block.header.namespace, block.header.block_hash) not in self.kit.changes.registered

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def scribble(self, data) -> None:
        """A stalled writer writes into a slot that is somebody else's by now."""
        run = data.draw(st.sampled_from(self.leases))
        if self.kit.node.holds_lease(run.lease_id):
            block = data.draw(st.sampled_from(run.blocks))
            self.kit.arena.payload(block.slot, 4)[:] = b"torn"
            self.corrupted.add(block.header.block_hash)

    @rule(seconds=st.sampled_from([0, 1, 6, 11, 31]))
    def pass_time(self, seconds) -> None:
        self.kit.clock.seconds += seconds
        self.kit.node.expire()

    @rule(
        dry_run=st.booleans(),
        prompt=st.none() | st.sampled_from(PROMPTS),
        position=st.integers(0, 4),
        idle_for_s=st.none() | st.sampled_from([0, 5, 20]),
    )
    def evict(self, dry_run, prompt, position, idle_for_s) -> None:
        named = () if prompt is None else (prompt.chain[position],)
        selector = EvictSelector(block_hashes=named, idle_for_s=idle_for_s)
        planned = self.kit.node.evict(selector, dry_run=True)
        registered = set(self.kit.changes.registered)
        leased = {
            block.header.block_hash
            for run in self.leases
            if self.kit.node.holds_lease(run.lease_id)
            for block in run.blocks
        }
        report = self.kit.node.evict(selector, dry_run=dry_run)
        assert (report.blocks, report.bytes) == (planned.blocks, planned.bytes)
        gone = registered - self.kit.changes.registered
        assert not dry_run or not gone
        assert len(gone) <= report.blocks
        assert not {block_hash for _, block_hash in gone} & leased, "a leased block was evicted"

    @rule()
    def crash_and_recover(self) -> None:
        """The process is killed between two steps; the next one starts on the same memory."""
        before = {key[1] for key in self.kit.node.inventory()}
        broken = {block_hash for block_hash in before if block_hash in self.corrupted}
        arena = self.kit.arena.reattached()
        changes = ChangeLog()
        self.kit.clock.seconds += 1
        node = StoreNode(arena, node_id="n1", clock=self.kit.clock, changes=changes, recovered=recover_arena(arena))
        self.kit = StoreKit(self.kit.clock, arena, changes, node)
        after = {key[1] for key in node.inventory()}
        assert after <= before
        assert not after & broken
        assert broken or after == before, "a whole block was lost"
        self.incarnations.append(node.incarnation)
        assert self.incarnations == sorted(set(self.incarnations))
        self.ended += [reserved.reservation_id for reserved in self.open] + [run.lease_id for run in self.leases]
        self.open, self.leases = [], []

    @invariant()
    def the_books_are_true(self) -> None:
        if not hasattr(self, "kit"):
            return
        node = self.kit.node
        node.check_integrity()
        stat = node.stat()
        assert stat.free_blocks + stat.committed_blocks + stat.reserved_blocks == stat.total_blocks == 12 or (
            stat.block_bytes == 0
        )
        assert set(node.inventory()) == self.kit.changes.registered, "the index would say something else"

    @invariant()
    def what_is_held_is_closed_under_prefixes(self) -> None:
        if not hasattr(self, "kit"):
            return
        registered = {block_hash for _, block_hash in self.kit.changes.registered}
        for prompt in PROMPTS:
            present = [block_hash in registered for block_hash in prompt.chain]
            assert present == sorted(present, reverse=True)
            assert self.kit.held(prompt) == sum(present)

    @invariant()
    def what_has_ended_stays_ended(self) -> None:
        if not hasattr(self, "kit"):
            return
        for ended in self.ended[-4:]:
            assert not self.kit.node.holds_lease(ended)
            self.kit.node.release(ended)
            self.kit.node.abort(ended)

    def teardown(self) -> None:
        """At rest everything can go: nothing is pinned for ever."""
        if not hasattr(self, "kit"):
            return
        self.kit.clock.seconds += 100
        self.kit.node.expire()
        report = self.kit.node.evict(EvictSelector(), dry_run=False)
        assert report.skipped_leased_blocks == 0
        self.kit.node.check_integrity()
        assert self.kit.arena.free_bytes == self.kit.arena.data_bytes


StoreNodeMachine.TestCase.settings = settings(
    max_examples=120, stateful_step_count=40, deadline=None, suppress_health_check=list(HealthCheck)
)
TestStoreNodeMachine = StoreNodeMachine.TestCase
