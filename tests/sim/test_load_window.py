"""load_window against real store nodes on virtual time: what is moved, where it goes, and that a prefix counts only
when its whole window is there, whatever is missing, broken or late."""

import random
from dataclasses import fields

import pytest
from simulated_engine import LAYOUT, SimulatedKV, cold_kv
from simulated_nodes import FaultRates, SimulatedNodes
from simulated_world import World
from virtual_loop import run_virtual
from windowed_loads import GRPC, PROMPT, SHARED_MEMORY, TOKENS, WINDOW, commit, follow_slow_prefill, leased, run_meddled

from headrace.core.block import CacheSource
from headrace.core.clock import Deadline
from headrace.core.errors import StoreUnavailable
from headrace.core.generation import ALL_SOURCES, HandOff
from headrace.core.learned_costs import PRIOR_PREFILL
from headrace.core.transfer_budget import TransferBudget
from headrace.transfer.load_prefix import LoadedPrefix, LoadPlan
from headrace.transfer.load_window import WindowBudget, WindowTable, load_window

KV = cold_kv(TOKENS)


async def store_blocks(world: World, host: str, end: int, *, first: int = 0) -> None:
    """Have blocks [first, end) of PROMPT committed on a host's node; those before are there."""
    kv = SimulatedKV(20)
    kv.blocks = list(KV)
    await commit(world, host, ((i, i) for i in range(first, end)), pool=kv, layout=LAYOUT)


class Load:
    """One load into a pool that has the window of the first `num_shared` blocks already."""

    def __init__(self, world: World, *, num_shared: int = 0, end: int = 20, rates: FaultRates | None = None) -> None:
        self.world = world
        self.end, self.num_shared = end, num_shared
        self.kv = SimulatedKV(32)
        self.writes = 0
        self.first_block = WINDOW.first_of_prefix(num_shared)
        self.table = random.Random(3).sample(range(32), WINDOW.held_blocks(20 - self.first_block))
        for index in range(self.first_block, num_shared):
            self.kv.blocks[self.table[index - self.first_block]] = KV[index]
        self.kv.on_write = self._count
        self.nodes = SimulatedNodes("a", world.nodes, rates or FaultRates())

    def _count(self, block_id: int) -> None:
        self.writes += 1
        assert block_id in self.table[self.num_shared - self.first_block :], (
            "a block of others, or of the pool's prefix"
        )

    async def run(self, *, hints=(), sources=ALL_SOURCES, hand_off=None, budget=lambda blocks: None, for_s=60):
        loaded, table = await load_window(
            PROMPT,
            WindowTable(tuple(self.table), self.first_block, WINDOW),
            plan=LoadPlan(self.num_shared, self.end, sources, hints),
            budget=budget,
            hand_off=hand_off,
            layout=LAYOUT,
            nodes=self.nodes,
            pool=self.kv,
            deadline=Deadline.after(for_s, self.world.clock),
        )
        self.check(loaded, table)
        return loaded, table

    def check(self, loaded: LoadedPrefix, table: WindowTable) -> None:
        """What counts as reused is there, byte for byte, as far as it is read; and nothing is lost or doubled."""
        usable = self.num_shared + loaded.num_blocks
        assert table.first_block <= WINDOW.first_of_prefix(usable)
        for index in range(WINDOW.first_of_prefix(usable), usable):
            assert self.kv.blocks[table.block_ids[index - table.first_block]] == KV[index]
        assert len(set(table.block_ids)) == len(table.block_ids)
        assert set(table.block_ids) <= set(self.table)
        room = len(table.block_ids) - (usable - table.first_block)
        assert room >= min(20 - usable, 1), "no room to compute what comes next"


@pytest.mark.parametrize("stored", [1, 2, 3, 4, 13, 19, 20])
def test_the_whole_prefix_counts_and_only_its_window_is_moved(stored: int):
    """Fails when more or other blocks are loaded, or the prefix is not found to its end."""

    async def main(clock):
        world = World(clock)
        await store_blocks(world, "a", stored)
        load = Load(world)
        loaded, table = await load.run()
        assert loaded.sources == (SHARED_MEMORY,) * stored
        assert load.writes == min(stored, 3)
        assert table.first_block == max(0, stored - 3)
        assert (loaded.faults, leased(world)) == ((), 0)

    run_virtual(main, seed=1)


