"""load_layered against real store nodes on virtual time: which parts are moved, where they go, and that a prefix counts
only when all its wide parts and the near parts of its window are there, whatever is missing, broken or late."""

import random
from dataclasses import replace

import pytest
from simulated_engine import LAYOUT, SimulatedKV, cold_kv
from simulated_nodes import FaultRates, SimulatedNodes
from simulated_world import World
from virtual_loop import run_virtual
from windowed_loads import GRPC, PROMPT, SHARED_MEMORY, TOKENS, WINDOW, commit, follow_slow_prefill, leased, run_meddled

from headrace.blocks.two_parts import TwoPartPool
from headrace.core.clock import Deadline
from headrace.core.generation import ALL_SOURCES, HandOff
from headrace.core.limits import LOAD_PREFIX_TIMEOUT_MS
from headrace.core.part_ids import PartIds
from headrace.transfer.load_layered import NearTable, load_layered
from headrace.transfer.load_prefix import LoadedPrefix, LoadPlan

TWO_PARTS = replace(LAYOUT, num_layers=2, near_layers=1)
WIDE = cold_kv(TOKENS)
NEAR = [bytes(byte ^ 0x5A for byte in block) for block in WIDE]
PARTS = PartIds(32)


class Pool:
    """A pool of two parts over byte strings."""

    def __init__(self, num_near: int) -> None:
        self.wide, self.near = SimulatedKV(PARTS.num_wide), SimulatedKV(num_near)
        self.both = TwoPartPool(TWO_PARTS, self.wide, self.near, num_wide=PARTS.num_wide)


async def store_blocks(world: World, host: str, end: int, *, first: int = 0) -> None:
    """Have blocks [first, end) of PROMPT committed on a host's node; those before are there."""
    pool = Pool(20)
    pool.wide.blocks[:20], pool.near.blocks[:20] = WIDE, NEAR
    block_ids = ((i, PARTS.join(i, i)) for i in range(first, end))
    await commit(world, host, block_ids, pool=pool.both, layout=TWO_PARTS)


class Load:
    """One load into a pool that has the first `num_shared` blocks already, with near parts of their window."""

    def __init__(self, world: World, *, num_shared: int = 0, end: int = 20, rates: FaultRates | None = None) -> None:
        self.world = world
        self.end, self.num_shared = end, num_shared
        rng = random.Random(3)
        wide = rng.sample(range(PARTS.num_wide), 20)
        self.first_near = WINDOW.first_of_prefix(num_shared)
        near = rng.sample(range(16), WINDOW.held_blocks(20 - self.first_near))
        self.table = PARTS.place(wide, near, first=self.first_near)
        self.end_near = self.first_near + len(near)
        self.pool = Pool(16)
        self.own_near = near[: num_shared - self.first_near]
        for index in range(num_shared):
            self.pool.wide.blocks[wide[index]] = WIDE[index]
        for index, part in enumerate(self.own_near, start=self.first_near):
            self.pool.near.blocks[part] = NEAR[index]
        self.wide_writes = self.near_writes = 0
        own_wide, spare_near = set(wide[num_shared:]), set(near) - set(self.own_near)

        def on_wide(block_id: int) -> None:
            self.wide_writes += 1
            assert block_id in own_wide, "a wide part of others, or of the pool's prefix"

        def on_near(block_id: int) -> None:
            self.near_writes += 1
            assert block_id in spare_near, "a near part of others, or of the pool's prefix"

        self.pool.wide.on_write, self.pool.near.on_write = on_wide, on_near
        self.nodes = SimulatedNodes("a", world.nodes, rates or FaultRates())

    async def run(self, *, hints=(), sources=ALL_SOURCES, hand_off=None, for_s=60):
        loaded, table = await load_layered(
            PROMPT,
            NearTable(tuple(self.table), self.first_near, self.end_near, PARTS, WINDOW),
            plan=LoadPlan(self.num_shared, self.end, sources, hints),
            budget=lambda blocks: None,
            hand_off=hand_off,
            layout=TWO_PARTS,
            nodes=self.nodes,
            pool=self.pool.both,
            deadline=Deadline.after(for_s, self.world.clock),
        )
        self.check(loaded, table)
        return loaded, table

    def check(self, loaded: LoadedPrefix, table: NearTable) -> None:
        """What counts as reused is there, byte for byte, as far as it is read; and nothing is lost or doubled."""
        usable = self.num_shared + loaded.num_blocks
        wide, near = PARTS.split(table.block_ids)
        assert wide == PARTS.split(self.table)[0]
        assert len(set(near)) == len(near)
        assert set(near) <= set(PARTS.split(self.table)[1])
        having = [index for index, block_id in enumerate(table.block_ids) if PARTS.near_of(block_id) is not None]
        assert having == list(range(table.first_near, table.end_near))
        assert table.first_near <= WINDOW.first_of_prefix(usable)
        for index in range(usable):
            assert self.pool.wide.blocks[wide[index]] == WIDE[index]
        for index in range(WINDOW.first_of_prefix(usable), usable):
            part = PARTS.near_of(table.block_ids[index])
            assert part is not None
            assert self.pool.near.blocks[part] == NEAR[index]
        assert table.end_near > usable or usable == 20, "no near part to compute what comes next"
        assert not set(self.own_near) & {PARTS.near_of(each) for each in table.block_ids[usable:]}, (
            "shared, and written"
        )


