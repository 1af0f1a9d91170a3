"""Which node has what a windowed model's pool lacks: what a worker remembers, and what it asks before a prefill."""

import random

import pytest
from simulated_engine import SimulatedEngine
from simulated_nodes import FaultRates, SimulatedNodes
from simulated_world import NO_FAULTS, World
from test_load_window import store_blocks
from virtual_loop import run_virtual
from windowed_loads import GRPC, PROMPT, SHARED_MEMORY, TOKENS, WINDOW

from headrace.core.block import CacheSource
from headrace.core.clock import Deadline
from headrace.core.generation import CacheControl, GenerateRequest
from headrace.transfer.home_nodes import HomeNodes
from headrace.transfer.load_prefix import LoadedPrefix

BLOCKS = len(PROMPT.chain)


class WhileTheLocalNodeDrains(SimulatedNodes):
    """Host "a" publishes to node "b"."""

    def sink_node_id(self) -> str:
        return "b"


def make_homes(world: World, nodes: SimulatedNodes, *, in_pool: int) -> HomeNodes:
    """Of a worker whose pool has so many blocks of the prompt."""
    engine = SimulatedEngine(num_blocks=64, clock=world.clock, rng=random.Random(0))
    engine.window = WINDOW
    taken = engine.pool.take(in_pool)
    engine.pool.hash_blocks(PROMPT, taken.block_ids)
    engine.pool.unref_all(taken.block_ids)
    return HomeNodes(engine, nodes, report_fault=world.faults.append)


async def storable(world: World, nodes: SimulatedNodes) -> GenerateRequest:
    homes = make_homes(world, nodes, in_pool=BLOCKS)
    return await homes.storable(world.request(TOKENS), deadline=Deadline.after(60, world.clock))


@pytest.mark.parametrize("why", ["no node takes blocks", "the node does not answer"])
def test_a_prefill_uses_the_pools_window_when_nobody_says_that_the_store_lacks_what_is_before(why: str) -> None:
    """Fails if a long prompt is computed from its first token, though that makes nothing of it storable."""

    async def main(clock):
        world = World(clock)
        silent = why == "the node does not answer"
        nodes = SimulatedNodes("a", world.nodes if silent else {}, FaultRates(lost=1.0))
        assert CacheSource.DEVICE in (await storable(world, nodes)).cache.sources
        assert len(world.faults) == silent

    run_virtual(main, seed=1)


@pytest.mark.parametrize("sink_has_it", [True, False])
def test_the_node_that_is_asked_is_the_one_that_what_is_computed_goes_to(sink_has_it: bool) -> None:
    """Fails if it is the host's own while that drains, and takes nothing."""

    async def main(clock):
        world = World(clock)
        await store_blocks(world, "b" if sink_has_it else "a", BLOCKS)
        nodes = WhileTheLocalNodeDrains("a", world.nodes, NO_FAULTS)
        assert (CacheSource.DEVICE in (await storable(world, nodes)).cache.sources) == sink_has_it
        assert not world.faults

    run_virtual(main, seed=1)


@pytest.mark.parametrize(
    ("num_device", "loaded", "publish", "known"),
    [
        (0, (SHARED_MEMORY,) * BLOCKS, True, ""),  # the own node has it
        (3, (SHARED_MEMORY,) * (BLOCKS - 3), False, ""),
        (0, (), True, ""),  # computed from its beginning, and stored here
        (0, (), False, "b"),  # computed for nobody: the pool's window is what it was
        (BLOCKS, (), True, "b"),
    ],
)
def test_where_a_prefix_came_from_is_known_until_the_own_node_has_it(
    num_device: int, loaded: tuple[CacheSource, ...], publish: bool, known: str
) -> None:
    """Fails if later turns are offered to a node that may have lost the prefix since, while the own one has it."""

    async def main(clock):
        world = World(clock)
        homes = make_homes(world, SimulatedNodes("a", world.nodes, NO_FAULTS), in_pool=BLOCKS)

        def find(num_device: int, sources: tuple[CacheSource, ...], *, publish: bool = True, hints=()) -> str:
            request = world.request(TOKENS, cache=CacheControl(publish=publish))
            return homes.find(request, LoadedPrefix(len(sources), sources), num_device=num_device, hint_nodes=hints)

        assert find(0, (GRPC,) * BLOCKS, hints=("b",)) == "b"
        find(num_device, loaded, publish=publish)
        assert find(BLOCKS, ()) == known

    run_virtual(main, seed=1)
