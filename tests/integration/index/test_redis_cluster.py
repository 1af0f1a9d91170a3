"""An index in a Redis Cluster: what it costs, slots on their way, servers that go, and the real parts over it."""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from functools import partial

import pytest
from patient_redis import patient_index, patient_membership
from redis.crc import key_slot
from restricted_redis import empty, refused, restricted
from settled_mirror import SettledMirror
from valkey_cluster import ClusterNode, ValkeyCluster, wait_until

from headrace.core.block import HashAlgorithm, HolderId, NamespaceId, Tier, hash_prompt
from headrace.core.errors import IndexUnavailable
from headrace.core.index_limits import INDEX_CONNECTIONS_MAX, INDEX_SHARDS
from headrace.core.members import StoreNodeRecord
from headrace.index import redis_keys
from headrace.index.index_mirror import Reread
from headrace.index.redis_index import RedisIndex
from headrace.index.remove_own_keys import remove_own_keys

TTL_MS = 600_000
NODES = [
    StoreNodeRecord(node_id=name, incarnation=1, host="h", address="x:1", arena_path="/dev/shm/a", pid=1)
    for name in "abcdef"
]
NODE = NODES[0]
# One namespace in each shard, by the shard.
NAMESPACES = [
    next(
        name
        for name in (NamespaceId(f"{number:032x}") for number in range(1_000))
        if redis_keys.shard_of(name) == shard
    )
    for shard in range(INDEX_SHARDS)
]
CHAINS = {
    name: hash_prompt(name, range(40), block_tokens=1, algorithm=HashAlgorithm.XXH3_128).chain for name in NAMESPACES
}
MEMBERS_SLOT = key_slot(redis_keys.MEMBER_IDS_KEY)


def slot_of(namespace: NamespaceId) -> int:
    return key_slot(redis_keys.block_key_prefix(namespace))


class Setting:
    """A cluster in which a node has the same blocks in every shard, and who reads and writes there."""

    def __init__(self, cluster: ValkeyCluster) -> None:
        self.cluster = cluster
        self.url = restricted(cluster.url)
        self.index = patient_index(self.url)
        self.members = patient_membership(self.url)

    async def fill(self) -> None:
        for node in NODES:
            await self.members.announce(node, ttl_ms=TTL_MS)
        for namespace in NAMESPACES:
            await self.register(namespace)

    async def register(
        self, namespace: NamespaceId, incarnation: int = 1, *, holder: HolderId = NODE.holder_id
    ) -> None:
        await self.index.register(
            holder=holder,
            incarnation=incarnation,
            tier=Tier.HOST,
            namespace=namespace,
            blocks=CHAINS[namespace],
        )

    def has_entry(self, namespace: NamespaceId, holder: bytes) -> bool:
        """Whether any of the namespace's blocks has an entry of that holder, alive or dead."""
        keys = [redis_keys.block_key_prefix(namespace) + block_hash for block_hash in CHAINS[namespace]]
        owner = self.cluster.owner(slot_of(namespace))
        return any(owner.ask("HEXISTS", key, holder) for key in keys)

    async def found(self, namespace: NamespaceId) -> int:
        return (await self.index.longest_prefix(namespace, CHAINS[namespace])).of(NODE.holder_id)

    async def listed(self) -> list[str]:
        return [node.node_id for node in await self.members.store_nodes()]

    async def close(self) -> None:
        await self.index.close()
        await self.members.close()


@pytest.fixture(scope="module")
def cluster() -> Iterator[ValkeyCluster]:
    with ValkeyCluster(replicas=1) as made:
        yield made


@pytest.fixture
async def setting(cluster: ValkeyCluster) -> AsyncIterator[Setting]:
    for node in cluster.primaries:
        wait_until(lambda node=node: b"master_link" not in node.ask("INFO", "replication"))
    empty(cluster.url)
    made = Setting(cluster)
    await made.fill()
    yield made
    await made.close()
    assert refused(cluster.url) == "*0"


async def until_it_answers(attempt, *, is_good=lambda _: True):
    async with asyncio.timeout(60):
        while True:
            try:
                if is_good(answer := await attempt()):
                    return answer
            except IndexUnavailable:
                pass
            await asyncio.sleep(0.02)


async def why_unavailable(attempt) -> str:
    with pytest.raises(IndexUnavailable) as told:
        await attempt()
    return told.value.why


