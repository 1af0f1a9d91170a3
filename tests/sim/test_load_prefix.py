"""load_prefix against real store nodes on virtual time: which blocks count, from where, and what is held afterwards."""

import asyncio
from dataclasses import replace

import pytest
from simulated_engine import LAYOUT, SimulatedKV, cold_kv, make_prompt
from simulated_nodes import DirectStore, FaultRates, SimulatedNodes
from simulated_world import World
from virtual_loop import run_virtual

from headrace.core.block import CacheSource
from headrace.core.clock import Deadline
from headrace.core.errors import BlockCorrupt, StoreUnavailable
from headrace.core.generation import ALL_SOURCES, WorkerId
from headrace.core.limits import LOAD_PREFIX_TIMEOUT_MS
from headrace.engine.event_stream import FilledBlock
from headrace.transfer.load_prefix import LoadPlan, load_prefix
from headrace.transfer.publish_blocks import Producer, publish_blocks

TOKENS = list(range(24))  # six blocks
PROMPT = make_prompt(TOKENS)


async def store_blocks(world: World, host: str, num_blocks: int) -> None:
    """Have the leading blocks of PROMPT committed on a host's node."""
    kv = SimulatedKV(num_blocks)
    kv.blocks = cold_kv(TOKENS)[:num_blocks]
    filled = [
        FilledBlock(i, i, PROMPT.chain[i], PROMPT.parent_of(i), PROMPT.block_token_ids(i), PROMPT.namespace)
        for i in range(num_blocks)
    ]
    published = await publish_blocks(
        filled,
        sink=DirectStore(world.nodes[host], mapped=True, rates=FaultRates()),
        pool=kv,
        producer=Producer(WorkerId("maker"), LAYOUT, world.clock),
        deadline=Deadline.after(5, world.clock),
    )
    assert published.num_blocks == num_blocks


def load(world: World, *, first_block=0, end_block=6, sources=ALL_SOURCES, hints=(), kv=None, nodes=None):
    return load_prefix(
        PROMPT,
        list(range(10, 16)),
        plan=LoadPlan(first_block, end_block, sources, hints),
        layout=LAYOUT,
        nodes=nodes or SimulatedNodes("a", world.nodes, FaultRates()),
        pool=kv or SimulatedKV(16),
        deadline=Deadline.after(60, world.clock),
    )


def leased(world: World) -> int:
    return sum(node.node.stat().leased_blocks for node in world.nodes.values() if node.node)


def test_the_own_host_is_read_first_and_the_rest_comes_from_the_hinted_node():
    """Fails when sources are asked in another order, or blocks land in other places of the pool."""

    async def main(clock):
        world, kv = World(clock), SimulatedKV(16)
        await store_blocks(world, "a", 3)
        await store_blocks(world, "b", 6)
        loaded = await load(world, hints=("b",), kv=kv)
        assert loaded.sources == (CacheSource.SHARED_MEMORY,) * 3 + (CacheSource.GRPC,) * 3
        assert kv.blocks[10:16] == cold_kv(TOKENS)
        assert (loaded.faults, leased(world)) == ((), 0)

    run_virtual(main, seed=1)


def test_blocks_that_are_there_already_are_not_loaded_again():
    """Fails when `first_block` or `end_block` are ignored."""

    async def main(clock):
        world, kv = World(clock), SimulatedKV(16)
        await store_blocks(world, "a", 6)
        loaded = await load(world, first_block=2, end_block=4, kv=kv)
        assert loaded.num_blocks == 2
        assert [bool(any(block)) for block in kv.blocks[10:16]] == [False, False, True, True, False, False]

    run_virtual(main, seed=1)


def test_only_allowed_sources_are_asked():
    """Fails when a source that the request excluded is used all the same."""

    async def main(clock):
        world = World(clock)
        await store_blocks(world, "a", 6)
        by_grpc = await load(world, sources=frozenset({CacheSource.GRPC}), hints=("a",))
        assert by_grpc.sources == (CacheSource.GRPC,) * 6
        by_memory = await load(world, sources=frozenset({CacheSource.SHARED_MEMORY}), hints=("b",))
        assert by_memory.sources == (CacheSource.SHARED_MEMORY,) * 6
        assert (await load(world, sources=frozenset({CacheSource.DEVICE}), hints=("a", "b"))).num_blocks == 0

    run_virtual(main, seed=1)


@pytest.mark.parametrize("host", ["a", "b"])
def test_a_damaged_block_ends_the_run_and_is_reported_to_its_node(host: str):
    """Fails when a block after a wrong one counts, or the node is not told which one to look at."""

    async def main(clock):
        world = World(clock)
        await store_blocks(world, host, 6)
        node = world.nodes[host]
        held = node.node._blocks.get(PROMPT.namespace, PROMPT.chain[2])
        node.arena.payload(held.slot, LAYOUT.block_bytes)[7] ^= 1
        loaded = await load(world, hints=("b",))
        assert loaded.num_blocks == 2
        assert [type(fault) for fault in loaded.faults] == [BlockCorrupt]
        assert leased(world) == 0
        assert node.node.lookup(PROMPT.namespace, PROMPT.chain) == 2

    run_virtual(main, seed=1)


