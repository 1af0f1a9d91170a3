"""Members that Redis lost, or could not take, are not dead; members that left are."""

import asyncio
import os
import signal
from urllib.parse import urlsplit

import pytest
from patient_redis import patient_connections, patient_membership

from headrace.core.errors import IndexUnavailable
from headrace.core.limits import MEMBER_TTL_MS
from headrace.core.members import StoreNodeRecord
from headrace.index.redis_connections import Script
from headrace.index.redis_membership import RedisMembership

TTL_S = MEMBER_TTL_MS / 1000
A, B = (StoreNodeRecord(node_id=n, incarnation=1, host="h", address="x:1", arena_path="/a", pid=1) for n in "ab")


class HandClock:
    """Time that stands until it is moved. Redis keeps its own."""

    def __init__(self) -> None:
        self.time_s = 100.0

    def now_s(self) -> float:
        return self.time_s

    def unix_ms(self) -> int:
        return int(self.time_s * 1000)


class Setting:
    """A reader with a clock of its own, members that announce, and a hand on the server."""

    def __init__(self, url: str) -> None:
        self.port = urlsplit(url).port
        self.clock = HandClock()
        self.reader, self.members = patient_membership(url, clock=self.clock), patient_membership(url)
        self.server = patient_connections(url, connections_max=1, clock=self.clock)

    async def announce(self, *records: StoreNodeRecord) -> None:
        for record in records:
            await self.members.announce(record, ttl_ms=60_000)

    async def do(self, *command: str | bytes) -> None:
        async with self.server.call() as redis:
            await redis.round_trip(command)

    async def read(self, after_s: float = 1.0) -> list[str]:
        self.clock.time_s += after_s
        return [record.node_id for record in await self.reader.store_nodes()]


@pytest.fixture
async def setting(own_server):
    made = Setting(own_server.url)
    yield made
    for part in (made.reader, made.members, made.server):
        await part.close()


async def test_a_redis_that_came_back_empty_kills_nobody_who_announces_himself_again(setting):
    """Fails when a listing is believed in which some are back and others not yet."""
    await setting.announce(A, B)
    assert await setting.read() == ["a", "b"]
    await setting.do("FLUSHALL")
    with pytest.raises(IndexUnavailable, match="lost records"):
        await setting.read()
    await setting.announce(A)
    with pytest.raises(IndexUnavailable):
        await setting.read()
    await setting.announce(B)
    assert await setting.read() == ["a", "b"]


async def test_a_member_that_does_not_come_back_is_dead_after_one_lifetime(setting):
    """Fails when what was lost once is waited for without end."""
    await setting.announce(A, B)
    assert await setting.read() == ["a", "b"]
    await setting.do("FLUSHALL")
    await setting.announce(A)
    for _ in range(6):
        with pytest.raises(IndexUnavailable):
            await setting.read()
    assert await setting.read() == ["a"]


async def test_a_loss_of_which_nobody_told_the_reader_kills_nobody_either(own_server):
    """The listing that would have shown it was carried out and its answer was lost. Fails when the mark that it left
    hides the loss from the next one."""
    setting = Setting(own_server.url)
    await setting.announce(A, B)
    impatient = RedisMembership(own_server.url, clock=setting.clock, timeout_ms=500)
    async with asyncio.timeout(60):
        while True:
            try:
                assert len(await impatient.store_nodes()) == 2
                break
            except IndexUnavailable:
                setting.clock.time_s += 1
    await setting.do("FLUSHALL")
    await setting.announce(A)
    os.kill(own_server.pid, signal.SIGSTOP)
    with pytest.raises(IndexUnavailable, match="no answer"):
        await impatient.store_nodes()
    os.kill(own_server.pid, signal.SIGCONT)
    async with asyncio.timeout(60):
        while not (left := await values(setting)):  # noqa: ASYNC110 (what was sent is carried out now)
            await asyncio.sleep(0.01)
    first, _, highest = left[0].partition(b":")
    assert first == highest > b"1"
    setting.clock.time_s += 1
    await setting.announce(A)
    async with asyncio.timeout(60):
        while True:
            with pytest.raises(IndexUnavailable) as told:
                await impatient.store_nodes()
            if "lost records" in told.value.why:
                break
            setting.clock.time_s += 1
    for part in (impatient, setting.reader, setting.members, setting.server):
        await part.close()


