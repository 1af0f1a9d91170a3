"""load_prefix with several holders at once, on virtual time: how long it takes, who steps in for whom, what is held."""

import asyncio
import random

import pytest
from simulated_engine import LAYOUT, SimulatedKV, cold_kv, make_prompt
from simulated_nodes import DirectStore, FaultRates, SimulatedNode, SimulatedNodes
from simulated_world import World
from virtual_loop import run_virtual

from headrace.core.block import CacheSource
from headrace.core.clock import Deadline
from headrace.core.errors import BlockCorrupt, StoreUnavailable
from headrace.core.generation import ALL_SOURCES, WorkerId
from headrace.core.limits import LOAD_STALL_MS
from headrace.engine.event_stream import FilledBlock
from headrace.transfer.load_prefix import LoadPlan, load_prefix
from headrace.transfer.publish_blocks import Producer, publish_blocks

NUM_BLOCKS = 24
TOKENS = [token % 50 for token in range(NUM_BLOCKS * LAYOUT.block_tokens)]
PROMPT = make_prompt(TOKENS)
FIRST_ID = 3  # the pool's block of block 0
PIECE_BLOCKS = 4
BLOCK_S = 0.05  # what one payload takes to come
LEASE_S = 0.01


class PacedStore(DirectStore):
    """A node whose payloads come at an even pace, until something happens to it."""

    def __init__(self, node: SimulatedNode, *, mapped: bool, block_s: float = BLOCK_S) -> None:
        super().__init__(node, mapped=mapped, rates=FaultRates(delay_s=LEASE_S))
        self.block_s = block_s
        self.lease_ids: list[str] = []
        self.sent: list[int] = []  # positions
        self.hangs_before: int | None = None  # position
        self.answers = True

    async def lease_prefix(self, *args, **fields):
        if not self.answers:
            await asyncio.sleep(3_600)
        lease = await super().lease_prefix(*args, **fields)
        if lease.lease_id:
            self.lease_ids.append(lease.lease_id)
        return lease

    async def fetch_blocks(self, lease, *, deadline):
        payloads = self.node.live().leased_payloads(lease.lease_id)
        for header in lease.headers:
            await asyncio.sleep(3_600 if header.position == self.hangs_before else self.block_s)
            self.node.live()
            self.sent.append(header.position)
            yield memoryview(bytes(next(payloads)))

    @property
    def held_leases(self) -> list[str]:
        """Leases that its caller learned of and that stand."""
        return [lease_id for lease_id in self.lease_ids if self.node.node and self.node.node.holds_lease(lease_id)]


class Holders:
    """Nodes "a" (of this host) to "d", each with so many leading blocks, and one load from all of them."""

    def __init__(self, clock, blocks: dict[str, int], *, seed: int = 0) -> None:
        self.world, self.blocks, self.kv = World(clock, seed=seed), blocks, SimulatedKV(FIRST_ID + NUM_BLOCKS)
        for name in blocks:
            self.world.nodes.setdefault(name, SimulatedNode(name, num_slots=64, clock=clock, rng=self.world.rng))
        self.nodes = SimulatedNodes("a" if "a" in blocks else "(none)", self.world.nodes, FaultRates())
        self.stores = {name: PacedStore(self.world.nodes[name], mapped=name == "a") for name in blocks}
        self.nodes._remote = {name: store for name, store in self.stores.items() if name != "a"}
        if "a" in blocks:
            self.nodes._mapped = {"a": self.stores["a"]}

    async def store(self) -> None:
        kv = SimulatedKV(NUM_BLOCKS)
        kv.blocks = cold_kv(TOKENS)
        for name, num_blocks in self.blocks.items():
            await publish_blocks(
                [
                    FilledBlock(i, i, PROMPT.chain[i], PROMPT.parent_of(i), PROMPT.block_token_ids(i), PROMPT.namespace)
                    for i in range(num_blocks)
                ],
                sink=DirectStore(self.world.nodes[name], mapped=True, rates=FaultRates(delay_s=0)),
                pool=kv,
                producer=Producer(WorkerId("maker"), LAYOUT, self.world.clock),
                deadline=Deadline.after(5, self.world.clock),
            )

    async def load(
        self, *, deadline_s: float = 60, piece_blocks: int = PIECE_BLOCKS, end_block: int = NUM_BLOCKS, budget=None
    ):
        hints = tuple(name for name in self.blocks if name != "a")
        return await load_prefix(
            PROMPT,
            range(FIRST_ID, FIRST_ID + NUM_BLOCKS),
            plan=LoadPlan(0, end_block, ALL_SOURCES, hints, budget=budget),
            layout=LAYOUT,
            nodes=self.nodes,
            pool=self.kv,
            deadline=Deadline.after(deadline_s, self.world.clock),
            piece_bytes=piece_blocks * LAYOUT.block_bytes,
        )

    def check(self, loaded) -> None:
        """The blocks that count are the right ones, and nothing is held."""
        assert self.kv.blocks[FIRST_ID : FIRST_ID + loaded.num_blocks] == cold_kv(TOKENS)[: loaded.num_blocks]
        assert len(loaded.sources) == loaded.num_blocks
        self.check_leases()

    def check_leases(self) -> None:
        assert [name for name, store in self.stores.items() if store.held_leases] == []


