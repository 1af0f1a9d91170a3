"""Loads from a source that is slow, stalls or drips, on virtual time: slower than cold by no more than the promise."""

import asyncio

import pytest
from simulated_engine import LAYOUT
from test_split_load import NUM_BLOCKS, Holders, timed
from virtual_loop import run_virtual

from headrace.core.limits import OVERTAKE_ROUND_TRIP_MS, OVERTAKE_SHARE, OVERTAKE_WATCH_MS
from headrace.core.step_costs import PrefillCost
from headrace.core.transfer_budget import TransferBudget

B = LAYOUT.block_tokens
TOKENS = NUM_BLOCKS * B
COST = PrefillCost(base_s=0.01, tokens_per_s=8.0, attention_s=1e-4)  # half a second for each block
COLD_S = float(COST.seconds(0, TOKENS))
OWN_S = 0.21 + 2 * OVERTAKE_WATCH_MS / 1000  # a copy in a slow thread, which is waited for, and when we look
PROMISE_S = (1 + OVERTAKE_SHARE) * COLD_S + OVERTAKE_ROUND_TRIP_MS / 1000 + OWN_S


def budget(predicted_s: float) -> TransferBudget:
    return TransferBudget(COST, 0, TOKENS, TOKENS, predicted_s)


@pytest.mark.parametrize("predicted_s", [0.1, 1.2, 60.0], ids=["hopeful", "right", "gloomy"])
@pytest.mark.parametrize(
    ("block_s", "hangs_before"),
    [(3_600, None), (0.05, 0), (0.05, 1), (0.05, 12), (0.05, 23), (0.4, None), (0.6, None), (2.0, None), (0.4, 12)],
)
@pytest.mark.parametrize("seed", range(3))
def test_a_load_and_what_is_left_to_compute_keep_the_promise(block_s, hangs_before, predicted_s, seed):
    """Fails when a source can make a request slower than cold, or when loaded blocks are lost by overtaking."""

    async def main(clock):
        holders = Holders(clock, {"b": NUM_BLOCKS}, seed=seed)
        await holders.store()
        holders.stores["b"].block_s, holders.stores["b"].hangs_before = block_s, hangs_before
        loaded, seconds = await timed(holders.load(budget=budget(predicted_s)), clock)
        left_s = float(COST.seconds(loaded.num_blocks * B, TOKENS))
        assert seconds + left_s <= PROMISE_S
        holders.check(loaded)
        if hangs_before and block_s == 0.05:
            assert loaded.num_blocks == hangs_before

    run_virtual(main, seed=seed)


@pytest.mark.parametrize("seed", range(3))
def test_a_source_that_is_faster_than_computing_is_never_overtaken(seed):
    """Fails when a good load is cut, at the start or by its own lateness."""

    async def main(clock):
        holders = Holders(clock, {"a": 5, "b": NUM_BLOCKS}, seed=seed)
        await holders.store()
        loaded = await holders.load(budget=budget(0.1))
        assert (loaded.num_blocks, loaded.faults) == (NUM_BLOCKS, ())
        holders.check(loaded)

    run_virtual(main, seed=seed)


def test_after_overtaking_nothing_is_written_and_no_lease_stands():
    """Fails when the fetch goes on beside the computation: two writers to one block of the pool."""

    async def main(clock):
        holders = Holders(clock, {"b": NUM_BLOCKS, "c": NUM_BLOCKS})
        await holders.store()
        for name in ("b", "c"):
            holders.stores[name].block_s = 1.5
        loaded = await holders.load(budget=budget(0.1))
        assert loaded.num_blocks < NUM_BLOCKS
        written = list(holders.kv.blocks)
        holders.check(loaded)
        await asyncio.sleep(10)
        assert holders.kv.blocks == written

    run_virtual(main, seed=1)
