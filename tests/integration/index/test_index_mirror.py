"""A mirror in a running gateway's place: what it answers when Redis is slow to tell, gone, empty or too large."""

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import suppress

import pytest
from httpx import ASGITransport, AsyncClient
from patient_redis import PATIENT_MS, patient_index, patient_membership, patient_mirror
from settled_mirror import AT_ONCE, SettledMirror
from store_kit import make_kit, make_prompt

from headrace.compose import build_gateway
from headrace.config import load_config
from headrace.core.block import BlockHash, Chain, HashAlgorithm, HolderId, NamespaceId, Tier, hash_prompt
from headrace.core.clock import SystemClock
from headrace.core.errors import IndexUnavailable
from headrace.core.index_limits import INDEX_MIRROR_EVENTS, INDEX_MIRROR_FRESH_MS, INDEX_MIRROR_KEEP_MS, INDEX_SWEEP_MS
from headrace.core.limits import MEMBER_TTL_MS
from headrace.core.members import PrefixMatch, StoreNodeRecord
from headrace.index import redis_keys
from headrace.index.embedded_valkey import EmbeddedValkey
from headrace.index.index_mirror import IndexMirror, Pace, Reread
from headrace.index.redis_index import RedisIndex
from headrace.store.announce_node import announce_node
from headrace.store.register_blocks import PendingChanges, register_blocks

NAMESPACE = NamespaceId("0f" * 16)
CHAIN = hash_prompt(NAMESPACE, range(8), block_tokens=1, algorithm=HashAlgorithm.XXH3_128).chain
NODE = StoreNodeRecord(node_id="a", incarnation=1, host="h", address="x:1", arena_path="/dev/shm/a", pid=1)
TTL_MS = 600_000
CLOCK = SystemClock()


class AdvancedClock:
    """The system's clock, and as much more as a test has let pass."""

    def __init__(self) -> None:
        self.more_s = 0.0

    def now_s(self) -> float:
        return CLOCK.now_s() + self.more_s

    def unix_ms(self) -> int:
        return CLOCK.unix_ms() + int(self.more_s * 1_000)


class AskedIndex(RedisIndex):
    """The index in Redis, counting how often it is asked."""

    asked = 0

    async def longest_prefix(self, namespace: NamespaceId, chain: Chain) -> PrefixMatch:
        self.asked += 1
        return await super().longest_prefix(namespace, chain)


class Setting:
    """One Redis, a node's record and entries in it, and mirrors of it."""

    def __init__(self, url: str) -> None:
        self.url, self.clock = url, AdvancedClock()
        self.index = AskedIndex(url, clock=self.clock, timeout_ms=PATIENT_MS)
        self.members = patient_membership(url)
        self.closing = [self.index.close, self.members.close]

    def mirror(self, pace: Pace = AT_ONCE, **settings: int) -> IndexMirror:
        mirror = patient_mirror(self.index, self.url, clock=self.clock, pace=pace, **settings)
        self.closing.append(mirror.close)
        return mirror

    async def announce(self, *, ttl_ms: int = TTL_MS) -> None:
        await until_answered(lambda: self.members.announce(NODE, ttl_ms=ttl_ms))

    async def register(
        self, blocks: Chain, *, holder: HolderId = NODE.holder_id, namespace: NamespaceId = NAMESPACE
    ) -> None:
        await until_answered(
            lambda: self.index.register(
                holder=holder, incarnation=1, tier=Tier.HOST, namespace=namespace, blocks=blocks
            )
        )

    async def deregister(self, blocks: Chain) -> None:
        await until_answered(
            lambda: self.index.deregister(holder=NODE.holder_id, incarnation=1, namespace=NAMESPACE, blocks=blocks)
        )

    async def found(self, mirror: IndexMirror) -> int:
        return (await mirror.longest_prefix(NAMESPACE, CHAIN)).of(NODE.holder_id)


