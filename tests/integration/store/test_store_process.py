"""The store node as a process, with a real Valkey: killed, restarted, refused, cut off, stopped."""

import asyncio
import os
import random
import signal
import urllib.request
from collections.abc import Awaitable, Callable
from dataclasses import replace

import pytest
from free_ports import free_ports
from patient_redis import patient_index, patient_membership
from store_calls_kit import CLOCK, deadline, publish, read
from store_kit import make_header, make_prompt, payload_of

from headrace.blocks.host_arena import arena_path, open_arena, remove_arena
from headrace.core.block import HolderId, payload_digest
from headrace.core.errors import CacheFault, IndexUnavailable, LeaseExpired, StoreUnavailable
from headrace.core.ports import Reservation
from headrace.index.embedded_valkey import EmbeddedValkey
from headrace.index.redis_index import RedisIndex
from headrace.store.recover_arena import recover_arena
from headrace.store.store_node import StoreNode


async def until(holds: Callable[[], Awaitable[bool]], *, seconds: float = 60) -> None:
    async with asyncio.timeout(seconds):
        while not await holds():  # noqa: ASYNC110 (other processes have no event for us)
            await asyncio.sleep(0.05)


async def indexed(index: RedisIndex, node_id: str, prompt) -> int:
    try:
        match = await index.longest_prefix(prompt.namespace, prompt.chain)
    except IndexUnavailable:
        return -1
    return match.of(HolderId(f"node:{node_id}"))


@pytest.fixture
async def index(valkey_url):
    found = patient_index(valkey_url)
    yield found
    await found.close()


async def test_blocks_outlive_a_killed_node_and_are_registered_again(nodes, index) -> None:
    prompt = make_prompt(31, 5)
    first = await nodes.start("outlive")
    shared = nodes.shared_memory(first.record)
    assert await publish(shared, prompt, range(4)) == 4
    (unfinished,) = await shared.reserve([make_header(prompt, 4)], deadline=deadline())
    assert isinstance(unfinished, Reservation)
    unfinished.buffer[:] = payload_of(unfinished.header)
    lease = await shared.lease_prefix(prompt.namespace, prompt.chain, first_block=0, deadline=deadline())

    async def is_indexed() -> bool:
        return await indexed(index, "outlive", prompt) == 4

    await until(is_indexed)
    await first.kill()
    second = await nodes.start("outlive")
    assert second.record.incarnation > first.record.incarnation
    for store in (nodes.shared_memory(second.record), nodes.grpc(second.record)):
        assert await read(store, prompt) == [payload_of(make_header(prompt, i)) for i in range(4)]
    await until(is_indexed)
    # What was promised under the first incarnation is void: typed errors, no bytes.
    old = nodes.shared_memory(replace(first.record, address=second.record.address))
    with pytest.raises((StoreUnavailable, LeaseExpired)):
        async for _ in old.fetch_blocks(lease, deadline=deadline()):
            pass
    digest = payload_digest(unfinished.buffer)
    with pytest.raises(LeaseExpired):
        await old.commit(unfinished, payload_xxh3=digest, deadline=deadline())
    assert await publish(nodes.grpc(second.record), prompt, range(5)) == 1


async def test_an_adapter_made_before_a_restart_maps_the_new_arena(nodes) -> None:
    """The second node has a larger arena, hence another file: a stale mapping would read the old one."""
    prompt = make_prompt(32, 2)
    first = await nodes.start("remap", arena_mb=4)
    port = first.record.address.rpartition(":")[2]
    store = nodes.shared_memory(first.record)
    assert await publish(store, prompt, range(2)) == 2
    await first.kill()
    await nodes.start("remap", "--store-port", port, arena_mb=8)

    async def answers() -> bool:
        try:
            return await publish(store, prompt, range(2)) == 2
        except StoreUnavailable:
            return False

    await until(answers)
    assert await read(store, prompt) == [payload_of(make_header(prompt, i)) for i in range(2)]


