"""The end of an index in a Redis that goes on: its keys go, others' stay, nothing is waited for beyond the deadline."""

import asyncio
import socket
import time

import pytest
import redis
from free_ports import free_ports
from patient_redis import patient_index

from headrace.core.block import BlockHash, HolderId, NamespaceId, Tier
from headrace.core.errors import IndexUnavailable
from headrace.index.embedded_valkey import EmbeddedValkey
from headrace.index.remove_own_keys import main, remove_own_keys

# Several pages of keys, and more than one shard.
BLOCKS = 1_500


@pytest.fixture
def valkey():
    server = EmbeddedValkey(port=free_ports(1)[0])
    url = server.start()
    yield server, url
    server.stop()


async def fill(url: str) -> None:
    index = patient_index(url)
    for number in range(3):
        blocks = [BlockHash((number * BLOCKS + i).to_bytes(16, "big")) for i in range(BLOCKS // 3)]
        await index.register(
            holder=HolderId("node"), incarnation=7, tier=Tier.HOST, namespace=NamespaceId(f"n{number}"), blocks=blocks
        )
    await index.close()


async def test_its_keys_go_and_others_stay(valkey):
    _, url = valkey
    await fill(url)
    client = redis.Redis.from_url(url)
    client.mset({"hr2:other": "1", "session:9": "2", "hr1": "3", "xhr1:a": "4"})
    own = client.dbsize() - 4
    assert own > BLOCKS
    assert await remove_own_keys(url, deadline_s=60) == own
    assert sorted(client.keys()) == [b"hr1", b"hr2:other", b"session:9", b"xhr1:a"]


async def test_a_redis_that_is_gone_is_given_up_at_the_deadline_with_the_reason(valkey):
    server, url = valkey
    server.stop()
    with pytest.raises(IndexUnavailable, match="given up after 1 s: "):
        await asyncio.wait_for(remove_own_keys(url, deadline_s=1), 60)


async def test_a_redis_that_never_answers_is_given_up_too():
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}"
        with pytest.raises(IndexUnavailable, match=r"given up after 1 s: (no answer|Redis failed)"):
            await asyncio.wait_for(remove_own_keys(url, deadline_s=1), 60)


async def test_a_redis_that_comes_back_before_the_deadline_is_emptied(valkey):
    server, url = valkey
    server.stop()
    task = asyncio.create_task(remove_own_keys(url, deadline_s=120))
    await asyncio.sleep(0.05)
    await asyncio.to_thread(server.start)
    redis.Redis.from_url(url).set("session:9", "2")
    assert await task == 0
    assert redis.Redis.from_url(url).keys() == [b"session:9"]


async def test_a_refusal_is_told_at_once_and_not_tried_again(valkey):
    """Fails when a user who may not remove keys waits for a deadline that is far away."""
    _, url = valkey
    await fill(url)
    redis.Redis.from_url(url).execute_command("ACL SETUSER reader on >secret ~* +scan +ping +select")
    began = time.monotonic()
    with pytest.raises(IndexUnavailable, match=r"(?i)permission"):
        await remove_own_keys(url.replace("redis://", "redis://reader:secret@"), deadline_s=10_000)
    assert time.monotonic() - began < 5_000


def test_the_command_takes_its_url_from_the_environment_and_says_what_it_did(valkey, monkeypatch, capsys):
    server, url = valkey
    monkeypatch.setenv("HEADRACE_REDIS_URL", url)
    asyncio.run(fill(url))
    assert main([]) == 0
    assert capsys.readouterr().out.startswith("removed ")
    server.stop()
    assert main(["--deadline-s", "0.2"]) == 1
    assert "keys stay in Redis" in capsys.readouterr().err
    monkeypatch.delenv("HEADRACE_REDIS_URL")
    assert main([]) == 2
    assert "HEADRACE_REDIS_URL" in capsys.readouterr().err
