"""A Redis that evicts by itself takes entries of blocks that are held: hits are lost for a while, and nothing else."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from patient_redis import patient_connections, patient_index, patient_membership
from store_kit import StoreKit, make_kit, make_prompt

from headrace.core.block import BlockHash, NamespaceId
from headrace.core.clock import SystemClock
from headrace.core.limits import MEMBER_TTL_MS
from headrace.core.members import StoreNodeRecord
from headrace.index.redis_connections import RedisConnections
from headrace.index.redis_index import RedisIndex
from headrace.store.announce_node import announce_node
from headrace.store.register_blocks import PendingChanges, register_blocks

CLOCK = SystemClock()
PROMPTS = [make_prompt(number, 4) for number in range(50)]


@pytest.fixture
async def redis(own_server) -> AsyncIterator[RedisConnections]:
    connections = patient_connections(own_server.url, connections_max=1, clock=CLOCK)
    yield connections
    await connections.close()


async def send(redis: RedisConnections, *command: bytes | str | int):
    async with redis.call() as connection:
        [reply] = await connection.round_trip(command)
    assert not isinstance(reply, Exception), reply
    return reply


@asynccontextmanager
async def registered(kit: StoreKit, url: str, *, reregister_ms: int) -> AsyncIterator[RedisIndex]:
    """The node's blocks kept registered as its process does it."""
    index, membership, changes = patient_index(url), patient_membership(url), PendingChanges()
    record = StoreNodeRecord(kit.node.node_id, kit.node.incarnation, "h", "127.0.0.1:1", "", pid=1)
    tasks = [
        asyncio.create_task(
            register_blocks(
                kit.node, changes, index, announce=lambda: membership.announce(record, ttl_ms=MEMBER_TTL_MS)
            )
        ),
        asyncio.create_task(
            announce_node(lambda: record, changes, membership, clock=CLOCK, reregister_ms=reregister_ms)
        ),
    ]
    try:
        yield index
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await index.close()
        await membership.close()


async def known_blocks(index: RedisIndex) -> int:
    return sum([(await index.longest_prefix(p.namespace, p.chain)).num_blocks for p in PROMPTS])


async def test_what_redis_evicted_by_itself_is_registered_again_and_nothing_is_left_over(own_server, redis) -> None:
    """Fails when the index stays without entries of blocks that a node holds until the node restarts, or registering
    again leaves more in Redis than there are blocks."""
    kit = make_kit(blocks=4 * len(PROMPTS))
    for prompt in PROMPTS:
        kit.store(prompt, range(4))
    held: list[tuple[NamespaceId, BlockHash]] = kit.node.inventory()
    assert len(held) == 4 * len(PROMPTS)
    async with registered(kit, own_server.url, reregister_ms=1_000) as index, asyncio.timeout(60):
        while await known_blocks(index) < len(held):  # noqa: ASYNC110 (Redis has no event for us)
            await asyncio.sleep(0.02)
        keys = await send(redis, "KEYS", "*:b:*")
        assert len(keys) == len(held)
        evicted = random.Random(1).sample(keys, len(keys) // 4)
        async with redis.call() as connection:  # at one moment: the next registration is never far
            *_, replies = await connection.round_trip(("MULTI",), ("DEL", *evicted), ("KEYS", "*:b:*"), ("EXEC",))
        assert len(replies[1]) == len(held) - len(evicted)
        while await known_blocks(index) < len(held):  # noqa: ASYNC110
            await asyncio.sleep(0.05)
        assert sorted(await send(redis, "KEYS", "*:b:*")) == sorted(keys)
        assert await send(redis, "DBSIZE") <= len(held) + 10