@pytest.mark.parametrize("seed", range(4))
async def test_a_node_killed_at_any_moment_keeps_what_it_acknowledged_and_leaks_nothing(nodes, seed: int) -> None:
    """Writers and readers run while the node is killed; then its arena is recovered here and its books are checked."""
    rng, node_id = random.Random(seed), f"kill{seed}"
    node = await nodes.start(node_id)
    stores = [nodes.shared_memory(node.record), nodes.grpc(node.record)]
    acknowledged: list[tuple[int, int]] = []

    async def write(store, token: int) -> None:
        while True:
            prompt = make_prompt(token, 3)
            for outcome in await store.reserve([make_header(prompt, i) for i in range(3)], deadline=deadline()):
                assert isinstance(outcome, Reservation)
                outcome.buffer[:] = payload_of(outcome.header)
                await store.commit(outcome, payload_xxh3=payload_digest(outcome.buffer), deadline=deadline())
                acknowledged.append((token, outcome.header.position))
            token += 10

    writers = [asyncio.create_task(write(stores[n % 2], 100 + n)) for n in range(4)]

    async def is_under_way() -> bool:
        return bool(acknowledged)

    await until(is_under_way)
    await asyncio.sleep(0.1 * rng.random())
    await node.kill()
    for ended in await asyncio.gather(*writers, return_exceptions=True):
        assert isinstance(ended, CacheFault), ended
    arena = open_arena(arena_path(nodes.arena_dir, node_id), 4 << 20)
    after = StoreNode(arena, node_id=node_id, clock=CLOCK, recovered=recover_arena(arena))
    after.check_integrity()
    held = {block_hash for _, block_hash in after.inventory()}
    # The arena is not full, so nothing was evicted: whatever was acknowledged is there.
    assert len(acknowledged) < arena.num_units * 0.9
    assert {make_prompt(token, 3).chain[position] for token, position in acknowledged} <= held
    for run_token in {token for token, _ in acknowledged}:
        prompt = make_prompt(run_token, 3)
        run = after.lease(prompt.namespace, prompt.chain, first_block=0)
        for block, payload in zip(run.blocks, after.leased_payloads(run.lease_id), strict=True):
            assert bytes(payload) == payload_of(block.header)
    arena.close()


async def test_a_second_process_on_the_same_arena_is_refused(nodes) -> None:
    await nodes.start("twice")
    second = await nodes.spawn("--node-id", "twice", "--arena-mb", "4")
    _, log = await asyncio.wait_for(second.communicate(), 60)
    assert second.returncode == 2
    assert b"in use by another process" in log


async def test_an_orderly_stop_withdraws_the_record_and_keeps_or_removes_the_file(nodes, valkey_url) -> None:
    membership = patient_membership(valkey_url)

    async def alive() -> set[str]:
        return {record.node_id for record in await membership.store_nodes()}

    kept, removed = await nodes.start("kept"), await nodes.start("removed", "--remove-arena-on-exit")

    async def both_are_announced() -> bool:
        return {"kept", "removed"} <= await alive()

    await until(both_are_announced)
    assert await kept.terminate() == 0
    assert await removed.terminate() == 0
    assert not {"kept", "removed"} & await alive()
    assert arena_path(nodes.arena_dir, "kept").exists()
    assert not arena_path(nodes.arena_dir, "removed").exists()
    assert remove_arena(nodes.arena_dir, "kept")
    assert [path for path in nodes.arena_dir.iterdir() if "arena" in path.name] == []
    await membership.close()


async def test_a_node_serves_while_redis_is_away_and_tells_all_when_it_comes_back_empty(nodes) -> None:
    """Fails when registration is waited for on the data path, or when an emptied Redis goes unnoticed."""
    prompt, more = make_prompt(33, 3), make_prompt(34, 2)
    valkey = EmbeddedValkey(port=free_ports(1)[0])
    nodes.redis_url = valkey.start()
    index = patient_index(nodes.redis_url)
    try:
        node = await nodes.start("cutoff")
        remote = nodes.grpc(node.record)
        await publish(remote, prompt, range(3))

        async def first_is_indexed() -> bool:
            return await indexed(index, "cutoff", prompt) == 3

        await until(first_is_indexed)
        os.kill(valkey.pid, signal.SIGKILL)
        valkey.stop()
        assert await publish(remote, more, range(2)) == 2  # nobody brings Redis back meanwhile
        assert len(await read(remote, prompt)) == 3
        valkey.start()

        async def all_is_indexed() -> bool:
            return (await indexed(index, "cutoff", prompt), await indexed(index, "cutoff", more)) == (3, 2)

        await until(all_is_indexed, seconds=60)
    finally:
        await index.close()
        valkey.stop()


async def test_metrics_are_served_with_the_books(nodes) -> None:
    node = await nodes.start("metrics")
    await publish(nodes.grpc(node.record), make_prompt(35, 2), range(2))

    def scrape() -> str:
        url = f"http://127.0.0.1:{node.record.metrics_port}/metrics"
        with urllib.request.urlopen(url, timeout=30) as reply:
            return str(reply.read().decode())

    async def committed_is_two() -> bool:
        return 'headrace_store_blocks{state="committed",tier="host"} 2.0' in await asyncio.to_thread(scrape)

    await until(committed_is_two)


async def test_a_wrong_setting_is_refused_by_name(nodes) -> None:
    for flags, named in ((("--arena-mb", "0"), b"arena_mb"), (("--node-id", "../x"), b"node_id")):
        process = await nodes.spawn(*flags)
        _, log = await asyncio.wait_for(process.communicate(), 60)
        assert process.returncode == 2
        assert named in log
