"""Loading a prefix: from the store nodes that hold it into blocks of this worker's pool, each block verified.

Owns who is asked (the host's own node through shared memory, and the hinted nodes over gRPC, all at the same time), the
overlap of receiving and copying, and the rule that only the unbroken leading run of verified blocks counts. Who
delivers which blocks is `split_run.py`'s. Whatever goes wrong with the cache ends the load early, never the request:
what is missing is computed. Knows ports only; what a header must say is `blocks/block_codec.py`'s, how bytes lie in the
pool is the engine's.
"""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Protocol

from headrace.blocks.block_codec import verify_header
from headrace.blocks.two_parts import block_word
from headrace.core.block import BlockHeader, CacheSource, HashedPrompt, KvLayout
from headrace.core.clock import Deadline
from headrace.core.errors import BlockCorrupt, CacheFault, DeadlineExceeded, StoreUnavailable
from headrace.core.limits import (
    LEASE_BLOCKS_MAX,
    LOAD_AHEAD_BYTES_MAX,
    LOAD_NODES_MAX,
    LOAD_PIECE_BYTES,
    LOAD_PREFIX_TIMEOUT_MS,
    RELEASE_TIMEOUT_MS,
)
from headrace.core.overtake_limits import OVERTAKE_LOOK_MS, OVERTAKE_WATCH_MS
from headrace.core.ports import BlockSource, Lease, LeaseTerms, PrefixPool, StoreNodes
from headrace.core.retention import KEEP, Retention
from headrace.transfer.run_in_thread import finish, run_in_thread, until_done
from headrace.transfer.split_run import Holder, Piece, SplitRun
from headrace.transfer.timed_nodes import Way


class LoadBudget(Protocol):
    """When computing the rest is the better way than loading it: a TransferBudget, or one of another measure."""

    def left_s(self, *, seconds: float, loaded_tokens: int) -> float:
        """As TransferBudget.left_s."""
        ...

    def is_over(self, *, seconds: float, loaded_tokens: int, arrived_tokens: int) -> bool:
        """As TransferBudget.is_over."""
        ...


@dataclass(frozen=True, slots=True)
class LoadPlan:
    """Which blocks to load, and from where they may come."""

    first_block: int  # blocks [0, first_block) are valid in the pool already
    end_block: int  # blocks [first_block, end_block) are wanted
    sources: frozenset[CacheSource]
    hint_nodes: tuple[str, ...] = ()  # node ids believed to hold the prefix, best first
    retention: Retention = KEEP  # what this use of the blocks asks for
    budget: LoadBudget | None = None  # when to compute the rest instead; None: never sooner than time ends
    wait_s: float = 0.0  # how long each node is to wait for its first block while that is not there; costs no budget
    whole_from: int = 0  # of blocks before this one the wide part only, where payloads have two

    @property
    def lease_terms(self) -> LeaseTerms:
        """What is asked of each node with the blocks."""
        return LeaseTerms(self.retention, wait_s=self.wait_s, whole_from=self.whole_from)


@dataclass(frozen=True, slots=True)
class LoadedPrefix:
    """Blocks [first_block, first_block + num_blocks) are verified and in the pool; `sources` has one entry for each.

    `faults` is what went wrong with the cache on the way, for the counters; the blocks that count are good regardless.
    `spent_s` is how long it took from the moment when the first block could be had.
    """

    num_blocks: int
    sources: tuple[CacheSource, ...]
    faults: tuple[CacheFault, ...] = ()
    spent_s: float = 0.0


