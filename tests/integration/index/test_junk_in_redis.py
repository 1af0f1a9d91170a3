"""Junk under our keys: treated as absent, counted, never a crash, and replaced by what is true."""

import msgpack
import pytest
from patient_redis import patient_index, patient_membership

from headrace.core.block import HashAlgorithm, HolderId, NamespaceId, Tier, hash_prompt
from headrace.core.index_limits import MEMBER_RECORD_BYTES_MAX
from headrace.core.members import StoreNodeRecord
from headrace.index import redis_keys
from headrace.index.member_records import encode_record
from headrace.index.redis_index import RedisIndex

NAMESPACE = NamespaceId("0f" * 16)
CHAIN = hash_prompt(NAMESPACE, range(8), block_tokens=1, algorithm=HashAlgorithm.XXH3_128).chain
NODE = StoreNodeRecord(node_id="a", incarnation=3, host="h", address="x:1", arena_path="/dev/shm/a", pid=1)
HOLDER = NODE.holder_id
TTL_MS = 60_000


def key_of(depth: int) -> bytes:
    return redis_keys.block_key_prefix(NAMESPACE) + CHAIN[depth - 1]


@pytest.fixture
async def index(empty_valkey_url):
    index = patient_index(empty_valkey_url)
    yield index
    await index.close()


@pytest.fixture
async def membership(empty_valkey_url):
    membership = patient_membership(empty_valkey_url)
    yield membership
    await membership.close()


async def register(index: RedisIndex) -> None:
    await index.register(holder=HOLDER, incarnation=3, tier=Tier.HOST, namespace=NAMESPACE, blocks=CHAIN)


@pytest.mark.parametrize(
    "value",
    [b"", b"3:host", b"x" * 1_000_000, b"\xff" * 20 + b":host", b"99999999999999999999", b"-0000000000000000003:host"],
    ids=["empty", "short", "huge", "binary", "no tier", "negative"],
)
async def test_a_broken_entry_is_a_miss_and_is_replaced_by_the_next_registration(index, membership, send_raw, value):
    await membership.announce(NODE, ttl_ms=TTL_MS)
    for depth in (1, 5, 8):
        await send_raw("HSET", key_of(depth), HOLDER, value)
    assert (await index.longest_prefix(NAMESPACE, CHAIN)).num_blocks == 0
    assert index.junk_entries >= 1
    await register(index)
    assert (await index.longest_prefix(NAMESPACE, CHAIN)).of(HOLDER) == len(CHAIN)


@pytest.mark.parametrize("depth", [1, 8])
async def test_a_key_of_another_type_is_a_miss_and_is_replaced_by_the_next_registration(
    index, membership, send_raw, depth
):
    await membership.announce(NODE, ttl_ms=TTL_MS)
    await register(index)
    await send_raw("SET", key_of(depth), b"not a hash")
    assert (await index.longest_prefix(NAMESPACE, CHAIN)).of(HOLDER) < len(CHAIN)
    assert index.junk_entries >= 1
    await index.deregister(holder=HOLDER, incarnation=3, namespace=NAMESPACE, blocks=CHAIN[depth - 1 : depth])
    await register(index)
    assert (await index.longest_prefix(NAMESPACE, CHAIN)).of(HOLDER) == len(CHAIN)


async def test_a_block_with_absurdly_many_holders_is_read_in_bounded_part(index, membership, send_raw):
    await membership.announce(NODE, ttl_ms=TTL_MS)
    for start in range(0, 20_000, 1_000):
        names = [b"node:%d" % number for number in range(start, start + 1_000)]
        fields = [part for name in names for part in (name, redis_keys.entry_value(1, Tier.HOST))]
        await send_raw("HSET", key_of(1), *fields)
    assert (await index.longest_prefix(NAMESPACE, CHAIN)).num_blocks == 0


async def test_a_holder_whose_name_is_no_text_is_ignored(index, membership, send_raw):
    await membership.announce(NODE, ttl_ms=TTL_MS)
    await register(index)
    await send_raw("HSET", key_of(1), b"\xff\xfe", redis_keys.entry_value(1, Tier.HOST))
    assert (await index.longest_prefix(NAMESPACE, CHAIN)).num_blocks_by_holder == {HOLDER: len(CHAIN)}
    assert index.junk_entries == 1