class LyingStore(DirectStore):
    """Says something else in the header of block 1."""

    change: dict

    async def lease_prefix(self, *args, **fields):
        lease = await super().lease_prefix(*args, **fields)
        headers = list(lease.headers)
        headers[1] = replace(headers[1], **self.change)
        return replace(lease, headers=tuple(headers))


@pytest.mark.parametrize(
    "change",
    [
        {"token_ids": (9, 9, 9, 9)},
        {"position": 2},
        {"namespace": "0" * 32},
        {"parent_hash": PROMPT.chain[3]},
        {"block_hash": PROMPT.chain[3]},
        {"layout": replace(LAYOUT, dtype="bfloat16")},
        {"payload_bytes": 64},
        {"payload_xxh3": 1},
        {"format_version": 1},
    ],
    ids=lambda change: next(iter(change)),
)
def test_a_header_that_says_anything_unexpected_is_a_miss(change: dict):
    """Fails when one field of the header is not compared."""

    async def main(clock):
        world = World(clock)
        await store_blocks(world, "a", 6)
        nodes = SimulatedNodes("a", world.nodes, FaultRates())
        nodes._mapped["a"] = LyingStore(world.nodes["a"], mapped=True, rates=FaultRates())
        nodes._mapped["a"].change = change
        loaded = await load(world, nodes=nodes)
        assert loaded.num_blocks == 1
        assert isinstance(loaded.faults[0], BlockCorrupt)
        assert leased(world) == 0

    run_virtual(main, seed=1)


def test_a_node_that_dies_during_the_fetch_leaves_what_it_delivered_and_the_next_goes_on():
    """Fails when delivered blocks are dropped, or a dead node ends the load."""

    async def main(clock):
        world, kv = World(clock), SimulatedKV(16)
        await store_blocks(world, "a", 6)
        await store_blocks(world, "b", 6)
        nodes = SimulatedNodes("c", world.nodes, FaultRates(delay_s=0.2))
        third_copied = asyncio.Event()
        kv.on_write = lambda block_id: third_copied.set() if block_id == 12 else None
        task = asyncio.create_task(load(world, nodes=nodes, hints=("a", "b"), kv=kv))
        await third_copied.wait()
        world.nodes["a"].crash()
        loaded = await task
        assert loaded.num_blocks == 6
        assert [type(fault) for fault in loaded.faults] == [StoreUnavailable]
        assert kv.blocks[10:16] == cold_kv(TOKENS)
        assert leased(world) == 0

    run_virtual(main, seed=1)


class RecordingStore(DirectStore):
    """Remembers the leases that its caller learned of. One that was granted but never heard of can only expire."""

    def __init__(self, node, *, mapped: bool, rates: FaultRates) -> None:
        super().__init__(node, mapped=mapped, rates=rates)
        self.lease_ids: list[str] = []

    async def lease_prefix(self, *args, **fields):
        lease = await super().lease_prefix(*args, **fields)
        self.lease_ids.append(lease.lease_id)
        return lease


def test_the_own_node_is_not_asked_a_second_time_over_grpc():
    """Fails when a hint that names this host's node costs a round trip for what shared memory did not have either."""

    async def main(clock):
        world = World(clock)
        await store_blocks(world, "a", 3)
        nodes = SimulatedNodes("a", world.nodes, FaultRates())
        nodes._remote["a"] = RecordingStore(world.nodes["a"], mapped=False, rates=FaultRates())
        assert (await load(world, nodes=nodes, hints=("a",))).num_blocks == 3
        assert nodes._remote["a"].lease_ids == []

    run_virtual(main, seed=1)


def test_a_cancelled_load_holds_no_lease_and_its_copies_have_ended():
    """Fails when a thread writes to the pool after the load was cancelled, or a lease waits for its expiry."""

    async def main(clock):
        for cancel_after_ms in range(0, 400, 3):
            world, kv = World(clock), SimulatedKV(16)
            await store_blocks(world, "b", 6)
            store = RecordingStore(world.nodes["b"], mapped=False, rates=FaultRates(delay_s=0.02))
            nodes = SimulatedNodes("a", world.nodes, FaultRates())
            nodes._remote["b"] = store
            task = asyncio.create_task(load(world, nodes=nodes, hints=("b",), kv=kv))
            await asyncio.sleep(cancel_after_ms / 1000)
            task.cancel()
            await asyncio.wait([task])
            after_cancel = list(kv.blocks)
            await asyncio.sleep(1)
            assert kv.blocks == after_cancel
            assert not any(world.nodes["b"].node.holds_lease(lease_id) for lease_id in store.lease_ids)

    run_virtual(main, seed=2)


def test_a_stalled_node_costs_the_load_its_time_limit_and_no_more():
    """Fails when a load waits for a node that does not answer."""

    async def main(clock):
        world = World(clock)
        await store_blocks(world, "a", 6)
        stalling = FaultRates(stalled=1.0)
        before_s = clock.now_s()
        loaded = await load(world, nodes=SimulatedNodes("a", world.nodes, stalling), hints=("b",))
        assert clock.now_s() - before_s < LOAD_PREFIX_TIMEOUT_MS / 1000 + 1
        assert isinstance(loaded.faults[-1], StoreUnavailable)

    run_virtual(main, seed=3)
