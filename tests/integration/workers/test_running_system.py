"""A running system whose parts come, go and change under it: a gateway, real workers and a real store node."""

import asyncio

from headrace.config import EngineSettings, ModelSettings
from headrace.core.block import HashAlgorithm
from headrace.engine.load_model import LoadedModel, load_model
from headrace.gateway.examine_system import _examine_namespaces

from .gateway_kit import SmallSystem, small_system

B = 8


async def listed(system: SmallSystem, *worker_ids: str) -> None:
    """Wait until the gateway knows exactly these workers."""
    async with asyncio.timeout(10):
        while {record.worker_id for record in system.gateway.table.live()} != set(worker_ids):
            await system.gateway.refresh()
            await asyncio.sleep(0.01)


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
        new = await make_worker("new", model=with_blocks_of(2 * B, tiny_models[0]))
        system.calls.workers["new"] = new
        await listed(system, "new", "old")
        (apart,) = _examine_namespaces(system.gateway.table.records())
        assert not apart.ok
        assert "block_tokens differ" in apart.detail
        await old.worker.stop()
        await listed(system, "new")
        for cached in (0, 2 * 2 * B, 2 * 2 * B):
            answered = await system.ask(head)
            assert (answered.token_ids, answered.cached.total) == (cold.token_ids, cached)
            await new.published()
        (together,) = _examine_namespaces(system.gateway.table.records())
        assert together.ok


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
                await listed(system, "stay", leaving.worker.worker_id)
                await asyncio.sleep(0.1)
                await leaving.worker.stop()
            stopped.set()
    assert sum(worker_id.startswith("leave") for worker_id in served) > 6, served


def with_blocks_of(block_tokens: int, model: LoadedModel) -> LoadedModel:
    """The same weights with blocks of another length."""
    return load_model(
        ModelSettings(
            model=str(model.path),
            device="cpu",
            torch_threads=1,
            model_cache_dir=str(model.path / "cache"),
            dtype="float32",
        ),
        EngineSettings(block_tokens=block_tokens, pool_tokens=48 * block_tokens),
        trust_group="tests",
        hash_algorithm=HashAlgorithm.XXH3_128,
        report=lambda line: None,
    )
