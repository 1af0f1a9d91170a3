"""The account of blocks: nothing is lost, nothing is given twice, and what is found by hash is what was meant."""

import random
import threading
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from headrace.core.block import BlockHash, HashAlgorithm, HashedPrompt, NamespaceId, hash_prompt
from headrace.engine.block_pool import BlockPool, Evicted, HashesChanged, Selection, Short, Taken

NAMESPACE = NamespaceId("0a" * 16)
OTHER_NAMESPACE = NamespaceId("0b" * 16)


def make_prompt(token_ids: Sequence[int], *, block_tokens: int = 1, namespace: NamespaceId = NAMESPACE) -> HashedPrompt:
    return hash_prompt(namespace, token_ids, block_tokens=block_tokens, algorithm=HashAlgorithm.XXH3_128)


def take(pool: BlockPool, num_blocks: int, prompt: HashedPrompt | None = None) -> Taken:
    taken = pool.take(num_blocks, prompt=prompt, shared_max=num_blocks)
    assert isinstance(taken, Taken)
    return taken


def fill(pool: BlockPool, token_ids: Sequence[int]) -> HashedPrompt:
    """Leave a chain of blocks in the pool, unheld."""
    return leave(pool, make_prompt(token_ids))


def leave(pool: BlockPool, prompt: HashedPrompt) -> HashedPrompt:
    """Leave a prompt's blocks in the pool, unheld."""
    taken = take(pool, len(prompt.chain), prompt)
    pool.hash_blocks(prompt, taken.block_ids)
    pool.unref_all(taken.block_ids)
    return prompt


class ManualClock:
    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    def unix_ms(self) -> int:
        return int(self.time_s * 1000)


def test_a_chain_left_behind_is_found_again_as_far_as_it_matches() -> None:
    pool = BlockPool(8)
    fill(pool, [1, 2, 3, 4])
    taken = take(pool, 5, make_prompt([1, 2, 9, 4, 5]))
    assert taken.num_shared == 2
    assert pool.available_blocks == 3
    pool.check_integrity()


def test_a_hash_that_belongs_to_other_tokens_is_a_miss() -> None:
    """A collision, made by hand: fails if the pool trusts hashes without comparing tokens."""
    pool = BlockPool(4)
    honest = fill(pool, [1, 2])
    forged = HashedPrompt(NAMESPACE, (7, 2), honest.chain, block_tokens=1)
    assert take(pool, 2, forged).num_shared == 0


def test_a_hash_in_another_namespace_is_a_miss() -> None:
    pool = BlockPool(4)
    honest = fill(pool, [1, 2])
    foreign = HashedPrompt(OTHER_NAMESPACE, (1, 2), honest.chain, block_tokens=1)
    assert take(pool, 2, foreign).num_shared == 0


def test_taking_more_than_there_is_changes_nothing_and_says_what_is_missing() -> None:
    pool = BlockPool(4)
    prompt = fill(pool, [1, 2])
    held = take(pool, 1)
    assert pool.take(5, prompt=prompt, shared_max=2) == Short(needed=3, available=1)
    assert pool.resident_blocks(prompt) == 2
    assert pool.available_blocks == 3
    pool.unref_all(held.block_ids)
    pool.check_integrity()


def test_eviction_takes_tails_before_heads_and_the_longest_unused_chain_first() -> None:
    pool = BlockPool(6)
    old, new = fill(pool, [1, 2, 3]), fill(pool, [4, 5, 6])
    take(pool, 2)
    assert (pool.resident_blocks(old), pool.resident_blocks(new)) == (1, 3)
    take(pool, 2)
    assert (pool.resident_blocks(old), pool.resident_blocks(new)) == (0, 2)


def test_only_as_many_blocks_are_evicted_as_are_missing() -> None:
    removed: list[BlockHash] = []
    pool = BlockPool(5, on_hashes=lambda change: removed.extend(change.removed))
    fill(pool, [1, 2, 3])
    take(pool, 2)
    assert not removed
    take(pool, 1)
    assert len(removed) == 1


def test_a_shared_prefix_stays_while_a_new_tail_is_used() -> None:
    """Using a chain makes all of it young: the unused tail goes before the head that both share."""
    pool = BlockPool(5)
    first, second = fill(pool, [1, 2, 3]), fill(pool, [1, 2, 4])
    take(pool, 2)
    assert pool.resident_blocks(first) == 2
    assert pool.resident_blocks(second) == 3