def calls_of(cluster: ValkeyCluster, command: str) -> int:
    """How often the primaries were asked that."""
    lines = [line for node in cluster.primaries for line in node.ask("INFO", "commandstats").decode().splitlines()]
    found = [line for line in lines if line.startswith(f"cmdstat_{command}:")]
    return sum(int(line.split("calls=")[1].split(",")[0]) for line in found)


async def test_a_lookup_is_one_script_and_one_look_at_each_holder_wherever_they_lie(setting: Setting):
    """Fails when slots are asked for again, a command goes to a wrong server first, or a holder costs a trip."""
    assert {setting.cluster.owner(slot_of(each)).port for each in NAMESPACES} == {
        node.port for node in setting.cluster.primaries
    }
    for namespace in NAMESPACES:
        assert await setting.found(namespace) == 40
    for node in setting.cluster.primaries:
        node.ask("CONFIG", "RESETSTAT")
    for namespace in NAMESPACES:
        assert await setting.found(namespace) == 40
    assert (calls_of(setting.cluster, "evalsha"), calls_of(setting.cluster, "getrange")) == (8, 8)
    assert calls_of(setting.cluster, "cluster|slots") == calls_of(setting.cluster, "eval") == 0


async def test_many_lookups_at_once_share_few_connections_to_each_server(setting: Setting):
    """Fails when a cluster has connections without bound, or callers are refused who could wait."""
    index = patient_index(setting.url)

    def clients(node: ClusterNode) -> int:
        return node.ask("CLIENT", "LIST").count(b"id=")

    before = [clients(node) for node in setting.cluster.primaries]
    matches = await asyncio.gather(*(index.longest_prefix(each, CHAINS[each]) for each in NAMESPACES * 30))
    assert all(match.of(NODE.holder_id) == 40 for match in matches)
    for node, at_first in zip(setting.cluster.primaries, before, strict=True):
        assert clients(node) - at_first <= INDEX_CONNECTIONS_MAX + 1  # and the one that asked for slots, if still there
    await index.close()


async def test_one_server_is_enough_to_find_the_others_and_one_that_is_away_is_passed_over(setting: Setting):
    first = setting.cluster.primaries[0]
    index = patient_index(f"redis+cluster://127.0.0.1:1,127.0.0.1:{first.port}")
    for namespace in NAMESPACES:
        match = await until_it_answers(lambda each=namespace: index.longest_prefix(each, CHAINS[each]))
        assert match.of(NODE.holder_id) == 40
    await index.close()


async def test_a_server_that_is_no_cluster_is_an_index_that_is_away_and_says_why(own_server):
    index = patient_index(own_server.url.replace("redis://", "redis+cluster://"))
    with pytest.raises(IndexUnavailable, match="cluster support disabled"):
        await index.longest_prefix(NAMESPACES[0], CHAINS[NAMESPACES[0]])
    await index.close()


async def test_a_cluster_that_is_named_as_one_server_is_away_and_says_how_to_name_it(setting: Setting):
    index = patient_index(f"redis://127.0.0.1:{setting.cluster.primaries[0].port}")
    elsewhere = next(each for each in NAMESPACES if slot_of(each) in setting.cluster.primaries[1].slots)
    with pytest.raises(IndexUnavailable, match=r"redis\+cluster://"):
        await index.longest_prefix(elsewhere, CHAINS[elsewhere])
    await index.close()


async def test_servers_that_tell_no_addresses_are_reached_by_the_one_that_was_asked(setting: Setting):
    """Fails behind a load balancer or NAT, where servers leave their names out of the slots and out of MOVED."""
    cluster, moved = setting.cluster, NAMESPACES[0]
    source, target = cluster.owner(slot_of(moved)), cluster.primaries[0]
    for node in cluster.nodes:
        node.ask("CONFIG", "SET", "cluster-preferred-endpoint-type", "unknown-endpoint")
    index = patient_index(setting.url)
    for namespace in NAMESPACES:
        assert (await index.longest_prefix(namespace, CHAINS[namespace])).of(NODE.holder_id) == 40
    cluster.move(slot_of(moved), source, target)
    assert (await index.longest_prefix(moved, CHAINS[moved])).of(NODE.holder_id) == 40
    cluster.move(slot_of(moved), target, source)
    for node in cluster.nodes:
        node.ask("CONFIG", "SET", "cluster-preferred-endpoint-type", "ip")
    await index.close()


