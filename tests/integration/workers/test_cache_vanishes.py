"""Whatever happens to the cache while it is used costs hits, never an answer."""

import asyncio
import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

from patient_redis import patient_membership

from headrace.core.block import CacheSource
from headrace.core.clock import SystemClock
from headrace.core.generation import CacheControl, EvictSelector

B = 8
NOT_DEVICE = CacheControl(sources=frozenset({CacheSource.SHARED_MEMORY, CacheSource.GRPC}))
NEITHER_DEVICE_NOR_NEW = replace(NOT_DEVICE, publish=False)


async def test_evicting_everything_all_the_time_changes_no_answer(store_node, make_worker, prompts):
    """Fails when a block that went between lookup and fetch is used, or its loss is an error."""
    near, far = await make_worker("near"), await make_worker("far", near=False)
    heads = [prompts(5 * B + salt, salt=salt) for salt in range(3)]
    cold = [await near.cold(head) for head in heads]

    async def evict() -> None:
        while True:
            store_node.node.evict(EvictSelector(), dry_run=False)
            near.worker.evict_device(EvictSelector(), dry_run=False)
            store_node.node.check_integrity()
            await asyncio.sleep(0.05)

    async def ask(number: int) -> None:
        for turn in range(10):
            which = (number + turn) % len(heads)
            worker = (near, far)[turn % 2]
            reply = await worker.decode(heads[which], cache=NOT_DEVICE, hint_nodes=("node-1",))
            assert reply.same_answer_as(cold[which])

    evicting = asyncio.create_task(evict())
    await asyncio.gather(*(ask(number) for number in range(4)))
    evicting.cancel()
    await asyncio.wait([evicting])
    assert evicting.cancelled()


async def test_a_damaged_block_in_the_arena_is_recomputed_and_stored_anew(store_node, make_worker, prompts):
    """Fails when a flipped byte reaches an answer, or the broken block stays in the store for ever."""
    token_ids = prompts(5 * B + 2, salt=7)
    maker, reader = await make_worker("maker"), await make_worker("reader")
    cold = await maker.decode(token_ids)
    await maker.published()
    request = maker.request(token_ids, NOT_DEVICE)
    run = store_node.node.lease(request.prompt.namespace, request.prompt.chain, first_block=0)
    store_node._arena.payload(run.blocks[2].slot, 64)[5] ^= 0x10
    store_node.node.release(run.lease_id)
    reply = await reader.decode(token_ids, cache=NOT_DEVICE)
    assert reply.same_answer_as(cold)
    assert reply.cached.shared_memory == 2 * B
    assert [type(fault).__name__ for fault in reader.faults] == ["BlockCorrupt"]
    await reader.published()
    healed = await reader.decode(token_ids, cache=NOT_DEVICE)
    assert healed.cached.shared_memory == 5 * B
    assert healed.same_answer_as(cold)


async def test_a_store_node_killed_while_it_is_read_costs_a_recompute(make_worker, empty_valkey_url, tmp_path, prompts):
    """Fails when a dead node makes a request fail, hang or answer differently, or a restarted one stays lost."""
    node = start_store_node(empty_valkey_url, tmp_path)
    membership = patient_membership(empty_valkey_url, clock=SystemClock())
    try:
        near = await make_worker("near", members=membership)
        far = await make_worker("far", near=False, members=membership)
        async with asyncio.timeout(60):  # the node announces itself in the background
            while not (near.worker.nodes.local() and far.worker.nodes.remote("killed")):  # noqa: ASYNC110
                await asyncio.sleep(0.1)
        token_ids = prompts(40 * B + 1, salt=8)
        cold = await near.decode(token_ids)
        await near.published()
        assert near.faults == []
        warm = await far.decode(token_ids, cache=NOT_DEVICE, hint_nodes=("killed",))
        assert (warm.cached.grpc, far.faults) == (40 * B, [])
        asked = [
            asyncio.create_task(worker.decode(token_ids, cache=NOT_DEVICE, hint_nodes=("killed",)))
            for worker in (near, far, near, far)
        ]
        await asyncio.sleep(0.01)
        os.kill(node.pid, signal.SIGKILL)
        node.wait()
        async with asyncio.timeout(60):
            for reply in await asyncio.gather(*asked):
                assert reply.same_answer_as(cold)
            assert (await near.decode(token_ids, cache=NOT_DEVICE)).same_answer_as(cold)
        node = start_store_node(empty_valkey_url, tmp_path)
        async with asyncio.timeout(60):
            found_again = cold
            while found_again.cached.shared_memory < 40 * B:  # until the worker has seen the new record
                await asyncio.sleep(0.1)
                found_again = await near.decode(token_ids, cache=NEITHER_DEVICE_NOR_NEW)
                assert found_again.same_answer_as(cold)
    finally:
        node.kill()
        node.wait()
        await membership.close()


def start_store_node(redis_url: str, arena_dir) -> subprocess.Popen:
    """A store node in a process of its own, ready and announced."""
    node = subprocess.Popen(
        [
            *(sys.executable, "-m", "headrace.store.service"),
            *("--redis-url", redis_url),
            *("--node-id", "killed"),
            *("--arena-mb", "8"),
            *("--arena-dir", str(arena_dir)),
        ],
        stdout=subprocess.PIPE,
        text=True,
    )
    assert json.loads(node.stdout.readline())["node_id"] == "killed"
    return node