async def test_sweeping_passes_over_junk_and_removes_entries_that_no_incarnation_can_own(index, membership, send_raw):
    await membership.announce(NODE, ttl_ms=TTL_MS)
    await register(index)
    await send_raw("SET", b"hr1:{x}:b:" + 16 * b"h", b"another type")
    await send_raw("SET", b"hr1:", b"no such key")
    await send_raw("SET", b"somebody:else", b"1")
    await send_raw("HSET", key_of(2), "node:ghost", b"junk")
    assert await index.sweep({HOLDER: 3}, limit=100) == 1
    assert (await index.longest_prefix(NAMESPACE, CHAIN)).of(HOLDER) == len(CHAIN)
    assert await send_raw("EXISTS", b"somebody:else") == 1


def future_version() -> bytes:
    return msgpack.packb({**msgpack.unpackb(encode_record(NODE)), "version": 99})


@pytest.mark.parametrize(
    "value",
    [
        b"",
        b"junk",
        redis_keys.incarnation_text(9) + b":" + encode_record(NODE)[:-1],
        redis_keys.incarnation_text(3) + b":" + future_version(),
        redis_keys.incarnation_text(3) + b":" + b"x" * (2 * MEMBER_RECORD_BYTES_MAX),
    ],
    ids=["empty", "text", "cut", "future version", "huge"],
)
async def test_a_broken_record_is_nobody_and_spares_the_others(membership, send_raw, value):
    other = StoreNodeRecord(node_id="b", incarnation=1, host="h", address="x:2", arena_path="/dev/shm/b", pid=2)
    await membership.announce(other, ttl_ms=TTL_MS)
    await send_raw("SADD", redis_keys.MEMBER_IDS_KEY, HOLDER)
    await send_raw("SET", redis_keys.member_key(HOLDER), value, "PX", TTL_MS)
    assert await membership.store_nodes() == (other,)
    assert membership.junk_records == 1


async def test_a_record_without_a_lifetime_is_nobody_and_does_not_block_its_name(membership, send_raw):
    # As left by a foreign tool: with the largest incarnation and for ever, it would lock the node out.
    await send_raw("SADD", redis_keys.MEMBER_IDS_KEY, HOLDER)
    await send_raw("SET", redis_keys.member_key(HOLDER), b"9" * 20 + b":" + encode_record(NODE))
    assert await membership.store_nodes() == ()
    assert await membership.announce(NODE, ttl_ms=TTL_MS) is True
    assert await membership.store_nodes() == (NODE,)


async def test_a_record_under_another_members_key_is_nobody(membership, send_raw):
    await send_raw("SADD", redis_keys.MEMBER_IDS_KEY, "node:thief")
    value = redis_keys.incarnation_text(3) + b":" + encode_record(NODE)
    await send_raw("SET", redis_keys.member_key(HolderId("node:thief")), value, "PX", TTL_MS)
    assert await membership.store_nodes() == ()


async def test_member_keys_of_another_type_are_replaced_by_the_next_announcement(membership, send_raw):
    await send_raw("SET", redis_keys.MEMBER_IDS_KEY, b"not a set")
    await send_raw("RPUSH", redis_keys.member_key(HOLDER), b"not a string")
    assert await membership.store_nodes() == ()
    assert await membership.announce(NODE, ttl_ms=TTL_MS) is True
    assert await membership.store_nodes() == (NODE,)


async def test_ids_of_members_that_are_gone_do_not_pile_up(membership, send_raw):
    for number in range(50):
        await send_raw("SADD", redis_keys.MEMBER_IDS_KEY, f"node:{number}")
    for _ in range(50):
        await membership.announce(NODE, ttl_ms=TTL_MS)
    assert await membership.store_nodes() == (NODE,)
    assert await send_raw("SCARD", redis_keys.MEMBER_IDS_KEY) == 1
