"""A simulated GPU's memory against rules that any order of events must keep."""

import random

import pytest

from headrace.core.eviction import PolicyName
from headrace.core.prefix_map import PrefixMap
from headrace.simulate.worker_memory import DeviceMemory, HostMemory

BLOCK = 10


def make_device(blocks: int) -> tuple[DeviceMemory, PrefixMap[int]]:
    held = PrefixMap[int]()
    return DeviceMemory(blocks * BLOCK, block_tokens=BLOCK, holder=3, held=held), held


def make_chain(draw: random.Random) -> tuple[int, ...]:
    """A path in a tree with three branches at each block: names say their whole path."""
    chain, name = [], 0
    for _ in range(draw.randint(1, 6)):
        name = name * 4 + draw.randint(1, 3)
        chain.append(name)
    return tuple(chain)


@pytest.mark.parametrize("seed", range(8))
def test_whatever_happens_prefixes_stay_whole_uses_stay_held_and_room_is_kept(seed: int):
    """Fails when a parent goes before its child, a block in use goes, the map differs, or cached blocks exceed room."""
    draw = random.Random(seed)
    memory, held = make_device(20)
    running: list[tuple[tuple[int, ...], int]] = []
    for _ in range(600):
        if running and draw.random() < 0.5:
            chain, private = running.pop(draw.randrange(len(running)))
            memory.end_use(chain)
            memory.private_tokens -= private
        else:
            chain = make_chain(draw)
            got = chain[: memory.add(chain)]
            assert memory.num_leading(chain) == len(got)
            memory.use(got)
            if memory.fits(7):
                memory.take_private(7)
                running.append((got, 7))
            else:
                memory.end_use(got)
        assert memory.used_tokens <= 20 * BLOCK
        blocks = set(held.blocks_of(3))
        assert memory.used_tokens - memory.private_tokens == len(blocks) * BLOCK
        assert {block // 4 for block in blocks} - {0} <= blocks, "a block is held and its parent is not"
        for chain, _ in running:
            assert set(chain) <= blocks
    for chain, _ in running:
        memory.end_use(chain)
    memory.private_tokens = 0
    assert memory.busy_tokens == 0


def test_the_least_recently_used_chain_goes_first_and_from_its_tail():
    memory, held = make_device(4)
    memory.add((1, 11))
    memory.add((2, 22))
    memory.use((1, 11))
    memory.end_use((1, 11))
    memory.add((3,))
    assert set(held.blocks_of(3)) == {1, 11, 2, 3}
    memory.add((4, 44))
    assert set(held.blocks_of(3)) == {1, 3, 4, 44}


def test_a_chain_longer_than_the_room_is_kept_as_far_as_it_goes():
    memory, held = make_device(3)
    memory.add((9,))
    assert memory.add((1, 2, 3, 4, 5)) == 3
    assert set(held.blocks_of(3)) == {1, 2, 3}


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
        blocks = set(held.blocks_of(0))
        assert len(blocks) <= 12
        assert {block // 4 for block in blocks} - {0} <= blocks
