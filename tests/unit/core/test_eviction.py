"""Every policy keeps what is held closed under prefixes and within its room, whatever is asked of it."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.eviction import POLICY_CLASSES, EvictionPolicy, PolicyName, make_policy
from headrace.core.eviction_adaptive import AdaptiveOrder
from headrace.core.eviction_order import HEAP_SLACK, GdsfOrder, LfuOrder, LruOrder
from headrace.core.limits import EVICTION_GHOSTS_PER_BLOCK

BLOCK_BYTES = 100
EVERY_POLICY = pytest.mark.parametrize("name", list(PolicyName))
PROMPTS = st.tuples(st.integers(1, 6), st.integers(1, 6), st.sampled_from([0, 1, 3]))
REQUESTS = st.lists(PROMPTS, max_size=40)


def chain(prompt: int, blocks: int, *, shared: int = 0) -> list[int]:
    """Block names of a prompt. Its first `shared` blocks are those of every such prompt, the rest its own."""
    return [i if i < shared else prompt * 1_000 + shared * 100 + i for i in range(blocks)]


@dataclass
class NameStore:
    """A full store without bytes: asks the policy for room, and keeps its own account of what is held."""

    policy: EvictionPolicy[int]
    capacity: int
    parents: dict[int, int | None] = field(default_factory=dict)
    evicted: list[int] = field(default_factory=list)

    def ask(self, blocks: Sequence[int], *, may_leave: Callable[[int], bool] | None = None) -> int:
        """One request: read what is held of a chain, store the rest; how many leading blocks were held."""
        found = 0
        while found < len(blocks) and blocks[found] in self.parents:
            found += 1
        if found:
            self.policy.used(blocks[:found])
        for position in range(found, len(blocks)):
            parent = blocks[position - 1] if position else None
            if len(self.parents) >= self.capacity:
                victim = self.policy.victim(parent, may_leave=may_leave)
                if victim is None:
                    break
                assert victim != parent, "the block that is written to was evicted"
                self.remove(victim)
                self.evicted.append(victim)
            self.policy.added(blocks[position], parent, size_bytes=BLOCK_BYTES, recompute_s=1.0 + position / 10)
            self.parents[blocks[position]] = parent
        return found

    def remove(self, block: int) -> None:
        """Take a block out; it must be a leaf."""
        assert block not in self.parents.values(), f"{block} was to leave before a block that stands on it"
        del self.parents[block]
        self.policy.removed(block)


def make_store(name: PolicyName, capacity: int) -> NameStore:
    return NameStore(make_policy(name), capacity)


@EVERY_POLICY
@given(requests=REQUESTS, leaving=st.lists(st.integers(0, 100), max_size=40), held=st.sets(st.integers(0, 20)))
@settings(max_examples=30, deadline=None)
def test_what_is_held_stays_closed_under_prefixes_and_within_its_room(name, requests, leaving, held) -> None:
    """Also when an operator takes leaves, and when leased blocks may not leave."""
    store = make_store(name, capacity=8)
    leased = {block for block in held if block % 2}

    def may_leave(block: int) -> bool:
        return block not in leased

    for index, (prompt, blocks, shared) in enumerate(requests):
        store.ask(chain(prompt, blocks, shared=shared), may_leave=may_leave)
        assert len(store.parents) == len(store.policy) <= 8
        assert all(parent is None or parent in store.parents for parent in store.parents.values())
        assert all(block in store.policy for block in store.parents)
        leaves = sorted(set(store.parents) - set(store.parents.values()))
        if leaves and index < len(leaving):
            store.remove(leaves[leaving[index] % len(leaves)])
        store.policy.check_integrity(may_leave)
    assert not leased & set(store.evicted)


@EVERY_POLICY
@given(requests=REQUESTS)
@settings(max_examples=20, deadline=None)
def test_room_is_found_as_long_as_any_other_leaf_is_there(name, requests) -> None:
    store = make_store(name, capacity=5)
    for prompt, blocks, shared in requests:
        wanted = chain(prompt, blocks, shared=shared)
        store.ask(wanted)
        assert wanted[min(blocks, 5) - 1] in store.parents, "a block was refused although others could have left"


@EVERY_POLICY
def test_a_block_in_use_is_passed_over_and_goes_after_it_was_offered(name) -> None:
    store = make_store(name, capacity=2)
    store.ask([1])
    store.ask([2])
    assert store.policy.victim(may_leave=lambda block: block == 2) == 2
    assert store.policy.victim(may_leave=lambda block: False) is None
    assert store.policy.victim() is None, "nothing was offered again"
    store.policy.offer(1)
    assert store.policy.victim() == 1


@EVERY_POLICY
def test_the_same_requests_give_the_same_evictions(name) -> None:
    first, second = (make_store(name, capacity=20) for _ in range(2))
    for store in (first, second):
        for step in range(400):
            store.ask(chain(step * 7 % 23, 1 + step % 5, shared=1))
    assert first.evicted == second.evicted != []


@given(requests=REQUESTS)
@settings(max_examples=80, deadline=None)
def test_lru_evicts_what_a_naive_model_evicts(requests) -> None:
    """The model: the leaf whose last use, or that of any block that ever stood on it, is longest ago."""
    store = make_store(PolicyName.LRU, capacity=6)
    last_use: dict[int, int] = {}
    tick = 0
    for prompt, blocks, shared in requests:
        wanted = chain(prompt, blocks, shared=shared)
        found = next((i for i, block in enumerate(wanted) if block not in last_use), len(wanted))
        tick += 1
        last_use.update(dict.fromkeys(wanted[:found], tick))
        expected = []
        for position in range(found, len(wanted)):
            parent = wanted[position - 1] if position else None
            if len(last_use) >= 6:
                standing = {p: c for c, p in store_parents(wanted, store, last_use).items() if p is not None}
                leaves = [b for b in last_use if b not in standing and b != parent]
                if not leaves:
                    break
                oldest = min(leaves, key=lambda block: last_use[block])
                expected.append(oldest)
                above = store_parents(wanted, store, last_use)[oldest]
                if above is not None:
                    last_use[above] = max(last_use[above], last_use[oldest])
                del last_use[oldest]
            tick += 1
            last_use[wanted[position]] = tick
        before = len(store.evicted)
        store.ask(wanted)
        assert store.evicted[before:] == expected


def store_parents(wanted, store, held) -> dict[int, int | None]:
    """Parents of the model's blocks: those that the store has had since before, and those of the present prompt."""
    known = dict(store.parents)
    known.update({block: (wanted[i - 1] if i else None) for i, block in enumerate(wanted)})
    return {block: known[block] for block in held}