def test_a_block_whose_hash_is_resident_already_stays_private_and_is_freed_with_its_owner() -> None:
    pool = BlockPool(4)
    prompt = make_prompt([1])
    first, second = take(pool, 1).block_ids, take(pool, 1).block_ids
    pool.hash_blocks(prompt, first)
    pool.hash_blocks(prompt, second)
    assert take(pool, 1, prompt).block_ids == first
    pool.unref_all(second)
    assert pool.available_blocks == 3
    pool.check_integrity()


def test_a_held_tail_stops_being_found_when_its_unheld_head_must_go() -> None:
    """A reader may keep a tail longer than its head. The pool still gives out every unheld block it has."""
    pool = BlockPool(3)
    prompt = make_prompt([1, 2, 3])
    block_ids = take(pool, 3).block_ids
    pool.hash_blocks(prompt, block_ids)
    pool.ref(block_ids[1])
    pool.unref_all(block_ids)
    assert pool.available_blocks == 2
    assert set(take(pool, 2).block_ids) == {block_ids[0], block_ids[2]}
    pool.check_integrity()
    assert pool.resident_blocks(prompt) == 0
    pool.unref(block_ids[1])
    assert pool.available_blocks == 1


def test_a_chain_that_lost_its_head_is_whole_again_when_its_owner_hashes_on() -> None:
    """Our copy of block 0 was private because another one was resident; that one has been evicted since."""
    pool = BlockPool(3)
    prompt = make_prompt([1, 2])
    other, ours = take(pool, 1).block_ids, take(pool, 2).block_ids
    pool.hash_blocks(prompt, other)
    pool.hash_blocks(prompt, ours[:1])
    pool.unref_all(other)
    pool.evict(Selection(), dry_run=False)
    pool.hash_blocks(prompt, ours)
    assert pool.resident_blocks(prompt) == 2
    pool.check_integrity()


def test_giving_a_block_back_twice_is_our_bug_and_is_caught() -> None:
    pool = BlockPool(2)
    block_ids = take(pool, 1).block_ids
    pool.unref_all(block_ids)
    with pytest.raises(AssertionError, match="given back twice"):
        pool.unref_all(block_ids)


def test_a_dry_run_counts_what_eviction_then_does() -> None:
    pool = BlockPool(8)
    fill(pool, [1, 2, 3])
    held = take(pool, 2, make_prompt([1, 2]))
    assert pool.evict(Selection(), dry_run=True) == Evicted(num_blocks=1, num_kept=2)
    assert pool.resident_blocks(make_prompt([1, 2, 3])) == 3
    assert pool.evict(Selection(), dry_run=False) == Evicted(num_blocks=1, num_kept=2)
    assert pool.resident_blocks(make_prompt([1, 2, 3])) == 2
    pool.unref_all(held.block_ids)
    pool.check_integrity()


def test_a_parent_stays_while_somebody_holds_its_child() -> None:
    """Only by giving references back out of order can a child be held alone, as a slow reader of tails does."""
    pool = BlockPool(4)
    prompt = fill(pool, [1, 2])
    held = take(pool, 2, prompt).block_ids
    pool.unref(held[0])
    assert pool.evict(Selection(), dry_run=False) == Evicted(num_blocks=0, num_kept=2)
    assert pool.resident_blocks(prompt) == 2
    pool.check_integrity()


def test_evicting_a_block_evicts_what_hangs_below_it_and_nothing_else() -> None:
    pool = BlockPool(8)
    left, right = fill(pool, [1, 2, 3]), fill(pool, [1, 4])
    evicted = pool.evict(Selection(roots=frozenset({left.chain[1]})), dry_run=False)
    assert evicted == Evicted(num_blocks=2, num_kept=0)
    assert (pool.resident_blocks(left), pool.resident_blocks(right)) == (1, 2)


def test_a_block_named_together_with_its_ancestor_is_counted_once() -> None:
    pool = BlockPool(8)
    prompt = fill(pool, [1, 2, 3])
    evicted = pool.evict(Selection(roots=frozenset(prompt.chain)), dry_run=False)
    assert evicted == Evicted(num_blocks=3, num_kept=0)
    pool.check_integrity()


def test_eviction_by_age_keeps_what_was_used_since() -> None:
    clock = ManualClock()
    pool = BlockPool(8, clock=clock)
    old = fill(pool, [1, 2])
    clock.time_s = 100.0
    new = fill(pool, [3, 4])
    evicted = pool.evict(Selection(idle_for_s=50.0), dry_run=False)
    assert evicted == Evicted(num_blocks=2, num_kept=0)
    assert (pool.resident_blocks(old), pool.resident_blocks(new)) == (0, 2)


