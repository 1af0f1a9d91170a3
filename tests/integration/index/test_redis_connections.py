"""Nobody gets another caller's reply, and there are never more connections than were allowed."""

import asyncio
import os
import random
import signal
import time

import pytest
from patient_redis import patient_connections, patient_index

from headrace.core.block import HashAlgorithm, NamespaceId, hash_prompt
from headrace.core.clock import SystemClock
from headrace.core.index_limits import INDEX_CONNECTIONS_MAX, INDEX_TIMEOUT_MS
from headrace.index.redis_connections import RedisConnections

NAMESPACE = NamespaceId("0f" * 16)


async def echo(connections: RedisConnections, text: bytes) -> bytes:
    async with connections.call() as redis:
        [reply] = await redis.round_trip(("ECHO", text))
    return reply


async def count_clients(send_raw) -> int:
    """Connections at the server, without the one that asks."""
    return (await send_raw("CLIENT", "LIST")).count(b"id=") - 1


async def until_at_most(clients: int, send_raw) -> None:
    """The server sees the end of a connection in its own time."""
    async with asyncio.timeout(60):
        while await count_clients(send_raw) > clients:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def test_the_reply_to_a_cancelled_command_does_not_reach_the_next_caller(own_server):
    # The next caller sends while the server is still paused, so that no look at the socket can see the stray reply.
    # Fails (b"theirs" comes back) when the connection is kept; redis-py closes it too, so break both to see that.
    connections = patient_connections(own_server.url, connections_max=1, clock=SystemClock())
    assert await echo(connections, b"before") == b"before"
    os.kill(own_server.pid, signal.SIGSTOP)
    cancelled = asyncio.create_task(echo(connections, b"theirs"))
    await asyncio.sleep(0.05)
    cancelled.cancel()
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    ours = asyncio.create_task(echo(connections, b"ours"))
    await asyncio.sleep(0.05)
    os.kill(own_server.pid, signal.SIGCONT)
    assert await ours == b"ours"
    await connections.close()


async def test_callers_cancelled_at_any_moment_neither_mix_replies_nor_lose_connections(empty_valkey_url, send_raw):
    # Also cancelled twice, as a timeout inside a cancelled request does it. A lost slot would leave the last
    # callers waiting; a connection too many would show at the server.
    connections = patient_connections(empty_valkey_url, connections_max=3, clock=SystemClock())
    before = await count_clients(send_raw)
    draw = random.Random(11)

    async def caller(number: int) -> None:
        for turn in range(3):
            text = b"%d.%d" % (number, turn)
            assert await echo(connections, text) == text

    tasks = [asyncio.create_task(caller(number)) for number in range(90)]
    for task in draw.sample(tasks, 60):
        for _ in range(draw.randrange(3)):
            await asyncio.sleep(0)
        task.cancel()
        if draw.random() < 0.5:
            await asyncio.sleep(0)
            task.cancel()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(outcome is None or isinstance(outcome, asyncio.CancelledError) for outcome in outcomes), outcomes
    assert sum(outcome is None for outcome in outcomes) >= 30
    assert await asyncio.gather(*(echo(connections, b"%d" % n) for n in range(9))) == [b"%d" % n for n in range(9)]
    await until_at_most(before + 3, send_raw)
    await connections.close()


async def test_a_hundred_lookups_at_once_share_the_few_connections(empty_valkey_url, send_raw):
    index = patient_index(empty_valkey_url)
    before = await count_clients(send_raw)
    chain = hash_prompt(NAMESPACE, range(64), block_tokens=1, algorithm=HashAlgorithm.XXH3_128).chain
    await asyncio.gather(*(index.longest_prefix(NAMESPACE, chain) for _ in range(100)))
    assert 1 <= await count_clients(send_raw) - before <= INDEX_CONNECTIONS_MAX
    await index.close()
    await until_at_most(before, send_raw)


async def test_a_refused_command_does_not_spoil_the_connection(empty_valkey_url):
    connections = patient_connections(empty_valkey_url, connections_max=1, clock=SystemClock())
    async with connections.call() as redis:
        first, second = await redis.round_trip(("NO-SUCH-COMMAND",), ("ECHO", b"still in step"))
    assert isinstance(first, Exception)
    assert second == b"still in step"
    assert await echo(connections, b"again") == b"again"
    await connections.close()


async def test_an_event_loop_that_stood_still_is_not_taken_for_a_slow_server(empty_valkey_url):
    # The first reply has been there for most of the time, and the second trip still has to be made. Fails when the
    # time-out fires before the reply is read, or right after.
    connections = RedisConnections(empty_valkey_url, connections_max=1, clock=SystemClock())
    assert await echo(connections, b"connected") == b"connected"

    async def two_trips() -> list[bytes]:
        async with connections.call() as redis:
            return await redis.round_trip(("ECHO", b"one")) + await redis.round_trip(("ECHO", b"two"))

    call = asyncio.create_task(two_trips())
    await asyncio.sleep(0)
    time.sleep(INDEX_TIMEOUT_MS / 1000 + 0.1)  # noqa: ASYNC251  the very fault that is tested
    assert await call == [b"one", b"two"]
    await connections.close()
