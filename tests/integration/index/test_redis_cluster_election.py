"""A Redis Cluster whose primary dies: its replica is elected by the others, and all goes on without anybody's order."""

import asyncio

from patient_redis import patient_index, patient_membership
from redis.crc import key_slot
from valkey_cluster import ValkeyCluster, wait_until

from headrace.core.block import BlockHash, NamespaceId, Tier, shard_of
from headrace.core.errors import IndexUnavailable
from headrace.core.members import StoreNodeRecord
from headrace.index import redis_keys

NODE = StoreNodeRecord(node_id="a", incarnation=1, host="h", address="x:1", arena_path="/dev/shm/a", pid=1)
BLOCKS = [BlockHash(bytes([number]) * 16) for number in range(20)]
MEMBERS_SLOT = key_slot(redis_keys.MEMBER_IDS_KEY)


async def until_answered(attempt):
    async with asyncio.timeout(60):
        while True:
            try:
                return await attempt()
            except IndexUnavailable:
                await asyncio.sleep(0.02)


async def test_a_replica_that_is_elected_is_found_with_what_it_had_and_takes_what_comes():
    """Fails when the new primary is looked for by no one, a read or a write stays with the dead one, or members that it
    knows are taken for dead."""
    with ValkeyCluster(replicas=1) as cluster:
        slots = cluster.owner(MEMBERS_SLOT).slots
        namespace = next(
            name
            for name in (NamespaceId(f"{number:032x}") for number in range(1_000))
            if key_slot(redis_keys.events_key(shard_of(name))) in slots
        )
        index, members = patient_index(cluster.url), patient_membership(cluster.url)

        async def register(blocks: list[BlockHash]) -> None:
            await index.register(
                holder=NODE.holder_id, incarnation=1, tier=Tier.HOST, namespace=namespace, blocks=blocks
            )

        async def found() -> int:
            return (await index.longest_prefix(namespace, tuple(BLOCKS))).of(NODE.holder_id)

        await until_answered(lambda: members.announce(NODE, ttl_ms=600_000))
        await until_answered(lambda: register(BLOCKS[:10]))
        assert await until_answered(members.store_nodes) == (NODE,)
        pair = (cluster.owner(MEMBERS_SLOT), cluster.replicas[0])
        primary, replica = sorted(pair, key=lambda node: node.ask("ROLE")[0] != b"master")
        assert primary.ask("WAIT", 1, 60_000) == 1
        cluster.kill(primary)
        assert await until_answered(found) == 10
        await until_answered(lambda: register(BLOCKS))
        assert await until_answered(found) == 20
        assert await until_answered(members.store_nodes) == (NODE,)
        assert replica.ask("ROLE")[0] == b"master", "nobody told it to take over"
        cluster.start(primary)
        wait_until(lambda: primary.ask("ROLE")[0] == b"slave")  # it comes back as the replica of its replica
        assert await until_answered(found) == 20
        await index.close()
        await members.close()
