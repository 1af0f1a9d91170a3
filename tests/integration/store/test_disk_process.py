"""A store node with a disk tier as a process: what left the arena is read again, also after kill -9."""

import asyncio
from pathlib import Path

from store_calls_kit import CLOCK, deadline, publish, read
from store_kit import make_header, make_prompt, payload_of

from headrace.blocks.disk_tier import disk_path
from headrace.blocks.host_arena import remove_arena
from headrace.config import StoreSettings
from headrace.core.block import HolderId
from headrace.core.generation import EvictSelector
from headrace.index.memory_index import MemoryIndex, MemoryMembership
from headrace.store.service import StoreNodeService
from headrace.wire.render import render_selector
from headrace.wire.v1 import admin_pb2 as pb
from headrace.wire.v1 import admin_pb2_grpc as pb_grpc

PROMPTS = [make_prompt(500 + n, 6) for n in range(80)]  # 480 blocks; one MiB of arena has room for about 250
WHOLE = {prompt.chain: [payload_of(make_header(prompt, i)) for i in range(6)] for prompt in PROMPTS}


def bytes_in(path: Path) -> int:
    return sum(file.stat().st_size for file in path.glob("*.blocks"))


def rot(path: Path) -> None:
    """Flip a bit in every few thousand bytes of every segment."""
    for file in path.glob("*.blocks"):
        data = bytearray(file.read_bytes())
        for at in range(3_000, len(data), 3_000):
            data[at] ^= 1
        file.write_bytes(data)


async def stat_rows(nodes, record) -> dict[str, pb.HolderStat]:
    stub = pb_grpc.CacheAdminStub(nodes.channels.to(record.address))
    return {row.tier: row for row in (await stub.Stat(pb.StatRequest())).holders}


async def settle(nodes, record, path: Path) -> None:
    """Return when nothing is left to write: writing is behind, and nobody waits for it."""
    before = -1
    async with asyncio.timeout(60):
        while (await stat_rows(nodes, record))["disk"].reserved_blocks or (now := bytes_in(path)) != before or not now:
            before = bytes_in(path)
            await asyncio.sleep(0.3)


async def test_blocks_that_left_the_arena_are_read_from_disk_also_after_a_kill(nodes, tmp_path) -> None:
    flags = ("--disk-gb", "0.02", "--disk-dir", str(tmp_path / "disk"))
    node = await nodes.start("disk1", *flags, arena_mb=1)
    writer = nodes.grpc(node.record)
    for prompt in PROMPTS:
        assert await publish(writer, prompt, range(6)) == 6
    await settle(nodes, node.record, disk_path(tmp_path / "disk", "disk1"))
    rows = await stat_rows(nodes, node.record)
    assert rows["host"].committed_blocks + rows["disk"].committed_blocks == 480
    assert rows["disk"].committed_blocks > 200
    for store in (nodes.shared_memory(node.record), nodes.grpc(node.record)):
        for prompt in PROMPTS[:6]:
            assert await read(store, prompt) == WHOLE[prompt.chain]
    await settle(nodes, node.record, disk_path(tmp_path / "disk", "disk1"))
    await node.kill()
    again = await nodes.start("disk1", *flags, arena_mb=1)
    assert again.record.incarnation > node.record.incarnation
    reader = nodes.grpc(again.record)
    for prompt in PROMPTS:
        assert await read(reader, prompt) == WHOLE[prompt.chain]
    # And from disk alone: the arena is gone, as after the host was started again.
    await settle(nodes, again.record, disk_path(tmp_path / "disk", "disk1"))
    on_disk = (await stat_rows(nodes, again.record))["disk"].committed_blocks
    await again.kill()
    assert remove_arena(nodes.arena_dir, "disk1")
    last = await nodes.start("disk1", *flags, arena_mb=1)
    found = [await read(nodes.grpc(last.record), prompt) for prompt in PROMPTS]
    assert sum(len(blocks) for blocks in found) >= on_disk - 6
    for prompt, blocks in zip(PROMPTS, found, strict=True):
        assert blocks == WHOLE[prompt.chain][: len(blocks)]