async def test_a_mark_and_the_listing_that_goes_by_it_come_by_one_connection(setting):
    """Fails when they can come from two servers, of which one was a primary until just now."""
    await setting.announce(A, B)
    watching, writer = await asyncio.open_connection("127.0.0.1", setting.port)
    writer.write(b"MONITOR\r\n")
    async with asyncio.timeout(60):
        assert await watching.readline() == b"+OK\r\n"
        await asyncio.gather(*(setting.reader.store_nodes() for _ in range(20)))
        client_to_scripts: dict[bytes, list[bytes]] = {}
        while sum(map(len, client_to_scripts.values())) < 40:
            words = (await watching.readline()).lower().split()
            if words[3] in (b'"evalsha"', b'"eval"') and not words[2].startswith(b"lua"):
                by_client = client_to_scripts.setdefault(words[2], [])
                by_client.append(b"mark" if b"hr1:{members}:p:" in b" ".join(words[4:]) else b"listing")
    writer.close()
    assert all(scripts == [b"mark", b"listing"] * (len(scripts) // 2) for scripts in client_to_scripts.values())


@pytest.mark.parametrize("known", ["probe", "read_members"])
async def test_they_come_by_one_connection_in_order_where_the_server_knows_one_script_of_the_two(setting, known):
    """Fails when the one that is known runs first, whichever it is, and the other one later by another connection."""
    await setting.announce(A, B)
    await setting.do("SCRIPT", "FLUSH")
    await setting.do("SCRIPT", "LOAD", Script(known).text)
    watching, writer = await asyncio.open_connection("127.0.0.1", setting.port)
    writer.write(b"MONITOR\r\n")
    async with asyncio.timeout(60):
        assert await watching.readline() == b"+OK\r\n"
        assert await setting.read() == ["a", "b"]
        await setting.do("ECHO", "all-was-read")
        whole = []  # client and kind of each script that was sent whole
        while b"all-was-read" not in (line := (await watching.readline()).lower()):
            words = line.split()
            if words[3] == b'"eval"' and not words[2].startswith(b"lua"):
                whole.append((words[2], b"mark" if b"hr1:{members}:p:" in line else b"listing"))
    writer.close()
    assert [kind for _, kind in whole] == [b"mark", b"listing"]
    assert whole[0][0] == whole[1][0]


async def test_a_mark_that_was_left_twice_does_not_hide_that_the_last_one_was_lost(setting):
    """Fails when a replica that took over before it had heard of the last announcements is believed."""
    await setting.announce(A, B)
    assert await setting.read() == await setting.read() == ["a", "b"]
    (mark,) = await marks(setting)
    assert await values(setting) == [b"1:2"]
    await setting.do("SET", mark, "1:1")
    await setting.do("DEL", "hr1:{members}:m:node:b")
    await setting.do("SCRIPT", "FLUSH")
    await setting.do("SCRIPT", "LOAD", Script("probe").text)
    with pytest.raises(IndexUnavailable, match="lost records"):
        await setting.read()


async def test_a_replica_that_takes_no_records_kills_nobody_for_as_long_as_it_lasts(setting):
    """Fails when records that ran out because nobody could refresh them count as deaths."""
    await setting.announce(A, B)
    assert await setting.read() == ["a", "b"]
    await setting.do("DEL", "hr1:{members}:m:node:b")  # its time ran out
    await setting.do("REPLICAOF", "127.0.0.1", "1")
    for _ in range(20):
        with pytest.raises(IndexUnavailable, match="refuses writes"):
            await setting.read()
    await setting.do("REPLICAOF", "NO", "ONE")
    await setting.announce(B)
    assert await setting.read() == ["a", "b"]


async def test_a_replica_on_which_everybody_stands_is_believed(setting):
    await setting.announce(A, B)
    await setting.do("REPLICAOF", "127.0.0.1", "1")
    assert await setting.read() == await setting.read() == ["a", "b"]


async def test_a_member_that_leaves_a_sound_redis_is_gone_at_the_next_reading(setting):
    """Fails when every absence is doubted: a stopped worker must get no further request."""
    await setting.announce(A, B)
    assert await setting.read() == ["a", "b"]
    await setting.members.withdraw(B)
    assert await setting.read() == ["a"]


async def test_who_reads_seldom_is_told_what_stands(setting):
    """Fails when a mark that ran out between two readings looks like a loss: a sweep would never see a death."""
    await setting.announce(A, B)
    assert await setting.read() == ["a", "b"]
    await setting.members.withdraw(B)
    await setting.do("DEL", *await marks(setting))
    assert await setting.read(after_s=TTL_S) == ["a"]


async def test_marks_go_by_themselves(setting):
    await setting.read()
    (mark,) = await marks(setting)
    async with setting.server.call() as redis:
        [ttl_ms] = await redis.round_trip(("PTTL", mark))
    assert 0 < ttl_ms <= MEMBER_TTL_MS


async def values(setting: Setting) -> list[bytes]:
    """What the marks that stand say."""
    found = await marks(setting)
    async with setting.server.call() as redis:
        return await redis.round_trip(*(("GET", mark) for mark in found))


async def marks(setting: Setting) -> list[str]:
    async with setting.server.call() as redis:
        [keys] = await redis.round_trip(("KEYS", "hr1:{members}:p:*"))
    return [key.decode() for key in keys]