def test_eviction_by_namespace_leaves_others_alone() -> None:
    pool = BlockPool(4)
    prompt = fill(pool, [1, 2])
    assert pool.evict(Selection(namespace=OTHER_NAMESPACE), dry_run=False) == Evicted(0, 0)
    assert pool.evict(Selection(namespace=NAMESPACE), dry_run=False) == Evicted(2, 0)
    assert pool.resident_blocks(prompt) == 0


def test_a_prefix_means_its_last_full_block_and_what_follows_in_every_namespace() -> None:
    pool = BlockPool(8)
    for namespace in (NAMESPACE, OTHER_NAMESPACE):
        prompt = make_prompt([1, 2, 3], namespace=namespace)
        leave(pool, prompt)
    leave(pool, make_prompt([1, 9]))
    described = pool.describe(Selection(prefix_token_ids=(1, 2)))
    assert [(block.token_ids, block.position) for block in described] == [((2,), 1), ((3,), 2)] * 2
    assert {block.namespace for block in described} == {NAMESPACE, OTHER_NAMESPACE}
    assert pool.evict(Selection(prefix_token_ids=(1, 2, 3, 4)), dry_run=True).num_blocks == 0
    assert pool.evict(Selection(prefix_token_ids=(1, 2), namespace=NAMESPACE), dry_run=False).num_blocks == 2
    pool.check_integrity()


def test_a_namespace_means_those_narrowed_from_it_too() -> None:
    pool = BlockPool(8)
    leave(pool, replace(make_prompt([1, 2], namespace=OTHER_NAMESPACE), narrowed_from=(NAMESPACE,)))
    leave(pool, make_prompt([3]))
    assert pool.evict(Selection(namespace=OTHER_NAMESPACE), dry_run=True).num_blocks == 2
    assert pool.evict(Selection(namespace=NAMESPACE), dry_run=False).num_blocks == 3


def test_what_was_evicted_and_taken_by_hash_is_counted_once() -> None:
    pool = BlockPool(4)
    prompt = make_prompt([1, 2])
    leave(pool, prompt)
    taken = pool.take(2, prompt=prompt, shared_max=2)
    pool.unref_all(taken.block_ids)
    assert [block.hits for block in pool.describe(Selection())] == [1, 1]
    pool.take(3)
    assert pool.counters.evicted_blocks == 1


def test_a_listener_sees_a_set_of_hashes_that_is_what_can_be_found() -> None:
    seen: set[BlockHash] = set()

    def follow(change: HashesChanged) -> None:
        assert bool(change.stored) != bool(change.removed)
        assert not seen & set(change.stored)
        assert seen.issuperset(change.removed)
        seen.update(change.stored)
        seen.difference_update(change.removed)

    pool = BlockPool(4, on_hashes=follow)
    prompts = [fill(pool, tokens) for tokens in ([1, 2], [1, 3], [4, 5])]
    assert seen == {h for prompt in prompts for h in prompt.chain[: pool.resident_blocks(prompt)]}


def test_threads_that_take_and_give_back_at_once_lose_nothing() -> None:
    pool = BlockPool(16)

    def work(seed: int) -> None:
        rng = random.Random(seed)
        for _ in range(200):
            prompt = make_prompt(rng.choices((1, 2), k=rng.randint(1, 4)))
            taken = pool.take(len(prompt.chain), prompt=prompt, shared_max=4)
            if isinstance(taken, Taken):
                pool.hash_blocks(prompt, taken.block_ids)
                pool.unref_all(taken.block_ids)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    pool.check_integrity()
    assert pool.available_blocks == 16


def test_an_eviction_of_so_many_blocks_spares_a_parent_whose_child_was_used_later() -> None:
    """Fails if the oldest blocks go whatever stands on them: a request that may not reuse shares only what is new."""
    clock = ManualClock()
    pool, prompt = BlockPool(4, clock=clock), make_prompt([1, 2])
    parent = pool.take(1)
    pool.hash_blocks(prompt, parent.block_ids)
    copies = pool.take(2)
    pool.hash_blocks(prompt, copies.block_ids)
    pool.unref_all(parent.block_ids)
    clock.time_s += 5
    pool.unref_all(copies.block_ids)
    assert pool.evict(Selection(blocks_max=1), dry_run=False).block_hashes == prompt.chain[1:]
    pool.check_integrity()


