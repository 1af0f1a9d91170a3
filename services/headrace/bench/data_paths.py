"""The ways for a run of blocks to reach one destination buffer, each timed alike.

Owns what is copied where, so that the columns can be compared. Every way ends with the run's bytes in the same
destination, written block by block by one thread:

    memcpy   private memory -> destination                                              1 copy
    tcp      sender's memory -> kernel -> destination (recv_into)                       2 copies, kernel in between
    redis    server's memory -> kernel -> bytes object made by hiredis -> destination
    grpc     arena -> message -> kernel -> message (one bytes object) -> destination    a store node's process sends
    shm      arena, mapped here -> destination                                          1 copy
    loaded   what a worker does with either: `load_prefix` into a paged pool, where each block is copied, and its header
             and the checksum of the pool's own bytes are verified

`grpc`, `shm` and `loaded` include leasing and releasing. None knows how often it is measured.
"""

import socket
import time
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from headrace.bench.raw_sender import REQUEST
from headrace.core.block import BlockHeader, CacheSource, HashedPrompt, KvLayout, payload_digest
from headrace.core.clock import Clock, Deadline
from headrace.core.errors import BlockCorrupt, BlockMissing, StoreUnavailable
from headrace.core.ports import BlockSource, PrefixPool, Reservation
from headrace.transfer.fetch_blocks import GrpcStore
from headrace.transfer.load_prefix import LoadPlan, load_prefix
from headrace.transfer.shared_memory import SharedMemoryStore

# One pass over a run takes well under a second; whoever waits longer waits for something dead.
PASS_TIMEOUT_S = 10.0
# Blocks reserved at once: their reservations must not expire while they are filled.
_RESERVE_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class BlockRun:
    """A prompt's blocks of one size, and their payloads side by side in private memory."""

    layout: KvLayout
    prompt: HashedPrompt
    payloads: memoryview

    @property
    def block_bytes(self) -> int:
        """Payload bytes of one block."""
        return self.layout.block_bytes

    @property
    def num_blocks(self) -> int:
        """Blocks in the run."""
        return len(self.prompt.chain)

    def payload(self, index: int) -> memoryview:
        """One block's payload."""
        return self.payloads[index * self.block_bytes : (index + 1) * self.block_bytes]


# Copies a run into the destination; returns the seconds that it took.
Move = Callable[[BlockRun, memoryview], Awaitable[float]]


async def store_run(run: BlockRun, sink: SharedMemoryStore, clock: Clock) -> None:
    """Have the run in the store node. Raises CacheFault, StoreUnavailable when the node has no room for it."""
    for first in range(0, run.num_blocks, _RESERVE_BLOCKS):
        indices = range(first, min(first + _RESERVE_BLOCKS, run.num_blocks))
        deadline = Deadline.after(PASS_TIMEOUT_S, clock)
        outcomes = await sink.reserve([_header(run, index, clock) for index in indices], deadline=deadline)
        for index, outcome in zip(indices, outcomes, strict=True):
            if not isinstance(outcome, Reservation):
                raise StoreUnavailable(sink.record.node_id, f"did not take a block: {type(outcome).__name__}")
            outcome.buffer[:] = run.payload(index)
            await sink.commit(outcome, payload_xxh3=payload_digest(run.payload(index)), deadline=deadline)


def _header(run: BlockRun, index: int, clock: Clock) -> BlockHeader:
    return BlockHeader(
        namespace=run.prompt.namespace,
        block_hash=run.prompt.chain[index],
        parent_hash=run.prompt.parent_of(index),
        position=index,
        token_ids=run.prompt.block_token_ids(index),
        layout=run.layout,
        payload_bytes=run.block_bytes,
        payload_xxh3=0,
        producer="bench",
        created_unix_ms=clock.unix_ms(),
    )


async def copy_in_memory(run: BlockRun, destination: memoryview) -> float:
    """memcpy: block by block from private memory."""
    started_s, size = time.perf_counter(), run.block_bytes
    for at in range(0, run.num_blocks * size, size):
        destination[at : at + size] = run.payloads[at : at + size]
    return time.perf_counter() - started_s


