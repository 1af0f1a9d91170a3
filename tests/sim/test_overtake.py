"""Loads from a source that is slow, stalls or drips, on virtual time: slower than cold by no more than the promise."""

import asyncio

import pytest
from simulated_engine import LAYOUT
from simulated_nodes import FaultRates
from test_split_load import BLOCK_S, LEASE_S, NUM_BLOCKS, Holders, timed
from virtual_loop import run_virtual

from headrace.core.block import CacheSource
from headrace.core.generation import ALL_SOURCES
from headrace.core.overtake_limits import (
    OVERTAKE_LOOK_MS,
    OVERTAKE_ROUND_TRIP_MAX_MS,
    OVERTAKE_SHARE,
    ROUND_TRIPS_KNOWN,
)
from headrace.core.step_costs import PrefillCost
from headrace.core.transfer_budget import TransferBudget
from headrace.transfer.load_prefix import asked_ways
from headrace.transfer.timed_nodes import TimedStoreNodes

B = LAYOUT.block_tokens
TOKENS = NUM_BLOCKS * B
COST = PrefillCost(base_s=0.01, tokens_per_s=8.0, attention_s=1e-4)  # half a second for each block
COLD_S = float(COST.seconds(0, TOKENS))
RELEASE_S = 2 * LEASE_S  # a simulated node answers when a lease is given back, and that is waited for
OWN_S = 0.21 + RELEASE_S  # and a copy in a slow thread
PROMISE_S = (1 + OVERTAKE_SHARE) * COLD_S + OVERTAKE_ROUND_TRIP_MAX_MS / 1000 + OWN_S


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


SHORT = PrefillCost(base_s=0.005, tokens_per_s=400.0, attention_s=0.0)  # 10 ms for each block
FAULTS = {
    "silent": {"answers": False},
    "stalls at once": {"hangs_before": 0},
    "stalls later": {"hangs_before": 3, "block_s": 0.002},
    "slow": {"block_s": 0.02},
    "drips": {"block_s": 3_600},
}


@pytest.mark.parametrize("fault", FAULTS)
@pytest.mark.parametrize("num_blocks", [1, 2, 4, 8, NUM_BLOCKS])
@pytest.mark.parametrize("seed", range(2))
def test_short_prompts_keep_the_promise_by_the_round_trip_that_was_measured(fault, num_blocks, seed):
    """Fails when a prompt of 15 ms waits for a silent node as long as one of ten seconds may."""

    async def main(clock):
        holders = Holders(clock, {"b": NUM_BLOCKS}, seed=seed)
        await holders.store()
        nodes, holders.stores["b"].block_s = TimedStoreNodes(holders.nodes, clock), 0.002
        holders.nodes = nodes
        for _ in range(ROUND_TRIPS_KNOWN):
            await holders.load()
        round_trip_s = nodes.times.round_trip_s([("b", CacheSource.GRPC)])
        assert round_trip_s <= 2 * LEASE_S + 0.002
        for name, value in FAULTS[fault].items():
            setattr(holders.stores["b"], name, value)
        tokens, cold_s = num_blocks * B + 1, float(SHORT.seconds(0, num_blocks * B + 1))
        allowed = TransferBudget(SHORT, 0, num_blocks * B, tokens, 0.001, round_trip_s)
        loaded, seconds = await timed(holders.load(budget=allowed, end_block=num_blocks), clock)
        left_s = float(SHORT.seconds(loaded.num_blocks * B, tokens))
        copy_s = 0.005 if loaded.num_blocks else 0.0
        own_s = OVERTAKE_LOOK_MS / 1000 + copy_s + RELEASE_S
        assert seconds + left_s <= (1 + OVERTAKE_SHARE) * cold_s + round_trip_s + own_s
        holders.check(loaded)

    run_virtual(main, seed=seed, stalls=0.0)


