"""Where a worker publishes while nodes drain: records of two nodes, one on the worker's own host."""

from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.blocks.host_arena import HostArena, arena_path, host_id, open_arena
from headrace.core.clock import SystemClock
from headrace.core.members import StoreNodeRecord
from headrace.index.memory_index import MemoryMembership
from headrace.transfer.store_nodes import StoreNodeTable

CLOCK = SystemClock()
Announce = Callable[[StoreNodeRecord], Awaitable[StoreNodeTable]]


@pytest.fixture
def arena(tmp_path: Path) -> HostArena:
    return open_arena(arena_path(tmp_path, "near"), 1 << 20)


@pytest.fixture
async def announce(tmp_path: Path) -> AsyncIterator[Announce]:
    """announce(record): one more record (or a newer one) that a worker on this host sees; gives its table."""
    membership = MemoryMembership(CLOCK)
    table = StoreNodeTable(host=host_id(tmp_path), membership=membership, clock=CLOCK, report_fault=lambda fault: None)

    async def announced(record: StoreNodeRecord) -> StoreNodeTable:
        await membership.announce(record, ttl_ms=60_000)
        await table.refresh()
        return table

    yield announced
    await table.stop()


def record_of(node_id: str, tmp_path: Path, arena: HostArena, *, near: bool) -> StoreNodeRecord:
    return StoreNodeRecord(
        node_id=node_id,
        incarnation=arena.incarnation,
        host=host_id(tmp_path) if near else "elsewhere",
        address="127.0.0.1:1",
        arena_path=str(arena_path(tmp_path, node_id)),
        pid=1,
    )


async def test_a_worker_publishes_elsewhere_while_its_own_node_drains(announce, arena, tmp_path):
    """Fails when blocks are offered to a node that refuses them all, or what it holds is not read any more."""
    near = record_of("near", tmp_path, arena, near=True)
    await announce(near)
    table = await announce(record_of("far", tmp_path, arena, near=False))
    own = table.local()
    assert table.sink() is own is not None
    await announce(replace(near, draining=True))
    assert (table.sink_node_id(), table.sink()) == ("far", table.remote("far"))
    assert table.local() is own, "a reader's mapping went with the order to drain"
    await announce(near)
    assert table.sink() is own


async def test_with_none_but_a_draining_node_nothing_is_published(announce, arena, tmp_path):
    """Fails when the only node is used as a sink although it drains."""
    table = await announce(replace(record_of("far", tmp_path, arena, near=False), draining=True))
    assert (table.sink(), table.sink_node_id()) == (None, "")
    assert table.remote("far") is not None
