"""Times to live in a worker's pool: they run from the last use, the longest asked for holds, and only leaves go."""

import math
from collections.abc import Sequence

from headrace.core.block import HashAlgorithm, HashedPrompt, NamespaceId, hash_prompt
from headrace.engine.block_pool import BlockPool, Selection, Taken


class ManualClock:
    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    def unix_ms(self) -> int:
        return int(self.time_s * 1000)


def make_prompt(token_ids: Sequence[int]) -> HashedPrompt:
    return hash_prompt(NamespaceId("0a" * 16), token_ids, block_tokens=1, algorithm=HashAlgorithm.XXH3_128)


def timed_pool(num_blocks: int = 8) -> tuple[BlockPool, ManualClock]:
    clock = ManualClock()
    return BlockPool(num_blocks, clock=clock), clock


def use(pool: BlockPool, prompt: HashedPrompt, ttl_s: float) -> Taken:
    """Take a prompt, compute what is missing, share it; the caller gives it back."""
    taken = pool.take(len(prompt.chain), prompt=prompt, shared_max=len(prompt.chain), ttl_s=ttl_s)
    assert isinstance(taken, Taken)
    pool.hash_blocks(prompt, taken.block_ids, ttl_s=ttl_s)
    return taken


def used(pool: BlockPool, prompt: HashedPrompt, ttl_s: float) -> None:
    pool.unref_all(use(pool, prompt, ttl_s).block_ids)


def test_a_block_goes_when_nobody_used_it_for_its_time_and_every_use_starts_that_anew() -> None:
    """Fails when the time runs from the block's making, or never ends."""
    pool, clock = timed_pool()
    prompt = make_prompt([1, 2, 3])
    used(pool, prompt, 60)
    clock.time_s = 50
    used(pool, make_prompt([1, 2]), 60)
    clock.time_s = 61
    assert pool.evict_expired() == 49  # what is left is over then
    assert pool.resident_blocks(prompt) == 2
    clock.time_s = 110
    assert pool.evict_expired() == math.inf
    assert (pool.resident_blocks(prompt), pool.available_blocks, pool.kept_blocks) == (0, 8, 0)
    assert pool.counters.evicted_blocks == 3
    pool.check_integrity()


def test_of_several_times_the_longest_holds_and_none_is_longer_than_any() -> None:
    """Fails when a later, shorter time cuts an earlier one, or a request without a time is forgotten."""
    pool, clock = timed_pool()
    long, unbounded = make_prompt([1]), make_prompt([2])
    used(pool, long, 100)
    used(pool, long, 10)
    used(pool, unbounded, math.inf)
    used(pool, unbounded, 10)
    clock.time_s = 99
    pool.evict_expired()
    assert (pool.resident_blocks(long), pool.resident_blocks(unbounded)) == (1, 1)
    clock.time_s = 1_000_000
    pool.evict_expired()
    assert (pool.resident_blocks(long), pool.resident_blocks(unbounded)) == (0, 1)


def test_a_shorter_time_later_neither_cuts_a_longer_one_nor_starts_it_anew() -> None:
    """Fails when a block outlasts the time of everybody who used it, or goes before somebody's is over."""
    pool, clock = timed_pool()
    prompt = make_prompt([1])
    used(pool, prompt, 60)
    clock.time_s = 40
    used(pool, prompt, 10)
    clock.time_s = 59
    pool.evict_expired()
    assert pool.resident_blocks(prompt) == 1
    clock.time_s = 60
    pool.evict_expired()
    assert pool.resident_blocks(prompt) == 0


def test_the_time_of_a_long_sequence_runs_from_its_end() -> None:
    """Fails when a use counts from where it began: then what took long to compute would go at once."""
    pool, clock = timed_pool()
    running = use(pool, make_prompt([1, 2]), 60)
    clock.time_s = 1_000
    pool.evict_expired()
    pool.unref_all(running.block_ids)
    clock.time_s = 1_059
    pool.evict_expired()
    assert pool.resident_blocks(make_prompt([1, 2])) == 2
    clock.time_s = 1_060
    pool.evict_expired()
    assert pool.resident_blocks(make_prompt([1, 2])) == 0


def test_who_computes_what_is_resident_already_has_used_it() -> None:
    """Fails when a request that may not read the pool does not keep what it would have left there."""
    pool, clock = timed_pool()
    prompt = make_prompt([1, 2])
    used(pool, prompt, 60)
    clock.time_s = 59
    own = pool.take(2)
    assert isinstance(own, Taken)
    pool.hash_blocks(prompt, own.block_ids, ttl_s=60)
    pool.unref_all(own.block_ids)
    clock.time_s = 100
    pool.evict_expired()
    assert pool.resident_blocks(prompt) == 2


def test_a_block_in_use_and_what_it_stands_on_stay() -> None:
    """Fails when bytes are taken from under a sequence, or a parent goes before its child."""
    pool, clock = timed_pool()
    running = use(pool, make_prompt([1, 2, 3]), 60)
    pool.unref_all(running.block_ids[:2])
    clock.time_s = 1_000
    pool.evict_expired()
    assert pool.resident_blocks(make_prompt([1, 2, 3])) == 3
    pool.unref_all(running.block_ids[2:])
    clock.time_s = 1_060
    pool.evict_expired()
    assert pool.resident_blocks(make_prompt([1, 2, 3])) == 0


def test_a_listing_says_when_a_block_goes() -> None:
    """Fails when people are told another moment than the one that holds."""
    pool, clock = timed_pool()
    used(pool, make_prompt([1]), 60)
    used(pool, make_prompt([2]), math.inf)
    clock.time_s = 20
    assert {block.token_ids: block.expires_unix_ms for block in pool.describe(Selection())} == {(1,): 60_000, (2,): 0}


def test_forgetting_a_prefix_takes_it_from_those_who_ask_and_not_from_those_who_compute() -> None:
    """Fails when a hot prefix is found after an order's moment, or a running sequence loses its blocks."""
    pool, _ = timed_pool()
    prompt = make_prompt([1, 2, 3])
    running = use(pool, prompt, math.inf)
    used(pool, make_prompt([1, 2, 4]), math.inf)
    used(pool, make_prompt([1, 5]), math.inf)
    assert pool.forget(Selection(prefix_token_ids=(1, 2))) == 3
    assert (pool.resident_blocks(prompt), pool.resident_blocks(make_prompt([1, 5]))) == (1, 2)
    pool.check_integrity()
    assert pool.available_blocks == 8 - 3
    pool.hash_blocks(prompt, running.block_ids)  # as when its next block is full
    assert pool.resident_blocks(prompt) == 1
    anew = use(pool, prompt, math.inf)
    assert (anew.num_shared, pool.resident_blocks(prompt)) == (1, 3)
    pool.hash_blocks(prompt, running.block_ids)
    pool.unref_all(running.block_ids)
    pool.unref_all(anew.block_ids)
    pool.check_integrity()
    assert (pool.resident_blocks(prompt), pool.available_blocks) == (3, 8)
