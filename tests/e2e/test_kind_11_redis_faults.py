"""Redis is an index of the cache and no single point of failure: what happens to it costs hits, never an answer."""

import time

import pytest
from live_load import load_while, make_token_ids
from local_system import BLOCK_TOKENS, LocalSystem, wait_until
from redis import Redis


@pytest.fixture
def redis(system: LocalSystem):
    with Redis.from_url(system.state.redis_url) as connected:
        yield connected


@pytest.fixture
def prompts() -> list[list[int]]:
    return [make_token_ids(6 * BLOCK_TOKENS, seed=110_000 + i) for i in range(8)]


def test_a_redis_that_loses_everything_again_and_again_fails_no_request(system: LocalSystem, redis: Redis, prompts):
    """Fails when a listing is believed that lacks those who have not announced themselves again yet."""

    def flush() -> None:
        for _ in range(15):
            redis.flushall()
            time.sleep(0.2)

    outcome = load_while(system, prompts, flush, after_s=1)
    assert (outcome.errors, outcome.wrong) == ([], 0)
    wait_until(lambda: len(system.client.status().workers) == 3, what="all announced again")


def test_a_redis_that_takes_no_writes_fails_no_request(system: LocalSystem, redis: Redis, prompts):
    """A failover left us with a replica on which some records have run out and cannot be put again. Fails when their
    owners, who serve all the while, count as dead."""
    records = [f"hr1:{{members}}:m:worker:{worker_id}" for worker_id in system.worker_ids("decode")]
    assert len(records) == 2
    wait_until(lambda: redis.exists(*records) == 2, what="both announced")  # what came before may last

    def demote() -> None:
        redis.delete(*records)
        redis.execute_command("REPLICAOF", "127.0.0.1", "1")
        try:
            time.sleep(3)
        finally:
            redis.execute_command("REPLICAOF", "NO", "ONE")

    outcome = load_while(system, prompts, demote)
    assert (outcome.errors, outcome.wrong) == ([], 0)
    wait_until(lambda: len(system.client.status().workers) == 3, what="all announced again")


def test_killed_connections_are_replaced_and_do_not_add_up(system: LocalSystem, redis: Redis, prompts):
    """Fails when a connection is lost at each fault, or a reply reaches another command's caller."""
    before = redis.info("clients")["connected_clients"]

    def cut() -> None:
        for _ in range(10):
            redis.execute_command("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "yes")
            time.sleep(0.2)

    outcome = load_while(system, prompts, cut, after_s=1)
    assert (outcome.errors, outcome.wrong) == ([], 0)
    assert outcome.hits > 0
    wait_until(
        lambda: redis.info("clients")["connected_clients"] <= before + 8,
        what="connections as before",
    )


def test_a_redis_that_evicts_by_itself_fails_no_request(system: LocalSystem, redis: Redis, prompts):
    """Fails when an entry, a member's record or an event stream that went without a word is more than a miss, or the
    index is not what the nodes hold after a repair."""
    before = redis.config_get("maxmemory", "maxmemory-policy")

    def squeeze() -> None:
        redis.config_set("maxmemory-policy", "allkeys-lru")
        redis.config_set("maxmemory", redis.info("memory")["used_memory"])
        try:
            for number in range(300):
                redis.set(f"others:{number % 100}", b"x" * 1_000)
                time.sleep(0.005)
        finally:
            for name, value in before.items():
                redis.config_set(name, value)
            redis.delete(*(f"others:{number}" for number in range(100)))

    outcome = load_while(system, prompts, squeeze, after_s=1)
    assert redis.info("stats")["evicted_keys"] > 0, "void: nothing was evicted"
    assert (outcome.errors, outcome.wrong) == ([], 0)
    wait_until(lambda: len(system.client.status().workers) == 3, what="all announced again")
    # Nodes register again by themselves, paced; an operator need not wait for it.
    system.client.doctor(fix=True)
    wait_until(lambda: all(f.ok for f in system.client.doctor()), what="the index names what is held")