async def until_answered(call: Callable[[], Awaitable[object]]) -> None:
    """Repeat a call that may be repeated while the machine is too busy for it."""
    async with asyncio.timeout(60):
        while True:
            try:
                await call()
                return
            except IndexUnavailable:
                await asyncio.sleep(0.05)


async def step_until(mirror: IndexMirror, condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            try:
                await mirror.step()
            except IndexUnavailable:
                await asyncio.sleep(0.02)


@pytest.fixture
async def setting(own_server: EmbeddedValkey) -> AsyncIterator[Setting]:
    setting = Setting(own_server.url)
    yield setting
    for close in setting.closing:
        await close()


async def test_a_new_mirror_answers_as_the_old_one_before_it_has_read_anything(setting: Setting):
    # Fails when a restarted gateway begins without hits: its first request would be computed again.
    await setting.announce()
    await setting.register(CHAIN)
    old = setting.mirror()
    await step_until(old, lambda: old.answers)
    new = setting.mirror()
    assert await setting.found(new) == await setting.found(old) == len(CHAIN)
    assert setting.index.asked == 1
    await new.step()  # still reading
    assert await setting.found(new) == len(CHAIN)
    await step_until(new, lambda: new.answers)
    assert await setting.found(new) == len(CHAIN)
    assert setting.index.asked == 2


async def test_a_change_is_heard_at_once_and_lookups_ask_nobody(setting: Setting):
    await setting.announce()
    mirror = setting.mirror(Pace())
    following = asyncio.create_task(mirror.follow())
    try:
        async with asyncio.timeout(60):
            while not mirror.answers:  # noqa: ASYNC110 (what is waited for is in another process)
                await asyncio.sleep(0.01)
            asked = setting.index.asked
            for depth in range(1, len(CHAIN) + 1):
                await setting.register(CHAIN[:depth])
                while await setting.found(mirror) != depth:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
        assert setting.index.asked - asked <= 2  # only where a busy machine let the mirror fall behind
    finally:
        following.cancel()
        await asyncio.gather(following, return_exceptions=True)


async def test_while_redis_is_away_the_mirror_answers_for_a_while_and_then_nobody_does(
    setting: Setting, own_server: EmbeddedValkey
):
    await setting.announce(ttl_ms=MEMBER_TTL_MS)
    await setting.register(CHAIN)
    mirror = setting.mirror()
    await step_until(mirror, lambda: mirror.answers)
    await asyncio.to_thread(own_server.stop)
    for past_s in (INDEX_MIRROR_FRESH_MS / 1_000 + 1, 2 * MEMBER_TTL_MS / 1_000, INDEX_MIRROR_KEEP_MS / 1_000 - 1):
        setting.clock.more_s = past_s
        with pytest.raises(IndexUnavailable):
            await mirror.step()
        assert not mirror.answers
        assert await setting.found(mirror) == len(CHAIN), "the node's record could not be renewed, which says nothing"
    setting.clock.more_s = INDEX_MIRROR_KEEP_MS / 1_000 + 1
    with pytest.raises(IndexUnavailable):
        await setting.found(mirror)


async def test_a_mirror_that_fell_behind_asks_redis_first(setting: Setting):
    # Fails when a mirror whose reading hangs answers with what it knew, though Redis knows better.
    await setting.announce()
    await setting.register(CHAIN[:2])
    mirror = setting.mirror()
    await step_until(mirror, lambda: mirror.answers)
    await setting.register(CHAIN)
    setting.clock.more_s = INDEX_MIRROR_FRESH_MS / 1_000 + 0.1
    assert await setting.found(mirror) == len(CHAIN)


async def test_a_redis_that_came_back_empty_is_filled_by_its_nodes_and_the_mirror_follows(own_server: EmbeddedValkey):
    """The node's own process does that. Fails when a mirror still knows what is no more, or not what was put again."""
    kit, prompt = make_kit(blocks=8), make_prompt(1, 4)
    kit.store(prompt, range(4))
    index, members, changes = patient_index(own_server.url), patient_membership(own_server.url), PendingChanges()
    record = StoreNodeRecord(kit.node.node_id, kit.node.incarnation, "h", "127.0.0.1:1", "", pid=1)
    mirror = SettledMirror(own_server.url)
    tasks = [
        asyncio.create_task(
            register_blocks(kit.node, changes, index, announce=lambda: members.announce(record, ttl_ms=MEMBER_TTL_MS))
        ),
        asyncio.create_task(announce_node(lambda: record, changes, members, clock=CLOCK)),
    ]

    async def until_mirrored() -> None:
        async with asyncio.timeout(60):
            while not mirror.mirror.answers or (await asked()).num_blocks < 4:
                with suppress(IndexUnavailable):
                    await mirror.mirror.step()

    async def asked() -> PrefixMatch:
        return await mirror.mirror.longest_prefix(prompt.namespace, prompt.chain)

    try:
        await until_mirrored()
        await asyncio.to_thread(own_server.stop)
        await asyncio.to_thread(own_server.start)
        await step_until(mirror.mirror, lambda: mirror.mirror.stat().rereads[Reread.REDIS_RESTARTED] == 1)
        await until_mirrored()
        assert (await asked()).of(record.holder_id) == 4
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for each in (mirror, index, members):
            await each.close()


async def test_an_index_with_too_many_blocks_is_asked_in_redis_until_it_has_fewer(setting: Setting):
    await setting.announce()
    await setting.register(CHAIN)
    mirror = setting.mirror(blocks_max=len(CHAIN) - 1)
    await step_until(mirror, lambda: mirror.stat().rereads[Reread.TOO_LARGE] == 3)
    assert (mirror.answers, mirror.stat().blocks) == (False, 0)
    assert await setting.found(mirror) == len(CHAIN)
    await setting.deregister(CHAIN[: len(CHAIN) - 2 : -1])
    await step_until(mirror, lambda: mirror.answers)
    await setting.register(CHAIN)
    await step_until(mirror, lambda: mirror.stat().rereads[Reread.TOO_LARGE] > 3)
    assert not mirror.answers


async def test_what_a_node_left_behind_is_out_of_memory_in_bounded_time(setting: Setting):
    await setting.announce()
    await setting.register(CHAIN)
    mirror = setting.mirror()
    await step_until(mirror, lambda: mirror.answers)
    await setting.members.withdraw(NODE)
    await mirror.step()
    assert (await setting.found(mirror), mirror.stat().blocks) == (0, len(CHAIN))
    setting.clock.more_s = INDEX_SWEEP_MS / 1_000 + 1
    await step_until(mirror, lambda: mirror.stat().holders == 0)
    assert mirror.stat().blocks == 0
    # Redis has not been swept, and the node comes back under the same incarnation: nothing registers its blocks again.
    await setting.announce()
    await step_until(mirror, lambda: mirror.stat().rereads[Reread.HOLDER_RETURNED] == 1)
    await step_until(mirror, lambda: mirror.answers)
    assert await setting.found(mirror) == len(CHAIN)


async def test_who_renews_its_record_is_named_however_quiet_it_is(setting: Setting):
    """Fails when liveness is judged by events, of which a node that stores nothing new makes none."""
    await setting.announce()
    await setting.register(CHAIN)
    mirror = setting.mirror()
    await step_until(mirror, lambda: mirror.answers)
    for _ in range(4):
        setting.clock.more_s += TTL_MS / 2_000
        await setting.announce()
        await step_until(mirror, lambda: mirror.answers)
        assert await setting.found(mirror) == len(CHAIN)
    assert sum(mirror.stat().rereads.values()) == 0


async def test_who_died_is_not_named_from_the_moment_its_record_ends(setting: Setting):
    """Without another look at the members. Fails when requests are sent after a holder that is known to be dead."""
    await setting.announce(ttl_ms=MEMBER_TTL_MS)
    await setting.register(CHAIN)
    mirror = setting.mirror(Pace(wait_ms=0, audit_ms=TTL_MS, liveness_ms=TTL_MS))
    await step_until(mirror, lambda: mirror.answers)
    setting.clock.more_s = MEMBER_TTL_MS / 1_000
    await step_until(mirror, lambda: mirror.answers)
    assert await setting.found(mirror) == 0


async def test_a_gateway_mirrors_the_index_and_says_so(own_server: EmbeddedValkey):
    """Fails when a gateway asks Redis for each request and nobody sees it."""
    gateway = build_gateway(load_config({"redis_url": own_server.url}, environ={}), calls=NoCalls())
    await gateway.start()
    try:
        async with AsyncClient(transport=ASGITransport(gateway.http_app), base_url="http://localhost") as http:
            async with asyncio.timeout(60):
                while True:
                    metrics = (await http.get("/metrics")).text
                    if "headrace_index_mirror_answers 1.0" in metrics.splitlines():
                        break
                    await asyncio.sleep(0.05)
        assert "headrace_index_mirror_blocks 0.0" in metrics.splitlines()
        assert 'headrace_index_mirror_rereads_total{reason="events_lost"} 0.0' in metrics.splitlines()
    finally:
        await gateway.stop()


class NoCalls:
    """Workers that nobody calls: there are none."""


async def test_more_events_than_one_reply_takes_are_all_heard_before_it_answers_again(setting: Setting):
    await setting.announce()
    mirror = setting.mirror()
    await step_until(mirror, lambda: mirror.answers)
    for _ in range(INDEX_MIRROR_EVENTS):
        await setting.register(CHAIN)
        await setting.deregister(CHAIN[::-1])
    await setting.register(CHAIN)
    setting.clock.more_s = INDEX_MIRROR_FRESH_MS / 1_000 + 0.1
    await mirror.step()
    assert not mirror.answers
    await step_until(mirror, lambda: mirror.answers)
    assert await setting.found(mirror) == len(CHAIN)
    assert sum(mirror.stat().rereads.values()) == 0


async def test_blocks_that_very_many_hold_are_read_in_replies_that_come_in_time(setting: Setting):
    # Fails when a page of blocks is one reply: 100 blocks of 400 holders take longer to read than a call may.
    holders = [HolderId(f"node:{number}") for number in range(400)]
    blocks = tuple(BlockHash(b"%016d" % number) for number in range(100))
    for holder in holders:
        await setting.register(blocks, holder=holder)
    mirror = setting.mirror()
    await step_until(mirror, lambda: mirror.answers)
    assert (mirror.stat().blocks, mirror.stat().holders) == (100, 400)


STREAM = redis_keys.events_key(redis_keys.shard_of(NAMESPACE))


@pytest.mark.parametrize("lost", [("XTRIM", STREAM, "MAXLEN", 0), ("XTRIM", STREAM, "MAXLEN", 1), ("DEL", STREAM)])
async def test_events_that_were_gone_before_they_were_read_are_missed_by_the_next_look(
    setting: Setting, lost: tuple[bytes | str | int, ...]
):
    """Fails when a loss is noticed only by the holder's next event, which may never come."""
    await setting.announce()
    await setting.register(CHAIN[:1])
    mirror = setting.mirror()
    await step_until(mirror, lambda: mirror.answers)
    for depth in (2, 3):
        await setting.register(CHAIN[:depth])
    async with setting.index._redis.call() as redis:
        await redis.round_trip(lost)
    await step_until(mirror, lambda: mirror.stat().rereads[Reread.EVENTS_LOST] == 1)
    await step_until(mirror, lambda: mirror.answers)
    assert await setting.found(mirror) == 3


async def test_a_lost_event_of_one_holder_is_missed_when_only_others_have_more(setting: Setting):
    """Fails when only the numbers of those who speak are compared, and not how many events there were."""
    await setting.announce()
    await setting.register(CHAIN[:1])
    mirror = setting.mirror()
    await step_until(mirror, lambda: mirror.answers)
    await setting.register(CHAIN)
    await setting.register(CHAIN, holder=HolderId("node:b"))
    async with setting.index._redis.call() as redis:
        await redis.round_trip(("XTRIM", STREAM, "MAXLEN", 1))
    await step_until(mirror, lambda: mirror.stat().rereads[Reread.EVENTS_LOST] == 1)
    await step_until(mirror, lambda: mirror.answers)
    assert await setting.found(mirror) == len(CHAIN)


async def test_after_an_outage_it_is_looked_at_once_whether_it_is_still_the_same_redis(
    setting: Setting, own_server: EmbeddedValkey
):
    await setting.announce()
    await setting.register(CHAIN)
    mirror = setting.mirror(Pace(wait_ms=0, reread_ms=0, audit_ms=TTL_MS))
    await step_until(mirror, lambda: mirror.answers)
    await asyncio.to_thread(own_server.stop)
    with pytest.raises(IndexUnavailable):
        await mirror.step()
    await asyncio.to_thread(own_server.start)
    await step_until(mirror, lambda: mirror.stat().rereads[Reread.REDIS_RESTARTED] == 1)


async def test_namespaces_of_many_tenants_and_salts_are_all_read_and_all_followed(setting: Setting):
    """Fails when a mirror must be told which namespaces there are, or a page forgets those that it has no room for."""
    await setting.announce()
    namespaces = [NamespaceId(f"{number:032x}") for number in range(60)]
    longer = hash_prompt(NAMESPACE, range(8), block_tokens=1, algorithm=HashAlgorithm.SHA256).chain
    mirror = setting.mirror()
    for namespace in namespaces[:50]:
        await setting.register(CHAIN, namespace=namespace)
    await setting.register(longer, namespace=namespaces[0])  # no namespace has two kinds; who knows
    await step_until(mirror, lambda: mirror.answers)
    for namespace in namespaces[50:]:
        await setting.register(CHAIN, namespace=namespace)
    setting.clock.more_s += INDEX_MIRROR_FRESH_MS / 1_000 + 1
    await step_until(mirror, lambda: mirror.answers)
    asked = setting.index.asked
    for namespace in namespaces:
        assert (await mirror.longest_prefix(namespace, CHAIN)).of(NODE.holder_id) == len(CHAIN)
    assert (await mirror.longest_prefix(namespaces[0], longer)).of(NODE.holder_id) == len(longer)
    assert (setting.index.asked, mirror.stat().blocks) == (asked, 61 * len(CHAIN))


@pytest.mark.parametrize("key", [redis_keys.events_key(0), redis_keys.numbers_key(0), b"hr1:{0}:b:junk"])
async def test_junk_in_the_place_of_what_is_read_stops_nothing(setting: Setting, key: bytes):
    await setting.announce()
    await setting.register(CHAIN)
    async with setting.index._redis.call() as redis:
        await redis.round_trip(
            ("DEL", key), ("SET", key, b"junk"), ("XADD", redis_keys.events_key(1), "*", "junk", b"\xff")
        )
    mirror = setting.mirror()
    await step_until(mirror, lambda: mirror.answers)
    async with setting.index._redis.call() as redis:
        await redis.round_trip(("XADD", redis_keys.events_key(1), "*", "junk", b"\xff"))
    for _ in range(3):
        await mirror.step()
    assert mirror.answers
    assert await setting.found(mirror) == len(CHAIN)


async def test_a_redis_that_stands_still_holds_up_no_lookup_of_a_fresh_mirror(
    setting: Setting, own_server: EmbeddedValkey
):
    await setting.announce()
    await setting.register(CHAIN)
    mirror = setting.mirror()
    await step_until(mirror, lambda: mirror.answers)
    os.kill(own_server.pid, signal.SIGSTOP)
    try:
        await mirror_answers_quickly(setting, mirror)
    finally:
        os.kill(own_server.pid, signal.SIGCONT)


async def mirror_answers_quickly(setting: Setting, mirror: IndexMirror) -> None:
    await setting.index.close()
    began_s = time.monotonic()
    assert await setting.found(mirror) == len(CHAIN)
    assert time.monotonic() - began_s < PATIENT_MS / 2_000, "it waited for Redis"