def test_a_round_trip_lasts_until_the_first_block_is_there():
    """Fails when a way whose blocks take long each is left before the first one, however much it would save."""

    async def main(clock):
        holders = Holders(clock, {"b": NUM_BLOCKS})
        await holders.store()
        nodes = holders.nodes = TimedStoreNodes(holders.nodes, clock)
        for _ in range(ROUND_TRIPS_KNOWN):
            await holders.load()
        assert BLOCK_S <= nodes.times.round_trip_s([("b", CacheSource.GRPC)]) <= BLOCK_S + 2 * LEASE_S

    run_virtual(main, seed=1, stalls=0.0)


def test_a_node_that_never_has_anything_leaves_others_no_more_time_than_theirs():
    """Fails when a silent node may take a quarter of a second because the host's own one has nothing, each time."""

    async def main(clock):
        holders = Holders(clock, {"a": 0, "b": NUM_BLOCKS})
        await holders.store()
        nodes, holders.stores["b"].block_s = TimedStoreNodes(holders.nodes, clock), 0.002
        holders.nodes = nodes
        for _ in range(ROUND_TRIPS_KNOWN):
            assert (await holders.load()).num_blocks == NUM_BLOCKS
        ways = asked_ways(nodes, ALL_SOURCES, ["b"])
        assert len(ways) == 2
        assert nodes.times.round_trip_s(ways) <= 2 * LEASE_S + 0.002

    run_virtual(main, seed=0, stalls=0.0)


@pytest.mark.parametrize("seed", range(3))
def test_the_first_blocks_of_a_far_node_that_had_nothing_before_are_waited_for(seed):
    """Fails when the way is known by empty answers, but not how long it is: a short prompt would not wait for it."""

    async def main(clock):
        holders = Holders(clock, {"b": 0}, seed=seed)
        store = holders.stores["b"]
        store._rates, store.block_s = FaultRates(delay_s=0.06), 0.002
        nodes = holders.nodes = TimedStoreNodes(holders.nodes, clock)
        for _ in range(ROUND_TRIPS_KNOWN):
            assert (await holders.load()).num_blocks == 0
        holders.blocks["b"] = NUM_BLOCKS
        await holders.store()
        round_trip_s = nodes.times.round_trip_s([("b", CacheSource.GRPC)])
        assert round_trip_s < OVERTAKE_ROUND_TRIP_MAX_MS / 1000
        allowed = TransferBudget(SHORT, 0, 2 * B, 2 * B + 1, 0.001, round_trip_s)
        assert (await holders.load(budget=allowed, end_block=2)).num_blocks == 2

    run_virtual(main, seed=seed, stalls=0.0)


def test_a_way_that_has_become_longer_is_found_out():
    """Fails when loads are given up before the answer could be there, each time again."""

    async def main(clock):
        holders = Holders(clock, {"b": NUM_BLOCKS})
        await holders.store()
        nodes, holders.stores["b"].block_s = TimedStoreNodes(holders.nodes, clock), 0.002
        holders.nodes = nodes
        for _ in range(ROUND_TRIPS_KNOWN):
            await holders.load()
        holders.stores["b"]._rates = FaultRates(delay_s=0.06)
        holders.stores["b"].block_s = 0.0
        loaded = []
        for _ in range(60):
            round_trip_s = nodes.times.round_trip_s([("b", CacheSource.GRPC)])
            allowed = TransferBudget(SHORT, 0, 8 * B, 8 * B + 1, 0.001, round_trip_s)
            loaded.append((await holders.load(budget=allowed, end_block=8)).num_blocks)
        assert loaded[0] == 0
        assert loaded[-20:].count(8) >= 8, "answers take between nothing and 0.24 s: not each time"
        assert nodes.times.round_trip_s([("b", CacheSource.GRPC)]) < OVERTAKE_ROUND_TRIP_MAX_MS / 1000

    run_virtual(main, seed=3, stalls=0.0)


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