class PoolMachine(RuleBasedStateMachine):
    """Sequences come, compute, share and go in any order. The oracle is what each block was last filled with."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(7)
        self.block_to_prefix: dict[int, tuple[int, ...]] = {}
        self.sequences: list[tuple[HashedPrompt, tuple[int, ...], int]] = []  # prompt, blocks, leading valid ones
        self.references: list[int] = []
        self.forgotten: set[int] = set()  # blocks that were held when they were ordered away

    @property
    def held(self) -> set[int]:
        return {b for _, block_ids, _ in self.sequences for b in block_ids} | set(self.references)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=5), extra=st.integers(0, 1), shares=st.booleans())
    def admit(self, tokens: list[int], extra: int, shares: bool) -> None:
        prompt = make_prompt(tokens)
        before = self.pool.available_blocks
        held = self.held
        self.forgotten &= held
        taken = self.pool.take(len(tokens) + extra, prompt=prompt, shared_max=len(tokens) if shares else 0)
        match taken:
            case Short(needed=needed, available=available):
                assert needed > available
                assert self.pool.available_blocks == before
            case Taken(block_ids=block_ids, num_shared=num_shared):
                for index in range(num_shared):
                    assert self.block_to_prefix[block_ids[index]] == tuple(tokens[: index + 1])
                assert not held & set(block_ids[num_shared:]), "a held block was given out as fresh"
                for block_id in block_ids[num_shared:]:
                    self.block_to_prefix.pop(block_id, None)
                self.sequences.append((prompt, block_ids, num_shared))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def compute(self, data: st.DataObject) -> None:
        index = data.draw(st.integers(0, len(self.sequences) - 1))
        prompt, block_ids, num_valid = self.sequences[index]
        stop = data.draw(st.integers(num_valid, len(prompt.chain)))
        for position in range(num_valid, stop):
            self.block_to_prefix[block_ids[position]] = prompt.token_ids[: position + 1]
        self.pool.hash_blocks(prompt, block_ids[:stop])
        self.sequences[index] = (prompt, block_ids, stop)
        assert self.pool.resident_blocks(prompt) >= stop or self.forgotten & set(block_ids)
        assert not self.forgotten & set(self.pool._hashed)

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def read(self, data: st.DataObject) -> None:
        _, block_ids, _ = data.draw(st.sampled_from(self.sequences))
        self.references.append(data.draw(st.sampled_from(block_ids)))
        self.pool.ref(self.references[-1])

    @precondition(lambda self: self.references)
    @rule(data=st.data())
    def stop_reading(self, data: st.DataObject) -> None:
        self.pool.unref(self.references.pop(data.draw(st.integers(0, len(self.references) - 1))))

    @precondition(lambda self: self.sequences)
    @rule(data=st.data())
    def leave(self, data: st.DataObject) -> None:
        _, block_ids, _ = self.sequences.pop(data.draw(st.integers(0, len(self.sequences) - 1)))
        self.pool.unref_all(block_ids)

    @rule(tokens=st.lists(st.integers(0, 1), min_size=1, max_size=3))
    def forget(self, tokens: list[int]) -> None:
        """As an operator's order does at its moment: nothing is found below the root, and nobody loses a block."""
        prompt = make_prompt(tokens)
        held = self.held
        before = set(self.pool._hashed)
        self.pool.forget(Selection(roots=frozenset(prompt.chain[-1:])))
        self.forgotten |= (before - set(self.pool._hashed)) & held
        assert self.pool.resident_blocks(prompt) < len(tokens)
        assert not held & set(self.pool._free)

    @rule(tokens=st.lists(st.integers(0, 1), max_size=3), dry_run=st.booleans())
    def evict(self, tokens: list[int], dry_run: bool) -> None:
        chain = make_prompt(tokens).chain
        before = self.pool.available_blocks
        evicted = self.pool.evict(Selection(roots=frozenset(chain[-1:]) or None), dry_run=dry_run)
        assert self.pool.available_blocks == before, "evicting frees only blocks that could be had anyway"
        if not dry_run and evicted.num_kept == 0:
            assert self.pool.resident_blocks(make_prompt(tokens)) < max(1, len(chain))

    @invariant()
    def books_balance(self) -> None:
        self.pool.check_integrity()
        assert self.pool.available_blocks == self.pool.num_blocks - len(self.held)


TestPoolMachine = PoolMachine.TestCase
TestPoolMachine.settings = settings(max_examples=120, stateful_step_count=30, deadline=None)