class RawLoopback:
    """tcp: one connection to `raw_sender`, which has the same payloads."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection

    async def __call__(self, run: BlockRun, destination: memoryview) -> float:
        """Ask for the whole run once and receive it in place. Blocks."""
        wanted, filled = run.num_blocks * run.block_bytes, 0
        started_s = time.perf_counter()
        self._connection.sendall(REQUEST.pack(wanted, run.block_bytes))
        while filled < wanted:
            received = self._connection.recv_into(destination[filled:wanted])
            if not received:
                raise StoreUnavailable("raw sender", "it closed the connection")
            filled += received
        return time.perf_counter() - started_s


class RedisGet:
    """redis: one GET per block, one after another on one connection. Any other client waits for its reply as well."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def store(self, run: BlockRun) -> None:
        """Have the run in the server. Blocks."""
        for index, block_hash in enumerate(run.prompt.chain):
            self._client.set(b"bench:" + block_hash, run.payload(index))

    async def __call__(self, run: BlockRun, destination: memoryview) -> float:
        """GET every block. Blocks. Raises BlockMissing when the server evicted one."""
        size = run.block_bytes
        started_s = time.perf_counter()
        for index, block_hash in enumerate(run.prompt.chain):
            value = self._client.get(b"bench:" + block_hash)
            if value is None:
                raise BlockMissing(block_hash)
            destination[index * size : (index + 1) * size] = value
        return time.perf_counter() - started_s


class StoreRead:
    """grpc or shm: lease the run, copy each payload as it comes, release."""

    def __init__(self, store: GrpcStore | SharedMemoryStore, clock: Clock) -> None:
        self._store = store
        self._clock = clock

    async def __call__(self, run: BlockRun, destination: memoryview) -> float:
        """The whole run under one lease."""
        return await self._read(run, destination, range(run.num_blocks))

    async def read_one(self, run: BlockRun, destination: memoryview, index: int) -> float:
        """One block from the middle of the run, as a reader who has those before it: its latency."""
        return await self._read(run, destination, range(index, index + 1))

    async def _read(self, run: BlockRun, destination: memoryview, wanted: range) -> float:
        size, at = run.block_bytes, wanted.start * run.block_bytes
        started_s = time.perf_counter()
        deadline = Deadline.after(PASS_TIMEOUT_S, self._clock)
        chain = run.prompt.chain[: wanted.stop]
        lease = await self._store.lease_prefix(run.prompt.namespace, chain, first_block=wanted.start, deadline=deadline)
        try:
            if len(lease.headers) != len(wanted):
                raise BlockMissing(chain[wanted.start + len(lease.headers)])
            async with aclosing(self._store.fetch_blocks(lease, deadline=deadline)) as payloads:
                async for payload in payloads:
                    destination[at : at + size] = payload
                    at += size
        finally:
            await self._store.release(lease)
        return time.perf_counter() - started_s


class WorkerLoad:
    """loaded: the real `load_prefix`, into a pool of the run's layout. Checks the data by itself."""

    def __init__(self, store: BlockSource, node_id: str, *, pools: dict[int, PrefixPool], clock: Clock) -> None:
        """pools: by block bytes; each with room for one run."""
        self._nodes = _OneNode(store, node_id, is_local=isinstance(store, SharedMemoryStore))
        self._pools = pools
        self._clock = clock
        self._node_id = node_id

    async def __call__(self, run: BlockRun, destination: memoryview) -> float:
        """Load every block of the run. `destination` is not used. Raises the first fault when one was not loaded."""
        pool, source = self._pools[run.block_bytes], self._nodes.kind
        started_s = time.perf_counter()
        loaded = await load_prefix(
            run.prompt,
            range(run.num_blocks),
            plan=LoadPlan(0, run.num_blocks, frozenset({source}), hint_nodes=(self._node_id,)),
            layout=run.layout,
            nodes=self._nodes,
            pool=pool,
            deadline=Deadline.after(PASS_TIMEOUT_S, self._clock),
        )
        seconds = time.perf_counter() - started_s
        if loaded.num_blocks < run.num_blocks:
            raise loaded.faults[0] if loaded.faults else BlockMissing(run.prompt.chain[loaded.num_blocks])
        return seconds


def check_blocks(run: BlockRun, destination: memoryview, indices: range) -> None:
    """Raises BlockCorrupt when the destination has other bytes than the run."""
    size = run.block_bytes
    for index in indices:
        if payload_digest(destination[index * size : (index + 1) * size]) != payload_digest(run.payload(index)):
            raise BlockCorrupt(run.prompt.chain[index], "the measured copy has other bytes than were stored")


class _OneNode:
    """StoreNodes of exactly one node, reached in exactly one way."""

    def __init__(self, store: BlockSource, node_id: str, *, is_local: bool) -> None:
        self._store = store
        self._node_id = node_id
        self._is_local = is_local
        self.kind = CacheSource.SHARED_MEMORY if is_local else CacheSource.GRPC

    def local(self) -> BlockSource | None:
        return self._store if self._is_local else None

    def remote(self, node_id: str) -> BlockSource | None:
        return None if self._is_local else self._store

    def sink(self) -> None:
        return None

    def sink_at(self, node_id: str) -> None:
        return None

    def local_node_id(self) -> str:
        return self._node_id if self._is_local else ""

    def sink_node_id(self) -> str:
        return ""
