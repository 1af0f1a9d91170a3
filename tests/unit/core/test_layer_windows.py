"""What layers read, hold and move, against sums over single positions and blocks."""

import pytest

from headrace.core.key_window import KeyWindow
from headrace.core.layer_windows import LayerWindows
from headrace.core.limits import PUBLISH_BATCH_BLOCKS, PUBLISH_QUEUE_BLOCKS

B = 8
MODELS = [(None, None), (24, 24), (24, 40), (24, None, 24, None), (5, None), (100, 7, None)]


def keys(window: int | None, position: int) -> set[int]:
    """What position `position` reads."""
    return set(range(0 if window is None else max(0, position - window + 1), position + 1))


@pytest.mark.parametrize("windows", MODELS)
@pytest.mark.parametrize(("tokens", "context"), [(1, 0), (7, 0), (7, 30), (50, 3), (64, 100)])
def test_pairs_and_keys_are_those_of_each_position(windows, tokens, context):
    seen = LayerWindows(windows)
    positions = range(context, context + tokens)
    assert seen.keys_read(context + tokens) == sum(len(keys(w, context + tokens - 1)) for w in windows)
    assert seen.pairs(tokens, context) == sum(len(keys(w, p)) for w in windows for p in positions)
    assert seen.keys_touched(tokens, context) == sum(
        len(set().union(*(keys(w, p) for p in positions))) for w in windows
    )


@pytest.mark.parametrize("windows", MODELS)
def test_the_context_that_reads_so_much_is_the_shortest(windows):
    seen = LayerWindows(windows)
    for wanted in (1, 30, 47, 48, 49, 64, 300):
        found = seen.context_of(wanted)
        if found is None:
            assert seen.keys_read(10**9) < wanted
        else:
            assert seen.keys_read(found - 1) < wanted <= seen.keys_read(found)


def test_of_windowed_layers_two_windows_and_two_blocks_are_held_and_one_window_is_moved():
    """A window of 24 tokens is 3 blocks: 8 are held of any sequence that is longer, 3 moved."""
    full, mixed, windowed = LayerWindows((None,) * 4), LayerWindows((24, 24, 24, None)), LayerWindows((24,) * 4)
    for num_blocks, held, moved in ((1, 1, 1), (3, 3, 3), (5, 5, 3), (8, 8, 3), (100, 8, 3)):
        tokens = num_blocks * B
        assert full.held(tokens, block_tokens=B) == full.moved(tokens, block_tokens=B) == 4 * tokens
        assert windowed.held(tokens, block_tokens=B) == 4 * held * B
        assert windowed.moved(tokens, block_tokens=B) == 4 * moved * B
        assert mixed.held(tokens, block_tokens=B) == tokens + 3 * held * B
        assert mixed.moved(tokens, block_tokens=B) == tokens + 3 * moved * B
    assert full.held(9, block_tokens=B) == 4 * 2 * B, "a block is held whole"
    assert full.moved(9, block_tokens=B) == 4 * B, "what is no full block is not moved"


def test_the_widest_window_decides_for_all_layers_of_a_part():
    wide, narrow = LayerWindows((40, 40, None)), LayerWindows((24, 40, None))
    assert wide.held(800, block_tokens=B) == narrow.held(800, block_tokens=B)
    assert wide.keys_read(800) > narrow.keys_read(800)


def test_a_pool_of_two_parts_has_near_ones_for_its_batch_and_for_what_is_published():
    mixed, near = LayerWindows((24, 24, 24, None)), KeyWindow(24, B)
    published = PUBLISH_QUEUE_BLOCKS + PUBLISH_BATCH_BLOCKS
    assert mixed.pool(4, 100 * B, block_tokens=B) == B * (400 + 3 * (4 * near.held_blocks(400) + published))
    assert mixed.pool(4, 10 * B, block_tokens=B) == B * 4 * 40, "never more of them than of wide ones"


@pytest.mark.parametrize("windows", MODELS)
def test_what_fits_fits_and_one_more_does_not(windows):
    layers = LayerWindows(windows)
    for room in (50_000, 1_000_000):
        fit = layers.fitting_sequences(room, 1_000, block_tokens=B)
        assert layers.pool(fit, 1_000, block_tokens=B) <= room < layers.pool(fit + 1, 1_000, block_tokens=B)
        longest = layers.fitting_tokens(room, 16, block_tokens=B)
        if longest is None:
            assert None not in windows
            assert layers.pool(16, 10**9, block_tokens=B) <= room
        else:
            assert layers.pool(16, longest, block_tokens=B) <= room < layers.pool(16, longest + B, block_tokens=B)
