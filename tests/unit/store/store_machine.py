"""The store machine: a real node over a real arena, driven step by step beside a model that knows what must follow.

Any rule may be the process's last: `die_soon` arms a death before some line of the next call that writes durable
state. Then memory (and disk) are opened anew, and what is found must lie between what was there before the call and
what the call was about to do. After every step the arena's own records, the node's books, the index that follows its
changes, the leased bytes and the counters are compared with the model.

Rules come in layers: here death and the clock, in `store_machine_claims.py` writers, readers and evictions, in
`store_machine_control.py` operators' orders, in `store_machine_disk.py` the disk. The tests are in
`test_store_machine.py`.
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
from known_blocks import BLOCK_TOKENS, BLOCKS, BY_HEADER_BYTES, CHAINS, Key, KnownChain
from store_kit import HandClock
from store_model import Life, StoreModel, ancestry, closed

from headrace.blocks import disk_tier, host_arena
from headrace.blocks.claims import SlotReserved
from headrace.blocks.host_arena import HostArena, SlotTerms, budgets_path, open_arena
from headrace.core.block import BlockHash, BlockHeader, NamespaceId
from headrace.core.eviction import PolicyName
from headrace.store import budgets_file
from headrace.store.node_rules import NodeRules
from headrace.store.recover_arena import recover_arena
from headrace.store.store_node import StoreNode

DURABLE = (host_arena, disk_tier, budgets_file)  # the modules whose lines change what outlives the process
LEASE_TTL_S, RESERVATION_TTL_S = 30.0, 10.0
ANY = st.integers(0, 2**16)


def rules_of(policy: PolicyName) -> NodeRules:
    return NodeRules(
        eviction_policy=policy,
        lease_ttl_ms=int(LEASE_TTL_S * 1_000),
        reservation_ttl_ms=int(RESERVATION_TTL_S * 1_000),
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
    """A node, what is known of it, and its deaths."""

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
        self.rules = rules_of(policy)
        total_bytes = (units + 2) * host_arena.UNIT_BYTES
        if in_file == 7:
            self.directory = Path(tempfile.mkdtemp(prefix="store-machine-", dir="/dev/shm"))
            self.arena = open_arena(self.directory / "n1.arena", total_bytes)
        else:
            self.arena = HostArena.in_memory(total_bytes)
        assert self.arena.num_units == units
        self.open_node()
        self.fill_some()

    def fill_some(self) -> None:
        """What other runs left: an empty node has little to get wrong."""

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
            rules=self.rules,
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
            for of in (lambda arena: arena, budgets_path):
                if of(left.path).exists():
                    shutil.copyfile(of(left.path), of(path))
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
        self.node.disk.check_files()

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

    # The clock

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

    def time_passed(self) -> None:
        """What every call of the node starts with: whatever is over, ends."""
        gone = self.model.expire()
        self.gone_by_time |= gone
        self.may_lose_in_step |= gone

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
        self.node.disk.check_files()
        assert len(self.arena.slot_units()) == len(self.model.blocks), "a slot is held for nothing, or a block has none"
        used = sum(block.known.slot_bytes for block in self.model.blocks.values())
        assert self.arena.free_bytes + used == self.arena.data_bytes
        self.check_readable()
        terms = {BY_HEADER_BYTES[record.header]: record.terms for record in self.arena.records()}
        assert terms.keys() == self.model.committed()
        assert all(terms[key] == self.model.blocks[key].terms for key in self.model.visible())
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
        """The last step: what must hold when nothing is in progress any more."""
        self.died_after = 0


def check_terms(found: SlotTerms, known: list[SlotTerms]) -> None:
    """What a record says after a death is word by word what it said before the call, or what the call wrote there."""
    assert found.expires_unix_ms in {terms.expires_unix_ms for terms in known}
    assert found.ordered_unix_ms in {terms.ordered_unix_ms for terms in known}
    assert found.pinned_until_unix_ms in {terms.pinned_until_unix_ms for terms in known}
    assert found.not_on_disk in {terms.not_on_disk for terms in known}
