"""Which blocks a window needs, against the definition: position p reads the keys of positions p - window + 1 to p."""

import pytest

from headrace.core.key_window import KeyWindow, model_window

CASES = [(tokens, block) for tokens in (1, 2, 7, 8, 9, 16, 24, 64) for block in (1, 4, 8, 16)]


def blocks_read(first: int, last: int, *, tokens: int, block: int) -> set[int]:
    """Blocks that computing positions [first, last) reads or writes."""
    return {key // block for p in range(first, last) for key in range(max(0, p - tokens + 1), p + 1)}


@pytest.mark.parametrize(("tokens", "block"), CASES)
def test_the_first_block_is_the_first_that_is_read(tokens, block):
    window = KeyWindow(tokens, block)
    for position in range(3 * tokens + 3 * block):
        assert window.first_block(position) == min(blocks_read(position, position + 5, tokens=tokens, block=block))


@pytest.mark.parametrize(("tokens", "block"), CASES)
def test_a_prefix_needs_its_last_blocks_and_no_other(tokens, block):
    window = KeyWindow(tokens, block)
    for num_blocks in range(12):
        position = num_blocks * block
        read = blocks_read(position, position + 1, tokens=tokens, block=block) - {num_blocks}
        assert set(range(window.first_of_prefix(num_blocks), num_blocks)) == read
        assert len(read) == min(num_blocks, window.prefix_blocks)


@pytest.mark.parametrize(("tokens", "block"), CASES)
def test_no_step_needs_more_blocks_than_a_sequence_may_hold(tokens, block):
    """And there is room to load another prefix's window beside the one that is held."""
    window = KeyWindow(tokens, block)
    rows = window.step_rows(1_000)
    assert rows >= block
    for first in range(tokens + 3 * block):
        stretch = blocks_read(first, first + rows, tokens=tokens, block=block)
        assert len(stretch) <= window.held_blocks(1_000)
    assert 2 * window.prefix_blocks < window.held_blocks(1_000)


def test_one_layer_that_sees_everything_needs_everything():
    mixed = model_window([64, 64, None, 64], block_tokens=16)
    assert not mixed.bounded
    assert (mixed.first_block(10_000), mixed.first_of_prefix(600)) == (0, 0)
    assert (mixed.held_blocks(600), mixed.step_rows(512)) == (600, 512)


def test_the_widest_window_counts():
    assert model_window([64, 128, 64], block_tokens=16) == KeyWindow(128, 16)


def test_a_window_shorter_than_a_block_keeps_the_newest_full_block():
    """Fails if a sequence can have a table without any block that others find: what it shares next has no parent."""
    window = model_window([3, 2], block_tokens=8)
    assert [window.first_block(position) for position in (7, 12, 16, 23)] == [0, 0, 1, 1]