async def test_while_a_shard_is_on_its_way_its_lookups_miss_and_all_is_there_afterwards(setting: Setting):
    """Fails when a half of a shard is taken for all of it, a registration is applied in part, or the rest waits too."""
    cluster, moving = setting.cluster, NAMESPACES[0]
    mirror = SettledMirror(setting.url)
    await mirror.settle()
    source, target = cluster.owner(slot_of(moving)), cluster.primaries[0]
    keys = cluster.begin_move(slot_of(moving), source, target)
    assert len(keys) == 42  # blocks, events, numbers
    for gone_ahead in (keys[:20], keys[20:41]):
        cluster.move_keys(gone_ahead, source, target)
        for refuses in (setting.found(moving), setting.register(moving, incarnation=2)):
            with pytest.raises(IndexUnavailable):
                await refuses
        for namespace in NAMESPACES[1:]:
            assert await setting.found(namespace) == 40
        assert (await mirror.mirror.longest_prefix(moving, CHAINS[moving])).of(NODE.holder_id) == 40
    cluster.move_keys(keys[41:], source, target)
    cluster.end_move(slot_of(moving), source, target)
    assert await setting.found(moving) == 40
    await setting.register(moving)
    assert (await mirror.longest_prefix(moving, CHAINS[moving])).of(NODE.holder_id) == 40
    assert mirror.mirror.stat().rereads[Reread.REDIS_RESTARTED] == 1
    await mirror.close()
    cluster.move(slot_of(moving), target, source)
    assert await setting.found(moving) == 40


async def test_while_the_members_are_on_their_way_nobody_is_missing_from_a_listing(setting: Setting):
    """Fails when a record that has not arrived yet passes for one that ran out: its owner would be taken for dead."""
    cluster, everybody = setting.cluster, [node.node_id for node in NODES]
    assert await setting.listed() == everybody
    source, target = cluster.owner(MEMBERS_SLOT), cluster.primaries[2]
    listings = []
    for key in cluster.begin_move(MEMBERS_SLOT, source, target):
        cluster.move_keys([key], source, target)
        try:
            listings.append(await setting.listed())
        except IndexUnavailable:
            listings.append([])
        for namespace in NAMESPACES:  # a plain command finds a record where it is
            assert await setting.found(namespace) == 40
    assert [] in listings
    assert all(listing in ([], everybody) for listing in listings)
    cluster.end_move(MEMBERS_SLOT, source, target)
    assert await setting.listed() == everybody
    cluster.move(MEMBERS_SLOT, target, source)
    assert await setting.listed() == everybody


async def test_a_primary_that_hangs_costs_its_own_shards_and_no_other(setting: Setting):
    """Fails when one server's silence makes all of the index be left alone, or keeps what the dead left in the others'
    shards from being swept."""
    hangs = setting.cluster.primaries[0]
    shards = [each for each in NAMESPACES if slot_of(each) in hangs.slots]
    for namespace in NAMESPACES:
        await setting.register(namespace, holder=HolderId("node:gone"))
    assert 0 < len(shards) < len(NAMESPACES)
    impatient = RedisIndex(setting.url, timeout_ms=500)

    async def found(namespace: NamespaceId) -> int:
        return (await impatient.longest_prefix(namespace, CHAINS[namespace])).of(NODE.holder_id)

    assert await until_it_answers(lambda: found(shards[0])) == 40
    os.kill(setting.cluster.pid(hangs), signal.SIGSTOP)
    try:
        with pytest.raises(IndexUnavailable):
            await found(shards[0])
        for namespace in set(NAMESPACES) - set(shards):
            assert await until_it_answers(partial(found, namespace)) == 40
        assert await setting.listed() == [node.node_id for node in NODES]
        async with asyncio.timeout(60):
            while any(setting.has_entry(each, b"node:gone") for each in NAMESPACES if each not in shards):
                try:
                    await impatient.sweep({}, limit=10_000)
                except IndexUnavailable:
                    await asyncio.sleep(0.02)
    finally:
        os.kill(setting.cluster.pid(hangs), signal.SIGCONT)
    assert await until_it_answers(lambda: found(shards[0])) == 40
    await impatient.close()


