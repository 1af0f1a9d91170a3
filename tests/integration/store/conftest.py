"""Real store nodes for tests: as a process of its own that can be killed, and inside the test's process."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headrace.config import StoreSettings
from headrace.core.clock import SystemClock
from headrace.core.members import StoreNodeRecord
from headrace.index.memory_index import MemoryIndex, MemoryMembership
from headrace.store.service import StoreNodeService
from headrace.transfer.channels import Channels
from headrace.transfer.fetch_blocks import GrpcStore
from headrace.transfer.shared_memory import SharedMemoryStore

CLOCK = SystemClock()


@dataclass
class NodeProcess:
    """`python -m headrace.store.service` under test."""

    process: asyncio.subprocess.Process
    record: StoreNodeRecord

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()

    async def terminate(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return await asyncio.wait_for(self.process.wait(), 60)


@dataclass
class Nodes:
    """Starts nodes in one directory, and ends whatever a test leaves running."""

    arena_dir: Path
    redis_url: str
    channels: Channels
    started: list[NodeProcess] = field(default_factory=list)

    async def spawn(self, *flags: str) -> asyncio.subprocess.Process:
        return await asyncio.create_subprocess_exec(
            sys.executable, "-m", "headrace.store.service", "--redis-url", self.redis_url,
            "--arena-dir", str(self.arena_dir), *flags,
            stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE, env=os.environ | {"OMP_NUM_THREADS": "1"},
        )  # fmt: skip

    async def start(self, node_id: str = "n1", *flags: str, arena_mb: int = 4) -> NodeProcess:
        process = await self.spawn("--node-id", node_id, "--arena-mb", str(arena_mb), *flags)
        assert process.stdout is not None
        line = await asyncio.wait_for(process.stdout.readline(), 60)
        if not line:
            _, log = await process.communicate()
            raise AssertionError(f"the node did not start:\n{log.decode()}")
        node = NodeProcess(process, StoreNodeRecord(**json.loads(line)))
        self.started.append(node)
        return node

    def shared_memory(self, record: StoreNodeRecord) -> SharedMemoryStore:
        return SharedMemoryStore(record, self.channels, CLOCK)

    def grpc(self, record: StoreNodeRecord) -> GrpcStore:
        return GrpcStore(record, self.channels, CLOCK)

    @asynccontextmanager
    async def inside(self, **ttls: int) -> AsyncIterator[StoreNodeService]:
        """A node in this process, on an in-memory index: for tests that look at its books."""
        membership = MemoryMembership(CLOCK)
        settings = StoreSettings(node_id="inside", arena_mb=1, arena_dir=str(self.arena_dir))
        service = StoreNodeService(settings, index=MemoryIndex(membership), membership=membership, clock=CLOCK, **ttls)
        await service.start()
        try:
            yield service
        finally:
            await service.stop(remove_arena=True)


@pytest.fixture
async def nodes(tmp_path: Path, valkey_url: str) -> AsyncIterator[Nodes]:
    found = Nodes(tmp_path, valkey_url, Channels())
    try:
        yield found
    finally:
        await found.channels.close()
        for node in found.started:
            if node.process.returncode is None:
                await node.kill()