async def test_what_an_operator_evicted_from_disk_stays_gone_after_a_kill(nodes, tmp_path) -> None:
    flags = ("--disk-gb", "0.02", "--disk-dir", str(tmp_path / "disk"))
    node = await nodes.start("disk2", *flags, arena_mb=1)
    writer = nodes.grpc(node.record)
    for prompt in PROMPTS:
        await publish(writer, prompt, range(6))
    await settle(nodes, node.record, disk_path(tmp_path / "disk", "disk2"))
    stub = pb_grpc.CacheAdminStub(nodes.channels.to(node.record.address))
    selector = render_selector(EvictSelector(block_hashes=(PROMPTS[0].chain[0],)))
    (report,) = (await stub.Evict(pb.EvictRequest(selector=selector, dry_run=False))).reports
    assert report.blocks == 6
    assert report.tokens == 24
    await node.kill()
    again = await nodes.start("disk2", *flags, arena_mb=1)
    assert await read(nodes.grpc(again.record), PROMPTS[0]) == []
    assert await read(nodes.grpc(again.record), PROMPTS[1]) == WHOLE[PROMPTS[1].chain]


async def test_a_missing_or_broken_disk_costs_hits_and_nothing_else(nodes, tmp_path) -> None:
    """Fails when a read that does not check out is served, or when what stands on a lost block still counts."""
    flags = ("--disk-gb", "0.02", "--disk-dir", str(tmp_path / "disk"))
    node = await nodes.start("disk3", *flags, arena_mb=1)
    writer = nodes.grpc(node.record)
    for prompt in PROMPTS:
        await publish(writer, prompt, range(6))
    path = disk_path(tmp_path / "disk", "disk3")
    await settle(nodes, node.record, path)
    rot(path)
    for prompt in PROMPTS:
        blocks = await read(writer, prompt)
        assert blocks == WHOLE[prompt.chain][: len(blocks)]
    held = [await _held(writer, prompt) for prompt in PROMPTS]
    assert sum(held) < 300, "blocks that cannot be read still count"
    assert await publish(writer, PROMPTS[0], range(6)) > 0
    assert await read(writer, PROMPTS[0]) == WHOLE[PROMPTS[0].chain]


async def _held(store, prompt) -> int:
    lease = await store.lease_prefix(prompt.namespace, prompt.chain, first_block=0, deadline=deadline())
    await store.release(lease)
    return len(lease.headers)


async def test_writing_behind_keeps_the_index_true(nodes, tmp_path) -> None:
    """A block that moves to disk stays registered; one that is lost is deregistered, and its tail with it."""
    membership = MemoryMembership(CLOCK)
    index = MemoryIndex(membership)
    settings = StoreSettings(
        node_id="inside", arena_mb=1, arena_dir=str(tmp_path), disk_gb=0.02, disk_dir=str(tmp_path / "disk")
    )
    service = StoreNodeService(settings, index=index, membership=membership, clock=CLOCK)
    record = await service.start()
    try:
        writer = nodes.grpc(record)
        for prompt in PROMPTS:
            await publish(writer, prompt, range(6))
        await settle(nodes, record, disk_path(tmp_path / "disk", "inside"))

        async def indexed() -> int:
            found = [await index.longest_prefix(prompt.namespace, prompt.chain) for prompt in PROMPTS]
            return sum(match.of(HolderId("node:inside")) for match in found)

        async with asyncio.timeout(60):
            while await indexed() != 480:  # noqa: ASYNC110 (the index has no event for us)
                await asyncio.sleep(0.05)
        service.node.check_integrity()
        report = service.node.evict(EvictSelector(), dry_run=False)
        assert report.blocks == 480
        async with asyncio.timeout(60):
            while await indexed() != 0:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
        service.node.check_integrity()
        service.node.disk.check_files()
    finally:
        await service.stop(remove_arena=True)
    assert disk_path(tmp_path / "disk", "inside").exists(), "a directory that the user named is the user's"
