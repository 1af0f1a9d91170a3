"""Which store nodes a worker sees, and that one bad node costs one failed call and not one per request."""

import asyncio
from dataclasses import replace

import pytest

from headrace.blocks.host_arena import host_id
from headrace.config import StoreSettings
from headrace.core.block import CacheSource
from headrace.core.clock import Deadline, SystemClock
from headrace.core.errors import IndexUnavailable, StoreUnavailable
from headrace.core.generation import CachedTokens
from headrace.core.limits import NODE_QUARANTINE_MS
from headrace.core.members import StoreNodeRecord
from headrace.index.memory_index import MemoryIndex
from headrace.store.service import StoreNodeService
from headrace.transfer.store_nodes import StoreNodeTable

B = 8
CLOCK = SystemClock()


class HandClock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.time_s = 1_000.0

    def now_s(self) -> float:
        return self.time_s

    def unix_ms(self) -> int:
        return CLOCK.unix_ms()


class HeardMembership:
    """A Membership that keeps what was announced, with records that outlive any pause that a busy machine makes."""

    def __init__(self, membership):
        self.announced = []
        self._membership = membership

    async def announce(self, record, *, ttl_ms):
        self.announced.append(record)
        return await self._membership.announce(record, ttl_ms=100 * ttl_ms)

    def __getattr__(self, name):
        return getattr(self._membership, name)


@pytest.fixture
async def table_on(membership, tmp_path):
    """Tables of workers on this host or another; all stopped at the end."""
    tables = []

    async def make(host: str | None = None, members=membership, clock=CLOCK):
        faults = []
        table = StoreNodeTable(
            host=host or host_id(tmp_path), membership=members, clock=clock, report_fault=faults.append
        )
        await table.start()
        tables.append(table)
        return table, faults

    yield make
    for table in tables:
        await table.stop()


async def test_the_own_hosts_node_is_mapped_and_others_are_reached_by_id(store_node, table_on):
    """Fails when a node of another host is mapped, or the own one is published to over gRPC."""
    near, _ = await table_on()
    far, _ = await table_on("elsewhere")
    assert near.sink() is near.local() is not None
    assert near.remote("node-1") is not None
    assert far.local() is None
    assert far.sink() is far.remote("node-1") is not None
    assert near.sink_node_id() == far.sink_node_id() == "node-1"
    assert far.remote("unknown") is None


async def test_a_node_that_failed_is_left_alone_for_a_while_and_then_tried_again(store_node, membership, table_on):
    """Fails when every request asks a dead node, or a node that failed once is never asked again."""
    await membership.withdraw(store_node.record)
    await membership.announce(replace(store_node.record, address="127.0.0.1:1"), ttl_ms=60_000)
    clock = HandClock()
    table, _ = await table_on("elsewhere", clock=clock)
    node = table.remote("node-1")
    with pytest.raises(StoreUnavailable):
        await node.lease_prefix("0" * 32, (bytes(16),), first_block=0, deadline=Deadline.after(30, CLOCK))
    clock.time_s += NODE_QUARANTINE_MS / 1000 - 0.05
    assert table.remote("node-1") is None
    assert table.sink() is None
    clock.time_s += 0.1
    assert table.remote("node-1") is not None


async def test_a_node_under_a_new_incarnation_is_a_new_node(store_node, membership, table_on):
    """Fails when a restarted node inherits the quarantine or the mapping of the one before."""
    table, _ = await table_on()
    before = table.local()
    await membership.announce(replace(store_node.record, incarnation=store_node.node.incarnation + 1), ttl_ms=60_000)
    await table.refresh()
    assert table.local() is not before
    unchanged = table.local()
    await table.refresh()
    assert table.local() is unchanged


async def test_while_the_index_is_away_known_nodes_stay(store_node, membership, table_on):
    """Fails when an outage of the index takes the store nodes away too."""

    class Flaky:
        away = False

        async def store_nodes(self):
            if self.away:
                raise IndexUnavailable("test")
            return await membership.store_nodes()

    members = Flaky()
    table, faults = await table_on(members=members)
    members.away = True
    await table.refresh()
    assert table.local() is not None
    assert [type(fault) for fault in faults] == [IndexUnavailable]


@pytest.mark.parametrize("name", ["follow store nodes", "end lost claims"])
async def test_a_worker_of_which_a_task_has_ended_is_not_healthy(name, make_worker):
    """Fails when its table grows stale, or claims stay at store nodes, and nobody replaces it."""
    worker = (await make_worker("w")).worker
    assert worker.healthy()
    (task,) = (each for each in asyncio.all_tasks() if each.get_name() == name)
    task.cancel()
    await asyncio.wait([task])
    assert not worker.healthy()


async def test_a_worker_without_a_node_of_its_own_publishes_over_grpc(store_node, make_worker, prompts):
    """Fails when blocks sent over gRPC are not stored, or differ from those written in place."""
    far, near = await make_worker("far", near=False), await make_worker("near")
    token_ids = prompts(4 * B + 1)
    computed = await far.decode(token_ids)
    await far.published()
    reply = await near.decode(token_ids)
    assert reply.cached == CachedTokens(shared_memory=4 * B)
    assert reply.same_answer_as(computed)


async def test_a_node_that_has_started_is_among_the_members_and_in_the_first_record_of_a_worker_beside_it(
    make_worker, membership, tmp_path
):
    """Fails when a node says that it serves before others can find it: then nothing is handed over to a new worker for
    seconds."""
    settings = StoreSettings(node_id="node-1", arena_mb=8, arena_dir=str(tmp_path))
    of_node, of_worker = HeardMembership(membership), HeardMembership(membership)
    node = StoreNodeService(settings, index=MemoryIndex(membership), membership=of_node, clock=CLOCK)
    record = await node.start()
    try:
        assert of_node.announced[:1] == [record]
        await make_worker("w", members=of_worker)
        first = of_worker.announced[0]
        assert (first.store_node, first.store_node_near) == ("node-1", True)
    finally:
        await node.stop(remove_arena=True)


async def test_a_worker_says_at_once_that_a_store_node_has_come_or_gone(make_worker, membership):
    """Fails when others hear of it by the next record only, seconds later."""
    heard = HeardMembership(membership)
    worker = (await make_worker("w", members=heard)).worker
    node = StoreNodeRecord("node-1", 1, host="far", address="127.0.0.1:1", arena_path="/none", pid=1)
    for act, told in ((membership.announce(node, ttl_ms=600_000), "node-1"), (membership.withdraw(node), "")):
        await act
        await worker._node_table.refresh()
        for _ in range(20):  # steps of the loop: no time passes
            await asyncio.sleep(0)
        assert heard.announced[-1].store_node == told


async def test_eight_prefills_of_one_cold_prompt_on_two_workers_store_it_once(store_node, make_worker, prompts):
    """Fails when publishing the same block twice is an error, a second copy, or a lost reference."""
    workers = [await make_worker("p1"), await make_worker("p2")]
    token_ids = prompts(6 * B, salt=5)
    results = await asyncio.gather(*(workers[number % 2].prefill(token_ids) for number in range(8)))
    assert {result.published_blocks for result in results} == {6}
    assert store_node.node.stat().committed_blocks == 6
    reader = await make_worker("reader")
    reply = await reader.decode(token_ids)
    assert reply.cached.by_source()[CacheSource.SHARED_MEMORY] == 5 * B
    assert reply.same_answer_as(await reader.cold(token_ids))
