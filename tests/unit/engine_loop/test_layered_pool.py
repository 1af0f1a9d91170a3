"""The account of blocks of two parts against a model of it: what is found has all that is read, and nothing is lost."""

import random

import pytest

from headrace.core.block import HashAlgorithm, NamespaceId, hash_prompt
from headrace.core.clock import SystemClock
from headrace.core.key_window import KeyWindow
from headrace.engine.layered_pool import LayeredPool
from headrace.engine.pool_values import Selection, Short

B, NUM_WIDE, NUM_NEAR = 4, 24, 14
WINDOW = KeyWindow(9, B)  # two blocks of a prefix, and so six near parts that a sequence may hold at once
NAMESPACE = NamespaceId("ab" * 16)


def make_pool(num_near: int = NUM_NEAR) -> LayeredPool:
    return LayeredPool(NUM_WIDE, num_near=num_near, near_window=WINDOW, clock=SystemClock())


def make_prompt(token_ids: list[int]):
    return hash_prompt(NAMESPACE, token_ids, block_tokens=B, algorithm=HashAlgorithm.XXH3_128)


class Sequence:
    """One sequence as the engine treats it, over tables that say whose KV is in which part."""

    def __init__(self, pool: LayeredPool, prompt, written: dict[tuple[str, int], bytes]) -> None:
        self.pool, self.prompt, self.written = pool, prompt, written
        self.num_computed = 0
        taken = pool.take(len(prompt.chain), prompt=prompt, shared_max=len(prompt.chain))
        self.is_admitted = not isinstance(taken, Short)
        if isinstance(taken, Short):
            return
        self.table = list(taken.block_ids)
        self.first_near, self.end_near = taken.first_near, taken.end_near
        self.num_computed = taken.num_shared
        self.check_read(taken.num_shared)

    def check_read(self, num_blocks: int) -> None:
        """What is read of so many blocks is that of this prompt, in both parts."""
        wide, _ = self.pool.parts.split(self.table[:num_blocks])
        for index in range(num_blocks):
            assert self.written[("wide", wide[index])] == self.prompt.chain[index]
        for index in range(WINDOW.first_of_prefix(num_blocks), num_blocks):
            near = self.pool.parts.near_of(self.table[index])
            assert self.written[("near", near)] == self.prompt.chain[index]

    def compute_one(self) -> bool:
        """One more block; False when there is no near part for it."""
        index = self.num_computed
        if index == len(self.prompt.chain):
            return True
        if index == self.end_near:
            near = self.pool.take_near(1)
            if isinstance(near, Short):
                return False
            self.table[index] = self.pool.parts.join(self.table[index], near[0])
            self.end_near += 1
        self.check_read(index)
        block_id = self.table[index]
        self.written["wide", self.pool.parts.wide_of(block_id)] = self.prompt.chain[index]
        self.written["near", self.pool.parts.near_of(block_id)] = self.prompt.chain[index]
        self.num_computed += 1
        self.pool.hash_blocks(self.prompt, self.table[: self.num_computed])
        passed = min(WINDOW.first_of_prefix(self.num_computed), self.end_near)
        if passed > self.first_near:
            stale = self.table[self.first_near : passed]
            self.table[self.first_near : passed] = self.pool.parts.place(stale, (), first=0)
            self.pool.unref_all([self.pool.parts.near_alone(near) for near in self.pool.parts.split(stale)[1]])
            self.first_near = passed
        return True

    def end(self) -> None:
        self.pool.unref_all(self.table)


@pytest.mark.parametrize("seed", range(30))
def test_sequences_that_come_and_go_find_only_what_is_theirs(seed):
    """Prompts of few beginnings in a pool that holds neither all wide nor all near parts; evictions in between."""
    rng = random.Random(seed)
    pool, written = make_pool(rng.choice((8, NUM_NEAR, NUM_WIDE))), {}
    running: list[Sequence] = []
    for _ in range(120):
        action = rng.random()
        if action < 0.25 and len(running) < 3:
            begin = [rng.randrange(2)] * (B * rng.randrange(1, 8))
            prompt = make_prompt(begin + [rng.randrange(2, 5)] * (B * rng.randrange(0, 4)))
            sequence = Sequence(pool, prompt, written)
            if sequence.is_admitted:
                running.append(sequence)
        elif action < 0.9 and running:
            sequence = rng.choice(running)
            if not sequence.compute_one():  # it gives way
                running.remove(sequence)
                sequence.end()
        elif action < 0.95 and running:
            running.pop(rng.randrange(len(running))).end()
        elif action < 0.97:
            pool.evict(Selection(blocks_max=rng.choice((None, 3))), dry_run=False)
        else:
            pool.forget(Selection())
        pool.check_integrity()
    for sequence in running:
        sequence.end()
    pool.check_integrity()
    assert (pool.available_blocks, pool.available_near) == (pool.num_blocks, pool.near.num_blocks)


def test_a_take_that_is_short_of_either_part_takes_nothing():
    pool = make_pool()
    prompt = make_prompt(list(range(8 * B)))
    first = pool.take(8, prompt=prompt)
    second = pool.take(8, prompt=prompt)
    assert not isinstance(first, Short)
    assert not isinstance(second, Short)
    assert isinstance(short := pool.take(8, prompt=prompt), Short)
    assert (short.needed, short.available) == (6, 2)  # near parts; of wide ones there are eight
    assert (pool.available_blocks, pool.available_near) == (8, 2)
    pool.unref_all(first.block_ids)
    assert isinstance(pool.take(17, prompt=make_prompt(list(range(17 * B)))), Short)
    assert (pool.available_blocks, pool.available_near) == (16, 8)
    pool.unref_all(second.block_ids)


def test_a_reference_to_a_block_keeps_both_its_parts():
    """As a block that is being published, while the window of its sequence passes it."""
    pool = make_pool()
    prompt = make_prompt(list(range(B)))
    taken = pool.take(1, prompt=prompt)
    assert not isinstance(taken, Short)
    pool.hash_blocks(prompt, taken.block_ids)
    pool.ref(taken.block_ids[0])
    pool.unref_all(taken.block_ids)
    assert (pool.available_blocks, pool.available_near) == (NUM_WIDE - 1, NUM_NEAR - 1)
    pool.unref(taken.block_ids[0])
    assert (pool.kept_blocks, pool.near.kept_blocks) == (1, 1)


def test_one_long_sequence_that_is_held_does_not_keep_others_from_being_found():
    """Fails when names of near parts are limited by how few of these there are: a sequence is as long as wide parts."""
    pool = LayeredPool(640, num_near=8, near_window=WINDOW, clock=SystemClock())
    long = Sequence(pool, make_prompt([1] * (590 * B)), {})
    while long.num_computed < 590:
        assert long.compute_one()
    computed = make_prompt([2] * (2 * B))
    taken = pool.take(2, prompt=computed)
    assert not isinstance(taken, Short)
    assert pool.hash_blocks(computed, taken.block_ids)
    assert pool.resident_blocks(computed) == 2
    pool.unref_all(taken.block_ids)
    loaded = make_prompt([3] * (10 * B))  # from a store, with near parts of its last window only
    taken = pool.take(10, prompt=loaded)
    assert not isinstance(taken, Short)
    near = pool.parts.split(taken.block_ids)[1]
    assert pool.hash_blocks(loaded, pool.parts.place(taken.block_ids, near[:2], first=8))
    assert pool.resident_blocks(loaded) == 10
    pool.check_integrity()
