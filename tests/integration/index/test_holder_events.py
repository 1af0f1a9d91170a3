"""Every change of the index is also an event of its holder, numbered without a gap."""

import pytest

from headrace.core.block import HashAlgorithm, HolderId, NamespaceId, Tier, hash_prompt
from headrace.core.limits import INDEX_EVENTS_MAX
from headrace.index import redis_keys
from headrace.index.redis_index import RedisIndex

NAMESPACE = NamespaceId("0f" * 16)
HOLDER = HolderId("node:a")
CHAIN = hash_prompt(NAMESPACE, range(600), block_tokens=1, algorithm=HashAlgorithm.XXH3_128).chain
STREAM = redis_keys.events_key(NAMESPACE, HOLDER)


@pytest.fixture
async def index(empty_valkey_url):
    index = RedisIndex(empty_valkey_url)
    yield index
    await index.close()


async def register(index: RedisIndex, blocks, incarnation: int = 7) -> None:
    await index.register(holder=HOLDER, incarnation=incarnation, tier=Tier.HOST, namespace=NAMESPACE, blocks=blocks)


async def deregister(index: RedisIndex, blocks, incarnation: int = 7) -> None:
    await index.deregister(holder=HOLDER, incarnation=incarnation, namespace=NAMESPACE, blocks=blocks)


async def test_changes_are_numbered_from_zero_within_an_incarnation(index, send_raw):
    await register(index, CHAIN[:2])
    await deregister(index, CHAIN[1:2])
    await register(index, CHAIN[1:3])
    events = await send_raw("XRANGE", STREAM, "-", "+")
    assert [event_id for event_id, _ in events] == [b"7-0", b"7-1", b"7-2"]
    assert events[0][1] == [b"op", b"+", b"tier", b"host", b"blocks", b"".join(CHAIN[:2])]
    assert events[1][1] == [b"op", b"-", b"blocks", CHAIN[1]]


async def test_what_changes_nothing_is_no_event(index, send_raw):
    await register(index, CHAIN[:2])
    await register(index, CHAIN[:2])
    await deregister(index, CHAIN[5:6])
    assert await send_raw("XLEN", STREAM) == 1


async def test_a_new_incarnation_starts_its_own_numbers_and_ends_the_old_ones(index, send_raw):
    await register(index, CHAIN[:2], 7)
    await register(index, CHAIN[:2], 8)
    await register(index, CHAIN[:4], 7)
    events = await send_raw("XRANGE", STREAM, "-", "+")
    assert [event_id for event_id, _ in events] == [b"7-0", b"8-0"]


async def test_the_stream_is_capped(index, send_raw):
    for _ in range(2 * INDEX_EVENTS_MAX):
        await register(index, CHAIN[:1])
        await deregister(index, CHAIN[:1])
    assert await send_raw("XLEN", STREAM) <= INDEX_EVENTS_MAX + 100  # trimmed by whole nodes of 100


async def test_a_stream_of_another_type_is_replaced(index, send_raw):
    await send_raw("SET", STREAM, b"junk")
    await register(index, CHAIN[:1])
    assert await send_raw("XLEN", STREAM) == 1


async def test_sweeping_drops_the_stream_of_a_holder_that_is_gone(index, send_raw):
    await register(index, CHAIN[:1])
    await index.sweep({HOLDER: 7}, limit=10)
    assert await send_raw("EXISTS", STREAM) == 1
    await index.sweep({}, limit=10)
    assert await send_raw("DBSIZE") == 0
