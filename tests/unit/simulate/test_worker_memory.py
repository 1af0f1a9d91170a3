"""A simulated GPU's memory against rules that any order of events must keep."""

import random

import pytest

from headrace.core.eviction import PolicyName
from headrace.core.key_window import KeyWindow
from headrace.core.prefix_map import PrefixMap
from headrace.simulate.windowed_memory import WindowedMemory
from headrace.simulate.worker_memory import DeviceMemory, HostMemory

BLOCK = 10
WINDOW = KeyWindow(2 * BLOCK + 1, BLOCK)  # two blocks of a prefix are read


def make_device(blocks: int, *, near_blocks: int | None = None) -> tuple[DeviceMemory, PrefixMap[int]]:
    """near_blocks: of a model with windows."""
    held = PrefixMap[int]()
    if near_blocks is None:
        return DeviceMemory(blocks * BLOCK, block_tokens=BLOCK, holder=3, held=held), held
    near = {"near_tokens": near_blocks * BLOCK, "window": WINDOW}
    return WindowedMemory(blocks * BLOCK, holder=3, held=held, **near), held


def make_chain(draw: random.Random) -> tuple[int, ...]:
    """A path in a tree with three branches at each block: names say their whole path."""
    chain, name = [], 0
    for _ in range(draw.randint(1, 6)):
        name = name * 4 + draw.randint(1, 3)
        chain.append(name)
    return tuple(chain)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("near_blocks", [None, 12], ids=["no window", "windows"])
def test_whatever_happens_prefixes_stay_whole_uses_stay_held_and_room_is_kept(near_blocks: int | None, seed: int):
    """Fails when a parent goes before its child, a block in use goes, the map differs, or cached blocks exceed room."""
    draw = random.Random(seed)
    memory, held = make_device(20, near_blocks=near_blocks)
    running: list[tuple[tuple[int, ...], int]] = []
    for _ in range(600):
        if running and draw.random() < 0.5:
            memory.end(*running.pop(draw.randrange(len(running))))
        else:
            chain = make_chain(draw)
            found = memory.num_leading(chain)
            got = chain[: memory.add_computed(chain, first=found) if draw.random() < 0.5 else memory.add(chain)]
            assert near_blocks or memory.num_leading(chain) == len(got)
            tokens = len(got) * BLOCK + 7
            if memory.fits(tokens):
                memory.begin(got, tokens)
                running.append((got, tokens))
        assert memory.used_tokens <= 20 * BLOCK
        blocks = set(held.blocks())
        assert memory.used_tokens - 7 * len(running) == len(blocks) * BLOCK
        assert {block // 4 for block in blocks} - {0} <= blocks, "a block is held and its parent is not"
        for chain, _ in running:
            assert set(chain) <= blocks
            assert memory.num_leading(chain) == len(chain)
    for each in running:
        memory.end(*each)
    assert memory.busy_tokens == 0


def test_of_layers_with_a_window_old_parts_go_first_and_a_prefix_is_found_by_its_last_window():
    """Eight near parts: two chains of five blocks need four of them at least."""
    memory, _ = make_device(20, near_blocks=8)
    first, second = (1, 11, 111, 1111, 11111), (2, 22, 222, 2222, 22222)
    memory.add_computed(first, first=0)
    assert memory.num_leading(first) == 5
    memory.add_computed(second, first=0)  # two of the first's parts have gone, those longest unused
    assert (memory.num_leading(first), memory.num_leading(second)) == (5, 5)
    assert memory.num_leading(first[:3]) == 0
    memory.add((3, 33, 333))  # it came from elsewhere: two parts
    assert memory.num_leading((3, 33, 333)) == 3
    assert memory.num_leading((3, 33)) == 0
    assert memory.num_leading(first) == 0
    assert memory.num_leading(second) == 5


def test_a_sequence_holds_two_windows_of_near_parts_however_long_it_is():
    memory, _ = make_device(200, near_blocks=6 + 2)
    memory.begin((), 90 * BLOCK)
    assert not memory.fits(BLOCK * 3)
    assert memory.fits(BLOCK * 2)
    memory.end((), 90 * BLOCK)
    assert memory.busy_tokens == 0


def test_the_least_recently_used_chain_goes_first_and_from_its_tail():
    memory, held = make_device(4)
    memory.add((1, 11))
    memory.add((2, 22))
    memory.begin((1, 11), 2 * BLOCK)
    memory.end((1, 11), 2 * BLOCK)
    memory.add((3,))
    assert set(held.blocks()) == {1, 11, 2, 3}
    memory.add((4, 44))
    assert set(held.blocks()) == {1, 3, 4, 44}


def test_a_chain_longer_than_the_room_is_kept_as_far_as_it_goes():
    memory, held = make_device(3)
    memory.add((9,))
    assert memory.add((1, 2, 3, 4, 5)) == 3
    assert set(held.blocks()) == {1, 2, 3}


@pytest.mark.parametrize("policy", list(PolicyName))
def test_a_host_keeps_its_map_true_under_every_policy(policy: PolicyName):
    draw, held = random.Random(1), PrefixMap[int]()
    memory = HostMemory(12 * BLOCK, block_tokens=BLOCK, policy=policy, holder=0, held=held)
    for _ in range(300):
        chain = make_chain(draw)
        found = memory.num_leading(chain)
        if found:
            memory.read(chain[:found])
        kept = memory.add(chain)
        assert memory.num_leading(chain) == kept >= found
        blocks = set(held.blocks())
        assert len(blocks) <= 12
        assert {block // 4 for block in blocks} - {0} <= blocks
