"""Every change of the index is also an event, numbered without a gap for each holder and incarnation."""

import pytest
from patient_redis import patient_index

from headrace.core.block import HashAlgorithm, HolderId, NamespaceId, Tier, hash_prompt
from headrace.core.index_limits import INDEX_BATCH_BLOCKS, INDEX_EVENT_BLOCKS_MAX, INDEX_EVENTS_MAX
from headrace.index import redis_keys
from headrace.index.redis_index import RedisIndex
from headrace.index.redis_keys import Op

NAMESPACE = NamespaceId("0f" * 16)
A, B = HolderId("node:a"), HolderId("node:b")
CHAIN = hash_prompt(NAMESPACE, range(600), block_tokens=1, algorithm=HashAlgorithm.XXH3_128).chain
SHARD = redis_keys.shard_of(NAMESPACE)
STREAM, NUMBERS = redis_keys.events_key(SHARD), redis_keys.numbers_key(SHARD)


@pytest.fixture
async def index(empty_valkey_url):
    index = patient_index(empty_valkey_url)
    yield index
    await index.close()


async def register(index: RedisIndex, blocks, incarnation: int = 7, *, holder: HolderId = A) -> None:
    await index.register(holder=holder, incarnation=incarnation, tier=Tier.HOST, namespace=NAMESPACE, blocks=blocks)


async def deregister(index: RedisIndex, blocks, incarnation: int = 7, *, holder: HolderId = A) -> None:
    await index.deregister(holder=holder, incarnation=incarnation, namespace=NAMESPACE, blocks=blocks)


async def read_events(send_raw):
    return [redis_keys.parse_event(fields) for _, fields in await send_raw("XRANGE", STREAM, "-", "+")]


async def test_changes_are_numbered_from_one_for_each_holder_and_incarnation(index, send_raw):
    await register(index, CHAIN[:2])
    await register(index, CHAIN[:1], holder=B)
    await deregister(index, CHAIN[1:2])
    await register(index, CHAIN[:2], 8)
    await register(index, CHAIN[5:6], 7)
    events = await read_events(send_raw)
    assert [(e.holder, e.incarnation, e.number, e.op, e.blocks) for e in events] == [
        (A, 7, 1, Op.REGISTERED, CHAIN[:2]),
        (B, 7, 1, Op.REGISTERED, CHAIN[:1]),
        (A, 7, 2, Op.DEREGISTERED, CHAIN[1:2]),
        (A, 8, 1, Op.REGISTERED, CHAIN[:2]),
        (A, 7, 3, Op.REGISTERED, CHAIN[5:6]),
    ]
    assert {event.namespace for event in events} == {NAMESPACE}


async def test_what_changes_nothing_is_no_event(index, send_raw):
    await register(index, CHAIN[:2])
    await register(index, CHAIN[:2])
    await deregister(index, CHAIN[5:6])
    await register(index, CHAIN[:2], 6)
    assert len(await read_events(send_raw)) == 1


async def test_many_blocks_are_several_events_of_bounded_size(index, send_raw):
    await register(index, CHAIN)
    events = await read_events(send_raw)
    assert tuple(block for event in events for block in event.blocks) == CHAIN
    assert [event.number for event in events] == list(range(1, len(events) + 1))
    assert max(len(event.blocks) for event in events) == INDEX_EVENT_BLOCKS_MAX


async def test_the_stream_is_capped(index, send_raw):
    await register(index, CHAIN[:1])
    for _ in range(8):  # one command of so many would take longer than a call may
        await send_raw(
            "EVAL",
            "for i = 1, ARGV[1] do redis.call('XADD', KEYS[1], '*', 'f', i) end",
            1,
            STREAM,
            INDEX_EVENTS_MAX // 4,
        )
    await deregister(index, CHAIN[:1])
    assert INDEX_EVENTS_MAX <= await send_raw("XLEN", STREAM) <= INDEX_EVENTS_MAX + 100  # trimmed by whole nodes


@pytest.mark.parametrize("key", [STREAM, NUMBERS])
async def test_what_has_another_type_is_replaced(index, send_raw, key):
    await send_raw("SET", key, b"junk")
    await register(index, CHAIN[:1])
    assert [event.number for event in await read_events(send_raw)] == [1]


async def test_a_number_that_is_none_is_replaced(index, send_raw):
    await register(index, CHAIN[:1])
    await send_raw("HSET", NUMBERS, redis_keys.incarnation_text(7) + b":node:a", b"junk")
    await register(index, CHAIN[:2])
    assert [event.number for event in await read_events(send_raw)] == [1, 1]


async def test_sweeping_says_whose_entries_it_took_and_forgets_how_many_events_the_dead_have_made(index, send_raw):
    # Fails when a holder that comes back under the same incarnation is taken to have what was swept meanwhile.
    await register(index, CHAIN[:4], 6)
    await register(index, CHAIN[:3], 7)
    await index.sweep({A: 7}, limit=10)
    swept = (await read_events(send_raw))[-1]
    assert (swept.holder, swept.incarnation, swept.op, swept.blocks) == (A, 6, Op.SWEPT, ())
    await index.sweep({A: 7}, limit=10)
    assert await send_raw("HKEYS", NUMBERS) == [redis_keys.incarnation_text(7) + b":node:a"]
    for _ in range(2):
        await index.sweep({}, limit=10)
    assert sorted(await send_raw("KEYS", "*")) == [STREAM]


async def test_what_dead_holders_had_goes_in_commands_of_bounded_size(index, send_raw):
    """Fails when one command removes all that a page has, and nobody else is answered meanwhile."""
    for holder in (A, B):
        await register(index, CHAIN, holder=holder)
    before = len(await read_events(send_raw))
    removed = 0
    for _ in range(8):  # a scan may end in the midst, and come back to where it has been
        removed += await index.sweep({}, limit=4 * len(CHAIN))
    assert removed == 2 * len(CHAIN)
    assert await send_raw("KEYS", "*:b:*") == []
    commands = [event for event in (await read_events(send_raw))[before:] if (event.op, event.holder) == (Op.SWEPT, A)]
    assert len(commands) >= removed / INDEX_BATCH_BLOCKS > 2, "so many entries in one command"
