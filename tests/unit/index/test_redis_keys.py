"""The layout of keys: one slot per namespace, and parsing that undoes spelling."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from headrace.core.block import BlockHash, HolderId, NamespaceId
from headrace.core.index_limits import INDEX_SHARDS
from headrace.index import redis_keys
from headrace.index.redis_keys import BlockKey, Event, NumbersKey, Op

NAMESPACE = NamespaceId("0123456789abcdef" * 2)
HOLDER = HolderId("node:a")


HASHES = st.binary(min_size=16, max_size=16) | st.binary(min_size=32, max_size=32)
NAMESPACES = st.text("0123456789abcdef", min_size=32, max_size=32).map(NamespaceId)


@given(NAMESPACES, HASHES)
def test_what_one_script_touches_lies_in_one_cluster_slot(namespace, block_hash):
    # Any byte may occur in a hash, also the braces and the colon.
    shard = redis_keys.shard_of(namespace)
    slot = key_slot(redis_keys.block_key_prefix(namespace))
    assert key_slot(redis_keys.block_key_prefix(namespace) + block_hash) == slot
    assert key_slot(redis_keys.events_key(shard)) == slot
    assert key_slot(redis_keys.numbers_key(shard)) == slot
    assert key_slot(redis_keys.MEMBER_IDS_KEY) == key_slot(redis_keys.member_key(HOLDER))


def test_shards_lie_in_different_slots_and_namespaces_in_all_of_them():
    # Fails when an index cannot spread over a cluster.
    assert len({key_slot(redis_keys.events_key(shard)) for shard in range(INDEX_SHARDS)}) == INDEX_SHARDS
    namespaces = [NamespaceId(f"{number:032x}") for number in range(500)]
    assert {redis_keys.shard_of(namespace) for namespace in namespaces} == set(range(INDEX_SHARDS))


@given(NAMESPACES, HASHES)
def test_a_block_key_is_parsed_back_whatever_bytes_the_hash_has(namespace, block_hash):
    key = redis_keys.block_key_prefix(namespace) + block_hash
    assert redis_keys.parse_key(key) == BlockKey(namespace, BlockHash(block_hash))


def test_a_numbers_key_is_parsed_back():
    assert redis_keys.parse_key(redis_keys.numbers_key(3)) == NumbersKey(3)


@pytest.mark.parametrize(
    "key",
    [
        b"",
        b"hr1:",
        b"hr1:{",
        b"hr1:{}",
        redis_keys.block_key_prefix(NAMESPACE) + b"short",
        redis_keys.block_key_prefix(NAMESPACE).replace(b":b:", b":z:") + 16 * b"h",
        redis_keys.block_key_prefix(NAMESPACE).replace(b"hr1", b"hr2") + 16 * b"h",
        b"hr1:{x}:b:" + NAMESPACE.encode() + b":" + 16 * b"h",
        b"hr1:{%d}:b:" % (1 - min(1, redis_keys.shard_of(NAMESPACE))) + NAMESPACE.encode() + b":" + 16 * b"h",
        b"hr1:{0}:b:\xff:" + 16 * b"h",
        b"hr1:{99}:n",
        redis_keys.events_key(0),
        redis_keys.MEMBER_IDS_KEY,
        redis_keys.member_key(HOLDER),
    ],
)
def test_other_keys_name_neither_a_block_nor_numbers(key):
    assert redis_keys.parse_key(key) is None


@given(st.integers(1, 2**63 - 1), st.integers(1, 2**63 - 1))
def test_incarnations_sort_as_text_as_they_do_as_numbers(one, other):
    texts = redis_keys.incarnation_text(one), redis_keys.incarnation_text(other)
    assert (texts[0] < texts[1]) == (one < other)
    assert redis_keys.parse_incarnation(texts[0] + b":rest") == one


@pytest.mark.parametrize("text", [b"", b"123", b"-0000000000000000001", b"0000000000000000000x:host"])
def test_what_does_not_begin_with_an_incarnation_has_none(text):
    assert redis_keys.parse_incarnation(text) is None


FIELDS = [
    *(b"holder", b"node:a", b"incarnation", b"%020d" % 7, b"number", b"3", b"op", b"-", b"tier", b""),
    *(b"namespace", NAMESPACE.encode(), b"width", b"16", b"blocks", 16 * b"x" + 16 * b"y"),
]


def test_an_event_is_parsed_with_its_blocks_apart():
    blocks = (BlockHash(16 * b"x"), BlockHash(16 * b"y"))
    assert redis_keys.parse_event(FIELDS) == Event(HOLDER, 7, 3, Op.DEREGISTERED, NAMESPACE, blocks)


@pytest.mark.parametrize(
    ("field", "junk"),
    [(1, b"\xff"), (3, b"x"), (5, b""), (7, b"!"), (13, b"15"), (13, b"x"), (15, b"short")],
)
def test_an_event_that_is_broken_anywhere_is_none(field, junk):
    assert redis_keys.parse_event([*FIELDS[:field], junk, *FIELDS[field + 1 :]]) is None
    assert redis_keys.parse_event(FIELDS[:field]) is None


def test_numbers_are_parsed_by_holder_and_incarnation_and_junk_is_left_out():
    pairs = [b"%020d:node:a" % 7, b"12", b"x:node:a", b"1", b"%020d:" % 7, b"1", b"%020d:node:b" % 7, b"many"]
    assert redis_keys.parse_numbers(pairs) == {(HOLDER, 7): 12}
