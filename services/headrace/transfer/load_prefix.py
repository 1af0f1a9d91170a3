"""Loading a prefix: from the store nodes that hold it into blocks of this worker's pool, each block verified.

Owns the order in which sources are asked (the host's own node through shared memory, then the hinted nodes over gRPC),
the overlap of receiving and copying, and the rule that only the unbroken leading run of verified blocks counts.
Whatever goes wrong with the cache ends the load early, never the request: what is missing is computed. Knows ports
only; what a header must say is `blocks/block_codec.py`'s, how bytes lie in the pool is the engine's.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from headrace.blocks.block_codec import verify_header
from headrace.core.block import BlockHeader, CacheSource, HashedPrompt, KvLayout
from headrace.core.clock import Deadline
from headrace.core.errors import BlockCorrupt, CacheFault, DeadlineExceeded, StoreUnavailable
from headrace.core.limits import (
    LEASE_BLOCKS_MAX,
    LOAD_AHEAD_BYTES_MAX,
    LOAD_NODES_MAX,
    LOAD_PREFIX_TIMEOUT_MS,
    RELEASE_TIMEOUT_MS,
)
from headrace.core.ports import BlockSource, Lease, PrefixPool, StoreNodes
from headrace.core.retention import KEEP, Retention
from headrace.transfer.run_in_thread import finish, run_in_thread


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Which blocks to load, and from where they may come."""

    first_block: int  # blocks [0, first_block) are valid in the pool already
    end_block: int  # blocks [first_block, end_block) are wanted
    sources: frozenset[CacheSource]
    hint_nodes: tuple[str, ...] = ()  # node ids believed to hold the prefix, best first
    retention: Retention = KEEP  # what this use of the blocks asks for


@dataclass(frozen=True, slots=True)
class LoadedPrefix:
    """Blocks [first_block, first_block + num_blocks) are verified and in the pool; `sources` has one entry for each.

    `faults` is what went wrong with the cache on the way, for the counters; the blocks that count are good regardless.
    """

    num_blocks: int
    sources: tuple[CacheSource, ...]
    faults: tuple[CacheFault, ...] = ()


async def load_prefix(
    prompt: HashedPrompt,
    block_ids: Sequence[int],
    *,
    plan: LoadPlan,
    layout: KvLayout,
    nodes: StoreNodes,
    pool: PrefixPool,
    deadline: Deadline,
) -> LoadedPrefix:
    """Copy blocks [plan.first_block, plan.end_block) of the prompt into the pool, as far as they verify.

    block_ids: the pool's block for each block index, owned by the caller and covering [0, plan.end_block).
    A node that has gone, or no longer holds what was hinted, is passed over for the next. The first block whose header
    or checksum is in doubt ends the whole load. Ends within LOAD_PREFIX_TIMEOUT_MS and `deadline` with what was loaded
    until then. Every lease is released on every path, and no thread writes to the pool after this returns or raises.
    Raises nothing of the cache; cancellation passes through.
    """
    assert plan.first_block >= 0
    assert plan.end_block <= min(len(prompt.chain), len(block_ids))
    load = _Load(prompt=prompt, block_ids=block_ids, plan=plan, layout=layout, pool=pool)
    load.next_block = plan.first_block
    sources: list[CacheSource] = []
    faults: list[CacheFault] = []
    limit = deadline.capped(LOAD_PREFIX_TIMEOUT_MS / 1000)
    for kind, source in _sources_in_order(plan, nodes):
        if load.next_block >= plan.end_block:
            break
        started_at = load.next_block
        try:
            async with limit.scope("load a prefix"):
                await _load_from(source, load, deadline=limit)
        except CacheFault as fault:
            faults.append(fault)
        except DeadlineExceeded as late:
            faults.append(StoreUnavailable("(any)", late.what))
        sources += [kind] * (load.next_block - started_at)
        if faults and isinstance(faults[-1], BlockCorrupt):
            break  # somebody stores wrong bytes under this prefix: computing is the only answer not to be doubted
        if limit.left_s() == 0:
            break
    return LoadedPrefix(num_blocks=len(sources), sources=tuple(sources), faults=tuple(faults))


@dataclass(slots=True)
class _Load:
    """One load under way: blocks before `next_block` are good."""

    prompt: HashedPrompt
    block_ids: Sequence[int]
    plan: LoadPlan
    layout: KvLayout
    pool: PrefixPool
    next_block: int = field(default=0)

    @property
    def end_block(self) -> int:
        """Blocks before it are wanted."""
        return self.plan.end_block


def _sources_in_order(plan: LoadPlan, nodes: StoreNodes) -> Iterator[tuple[CacheSource, BlockSource]]:
    """The host's own node first, then hinted ones; a generator, so that a node is only looked up when it is needed."""
    asked = ""
    if CacheSource.SHARED_MEMORY in plan.sources and (local := nodes.local()) is not None:
        asked = nodes.sink_node_id()  # with a local node, the sink is that node
        yield CacheSource.SHARED_MEMORY, local
    if CacheSource.GRPC in plan.sources:
        for node_id in plan.hint_nodes[:LOAD_NODES_MAX]:
            if node_id != asked and (remote := nodes.remote(node_id)) is not None:
                yield CacheSource.GRPC, remote


