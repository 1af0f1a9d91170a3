"""The map of holders answers what a walk over every block would, where what holders have is closed under prefixes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.predicted_blocks import PredictedBlocks
from headrace.core.prefix_map import PrefixMap

NUM_HOLDERS = 40  # more than the bits that a loop spreads


@given(st.lists(st.integers(0, 25), min_size=NUM_HOLDERS, max_size=NUM_HOLDERS), st.integers(0, 25))
def test_depths_are_those_of_a_walk(held: list[int], length: int):
    """Fails for a bisection that misses a place where a set shrinks."""
    blocks = PrefixMap[int]()
    for holder, depth in enumerate(held):
        blocks.add(holder, range(depth))
    assert blocks.depths(range(length), NUM_HOLDERS).tolist() == [min(depth, length) for depth in held]


@given(st.lists(st.tuples(st.integers(0, 5), st.integers(0, 8), st.booleans()), max_size=60))
def test_adding_and_removing_in_any_order_leaves_what_sets_would(steps: list[tuple[int, int, bool]]):
    blocks, model = PrefixMap[int](), dict.fromkeys(range(6), 0)
    for holder, depth, adds in steps:
        if adds:
            blocks.add(holder, range(depth))
            model[holder] = max(model[holder], depth)
        else:
            blocks.remove(holder, reversed(range(depth, 9)))
            model[holder] = min(model[holder], depth)
        blocks.check_integrity()
    assert blocks.depths(range(9), 6).tolist() == list(model.values())
    assert len(blocks) == max(model.values())


@given(st.lists(st.tuples(st.integers(0, 4), st.sets(st.integers(0, 20)), st.booleans()), max_size=20))
def test_a_depth_is_where_the_holder_has_a_block_whatever_is_missing_before(steps):
    """Fails when sets that are not closed under prefixes, as they are for a moment, name a block that nobody has."""
    blocks, model = PrefixMap[int](), {holder: set() for holder in range(5)}
    for holder, some, adds in steps:
        (blocks.add if adds else blocks.remove)(holder, some)
        model[holder] = model[holder] | some if adds else model[holder] - some
    for holder, depth in enumerate(blocks.depths(range(21), 5).tolist()):
        assert (0 in model[holder]) == (depth > 0)
        assert depth == 0 or depth - 1 in model[holder]


def test_blocks_that_the_same_holders_have_share_one_set():
    """Fails when each block has a set of its own: a thousand holders' are 160 bytes."""
    blocks = PrefixMap[int]()
    for start in range(0, 4_000, 8):  # as they are published
        for holder in range(1_000, 1_003):
            blocks.add(holder, range(start, start + 8))
    blocks.remove(1_001, range(2_000, 4_000))
    assert len({id(holders) for holders in blocks._block_to_holders.values()}) == 2


def test_another_chain_matches_nothing():
    blocks = PrefixMap[str]()
    blocks.add(3, "abc")
    assert not blocks.depths("xbc", 5).any()
    assert blocks.depths((), 5).tolist() == [0] * 5


def test_a_prediction_is_believed_until_its_end_and_while_another_of_the_same_blocks_lasts():
    predicted = PredictedBlocks[str](chains_max=10)
    predicted.add(1, "abc", until_s=5.0)
    predicted.add(1, "ab", until_s=9.0)
    assert predicted.depths("abcd", 3, now_s=4.0).tolist() == [0, 3, 0]
    assert predicted.depths("abcd", 3, now_s=5.0).tolist() == [0, 2, 0]
    assert not predicted.depths("abcd", 3, now_s=9.0).any()
    assert len(predicted) == 0


@given(st.lists(st.lists(st.integers(0, 1), max_size=6), max_size=12), st.lists(st.integers(0, 1), max_size=6))
def test_predictions_that_part_at_different_places_each_count_as_far_as_they_go(chains, suffix):
    """Fails when where one chain parts from the prompt is taken for where the next one does."""
    predicted, hashed = PredictedBlocks[tuple[int, ...]](chains_max=20), lambda tokens: named([0, *tokens])
    for holder, chain in enumerate(chains):
        predicted.add(holder, hashed(chain), until_s=9.0)
    depths = predicted.depths(hashed(suffix), len(chains), now_s=0.0).tolist()
    assert depths == [sum(map(tuple.__eq__, hashed(chain), hashed(suffix))) for chain in chains]


def named(tokens: list[int]) -> list[tuple[int, ...]]:
    """A block's name stands for all before it."""
    return [tuple(tokens[: end + 1]) for end in range(len(tokens))]


def test_more_predictions_than_the_bound_end_early():
    predicted = PredictedBlocks[int](chains_max=3)
    for number in range(10):
        predicted.add(0, (number,), until_s=100.0 + number)
    assert len(predicted) == 3
    found = [bool(predicted.depths((number,), 1, now_s=0.0)[0]) for number in range(10)]
    assert found == [False] * 7 + [True] * 3


def test_depths_come_as_numbers_that_arithmetic_takes():
    assert PrefixMap[int]().depths((1,), 4).dtype == np.int32