async def load_prefix(
    prompt: HashedPrompt,
    block_ids: Sequence[int],
    *,
    plan: LoadPlan,
    layout: KvLayout,
    nodes: StoreNodes,
    pool: PrefixPool,
    deadline: Deadline,
    piece_bytes: int = LOAD_PIECE_BYTES,
) -> LoadedPrefix:
    """Copy blocks [plan.first_block, plan.end_block) of the prompt into the pool, as far as they verify.

    block_ids: the pool's block for each block index, owned by the caller and covering [0, plan.end_block).
    piece_bytes: what one of several remote nodes delivers at once; a parameter for tests.
    What this host's node does not have is shared out among the hinted nodes, piece by piece from the front. What a node
    that is gone, too slow, or without what was hinted leaves undone, another one does. At the first block whose header
    or checksum is in doubt the run ends, since somebody stores wrong bytes under this prefix: computing is the only
    answer not to be doubted. Ends when plan.budget is used up, LOAD_PREFIX_TIMEOUT_MS or `deadline` is over, with what
    was loaded until then. Every lease is released on every path, and no thread writes to the pool after this returns or
    raises.
    Raises nothing of the cache; cancellation passes through.
    """
    assert plan.first_block >= 0
    assert plan.end_block <= min(len(prompt.chain), len(block_ids))
    limit = deadline.capped(LOAD_PREFIX_TIMEOUT_MS / 1000)
    piece_blocks = max(1, piece_bytes // layout.block_bytes)
    run = SplitRun(plan.first_block, plan.end_block, piece_blocks=piece_blocks, clock=deadline.clock)
    load = _Load(prompt=prompt, block_ids=block_ids, plan=plan, layout=layout, pool=pool, deadline=limit, run=run)
    holders = _holders(plan, nodes, piece_blocks)
    try:
        async with limit.scope("load a prefix"), asyncio.TaskGroup() as tasks:
            for holder in holders:
                run.join(holder)
            delivering = [tasks.create_task(_deliver(holder, load)) for holder in holders]
            if plan.budget is not None and delivering:
                tasks.create_task(_keep_budget(plan.budget, load, delivering))
    except DeadlineExceeded as late:
        load.faults.append(StoreUnavailable("(any)", late.what))
    sources = run.unbroken_sources()
    spent_s = 0.0 if load.granted_s is None else limit.clock.now_s() - load.granted_s
    return LoadedPrefix(num_blocks=len(sources), sources=sources, faults=tuple(load.faults), spent_s=spent_s)


@dataclass(slots=True)
class _Load:
    """One load under way."""

    prompt: HashedPrompt
    block_ids: Sequence[int]
    plan: LoadPlan
    layout: KvLayout
    pool: PrefixPool
    deadline: Deadline
    run: SplitRun
    faults: list[CacheFault] = field(default_factory=list)
    ahead_bytes: int = 0  # received from any holder, and not yet in the pool
    granted_s: float | None = None  # when the first lease of a block came
    ahead_blocks: int = 0


def _holders(plan: LoadPlan, nodes: StoreNodes, piece_blocks: int) -> list[Holder]:
    """The host's own node first, then the hinted ones, best first.

    The own node is given all that it has: nothing is as fast as memory. So is a node that is the only one to be asked.
    """
    holders = []
    asked = ""
    if CacheSource.SHARED_MEMORY in plan.sources and (local := nodes.local()) is not None:
        asked = nodes.local_node_id()
        holders.append(Holder(CacheSource.SHARED_MEMORY, asked, local, LEASE_BLOCKS_MAX, plan.end_block))
    hints = plan.hint_nodes[:LOAD_NODES_MAX] if CacheSource.GRPC in plan.sources else ()
    remotes = {node_id: remote for node_id in hints if node_id != asked and (remote := nodes.remote(node_id))}
    at_once = LEASE_BLOCKS_MAX if len(remotes) == 1 else min(piece_blocks, LEASE_BLOCKS_MAX)
    for node_id, remote in remotes.items():
        holders.append(Holder(CacheSource.GRPC, node_id, remote, at_once, plan.end_block))
    return holders


def asked_ways(nodes: StoreNodes, sources: frozenset[CacheSource], hint_nodes: Sequence[str]) -> list[Way]:
    """The store nodes that a load with these hints would ask, and how."""
    asked = nodes.local_node_id() if CacheSource.SHARED_MEMORY in sources else ""
    hints = hint_nodes[:LOAD_NODES_MAX] if CacheSource.GRPC in sources else ()
    near = [(asked, CacheSource.SHARED_MEMORY)] if asked else []
    return [*near, *((node_id, CacheSource.GRPC) for node_id in hints if node_id != asked)]


async def _deliver(holder: Holder, load: _Load) -> None:
    """Load pieces from one holder until there is nothing that it could do. Raises only cancellation."""
    try:
        while (piece := await load.run.claim(holder)) is not None:
            try:
                await _load_piece(piece, load)
            except BlockCorrupt as doubt:
                load.faults.append(doubt)
                load.run.end_at(piece.next_block)
                return
            except CacheFault as fault:
                load.faults.append(fault)
                return
            except DeadlineExceeded as late:
                load.faults.append(StoreUnavailable("(any)", late.what))
                return
            except asyncio.CancelledError:
                if piece.is_taken:
                    load.faults.append(StoreUnavailable(holder.node_id, "was too slow; others load the rest"))
                raise
    finally:
        load.run.leave(holder)


async def _keep_budget(budget: LoadBudget, load: _Load, delivering: Sequence["asyncio.Task[None]"]) -> None:
    """End the load at what is verified as soon as computing the rest is the better way.

    Of the time between two looks no more counts than the looks were to be apart, and OVERTAKE_WATCH_MS: when they come
    later than that, it was our own loop that stood still, and it would have done so while computing. Nor does the time
    count in which blocks are waited for that are being computed elsewhere.
    """
    clock, watch_s, block_tokens = load.deadline.clock, OVERTAKE_WATCH_MS / 1000, load.layout.block_tokens
    seconds, looked_s = 0.0, clock.now_s()
    while True:
        loaded_tokens = len(load.run.unbroken_sources()) * block_tokens
        num_arrived = load.run.num_delivered + load.ahead_blocks
        if budget.is_over(seconds=seconds, loaded_tokens=loaded_tokens, arrived_tokens=num_arrived * block_tokens):
            load.faults.append(StoreUnavailable("(any)", "computing the rest was faster than loading it"))
            for task in delivering:
                task.cancel()  # what has been received is copied and verified yet
            return
        left_s = budget.left_s(seconds=seconds, loaded_tokens=loaded_tokens)
        apart_s = max(min(watch_s, left_s), OVERTAKE_LOOK_MS / 1000)
        _, pending = await asyncio.wait(delivering, timeout=apart_s)
        if not pending:
            return
        now_s = clock.now_s()
        if load.granted_s is not None or not load.plan.wait_s:
            seconds += min(now_s - looked_s, apart_s + watch_s)
        looked_s = now_s


async def _load_piece(piece: Piece, load: _Load) -> None:
    """Lease, copy, release. Raises CacheFault; what was delivered before it counts."""
    source = piece.holder.source
    lease: Lease | None = None
    suspects: tuple[int, ...] = ()
    try:
        lease = await source.lease_prefix(
            load.prompt.namespace,
            load.prompt.chain[: piece.end_block],
            first_block=piece.first_block,
            deadline=load.deadline,
            terms=load.plan.lease_terms,
        )
        load.run.leased(piece, len(lease.headers))
        if lease.headers:
            load.granted_s = load.deadline.clock.now_s() if load.granted_s is None else load.granted_s
            await _copy_leased(lease, piece, load)
    except BlockCorrupt:
        suspects = (piece.next_block - piece.first_block,)
        raise
    finally:
        load.run.give_back(piece)  # before the release: others need not wait for that
        if lease is not None and lease.headers:
            await finish(release_lease(source, lease, suspects))


async def _copy_leased(lease: Lease, piece: Piece, load: _Load) -> None:
    """Fetch the leased blocks whose headers hold, and copy each while the next ones arrive."""
    headers, doubt = _verified_headers(lease, piece, load)
    if doubt is not None:
        load.run.end_at(piece.first_block + len(headers))
    copier = _Copier(load, piece, headers)
    try:
        if headers:
            async with aclosing(piece.holder.source.fetch_blocks(lease, deadline=load.deadline)) as payloads:
                await _copy_arriving(payloads, copier, piece)
    finally:
        await copier.finish()  # what was received before a fault or a cancellation is good
    doubt = copier.doubt or doubt
    if doubt is not None:
        raise doubt


def _verified_headers(lease: Lease, piece: Piece, load: _Load) -> tuple[list[BlockHeader], BlockCorrupt | None]:
    """The leading headers that say exactly what this prompt expects, and why the next one does not."""
    headers: list[BlockHeader] = []
    for index, header in enumerate(lease.headers[: piece.end_block - piece.first_block], start=piece.first_block):
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


async def _copy_arriving(payloads: AsyncIterator[memoryview], copier: "_Copier", piece: Piece) -> None:
    """Until the piece ends, which it may do earlier than was leased."""
    async for payload in payloads:
        await copier.add(payload)
        if copier.doubt is not None or copier.next_block >= piece.end_block:
            break


class _Copier:
    """Copies one piece's payloads into the pool in order, in a thread, while further ones arrive.

        loop    | recv 0 | recv 1 | recv 2 | recv 3 |
        thread           | copy 0 | copy 1, 2   | copy 3

    Whatever arrived during one copy is the next copy's batch: a slow source gets one hop per block and full overlap, a
    mapped arena gets a few hops for a whole prompt. At most LOAD_AHEAD_BYTES_MAX wait in all copiers of a load together
    (and one block more in each). `doubt` says which block did not match its checksum; nothing after it is delivered.
    """

    def __init__(self, load: _Load, piece: Piece, headers: Sequence[BlockHeader]) -> None:
        self.next_block = piece.first_block  # of the next payload to come
        self.doubt: BlockCorrupt | None = None
        self._load = load
        self._piece = piece
        self._headers = headers
        self._waiting: list[memoryview] = []
        self._batch: list[memoryview] = []  # what is being copied
        self._copying: asyncio.Task[list[int]] | None = None

    async def add(self, payload: memoryview) -> None:
        """Take one more payload."""
        self.next_block += 1
        self._waiting.append(payload)
        self._load.ahead_bytes += payload.nbytes
        self._load.ahead_blocks += 1
        if self._copying is None or self._copying.done() or self._load.ahead_bytes >= LOAD_AHEAD_BYTES_MAX:
            await self._settle()
            if self.doubt is None:
                self._start()

    async def finish(self) -> None:
        """Copy and check what still waits; after this no thread writes to the piece's blocks. Not to be used again."""
        await self._settle()
        if self._waiting and self.doubt is None:
            self._start()
            await self._settle()
        self._no_longer_ahead(self._waiting)

    def _no_longer_ahead(self, payloads: Sequence[memoryview]) -> None:
        self._load.ahead_bytes -= sum(payload.nbytes for payload in payloads)
        self._load.ahead_blocks -= len(payloads)

    def _start(self) -> None:
        batch, self._waiting = self._waiting, []
        self._batch = batch
        block_ids = self._load.block_ids[self.next_block - len(batch) : self.next_block]
        self._copying = asyncio.ensure_future(run_in_thread(_write_blocks, self._load.pool, block_ids, batch))

    async def _settle(self) -> None:
        """Wait for the copy under way; deliver what matches, up to the first block that does not."""
        if self._copying is None:
            return
        await until_done(self._copying)  # a cancellation comes after it: the blocks are the pool's owner's then
        digests, self._copying = self._copying.result(), None
        self._no_longer_ahead(self._batch)
        for digest in digests:
            header = self._headers[self._piece.next_block - self._piece.first_block]
            two_parts = self._load.layout.near_layers > 0
            if digest != (block_word(header.block_hash) if two_parts else header.payload_xxh3):
                self.doubt = BlockCorrupt(header.block_hash, "checksum of the payload")
                return
            self._load.run.delivered(self._piece)


def _write_blocks(pool: PrefixPool, block_ids: Sequence[int], payloads: Sequence[memoryview]) -> list[int]:
    return [pool.write_block(block_id, payload) for block_id, payload in zip(block_ids, payloads, strict=True)]


async def release_lease(source: BlockSource, lease: Lease, suspects: tuple[int, ...] = ()) -> None:
    """Give the lease back; a node that does not answer lets it expire. Raises only cancellation."""
    try:
        async with asyncio.timeout(RELEASE_TIMEOUT_MS / 1000):
            await source.release(lease, suspects=suspects)
    except (TimeoutError, CacheFault):
        return
