"""What tests of loads for models with windows share: one prompt, how its blocks come to a node, and what goes wrong.

Each of those tests has its own `store_blocks` and its own load, which checks itself when it has run.
"""

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

from simulated_engine import LAYOUT, make_prompt
from simulated_nodes import DirectStore, FaultRates
from simulated_world import World
from virtual_loop import run_virtual

from headrace.core.block import CacheSource, KvLayout
from headrace.core.clock import Deadline
from headrace.core.generation import HandOff, WorkerId
from headrace.core.key_window import KeyWindow
from headrace.core.ports import PrefixPool
from headrace.engine.event_stream import FilledBlock
from headrace.transfer.publish_blocks import Producer, publish_blocks

TOKENS = list(range(80))  # twenty blocks
PROMPT = make_prompt(TOKENS)
WINDOW = KeyWindow(11, LAYOUT.block_tokens)  # three blocks of a prefix, eight that are held at once
SHARED_MEMORY, GRPC = CacheSource.SHARED_MEMORY, CacheSource.GRPC

StoreBlocks = Callable[..., Awaitable[None]]  # (world, host, end, first=0)


async def commit(
    world: World, host: str, block_ids: Iterable[tuple[int, int]], *, pool: PrefixPool, layout: KvLayout
) -> None:
    """Have blocks of PROMPT committed on a host's node, each as (its index, its id in the pool)."""
    filled = [
        FilledBlock(i, block_id, PROMPT.chain[i], PROMPT.parent_of(i), PROMPT.block_token_ids(i), PROMPT.namespace)
        for i, block_id in block_ids
    ]
    published = await publish_blocks(
        filled,
        sink=DirectStore(world.nodes[host], mapped=True, rates=FaultRates()),
        pool=pool,
        producer=Producer(WorkerId("maker"), layout, world.clock),
        deadline=Deadline.after(5, world.clock),
    )
    assert published.num_blocks == len(filled)


async def follow_slow_prefill(
    load: Any, store_blocks: StoreBlocks, blocks: range, *, every_s: float, patience_ms: int
) -> Any:
    """Run the load while these blocks appear on host "a", one in `every_s`; what it loaded."""

    async def prefill() -> None:
        for index in blocks:
            await asyncio.sleep(every_s)
            await store_blocks(load.world, "a", index + 1, first=index)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(prefill())
        hand_off = HandOff(store_node="a", first_block=blocks.start, patience_ms=patience_ms)
        loaded, _ = await load.run(hand_off=hand_off)
    return loaded


def run_meddled(seed: int, store_blocks: StoreBlocks, make_load: Callable[..., Any]) -> None:
    """One load among crashes, lost calls, broken bytes, evictions and prefills that stop. make_load: (world,
    num_shared=, rates=)."""

    async def main(clock):
        rng = random.Random(seed)
        world = World(clock, seed=seed)
        for host in ("a", "b"):
            if end := rng.choice((0, 5, 12, 20)):
                await store_blocks(world, host, end)
        rates = FaultRates(lost=0.05, reply_lost=0.05, duplicated=0.1, stalled=0.02, delay_s=0.2)
        load = make_load(world, num_shared=rng.choice((0, 2, 9)), rates=rates)

        async def meddle() -> None:
            for _ in range(6):
                await asyncio.sleep(rng.uniform(0, 0.6))
                node = world.nodes[rng.choice("ab")]
                if node.node is None:
                    node.restart()
                else:
                    rng.choice((node.crash, node.flip_a_byte, node.flip_a_byte, node.evict_all))()

        hand_off = HandOff(store_node="b", first_block=4, patience_ms=400) if rng.random() < 0.3 else None
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(meddle())
            await load.run(hints=("b",), hand_off=hand_off)
        for node in world.nodes.values():
            if node.node is None:
                node.restart()

    run_virtual(main, seed=seed)


def leased(world: World) -> int:
    """Blocks under lease in all nodes."""
    return sum(node.node.stat().leased_blocks for node in world.nodes.values() if node.node)
