"""A store node whose start does not come to its end: nothing of it is left open."""

import asyncio
from pathlib import Path

import pytest
from free_ports import free_ports
from store_calls_kit import CLOCK

from headrace.config import StoreSettings
from headrace.core.members import MemberRecord
from headrace.index.memory_index import MemoryIndex, MemoryMembership
from headrace.store.service import StoreNodeService


class Stuck(MemoryMembership):
    """Members that a node cannot announce itself to, nor learns that it cannot."""

    def __init__(self) -> None:
        super().__init__(CLOCK)
        self.asked = asyncio.Event()

    async def announce(self, record: MemberRecord, *, ttl_ms: int) -> bool:
        self.asked.set()
        await asyncio.Event().wait()
        return True


class Broken(MemoryMembership):
    """Members whose announcement has a bug."""

    async def announce(self, record: MemberRecord, *, ttl_ms: int) -> bool:
        raise ValueError("a bug")


def make_service(path: Path, port: int, membership: MemoryMembership) -> StoreNodeService:
    settings = StoreSettings(node_id="starts", arena_mb=1, arena_dir=str(path), store_port=port)
    return StoreNodeService(settings, index=MemoryIndex(membership), membership=membership, clock=CLOCK)


async def can_start(path: Path, port: int) -> bool:
    """Whether the same node starts now: its arena is free, and nobody listens where it did."""
    with pytest.raises(ConnectionRefusedError):
        await asyncio.open_connection("127.0.0.1", port)
    again = make_service(path, port, MemoryMembership(CLOCK))
    record = await again.start()
    await again.stop(remove_arena=True)
    return record.address.endswith(f":{port}")


async def test_a_start_that_is_cancelled_while_it_announces_leaves_nothing_open(tmp_path: Path) -> None:
    """Fails when the arena stays locked, or a server goes on answering for a node that nobody has."""
    (port,), members = free_ports(1), Stuck()
    starting = asyncio.create_task(make_service(tmp_path, port, members).start())
    await members.asked.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert await can_start(tmp_path, port)


async def test_a_start_that_dies_of_its_announcement_leaves_nothing_open(tmp_path: Path) -> None:
    """Fails as above."""
    (port,) = free_ports(1)
    with pytest.raises(ValueError, match="a bug"):
        await make_service(tmp_path, port, Broken(CLOCK)).start()
    assert await can_start(tmp_path, port)