async def timed(work, clock):
    before_s = clock.now_s()
    result = await work
    return result, clock.now_s() - before_s


async def mean_seconds(clock, blocks: dict[str, int]) -> float:
    """What a load takes, over some seeds: single copies into the pool stall for 0.2 s."""
    total_s = 0.0
    for seed in range(10):
        holders = Holders(clock, blocks, seed=seed)
        await holders.store()
        loaded, seconds = await timed(holders.load(), clock)
        assert (loaded.num_blocks, loaded.faults) == (max(blocks.values()), ())
        holders.check(loaded)
        sent = [position for store in holders.stores.values() for position in store.sent]
        assert sorted(sent) == list(range(loaded.num_blocks))
        total_s += seconds
    return total_s / 10


def test_two_nodes_that_hold_the_same_run_take_little_more_than_half_of_the_time_of_one():
    """Fails when nodes are asked one after the other, or both for the same blocks."""

    async def main(clock):
        one_s = await mean_seconds(clock, {"b": NUM_BLOCKS})
        assert one_s > NUM_BLOCKS * BLOCK_S
        assert await mean_seconds(clock, {"b": NUM_BLOCKS, "c": NUM_BLOCKS}) < 0.75 * one_s
        assert await mean_seconds(clock, {"b": NUM_BLOCKS, "c": NUM_BLOCKS, "d": NUM_BLOCKS}) < 0.55 * one_s

    run_virtual(main, seed=1)


def test_the_own_node_and_a_peer_deliver_their_parts_at_the_same_time():
    """Fails when the peer is asked only when the own node is done: the time is then the sum."""

    async def main(clock):
        half = NUM_BLOCKS // 2
        one_s = await mean_seconds(clock, {"a": NUM_BLOCKS})
        assert await mean_seconds(clock, {"a": half, "b": NUM_BLOCKS}) < 0.65 * one_s
        holders = Holders(clock, {"a": half, "b": NUM_BLOCKS})
        await holders.store()
        loaded = await holders.load()
        assert loaded.sources == (CacheSource.SHARED_MEMORY,) * half + (CacheSource.GRPC,) * half
        assert holders.stores["b"].sent == list(range(half, NUM_BLOCKS))

    run_virtual(main, seed=1)


def test_what_one_node_alone_can_deliver_costs_one_lease():
    """Fails when a run is cut into pieces although nobody else could take one: each piece costs two round trips."""

    async def main(clock):
        for blocks in ({"b": NUM_BLOCKS}, {"a": NUM_BLOCKS, "b": NUM_BLOCKS, "c": NUM_BLOCKS}):
            holders = Holders(clock, blocks)
            await holders.store()
            loaded = await holders.load()
            assert loaded.num_blocks == NUM_BLOCKS
            assert sum(len(store.lease_ids) for store in holders.stores.values()) == 1

    run_virtual(main, seed=1)


