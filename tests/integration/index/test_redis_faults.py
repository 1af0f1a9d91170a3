"""Redis slow, gone, empty, full, read-only: hits are lost, for a bounded time; nothing else is."""

import asyncio
import os
import signal
import time
from collections import Counter
from contextlib import asynccontextmanager

import pytest
from patient_redis import PATIENT_MS, patient_connections

from headrace.core.block import HashAlgorithm, NamespaceId, Tier, hash_prompt
from headrace.core.clock import SystemClock
from headrace.core.errors import ConfigInvalid, IndexUnavailable
from headrace.core.index_limits import INDEX_CONNECTIONS_MAX, INDEX_PAUSE_MS, INDEX_TIMEOUT_MS
from headrace.core.members import StoreNodeRecord
from headrace.index.embedded_valkey import EmbeddedValkey
from headrace.index.redis_index import RedisIndex
from headrace.index.redis_membership import RedisMembership

pytestmark = pytest.mark.alone
NAMESPACE = NamespaceId("0f" * 16)
CHAIN = hash_prompt(NAMESPACE, range(8), block_tokens=1, algorithm=HashAlgorithm.XXH3_128).chain
NODE = StoreNodeRecord(node_id="a", incarnation=1, host="h", address="x:1", arena_path="/dev/shm/a", pid=1)
TTL_MS = 60_000
CALLERS = 400
IN_TURN_S = CALLERS * INDEX_TIMEOUT_MS / 1000  # what they take when they wait one after the other


@asynccontextmanager
async def index_on(url: str, *, timeout_ms: int = PATIENT_MS):
    index, membership = RedisIndex(url, timeout_ms=timeout_ms), RedisMembership(url, timeout_ms=timeout_ms)
    try:
        yield index, membership
    finally:
        await index.close()
        await membership.close()


async def register_all(index: RedisIndex) -> None:
    await index.register(holder=NODE.holder_id, incarnation=1, tier=Tier.HOST, namespace=NAMESPACE, blocks=CHAIN)


def kill_nine(server: EmbeddedValkey) -> None:
    os.kill(server.pid, signal.SIGKILL)
    give_up_at = time.monotonic() + 60
    while server.alive():
        assert time.monotonic() < give_up_at
        time.sleep(0.005)


async def until_it_answers(attempt, *, within_s: float = 60.0):
    give_up_at = time.monotonic() + within_s
    while True:
        try:
            return await attempt()
        except IndexUnavailable:
            assert time.monotonic() < give_up_at, "no recovery"
            await asyncio.sleep(0.02)


async def test_a_server_killed_and_restarted_empty_works_again_and_asks_for_everything_anew(own_server):
    # Fails when scripts are not sent again (NOSCRIPT), when dead connections are reused, or when announce() says False.
    async with index_on(own_server.url) as (index, membership):
        assert await membership.announce(NODE, ttl_ms=TTL_MS) is True
        await register_all(index)
        assert (await index.longest_prefix(NAMESPACE, CHAIN)).of(NODE.holder_id) == len(CHAIN)

        kill_nine(own_server)
        for attempt in (index.longest_prefix(NAMESPACE, CHAIN), membership.announce(NODE, ttl_ms=TTL_MS)):
            with pytest.raises(IndexUnavailable):
                await attempt
        await asyncio.to_thread(own_server.start)

        match = await until_it_answers(lambda: index.longest_prefix(NAMESPACE, CHAIN))
        assert match.num_blocks == 0
        assert await until_it_answers(lambda: membership.announce(NODE, ttl_ms=TTL_MS)) is True
        await register_all(index)
        assert (await index.longest_prefix(NAMESPACE, CHAIN)).of(NODE.holder_id) == len(CHAIN)


async def test_a_restart_between_two_calls_is_not_even_noticed(own_server):
    # Idle connections of the dead server must be seen as dead when they are taken, not when they fail.
    async with index_on(own_server.url) as (index, membership):
        await membership.announce(NODE, ttl_ms=TTL_MS)
        await asyncio.gather(*(register_all(index) for _ in range(20)))
        kill_nine(own_server)
        await asyncio.to_thread(own_server.start)
        assert await membership.announce(NODE, ttl_ms=TTL_MS) is True
        for _ in range(INDEX_CONNECTIONS_MAX + 1):
            await register_all(index)
        assert (await index.longest_prefix(NAMESPACE, CHAIN)).of(NODE.holder_id) == len(CHAIN)


async def test_a_paused_server_costs_its_callers_one_timeout_and_later_callers_nothing(own_server):
    async with index_on(own_server.url, timeout_ms=INDEX_TIMEOUT_MS) as (index, membership):
        await until_it_answers(lambda: membership.announce(NODE, ttl_ms=TTL_MS))
        await until_it_answers(lambda: register_all(index))
        os.kill(own_server.pid, signal.SIGSTOP)
        try:
            started_s = time.monotonic()
            outcomes = await asyncio.gather(
                *(index.longest_prefix(NAMESPACE, CHAIN) for _ in range(CALLERS)), return_exceptions=True
            )
            took_s = time.monotonic() - started_s
            assert all(isinstance(outcome, IndexUnavailable) for outcome in outcomes)
            assert INDEX_TIMEOUT_MS / 1000 * 0.9 <= took_s < IN_TURN_S / INDEX_CONNECTIONS_MAX

            started_s = time.monotonic()
            for _ in range(CALLERS):
                with pytest.raises(IndexUnavailable):
                    await index.longest_prefix(NAMESPACE, CHAIN)
            assert time.monotonic() - started_s < IN_TURN_S / 2
        finally:
            os.kill(own_server.pid, signal.SIGCONT)
        match = await until_it_answers(lambda: index.longest_prefix(NAMESPACE, CHAIN))
        assert match.of(NODE.holder_id) == len(CHAIN)


