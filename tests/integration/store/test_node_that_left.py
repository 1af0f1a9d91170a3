"""A store node that stopped answering and is forgotten: calls under way, and later ones, are faults of the cache.

A paused node's record runs out while readers wait for it. What its channel's closing looks like to them must not be
taken for a cancellation of the request.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from silent_server import silent_server
from store_calls_kit import CLOCK, deadline
from store_kit import make_header, make_prompt

from headrace.core.block import payload_digest
from headrace.core.errors import StoreUnavailable
from headrace.core.members import StoreNodeRecord
from headrace.core.ports import Lease, Reservation
from headrace.transfer.channels import Channels
from headrace.transfer.fetch_blocks import GrpcStore

PROMPT = make_prompt(1, 2)
HEADER = make_header(PROMPT, 0)
LEASE = Lease(lease_id="l", incarnation=1, headers=(HEADER,), slots=(0,), expires_in_ms=10_000)


async def lease(store: GrpcStore) -> object:
    return await store.lease_prefix(PROMPT.namespace, PROMPT.chain, first_block=0, deadline=deadline())


async def fetch(store: GrpcStore) -> object:
    return [payload async for payload in store.fetch_blocks(LEASE, deadline=deadline())]


async def reserve(store: GrpcStore) -> object:
    return await store.reserve([HEADER], deadline=deadline())


async def commit(store: GrpcStore) -> object:
    buffer = memoryview(bytearray(HEADER.payload_bytes))
    digest = payload_digest(buffer)
    return await store.commit(Reservation("r", HEADER, buffer), payload_xxh3=digest, deadline=deadline())


CALLS = [lease, fetch, reserve, commit]


@asynccontextmanager
async def silent_node() -> AsyncIterator[StoreNodeRecord]:
    async with silent_server() as port:
        yield StoreNodeRecord("n", 1, "h", f"127.0.0.1:{port}", str(Path("/nonexistent")), pid=1)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
async def test_a_call_under_way_when_the_node_is_forgotten_is_a_fault_and_no_cancellation(call) -> None:
    async with silent_node() as record:
        channels = Channels()
        under_way = asyncio.create_task(call(GrpcStore(record, channels, CLOCK)))
        await asyncio.sleep(0.2)
        assert not under_way.done()
        await channels.drop(record.address)
        with pytest.raises(StoreUnavailable):
            await asyncio.wait_for(under_way, 8)


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
async def test_a_call_after_the_node_is_forgotten_is_a_fault(call) -> None:
    """Fails when gRPC's UsageError of a closed channel gets through: a load begun before has later calls to make."""
    async with silent_node() as record:
        channels = Channels()
        store = GrpcStore(record, channels, CLOCK)
        await channels.drop(record.address)
        with pytest.raises(StoreUnavailable):
            await asyncio.wait_for(call(store), 60)
        await store.release(LEASE)
        await store.abort(Reservation("r", HEADER, memoryview(bytearray(HEADER.payload_bytes))))


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
async def test_our_own_cancellation_stays_one(call) -> None:
    async with silent_node() as record:
        channels = Channels()
        under_way = asyncio.create_task(call(GrpcStore(record, channels, CLOCK)))
        await asyncio.sleep(0.1)
        under_way.cancel()
        await asyncio.wait([under_way], timeout=60)
        assert under_way.cancelled()
        await channels.close()
