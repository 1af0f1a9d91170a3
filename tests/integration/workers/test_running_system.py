"""A running system whose parts come, go and change under it: a gateway, real workers and a real store node."""

import asyncio

import grpc.aio

from headrace.core.block import HashedPrompt
from headrace.core.errors import StoreUnavailable
from headrace.core.generation import CacheControl
from headrace.gateway.examine_system import examine_system
from headrace.gateway.fleet import Fleet
from headrace.index.memory_index import MemoryIndex
from headrace.store.service import StoreNodeService

from .gateway_kit import SmallSystem, load_again, small_system
from .priced_steps import PricedSteps

B = 8


async def test_workers_that_come_back_with_another_block_size_hit_again_and_never_falsely(
    store_node, make_worker, membership, tiny_models, prompts
):
    """Fails when a block of the old size is used for the new one, the router keeps the old size for good, or nobody
    can tell why there are no hits."""
    head = prompts(6 * B, salt=20)
    old = await make_worker("old")
    async with small_system(old, index=store_node._index, membership=membership) as system:
        cold = await old.cold(head, max_tokens=2)
        await system.ask(head)
        await old.published()
        assert (await system.ask(head)).cached.total == 5 * B
        new = await make_worker("new", model=load_again(tiny_models[0], block_tokens=2 * B, pool_blocks=48))
        system.calls.workers["new"] = new
        await system.listed("new", "old")
        assert "block_tokens differ" in (await ills(system))["namespace"]
        await old.worker.stop()
        await system.listed("new")
        for cached in (0, 2 * 2 * B, 2 * 2 * B):
            answered = await system.ask(head)
            assert (answered.token_ids, answered.cached.total) == (cold.token_ids, cached)
            await new.published()
        assert "namespace" not in await ills(system)


async def test_stopping_a_worker_again_and_again_under_tiny_calls_fails_none(
    store_node, make_worker, membership, tiny_models, prompts
):
    """Fails when a call that a stopping worker has not begun is an error for its client instead of a new attempt, or a
    call that it has begun is cut off."""
    stay = await make_worker("stay")
    token_ids = prompts(2 * B, salt=21)
    expected = (await stay.cold(token_ids, max_tokens=2)).token_ids
    served: dict[str, int] = {}
    async with small_system(stay, index=store_node._index, membership=membership) as system:
        stopped = asyncio.Event()

        async def call() -> None:
            while not stopped.is_set():
                answered = await system.ask(token_ids)
                assert answered.token_ids == expected
                served[answered.worker_id] = served.get(answered.worker_id, 0) + 1

        async with asyncio.TaskGroup() as callers:
            for _ in range(8):
                callers.create_task(call())
            for number in range(12):
                leaving = await make_worker(f"leave-{number}", model=tiny_models[0])
                system.calls.workers[leaving.worker.worker_id] = leaving
                await system.listed("stay", leaving.worker.worker_id)
                async with asyncio.timeout(60):
                    while not served.get(leaving.worker.worker_id):  # noqa: ASYNC110
                        await asyncio.sleep(0.01)
                await leaving.worker.stop()
            stopped.set()
    assert sum(worker_id.startswith("leave") for worker_id in served) == 12, served


async def test_a_warm_prompt_goes_to_the_worker_beside_its_blocks(store_node, make_worker, membership, prompts):
    """Fails when matches do not decide the routing, so that it is as good as chance: both workers are idle, and one is
    on the host of the node that holds the prompt."""
    near = await make_worker("near", steps=PricedSteps())
    far = await make_worker("far", near=False, steps=PricedSteps())
    async with small_system(near, far, index=store_node._index, membership=membership) as system:
        await system.listed("near", "far")
        for number in range(3):
            token_ids = prompts(6 * B, salt=30 + number)
            await near.decode(token_ids)
            await near.published()
            await indexed(store_node, near.request(token_ids, CacheControl()).prompt)
            asked = [await system.ask(token_ids) for _ in range(10)]
            assert [answered.worker_id for answered in asked].count("near") >= 9
            assert min(answered.cached.total for answered in asked) == 5 * B


async def test_a_worker_whose_blocks_nobody_keeps_is_reported(make_worker, membership, prompts):
    """Fails when a worker without a store node looks like any other: it serves, and reuse across workers is silently
    off. The doctor says so, and each batch that is not kept counts as a fault."""
    alone = await make_worker("alone")
    index = MemoryIndex(membership)
    async with small_system(alone, index=index, membership=membership) as system:
        await system.listed("alone")
        ill = await ills(system)
        assert "has no store node" in ill["worker"]
        assert "none is announced" in ill["store nodes"]
        await system.ask(prompts(2 * B + 1, salt=40))
        await alone.published()
        assert [type(fault) for fault in alone.faults] == [StoreUnavailable]


async def ills(system: SmallSystem) -> dict[str, str]:
    """What the doctor finds wrong: check -> detail."""
    async with grpc.aio.insecure_channel("127.0.0.1:1") as nowhere:
        fleet = Fleet(system.gateway, channel_to=lambda address: nowhere)
        return {finding.check: finding.detail for finding in await examine_system(fleet) if not finding.ok}


async def indexed(store_node: StoreNodeService, prompt: HashedPrompt) -> None:
    """Wait until the index names all full blocks of a prompt."""
    async with asyncio.timeout(60):
        while True:
            match = await store_node._index.longest_prefix(prompt.namespace, prompt.chain)
            if match.num_blocks == len(prompt.chain):
                return
            await asyncio.sleep(0.01)