async def test_during_a_pause_one_caller_at_a_time_tries(own_server):
    # Two seconds of outage may cost at most one timeout in every timeout + pause: three tries, not two hundred.
    async with index_on(own_server.url, timeout_ms=INDEX_TIMEOUT_MS) as (index, _):
        await until_it_answers(lambda: index.longest_prefix(NAMESPACE, CHAIN))
        os.kill(own_server.pid, signal.SIGSTOP)
        began_s = time.monotonic()
        try:
            said = Counter()
            while (took_s := time.monotonic() - began_s) < 2.0:
                with pytest.raises(IndexUnavailable) as failed:
                    await index.longest_prefix(NAMESPACE, CHAIN)
                said["tried" if "no answer" in str(failed.value) else "left alone"] += 1
                await asyncio.sleep(0.005)
        finally:
            os.kill(own_server.pid, signal.SIGCONT)
        assert 1 <= said["tried"] <= 2 + took_s / ((INDEX_TIMEOUT_MS + INDEX_PAUSE_MS) / 1000)
        assert said["left alone"]


async def test_an_announcement_whose_reply_was_lost_counts_as_new_when_it_succeeds(own_server):
    # The server took the record while we gave up waiting. Without the memory of that, the next call would say
    # "stood before" and the blocks would never be registered with the emptied server.
    async with index_on(own_server.url, timeout_ms=INDEX_TIMEOUT_MS) as (_, membership):
        await until_it_answers(lambda: membership.announce(NODE, ttl_ms=TTL_MS))
        os.kill(own_server.pid, signal.SIGSTOP)
        try:
            with pytest.raises(IndexUnavailable):
                await membership.announce(NODE, ttl_ms=TTL_MS)
        finally:
            os.kill(own_server.pid, signal.SIGCONT)
        assert await until_it_answers(lambda: membership.announce(NODE, ttl_ms=TTL_MS)) is True
        async with asyncio.timeout(60):
            while await until_it_answers(lambda: membership.announce(NODE, ttl_ms=TTL_MS)):
                continue  # this reply came too late as well


async def test_nobody_listening_is_unavailable_at_once():
    with EmbeddedValkey() as gone:
        url = gone.url
    async with index_on(url) as (index, membership):
        started_s = time.monotonic()
        with pytest.raises(IndexUnavailable):
            await index.longest_prefix(NAMESPACE, CHAIN)
        with pytest.raises(IndexUnavailable):
            await membership.store_nodes()
        assert time.monotonic() - started_s < IN_TURN_S / 2


async def test_a_full_server_refuses_writes_and_still_answers_lookups(own_server):
    raw = patient_connections(own_server.url, connections_max=1, clock=SystemClock())
    async with index_on(own_server.url) as (index, membership):
        await membership.announce(NODE, ttl_ms=TTL_MS)
        await register_all(index)
        async with raw.call() as redis:
            await redis.round_trip(
                ("CONFIG", "SET", "maxmemory-policy", "noeviction"), ("CONFIG", "SET", "maxmemory", 1)
            )
        with pytest.raises(IndexUnavailable, match="refuses"):
            await index.register(
                holder=NODE.holder_id, incarnation=2, tier=Tier.HOST, namespace=NAMESPACE, blocks=CHAIN
            )
        # Liveness outlives fullness, and removing makes room: else all holders would be lost with the new entries.
        assert await membership.announce(NODE, ttl_ms=TTL_MS) is False
        assert await membership.store_nodes() == (NODE,)
        assert (await index.longest_prefix(NAMESPACE, CHAIN)).of(NODE.holder_id) == len(CHAIN)
        await index.deregister(holder=NODE.holder_id, incarnation=1, namespace=NAMESPACE, blocks=CHAIN[4:])
        assert (await index.longest_prefix(NAMESPACE, CHAIN)).of(NODE.holder_id) == 4
        async with raw.call() as redis:
            await redis.round_trip(("CONFIG", "SET", "maxmemory", 0))
        await register_all(index)
    await raw.close()


async def test_a_read_only_server_refuses_writes_at_once_and_is_used_again_when_it_is_promoted(own_server):
    raw = patient_connections(own_server.url, connections_max=1, clock=SystemClock())
    async with index_on(own_server.url) as (index, membership):
        await membership.announce(NODE, ttl_ms=TTL_MS)
        async with raw.call() as redis:
            await redis.round_trip(("REPLICAOF", "127.0.0.1", 1))
        for _ in range(3):
            with pytest.raises(IndexUnavailable, match="refuses"):
                await register_all(index)
        assert (await membership.store_nodes()) == (NODE,)
        async with raw.call() as redis:
            await redis.round_trip(("REPLICAOF", "NO", "ONE"))
        await register_all(index)
        assert (await index.longest_prefix(NAMESPACE, CHAIN)).of(NODE.holder_id) == len(CHAIN)
    await raw.close()


def test_an_url_that_cannot_be_read_is_refused_by_the_settings_name():
    with pytest.raises(ConfigInvalid, match="redis_url"):
        RedisIndex("http://127.0.0.1:6379")