async def test_a_primary_that_is_killed_and_has_no_replica_is_empty_when_it_is_back(setting: Setting):
    cluster, killed = setting.cluster, setting.cluster.primaries[2]
    [lost, *_] = [each for each in NAMESPACES if slot_of(each) in killed.slots]
    mirror = SettledMirror(setting.url)
    await mirror.settle()
    cluster.kill(killed)
    with pytest.raises(IndexUnavailable):
        await setting.found(lost)
    with pytest.raises(IndexUnavailable):
        await setting.register(lost)
    assert await setting.found(NAMESPACES[3]) == 40
    assert (await mirror.mirror.longest_prefix(lost, CHAINS[lost])).of(NODE.holder_id) == 40
    cluster.start(killed)
    await asyncio.to_thread(cluster.wait_until_ready, killed)
    restricted(cluster.url)  # users are not kept in a file here
    assert await until_it_answers(lambda: setting.found(lost)) == 0
    await setting.register(lost)
    assert await setting.found(lost) == 40
    assert (await until_it_answers(partial(mirror.longest_prefix, lost, CHAINS[lost]))).of(NODE.holder_id) == 40
    await mirror.close()


async def test_own_keys_of_all_servers_are_removed_and_nobody_elses(setting: Setting):
    others = [b"session:%d" % number for number in range(100)]
    for key in others:
        setting.cluster.owner(key_slot(key)).ask("SET", key, "1")
    assert await remove_own_keys(setting.url, deadline_s=60) > 8 * 40
    left = [key for node in setting.cluster.primaries for key in node.ask("KEYS", "*")]
    assert sorted(left) == sorted(others)


async def test_a_replica_that_takes_over_is_found_and_what_it_never_heard_of_is_told_again(setting: Setting):
    """The primary of the members and of half of the shards dies with writes that its replica has not got. Fails when
    the new primary is not found, when a mirror goes by what was lost, or a lost member is taken for dead."""
    cluster = setting.cluster
    primary, replica = cluster.primaries[1], cluster.replicas[0]
    restricted(f"redis://127.0.0.1:{replica.port}")
    [kept, changed, *_] = [each for each in NAMESPACES if slot_of(each) in primary.slots]
    assert MEMBERS_SLOT in primary.slots
    assert await setting.listed() == [node.node_id for node in NODES]
    mirror = SettledMirror(setting.url)
    await mirror.settle()
    assert primary.ask("WAIT", 1, 60_000) == 1
    replica.ask("CONFIG", "SET", "primaryauth", "wrong")  # so that it cannot come back for what follows
    replica.ask("CLIENT", "KILL", "TYPE", "primary")
    newcomer = StoreNodeRecord(node_id="z", incarnation=1, host="h", address="x:1", arena_path="/a", pid=1)
    assert await setting.members.announce(newcomer, ttl_ms=TTL_MS) is True
    assert await setting.listed() == [*(node.node_id for node in NODES), "z"]
    await setting.index.deregister(
        holder=NODE.holder_id, incarnation=1, namespace=changed, blocks=CHAINS[changed][:9:-1]
    )
    await mirror.settle()
    cluster.kill(primary)
    with pytest.raises(IndexUnavailable):
        await setting.found(kept)
    assert replica.ask("CLUSTER", "FAILOVER", "TAKEOVER") == b"OK"

    assert await until_it_answers(lambda: setting.found(kept)) == 40
    assert await setting.found(changed) == 40  # a hint that is wrong: who follows it gets a shorter lease
    assert await until_it_answers(partial(why_unavailable, setting.listed), is_good=lambda why: "lost records" in why)
    assert await setting.members.announce(newcomer, ttl_ms=TTL_MS) is True
    assert await setting.listed() == [*(node.node_id for node in NODES), "z"]
    for namespace in NAMESPACES:
        known = await until_it_answers(partial(mirror.longest_prefix, namespace, CHAINS[namespace]))
        assert known == await setting.index.longest_prefix(namespace, CHAINS[namespace])
    assert mirror.mirror.stat().rereads[Reread.REDIS_RESTARTED] >= 1
    await mirror.close()
    # The old primary comes back as a replica.
    cluster.start(primary)
    await asyncio.to_thread(wait_until, lambda: b"role:slave" in primary.ask("INFO", "replication"))
    restricted(f"redis://127.0.0.1:{primary.port}")
    assert await setting.found(kept) == 40
