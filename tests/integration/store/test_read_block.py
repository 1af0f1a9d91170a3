"""Single blocks read for an export, over real gRPC from a node whose disk tier has what its arena had no room for."""

import asyncio
from types import SimpleNamespace
from typing import Any

import grpc.aio
import pytest
from store_calls_kit import CLOCK
from store_kit import fill, make_header, make_prompt, payload_of

from headrace.blocks.block_codec import encode_header
from headrace.blocks.claims import SlotReserved
from headrace.config import StoreSettings
from headrace.core.block import payload_digest
from headrace.index.memory_index import MemoryIndex, MemoryMembership
from headrace.store.service import StoreNodeService
from headrace.transfer.channels import Channels
from headrace.wire.v1 import admin_pb2, admin_pb2_grpc


@pytest.fixture
async def node(tmp_path):
    """A started node with an arena of 1 MB and a disk, and the stub of its NodeAdmin."""
    directories = {"arena_dir": str(tmp_path), "disk_dir": str(tmp_path / "disk")}
    settings = StoreSettings(node_id="n", arena_mb=1, disk_gb=0.05, **directories)
    membership, channels = MemoryMembership(CLOCK), Channels()
    service = StoreNodeService(settings, index=MemoryIndex(membership), membership=membership, clock=CLOCK)
    record = await service.start()
    stub_of: Any = admin_pb2_grpc.NodeAdminStub
    yield SimpleNamespace(store=service.node, admin=stub_of(channels.to(record.address)))
    await channels.close()
    await service.stop(remove_arena=True)


async def store(node, prompt) -> None:
    for position in range(len(prompt.chain)):
        (outcome,) = node.store.reserve([make_header(prompt, position)])
        assert isinstance(outcome, SlotReserved)
        fill(outcome)
        node.store.commit(outcome.reservation_id, payload_digest(outcome.buffer))
        await asyncio.sleep(0)  # the disk's writer keeps up


async def read(node, prompt, position: int) -> admin_pb2.StoredBlock:
    asked = admin_pb2.ReadBlockRequest(namespace=prompt.namespace, chain=prompt.chain[: position + 1])
    return await node.admin.ReadBlock(asked, timeout=10)


async def test_a_block_is_read_as_it_was_stored_wherever_it_lies_and_stays_there(node):
    """Fails when a block that the disk alone has cannot be exported, or an export moves it or counts as a use."""
    prompts = [make_prompt(token, 100) for token in range(1, 6)]
    for prompt in prompts:
        await store(node, prompt)
    before = node.store.stats()
    assert before[1].committed_blocks + before[1].reserved_blocks > 200, "nothing went to disk"
    for prompt in prompts:
        for position in (0, 99):
            block, header = await read(node, prompt, position), make_header(prompt, position)
            assert block.payload == payload_of(header)
            assert len(block.header) == len(encode_header(header))
    after = node.store.stats()
    assert [stat.lookups for stat in after] == [stat.lookups for stat in before]
    assert [stat.read_bytes for stat in after] == [0, 0]
    assert after[0].committed_blocks == before[0].committed_blocks


async def test_a_block_that_is_not_there_any_more_is_an_invalid_request(node):
    """Fails when an export that comes too late looks like a fault of the node."""
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await read(node, make_prompt(9, 2), 1)
    assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