async def _load_from(source: BlockSource, load: _Load, *, deadline: Deadline) -> None:
    """Lease, copy, release until this node has no more of the run. Raises CacheFault; `load.next_block` stays true."""
    chain = load.prompt.chain[: load.end_block]
    while load.next_block < load.end_block:
        lease = await source.lease_prefix(
            load.prompt.namespace,
            chain,
            first_block=load.next_block,
            deadline=deadline,
            retention=load.plan.retention,
        )
        if not lease.headers:
            return
        leased_from = load.next_block
        suspects: tuple[int, ...] = ()
        try:
            await _copy_leased(source, lease, load, deadline=deadline)
        except BlockCorrupt:
            suspects = (load.next_block - leased_from,)
            raise
        finally:
            await finish(_release(source, lease, suspects))
        if len(lease.headers) < LEASE_BLOCKS_MAX:
            return


async def _copy_leased(source: BlockSource, lease: Lease, load: _Load, *, deadline: Deadline) -> None:
    """Fetch the leased blocks whose headers hold, and copy each while the next ones arrive."""
    headers, doubt = _verified_headers(lease, load)
    copier = _Copier(load, headers)
    try:
        if headers:
            async with aclosing(source.fetch_blocks(lease, deadline=deadline)) as payloads:
                await _copy_arriving(payloads, copier, len(headers))
    except CacheFault:
        await copier.finish()  # what was delivered before a fault stays good
        raise
    finally:
        await copier.stop()
    if doubt is not None:
        raise doubt


def _verified_headers(lease: Lease, load: _Load) -> tuple[list[BlockHeader], BlockCorrupt | None]:
    """The leading headers that say exactly what this prompt expects, and why the next one does not."""
    headers: list[BlockHeader] = []
    for index, header in enumerate(lease.headers, start=load.next_block):
        if index >= load.end_block:
            break
        try:
            verify_header(
                header,
                namespace=load.prompt.namespace,
                block_hash=load.prompt.chain[index],
                parent_hash=load.prompt.parent_of(index),
                position=index,
                token_ids=load.prompt.block_token_ids(index),
                layout=load.layout,
            )
        except BlockCorrupt as doubt:
            return headers, doubt
        headers.append(header)
    return headers, None


async def _copy_arriving(payloads: AsyncIterator[memoryview], copier: "_Copier", num_blocks: int) -> None:
    async for payload in payloads:
        await copier.add(payload)
        num_blocks -= 1
        if num_blocks == 0:
            break
    await copier.finish()


class _Copier:
    """Copies payloads into the pool in order, in a thread, while further ones arrive.

        loop    | recv 0 | recv 1 | recv 2 | recv 3 |
        thread           | copy 0 | copy 1, 2   | copy 3

    Whatever arrived during one copy is the next copy's batch: a slow source gets one hop per block and full overlap, a
    mapped arena gets a few hops for a whole prompt. At most LOAD_AHEAD_BYTES_MAX wait (one block at least).
    """

    def __init__(self, load: _Load, headers: Sequence[BlockHeader]) -> None:
        self._load = load
        self._headers = headers
        self._first_block = load.next_block
        self._waiting: list[memoryview] = []
        self._num_started = 0  # of `headers`
        self._copying: asyncio.Task[list[int]] | None = None

    async def add(self, payload: memoryview) -> None:
        """Take one more payload. Raises BlockCorrupt when one before it did not match its checksum."""
        self._waiting.append(payload)
        waiting_bytes = len(self._waiting) * self._load.layout.block_bytes
        if self._copying is None or self._copying.done() or waiting_bytes >= LOAD_AHEAD_BYTES_MAX:
            await self._settle()
            self._start()

    async def finish(self) -> None:
        """Copy and check what still waits."""
        await self._settle()
        if self._waiting:
            self._start()
            await self._settle()

    async def stop(self) -> None:
        """Drop what waits and let the copy under way end: the pool's blocks go back to the caller after this."""
        self._waiting = []
        if self._copying is not None:
            await self._copying

    def _start(self) -> None:
        batch, self._waiting = self._waiting, []
        first = self._first_block + self._num_started
        self._num_started += len(batch)
        block_ids = self._load.block_ids[first : first + len(batch)]
        self._copying = asyncio.ensure_future(run_in_thread(_write_blocks, self._load.pool, block_ids, batch))

    async def _settle(self) -> None:
        """Wait for the copy under way; extend the run by what matches, and refuse the first block that does not."""
        if self._copying is None:
            return
        digests, self._copying = await self._copying, None
        for digest in digests:
            header = self._headers[self._load.next_block - self._first_block]
            if digest != header.payload_xxh3:
                raise BlockCorrupt(header.block_hash, "checksum of the payload")
            self._load.next_block += 1


def _write_blocks(pool: PrefixPool, block_ids: Sequence[int], payloads: Sequence[memoryview]) -> list[int]:
    return [pool.write_block(block_id, payload) for block_id, payload in zip(block_ids, payloads, strict=True)]


async def _release(source: BlockSource, lease: Lease, suspects: tuple[int, ...]) -> None:
    """Give the lease back; a node that does not answer lets it expire."""
    try:
        async with asyncio.timeout(RELEASE_TIMEOUT_MS / 1000):
            await source.release(lease, suspects=suspects)
    except (TimeoutError, CacheFault):
        return