def test_gdsf_keeps_the_block_that_costs_more_seconds_per_byte() -> None:
    order = GdsfOrder()
    order.added("cheap", None, size_bytes=100, recompute_s=1.0)
    order.added("dear", None, size_bytes=100, recompute_s=3.0)
    order.added("dear but large", None, size_bytes=1_000, recompute_s=3.0)
    left = []
    for _ in range(3):
        left.append(order.victim())
        order.removed(left[-1])
    assert left == ["dear but large", "cheap", "dear"]


def test_lfu_ages_so_that_old_fame_does_not_last() -> None:
    store = NameStore(LfuOrder(), capacity=3)
    for _ in range(5):
        store.ask([1])
    for fresh in range(10, 60):
        store.ask([fresh])
    assert 1 not in store.parents


def test_a_block_that_comes_back_is_not_taken_for_a_new_one() -> None:
    store = NameStore(LfuOrder(), capacity=2)
    for asked in (1, 1, 1, 2, 3, 3, 3, 3, 4, 4, 4, 4, 4):  # 1 is used three times, then pushed out
        store.ask([asked])
    assert 1 not in store.parents
    store.ask([1])
    store.ask([9])
    assert 1 in store.parents


def test_names_of_evicted_blocks_are_forgotten_in_time() -> None:
    store = NameStore(LfuOrder(), capacity=10)
    for fresh in range(1_000):
        store.ask([fresh])
    assert len(store.policy._ghosts) <= EVICTION_GHOSTS_PER_BLOCK * 11


@EVERY_POLICY
def test_blocks_that_leave_by_other_ways_leave_nothing_behind(name) -> None:
    """An operator who evicts all day never asks for a victim: the order's own heap must not grow."""
    policy = POLICY_CLASSES[name]()
    for step in range(5_000):
        policy.added(step, None, size_bytes=BLOCK_BYTES, recompute_s=1.0)
        policy.removed(step)
    assert len(policy._heap) <= HEAP_SLACK + 2


@EVERY_POLICY
def test_a_decision_among_many_blocks_costs_microseconds(name) -> None:
    """20,000 blocks; at most 200 us for a use, a victim, a removal and an addition, on a busy shared core."""
    store = make_store(name, capacity=20_000)
    for prompt in range(1, 2_001):
        store.ask(chain(prompt, 10))
    took_s = []
    for prompt in range(3_000, 3_300):
        start_s = time.process_time()
        store.policy.used(chain(1 + prompt % 50 + 1_900, 5))
        victim = store.policy.victim()
        store.policy.removed(victim)
        del store.parents[victim]
        store.policy.added(prompt * 1_000, None, size_bytes=BLOCK_BYTES, recompute_s=1.0)
        took_s.append(time.process_time() - start_s)
    assert sorted(took_s)[len(took_s) // 2] < 200e-6


def test_the_adaptive_policy_turns_from_recency_to_frequency_when_a_loop_defeats_recency() -> None:
    """Ten prompts in turn and a flood between them: least recently used never hits, uses tell."""
    store = NameStore(AdaptiveOrder(), capacity=40)
    plain = NameStore(LruOrder(), capacity=40)
    hits = plain_hits = 0
    for turn in range(400):
        asked = chain(1 + turn % 5, 4)
        hits += store.ask(asked)
        plain_hits += plain.ask(asked)
        flood = chain(100 + turn, 12)
        store.ask(flood)
        plain.ask(flood)
    assert plain_hits == 0
    assert hits > 0.8 * 4 * 400
    assert store.policy.leader != "lru"


def test_the_adaptive_policy_follows_recency_where_only_recency_pays() -> None:
    """Every prompt is asked twice in a row and never again, after prompts that were asked very often."""
    store = NameStore(AdaptiveOrder(), capacity=20)
    for _ in range(100):
        for famous in range(1, 5):
            store.ask(chain(famous, 5))
    hits = 0
    for prompt in range(100, 1_100):
        store.ask(chain(prompt, 5))
        store.ask(chain(prompt + 5_000, 5))
        hits += store.ask(chain(prompt, 5))
    assert hits > 0.9 * 5 * 1_000