@pytest.mark.parametrize(("num_shared", "stored", "moved"), [(4, 4, 0), (4, 3, 0), (4, 6, 2), (4, 7, 3), (4, 16, 3)])
def test_what_the_pool_has_is_not_moved_again(num_shared: int, stored: int, moved: int):
    async def main(clock):
        world = World(clock)
        await store_blocks(world, "b", stored)
        load = Load(world, num_shared=num_shared)
        loaded, _ = await load.run(hints=("b",))
        assert loaded.sources == (GRPC,) * max(0, stored - num_shared)
        assert load.writes == moved

    run_virtual(main, seed=1)


def test_only_allowed_sources_are_asked_and_the_longer_one_is_taken():
    async def main(clock):
        world = World(clock)
        await store_blocks(world, "a", 10)
        await store_blocks(world, "b", 15)
        assert (await Load(world).run(hints=("b",)))[0].sources == (GRPC,) * 15
        assert (await Load(world).run(hints=("b",), sources=frozenset({SHARED_MEMORY})))[0].num_blocks == 10
        assert (await Load(world).run(hints=("b",), sources=frozenset({CacheSource.DEVICE})))[0].num_blocks == 0

    run_virtual(main, seed=1)


@pytest.mark.parametrize("broken", [19, 18, 17])
def test_a_broken_block_in_the_window_shortens_the_prefix_and_what_is_missing_before_is_loaded(broken: int):
    """Fails when half a window counts, or when one bad block costs the whole prefix."""

    async def main(clock):
        world = World(clock)
        await store_blocks(world, "a", 20)
        node = world.nodes["a"]
        held = node.node._blocks.get(PROMPT.namespace, PROMPT.chain[broken])
        node.arena.payload(held.slot, LAYOUT.block_bytes)[7] ^= 1
        loaded, _ = await Load(world).run()
        assert loaded.num_blocks == broken
        assert leased(world) == 0
        assert node.node.lookup(PROMPT.namespace, PROMPT.chain) == broken

    run_virtual(main, seed=1)


def test_a_load_that_is_over_before_its_window_is_whole_counts_for_nothing():
    """Unless it begins where the pool's own prefix ends: then what has come is of use."""

    async def main(clock):
        world = World(clock)
        await store_blocks(world, "b", 20)
        for num_shared, end, least, most in ((5, 20, 0, 0), (16, 19, 1, 2)):
            load = Load(world, num_shared=num_shared, end=end)
            write = load.kv.on_write
            if world.nodes["b"].node is None:
                world.nodes["b"].restart()

            def crash_after_one(block_id: int, write=write) -> None:
                write(block_id)
                world.nodes["b"].crash()

            load.kv.on_write = crash_after_one
            loaded, _ = await load.run(hints=("b",))
            assert least <= loaded.num_blocks <= most
            assert any(isinstance(fault, StoreUnavailable) for fault in loaded.faults)

    run_virtual(main, seed=1)


def test_a_prefill_elsewhere_is_waited_for_and_only_its_last_window_is_moved():
    async def main(clock):
        world = World(clock)
        await store_blocks(world, "a", 6)

        load = Load(world)
        loaded = await follow_slow_prefill(load, store_blocks, range(6, 20), every_s=0.5, patience_ms=2_000)
        assert loaded.sources == (SHARED_MEMORY,) * 20
        assert load.writes == 3

    run_virtual(main, seed=1)


def test_a_prefill_that_ends_early_leaves_the_prefix_that_it_came_to():
    async def main(clock):
        world = World(clock)
        await store_blocks(world, "a", 14)
        load = Load(world)
        loaded, _ = await load.run(hand_off=HandOff(store_node="a", first_block=6, patience_ms=500))
        assert loaded.num_blocks == 14

    run_virtual(main, seed=1)


@pytest.mark.parametrize("seed", range(25))
def test_whatever_goes_wrong_what_counts_is_right(seed: int):
    """Crashes, lost calls, broken bytes, evictions and prefills that stop: `Load.check` holds."""

    run_meddled(seed, store_blocks, Load)


def test_a_window_is_worth_what_its_whole_prefix_takes_to_compute():
    """Fails when the rule against slow loads counts the tokens that are moved instead of those that are saved."""
    said = {each.name: 0.0 for each in fields(TransferBudget)}
    said |= {"prefill": PRIOR_PREFILL, "first_token": 0, "end_token": 4_000, "prompt_tokens": 4_100}
    whole = TransferBudget(**said)
    budget = WindowBudget(whole, moved_tokens=400)
    for share in (0.1, 0.5, 0.9):
        for seconds in (0.0, 0.1, 1.0, 10.0, 100.0):
            moved, saved = int(400 * share), int(4_000 * share)
            assert budget.is_over(seconds=seconds, loaded_tokens=moved, arrived_tokens=moved) == whole.is_over(
                seconds=seconds, loaded_tokens=saved, arrived_tokens=saved
            )