def test_a_shorter_holder_helps_as_far_as_it_goes():
    """Fails when a node that has only a part is not used for it, or its lack ends the run."""

    async def main(clock):
        holders = Holders(clock, {"b": 6, "c": NUM_BLOCKS, "d": 0})
        await holders.store()
        loaded = await holders.load(piece_blocks=2)
        assert (loaded.num_blocks, loaded.faults) == (NUM_BLOCKS, ())
        holders.check(loaded)
        assert holders.stores["b"].sent
        assert max(holders.stores["b"].sent) < 6

    run_virtual(main, seed=1)


def test_blocks_that_nobody_has_end_the_run_at_once():
    """Fails when the load waits for its deadline, or counts blocks behind the gap."""

    async def main(clock):
        holders = Holders(clock, {"a": 3, "b": 9, "c": 5})
        await holders.store()
        loaded, seconds = await timed(holders.load(), clock)
        assert (loaded.num_blocks, loaded.faults) == (9, ())
        assert seconds < 1
        holders.check(loaded)

    run_virtual(main, seed=1)


@pytest.mark.parametrize("other", ["a", "c"])
def test_a_node_that_dies_at_any_moment_costs_no_block_that_another_one_has(other: str):
    """Fails when delivered blocks are lost, a dead node's piece is not taken over, or a lease stays."""

    async def main(clock):
        rng = random.Random(5)
        for seed in range(25):
            holders = Holders(clock, {other: NUM_BLOCKS, "b": NUM_BLOCKS}, seed=seed)
            await holders.store()
            holders.stores[other].block_s = rng.choice([BLOCK_S, 2 * BLOCK_S])
            task = asyncio.create_task(holders.load())
            await asyncio.sleep(rng.uniform(0, 0.8))
            holders.world.nodes[rng.choice([other, "b"])].crash()
            loaded = await task
            assert loaded.num_blocks == NUM_BLOCKS
            holders.check(loaded)

    run_virtual(main, seed=2)


def test_when_both_die_the_unbroken_front_counts_and_nothing_behind_a_gap():
    """Fails when blocks behind a missing one count, or those in front of it do not."""

    async def main(clock):
        rng = random.Random(6)
        lengths = set()
        for seed in range(25):
            holders = Holders(clock, {"b": NUM_BLOCKS, "c": NUM_BLOCKS}, seed=seed)
            await holders.store()
            task = asyncio.create_task(holders.load())
            await asyncio.sleep(rng.uniform(0, 0.8))
            for name in ("b", "c"):
                holders.world.nodes[name].crash()
            loaded = await task
            holders.check(loaded)
            right = cold_kv(TOKENS)
            written = [holders.kv.blocks[FIRST_ID + i] == right[i] for i in range(NUM_BLOCKS)]
            assert loaded.num_blocks == [*written, False].index(False)
            assert loaded.num_blocks == NUM_BLOCKS or loaded.faults
            lengths.add(loaded.num_blocks)
        assert len(lengths) > 3

    run_virtual(main, seed=2)


@pytest.mark.parametrize("slow_s", [3_600, 0.4], ids=["hangs", "slow"])
@pytest.mark.parametrize("slow", ["a", "b"])
def test_a_slow_node_loses_its_piece_to_an_idle_one(slow: str, slow_s: float):
    """Fails when a load waits for one node as long as the others wait for nothing."""

    async def main(clock):
        holders = Holders(clock, {slow: NUM_BLOCKS, "c": NUM_BLOCKS})
        await holders.store()
        holders.stores[slow].block_s = slow_s
        loaded, seconds = await timed(holders.load(piece_blocks=8), clock)
        assert loaded.num_blocks == NUM_BLOCKS
        assert [fault.node_id for fault in loaded.faults if isinstance(fault, StoreUnavailable)] == [slow]
        assert seconds < NUM_BLOCKS * BLOCK_S + 2 * LOAD_STALL_MS / 1000
        holders.check(loaded)

    run_virtual(main, seed=3)


