"""The layout of keys: one slot per namespace, and parsing that undoes spelling."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.crc import key_slot

from headrace.core.block import BlockHash, HolderId, NamespaceId
from headrace.index import redis_keys
from headrace.index.redis_keys import BlockKey, EventsKey

NAMESPACE = NamespaceId("0123456789abcdef" * 2)
HOLDER = HolderId("node:a")


@given(st.binary(min_size=16, max_size=16) | st.binary(min_size=32, max_size=32))
def test_what_one_script_touches_lies_in_one_cluster_slot(block_hash):
    # Any byte may occur in a hash, also the braces and the colon.
    slot = key_slot(NAMESPACE.encode())
    assert key_slot(redis_keys.block_key_prefix(NAMESPACE)) == slot
    assert key_slot(redis_keys.block_key_prefix(NAMESPACE) + block_hash) == slot
    assert key_slot(redis_keys.events_key(NAMESPACE, HOLDER)) == slot
    assert key_slot(redis_keys.MEMBER_IDS_KEY) == key_slot(redis_keys.member_key(HOLDER))


@given(st.binary(min_size=16, max_size=16) | st.binary(min_size=32, max_size=32))
def test_a_block_key_is_parsed_back_whatever_bytes_the_hash_has(block_hash):
    key = redis_keys.block_key_prefix(NAMESPACE) + block_hash
    assert redis_keys.parse_key(key) == BlockKey(NAMESPACE, BlockHash(block_hash))


def test_an_events_key_is_parsed_back():
    assert redis_keys.parse_key(redis_keys.events_key(NAMESPACE, HOLDER)) == EventsKey(NAMESPACE, HOLDER)


@pytest.mark.parametrize(
    "key",
    [
        b"",
        b"hr1:",
        b"hr1:{",
        b"hr1:{}",
        b"hr1:{x}:b:short",
        b"hr1:{x}:z:" + 16 * b"h",
        b"hr2:{x}:b:" + 16 * b"h",
        b"hr1:{\xff}:b:" + 16 * b"h",
        b"hr1:{x}:e:\xff",
        b"hr1:{x}:e:",
        redis_keys.MEMBER_IDS_KEY,
        redis_keys.member_key(HOLDER),
    ],
)
def test_other_keys_name_neither_a_block_nor_events(key):
    assert redis_keys.parse_key(key) is None


@given(st.integers(1, 2**63 - 1), st.integers(1, 2**63 - 1))
def test_incarnations_sort_as_text_as_they_do_as_numbers(one, other):
    texts = redis_keys.incarnation_text(one), redis_keys.incarnation_text(other)
    assert (texts[0] < texts[1]) == (one < other)
    assert redis_keys.parse_incarnation(texts[0] + b":rest") == one


@pytest.mark.parametrize("text", [b"", b"123", b"-0000000000000000001", b"0000000000000000000x:host"])
def test_what_does_not_begin_with_an_incarnation_has_none(text):
    assert redis_keys.parse_incarnation(text) is None