@pytest.mark.parametrize("stored", [1, 2, 3, 4, 13, 19, 20])
def test_all_wide_parts_and_near_parts_of_the_window_are_moved(stored: int):
    """Fails when more or others are loaded, or the prefix is not found to its end."""

    async def main(clock):
        world = World(clock)
        await store_blocks(world, "a", stored)
        load = Load(world)
        loaded, table = await load.run()
        assert loaded.sources == (SHARED_MEMORY,) * stored
        assert (load.wide_writes, load.near_writes) == (stored, min(stored, 3))
        assert table.first_near == max(0, stored - 3)
        assert (loaded.faults, leased(world)) == ((), 0)

    run_virtual(main, seed=1)


@pytest.mark.parametrize(
    ("num_shared", "stored", "wide", "near"), [(4, 4, 0, 0), (4, 3, 0, 0), (4, 6, 2, 2), (4, 7, 3, 3), (4, 16, 12, 3)]
)
def test_what_the_pool_has_is_not_moved_again(num_shared: int, stored: int, wide: int, near: int):
    async def main(clock):
        world = World(clock)
        await store_blocks(world, "b", stored)
        load = Load(world, num_shared=num_shared)
        loaded, _ = await load.run(hints=("b",))
        assert loaded.sources == (GRPC,) * max(0, stored - num_shared)
        assert (load.wide_writes, load.near_writes) == (wide, near)

    run_virtual(main, seed=1)


@pytest.mark.parametrize(("broken", "at"), [(19, 7), (18, -20), (17, -20), (10, 7), (3, 7)])
def test_a_broken_part_shortens_the_prefix_and_near_parts_that_are_missing_before_are_loaded(broken: int, at: int):
    """Fails when half a window counts, or when one bad block costs the whole prefix."""

    async def main(clock):
        world = World(clock)
        await store_blocks(world, "a", 20)
        node = world.nodes["a"]
        held = node.node._blocks.get(PROMPT.namespace, PROMPT.chain[broken])
        node.arena.payload(held.slot, TWO_PARTS.block_bytes)[at] ^= 1
        load = Load(world)
        loaded, _ = await load.run()
        assert loaded.num_blocks == broken
        assert load.near_writes <= 3 + 3 + 1
        assert leased(world) == 0
        assert node.node.lookup(PROMPT.namespace, PROMPT.chain) == broken

    run_virtual(main, seed=1)


def test_a_broken_near_part_that_nobody_reads_is_not_noticed():
    async def main(clock):
        world = World(clock)
        await store_blocks(world, "a", 20)
        held = world.nodes["a"].node._blocks.get(PROMPT.namespace, PROMPT.chain[5])
        world.nodes["a"].arena.payload(held.slot, TWO_PARTS.block_bytes)[-20] ^= 1
        loaded, _ = await Load(world).run()
        assert (loaded.num_blocks, loaded.faults) == (20, ())

    run_virtual(main, seed=1)


def test_another_blocks_bytes_are_not_taken_for_a_wide_part_though_their_own_checksum_holds():
    """As when a slot is given to another block while it is read: fails if a check says nothing of whose part it is."""

    async def main(clock):
        world = World(clock)
        await store_blocks(world, "a", 20)
        node = world.nodes["a"]
        slots = [node.node._blocks.get(PROMPT.namespace, PROMPT.chain[index]).slot for index in (4, 9)]
        ours, others = (node.arena.payload(slot, TWO_PARTS.block_bytes) for slot in slots)
        ours[:] = bytes(others)
        loaded, _ = await Load(world).run()
        assert loaded.num_blocks == 4

    run_virtual(main, seed=1)


def test_a_prefill_elsewhere_is_followed_by_wide_parts_and_at_its_end_by_whole_blocks():
    async def main(clock):
        world = World(clock)
        await store_blocks(world, "a", 6)

        load = Load(world)
        loaded = await follow_slow_prefill(load, store_blocks, range(6, 20), every_s=0.5, patience_ms=2_000)
        assert loaded.sources == (SHARED_MEMORY,) * 20
        assert (load.wide_writes, load.near_writes) == (20, 3)

    run_virtual(main, seed=1)


def test_a_prefill_that_ends_early_leaves_the_prefix_that_it_came_to():
    async def main(clock):
        world = World(clock)
        await store_blocks(world, "a", 14)
        loaded, _ = await Load(world).run(hand_off=HandOff(store_node="a", first_block=6, patience_ms=500))
        assert loaded.num_blocks == 14

    run_virtual(main, seed=1)


def test_a_window_is_repaired_however_long_the_prefill_took_that_was_followed():
    """Fails when the time for the repair begins before the following: then all that came is thrown away."""

    async def main(clock):
        world = World(clock)
        await store_blocks(world, "a", 6)

        every_s = LOAD_PREFIX_TIMEOUT_MS / 1000 / 8
        loaded = await follow_slow_prefill(Load(world), store_blocks, range(6, 18), every_s=every_s, patience_ms=5_000)
        assert loaded.num_blocks == 18

    run_virtual(main, seed=1)


@pytest.mark.parametrize("seed", range(25))
def test_whatever_goes_wrong_what_counts_is_right(seed: int):
    """Crashes, lost calls, broken bytes, evictions and prefills that stop: `Load.check` holds."""

    run_meddled(seed, store_blocks, Load)