def test_a_node_that_hangs_with_nobody_else_to_ask_ends_the_load_at_its_deadline():
    """Fails when the blocks in front of the one that never comes are lost, or the load outlives its deadline."""

    async def main(clock):
        holders = Holders(clock, {"a": 5, "b": NUM_BLOCKS})
        await holders.store()
        holders.stores["b"].hangs_before = 15
        loaded, seconds = await timed(holders.load(deadline_s=4), clock)
        assert loaded.num_blocks == 15
        assert 3.9 < seconds < 5
        assert isinstance(loaded.faults[-1], StoreUnavailable)
        holders.check(loaded)

    run_virtual(main, seed=3)


@pytest.mark.parametrize("wrong", ["payload", "header"])
@pytest.mark.parametrize("position", [0, 6, 13, NUM_BLOCKS - 1])
def test_a_damaged_block_ends_the_run_there_and_leaves_what_others_deliver_before_it(position: int, wrong: str):
    """Fails when a block in front of it is lost, one from it on counts, or its node is not told."""

    async def main(clock):
        holders = Holders(clock, {"b": NUM_BLOCKS, "c": NUM_BLOCKS})
        await holders.store()
        for name in ("b", "c"):
            node = holders.world.nodes[name]
            held = node.node._blocks.get(PROMPT.namespace, PROMPT.chain[position])
            if wrong == "payload":
                node.arena.payload(held.slot, LAYOUT.block_bytes)[7] ^= 1
            else:
                object.__setattr__(held.header, "token_ids", (1, 2, 3, 4))
        loaded = await holders.load()
        assert loaded.num_blocks == position
        assert BlockCorrupt in {type(fault) for fault in loaded.faults}
        holders.check(loaded)
        if wrong == "payload":
            lengths = [holders.world.nodes[name].node.lookup(PROMPT.namespace, PROMPT.chain) for name in ("b", "c")]
            assert position in lengths

    run_virtual(main, seed=4)


def test_a_block_that_one_node_has_wrong_is_not_taken_from_another_one():
    """Fails when the run goes on behind a doubt: whose bytes are right is not for a reader to guess."""

    async def main(clock):
        holders = Holders(clock, {"b": NUM_BLOCKS, "c": NUM_BLOCKS})
        await holders.store()
        node = holders.world.nodes["b"]
        held = node.node._blocks.get(PROMPT.namespace, PROMPT.chain[1])
        node.arena.payload(held.slot, LAYOUT.block_bytes)[7] ^= 1
        loaded = await holders.load()
        assert loaded.num_blocks == 1
        assert [type(fault) for fault in loaded.faults] == [BlockCorrupt]
        holders.check(loaded)

    run_virtual(main, seed=4)


def test_a_split_load_that_is_cancelled_at_any_moment_leaves_no_lease_no_copy_and_no_task():
    """Fails when a piece's holder or copy outlives the load."""

    async def main(clock):
        for cancel_after_ms in range(0, 900, 13):
            holders = Holders(clock, {"a": 5, "b": NUM_BLOCKS, "c": NUM_BLOCKS})
            await holders.store()
            task = asyncio.create_task(holders.load())
            await asyncio.sleep(cancel_after_ms / 1000)
            task.cancel()
            await asyncio.wait([task])
            assert task.cancelled() or task.result().num_blocks == NUM_BLOCKS
            after_cancel = list(holders.kv.blocks)
            holders.check_leases()
            await asyncio.sleep(1)
            assert holders.kv.blocks == after_cancel
            assert len(asyncio.all_tasks()) == 1

    run_virtual(main, seed=5)
