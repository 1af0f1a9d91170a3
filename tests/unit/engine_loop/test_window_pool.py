"""The account of blocks of a model with a window: a prefix is found by its last window, whatever is gone before it."""

import random

from headrace.core.block import HashedPrompt
from headrace.core.key_window import KeyWindow
from headrace.core.limits import POOL_NAMES_PER_BLOCK_MAX
from headrace.engine.block_pool import BlockPool, Selection, Short, Taken

from .test_block_pool import make_prompt

WINDOW = KeyWindow(3, 1)  # two blocks of a prefix; six are held at once


def run(pool: BlockPool, prompt: HashedPrompt) -> None:
    """Compute a prompt as the engine does: block after block, sharing each, and giving back what the window passed."""
    taken = pool.take(len(prompt.chain), prompt=prompt, shared_max=len(prompt.chain))
    assert isinstance(taken, Taken)
    held, first, shared = list(taken.block_ids), taken.first_block, True
    for done in range(taken.num_shared + 1, len(prompt.chain) + 1):
        if first + len(held) < done:
            more = pool.take(1)
            assert isinstance(more, Taken)
            held += more.block_ids
        shared = shared and pool.hash_blocks(prompt, held[: done - first], first_block=first)
        passed = WINDOW.first_block(done) - first
        pool.unref_all(held[:passed])
        del held[:passed]
        first += passed
        pool.check_integrity()
    pool.unref_all(held)


def test_a_prefix_is_found_when_its_last_window_is_there() -> None:
    """Ten blocks through a pool of six: the head is gone, the tail is worth ten."""
    pool, prompt = BlockPool(6, window=WINDOW), make_prompt(range(10))
    run(pool, prompt)
    assert pool.resident_blocks(prompt) == 10
    assert pool.resident_blocks(make_prompt([*range(9), 77, 78])) == 9
    assert pool.resident_blocks(make_prompt(range(4))) == 0
    taken = pool.take(12, prompt=make_prompt([*range(10), 77, 78]), shared_max=12)
    assert isinstance(taken, Taken)
    assert (taken.num_shared, taken.first_block, len(taken.block_ids)) == (10, 8, 4)
    pool.check_integrity()


def test_an_eviction_by_prefix_reaches_what_stands_on_blocks_that_are_gone() -> None:
    """Fails if a tail outlives an order to evict the prefix that it was computed from."""
    pool, prompt = BlockPool(6, window=WINDOW), make_prompt(range(10))
    run(pool, prompt)
    assert pool.resident_blocks(make_prompt(range(2))) == 0
    dry = pool.evict(Selection(prefix_token_ids=(0, 1)), dry_run=True)
    assert dry.num_blocks > 0
    assert pool.evict(Selection(roots=frozenset(prompt.chain[:1])), dry_run=False).num_blocks == dry.num_blocks
    assert pool.resident_blocks(prompt) == 0
    pool.check_integrity()


def test_what_stands_on_a_forgotten_prefix_is_not_shared_when_the_window_has_passed_that() -> None:
    pool, prompt = BlockPool(12, window=WINDOW), make_prompt(range(10))
    taken = pool.take(10, prompt=prompt)
    assert isinstance(taken, Taken)
    assert pool.hash_blocks(prompt, taken.block_ids[:3])
    assert pool.forget(Selection(prefix_token_ids=(0,))) == 3
    assert not pool.hash_blocks(prompt, taken.block_ids[:4])
    assert not pool.hash_blocks(prompt, taken.block_ids[2:5], first_block=2)
    pool.unref_all(taken.block_ids)
    pool.check_integrity()


def test_names_of_blocks_that_are_gone_are_bounded() -> None:
    """Tails of long prompts, each with all its names: fails if a pool remembers more than it may."""
    pool, length = BlockPool(8, window=WINDOW), 2 * POOL_NAMES_PER_BLOCK_MAX
    prompts = [make_prompt([1_000 * seed + position for position in range(length)]) for seed in range(4)]
    for prompt in prompts * 2:
        tail = pool.take(2)
        assert isinstance(tail, Taken)
        assert pool.hash_blocks(prompt, tail.block_ids, first_block=length - 2)
        pool.unref_all(tail.block_ids)
        assert pool.resident_blocks(prompt) == length
        assert len(pool._tree.names) <= POOL_NAMES_PER_BLOCK_MAX * 8
        pool.check_integrity()
    small, held = BlockPool(4, window=WINDOW), []
    for prompt in prompts:
        tail = small.take(1)
        assert isinstance(tail, Taken)
        small.hash_blocks(prompt, tail.block_ids, first_block=length - 1)
        held += tail.block_ids
    assert len(small._tree.names) <= POOL_NAMES_PER_BLOCK_MAX * 4, "all are held: the last ones are not shared"
    small.unref_all(held)
    small.check_integrity()


def test_random_prompts_come_and_go_and_the_books_balance() -> None:
    """What is taken as shared is the prompt's own, block by block; evictions and orders in between."""
    dice = random.Random(4)
    pool = BlockPool(14, window=WINDOW)
    meant: dict[int, tuple[int, ...]] = {}
    for _ in range(400):
        tokens = [dice.randrange(2) for _ in range(dice.randint(1, 9))]
        prompt = make_prompt(tokens)
        taken = pool.take(len(tokens), prompt=prompt, shared_max=len(tokens) - 1)
        if isinstance(taken, Short):
            continue
        for index in range(taken.first_block, taken.num_shared):
            assert meant[taken.block_ids[index - taken.first_block]] == tuple(tokens[: index + 1])
        stop = dice.randint(taken.num_shared, min(len(tokens), taken.first_block + len(taken.block_ids)))
        for index in range(taken.num_shared, stop):
            meant[taken.block_ids[index - taken.first_block]] = tuple(tokens[: index + 1])
        pool.hash_blocks(prompt, taken.block_ids[: stop - taken.first_block], first_block=taken.first_block)
        pool.check_integrity()
        dropped = dice.randint(0, len(taken.block_ids))
        pool.unref_all(taken.block_ids[:dropped])
        if dice.random() < 0.2:
            order = pool.forget if dice.random() < 0.5 else lambda each: pool.evict(each, dry_run=False)
            order(Selection(prefix_token_ids=tuple(tokens[: dice.randint(1, 3)])))
            pool.check_integrity()
        pool.unref_all(taken.block_ids[dropped:])
        pool.check_integrity()
    assert pool.available_blocks == 14
