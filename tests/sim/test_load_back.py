"""Blocks of a preempted run read back from a slow node: waited for as long as computing what they save would take."""

import asyncio

import pytest
from simulated_engine import LAYOUT
from simulated_nodes import DirectStore
from simulated_world import NO_FAULTS, World
from test_load_window import store_blocks
from virtual_loop import run_virtual
from windowed_loads import GRPC, PROMPT, TOKENS, WINDOW

from headrace.core.clock import Deadline
from headrace.core.members import WorkerRole
from headrace.core.step_costs import PrefillCost
from headrace.transfer.hold_prefix import load_back
from headrace.transfer.load_prefix import LoadPlan

BLOCKS = len(PROMPT.chain)
BLOCK_S = 0.5  # to compute one
DRIP_S = 0.6  # to fetch one


class DrippingStore(DirectStore):
    """Its first block comes at once."""

    async def fetch_blocks(self, lease, *, deadline):
        first = True
        async for payload in super().fetch_blocks(lease, deadline=deadline):
            if not first:
                await asyncio.sleep(DRIP_S)
            first = False
            yield payload


@pytest.mark.parametrize(("saved_from", "is_worth_it"), [(0, True), (BLOCKS - 6, False)])
def test_a_window_is_read_back_as_long_as_that_is_sooner_than_computing_what_it_saves(saved_from, is_worth_it):
    """One window, behind which twenty blocks need not be computed, or six since the pool has the others. Fails if a run
    that could begin at its pool's prefix waits as if it had none, or gives a window up that saves everything."""

    async def main(clock):
        world = World(clock)
        await store_blocks(world, "a", BLOCKS)
        worker = await world.add_worker("decode-b", WorkerRole.DECODE)
        worker.engine.prefill = PrefillCost(base_s=0.0, tokens_per_s=LAYOUT.block_tokens / BLOCK_S, attention_s=0.0)
        worker.nodes._remote["a"] = DrippingStore(world.nodes["a"], mapped=False, rates=NO_FAULTS)
        taken = worker.engine.pool.take(BLOCKS)
        first = WINDOW.first_of_prefix(BLOCKS)
        plan = LoadPlan(first_block=first, end_block=BLOCKS, sources=frozenset({GRPC}), hint_nodes=("a",))
        num_blocks = await load_back(
            worker,
            world.request(TOKENS),
            taken.block_ids,
            range(saved_from, BLOCKS),
            plan=plan,
            deadline=Deadline.after(60, clock),
        )
        assert (num_blocks == BLOCKS - first) == is_worth_it
        worker.engine.pool.unref_all(taken.block_ids)
        await world.stop()

    run_virtual(main, seed=1)
