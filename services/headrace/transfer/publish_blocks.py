"""Publishing: from blocks of this worker's pool into a store node. Bytes first, commit with checksum, index entry last.

`publish_blocks` is one batch, in chain order; `BlockPublisher` is the worker's bounded queue of them with one owner
task. Decoding never waits for a store node: a full queue drops the block and counts it. Whatever happens, the pool
reference that came with a block is given back exactly once. The index is not known here: the store node registers what
it committed.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.blocks.two_parts import tie_parts
from headrace.core.block import BlockHeader, KvLayout
from headrace.core.clock import Clock, Deadline
from headrace.core.errors import BlockCorrupt, CacheFault, DeadlineExceeded, StoreFull, StoreUnavailable
from headrace.core.generation import WorkerId
from headrace.core.limits import PUBLISH_BATCH_BLOCKS, PUBLISH_QUEUE_BLOCKS, RESERVATION_TTL_MS
from headrace.core.ports import AlreadyStored, BlockSink, PrefixPool, Reservation, StoreNodes
from headrace.core.retention import KEEP, Retention
from headrace.engine.event_stream import FilledBlock
from headrace.telemetry.request_context import current, within
from headrace.transfer.reservations import give_back, leading_outcomes
from headrace.transfer.run_in_thread import finish, run_in_thread


@dataclass(frozen=True, slots=True)
class Producer:
    """What all headers of one worker say alike."""

    worker_id: WorkerId
    layout: KvLayout
    clock: Clock


@dataclass(frozen=True, slots=True)
class Published:
    """The leading `num_blocks` of a batch are stored; `fault` says why the next one is not."""

    num_blocks: int
    fault: CacheFault | None = None


async def publish_blocks(
    filled: Sequence[FilledBlock],
    *,
    sink: BlockSink,
    pool: PrefixPool,
    producer: Producer,
    deadline: Deadline,
    retention: Retention = KEEP,
) -> Published:
    """Store blocks of one chain, in order, and say how many leading ones are readable (or being written by another).

    Nothing of a block is visible before its bytes are whole and its checksum is committed, and no block before its
    parent. The first block that cannot be stored ends the batch: those after it would be unreachable. Reservations that
    were not committed are given back on every path, after the thread that fills them has ended.
    """
    headers = [_header(block, producer) for block in filled]
    unused: list[Reservation] = []
    num_stored = 0
    try:
        async with deadline.scope("publish blocks"):
            outcomes = await sink.reserve(headers, deadline=deadline, retention=retention)
            assert len(outcomes) == len(headers)
            unused = [outcome for outcome in outcomes if isinstance(outcome, Reservation)]
            stored_or_reserved = leading_outcomes(outcomes)
            digests, uncoded = await run_in_thread(_fill, pool, filled, stored_or_reserved)
            for outcome, digest in zip(stored_or_reserved, digests, strict=False):
                if isinstance(outcome, Reservation):
                    await sink.commit(outcome, payload_xxh3=digest, deadline=deadline)
                    unused.remove(outcome)
                num_stored += 1
    except CacheFault as fault:
        return Published(num_stored, fault)
    except DeadlineExceeded as late:
        return Published(num_stored, StoreUnavailable("(sink)", late.what))
    finally:
        if unused:
            await finish(give_back(sink, unused))
    missing = len(filled) - num_stored
    return Published(num_stored, uncoded or (StoreFull(missing) if missing else None))


def _header(block: FilledBlock, producer: Producer) -> BlockHeader:
    return BlockHeader(
        namespace=block.namespace,
        block_hash=block.block_hash,
        parent_hash=block.parent_hash,
        position=block.position,
        token_ids=tuple(block.token_ids),
        layout=producer.layout,
        payload_bytes=producer.layout.block_bytes,
        payload_xxh3=0,
        producer=producer.worker_id,
        created_unix_ms=producer.clock.unix_ms(),
        narrowed_from=block.narrowed_from,
    )


def _fill(
    pool: PrefixPool, filled: Sequence[FilledBlock], outcomes: Sequence[Reservation | AlreadyStored]
) -> tuple[list[int], BlockCorrupt | None]:
    """Copy the reserved blocks into their slots; one digest per outcome, 0 where nothing had to be copied.

    Ends before the first block that the codec cannot keep, and says why.
    """
    digests: list[int] = []
    for block, outcome in zip(filled, outcomes, strict=False):
        try:
            digests.append(_fill_one(pool, block, outcome) if isinstance(outcome, Reservation) else 0)
        except BlockCorrupt as fault:
            return digests, BlockCorrupt(block.block_hash, fault.why)
    return digests, None


def _fill_one(pool: PrefixPool, block: FilledBlock, slot: Reservation) -> int:
    digest, layout = pool.read_block(block.block_id, slot.buffer), slot.header.layout
    return tie_parts(slot.buffer, layout, block.block_hash) if layout.near_layers else digest


class Publication:
    """The blocks that one attempt offers, in chain order, and how many of them are stored without a gap."""

    def __init__(self, retention: Retention = KEEP, *, node_id: str = "") -> None:
        """node_id: the store node that has what these blocks stand on; "": the one that this worker publishes to."""
        self.retention = retention
        self.node_id = node_id
        self.context = current()  # the request that it is for; publishing is done by a task of nobody's
        self.num_stored = 0
        self.closed = False  # takes no more: a block was dropped or refused, and those after it have no parent
        self.broken = False  # a queued block was not stored: those queued behind it are not sent
        self.num_pending = 0
        self._idle = asyncio.Event()
        self._idle.set()

    async def finished(self) -> int:
        """Wait until nothing offered is pending; the number of leading blocks that are stored."""
        await self._idle.wait()
        return self.num_stored

    def add_pending(self) -> None:
        """One more block is queued."""
        self.num_pending += 1
        self._idle.clear()

    def settle(self, num_blocks: int, *, num_stored: int) -> None:
        """`num_blocks` queued blocks are done with, of which the leading `num_stored` are stored."""
        assert 0 <= num_stored <= num_blocks <= self.num_pending
        assert not (self.broken and num_stored)
        self.num_stored += num_stored
        if num_stored < num_blocks:
            self.broken = self.closed = True
        self.num_pending -= num_blocks
        if self.num_pending == 0:
            self._idle.set()


class BlockPublisher:
    """One worker's queue of blocks to publish: bounded by PUBLISH_QUEUE_BLOCKS, emptied by one task."""

    def __init__(
        self,
        *,
        nodes: StoreNodes,
        pool: PrefixPool,
        producer: Producer,
        drop_reference: Callable[[int], None],
        report: Callable[[CacheFault], None],
    ) -> None:
        """`drop_reference(block_id)` gives a pool reference back; `report` counts a fault. Neither may block."""
        self._nodes = nodes
        self._pool = pool
        self._producer = producer
        self._drop_reference = drop_reference
        self._report = report
        self._queue: deque[tuple[Publication, FilledBlock]] = deque()
        self._work = asyncio.Event()  # set: there may be something in the queue
        self._room = asyncio.Event()  # set: the queue has room
        self._room.set()
        self._num_in_batch = 0
        self._owner: asyncio.Task[None] | None = None
        self.dropped_blocks = 0  # offered while the queue was full
        self.published_blocks = 0

    def start(self) -> None:
        """Begin to publish; call from the event loop."""
        assert self._owner is None
        self._owner = asyncio.create_task(self._publish_queued(), name="publish blocks")

    async def stop(self) -> None:
        """End the task and give every queued reference back. Idempotent."""
        owner, self._owner = self._owner, None
        if owner is None:
            return
        owner.cancel()
        await asyncio.wait([owner])
        self._drop_queued()
        if not owner.cancelled():
            owner.result()

    @property
    def num_pending(self) -> int:
        """Blocks offered and not yet settled."""
        return len(self._queue) + self._num_in_batch

    @property
    def running(self) -> bool:
        """Whether the owner task lives; what is offered while it does not is dropped."""
        return self._owner is not None and not self._owner.done()

    def offer(self, publication: Publication, block: FilledBlock) -> bool:
        """Queue a block with its pool reference, or, when there is no room, give that back and count. Never waits."""
        if publication.closed or not self.running or len(self._queue) >= PUBLISH_QUEUE_BLOCKS:
            if not publication.closed:
                self.dropped_blocks += 1
            publication.closed = True
            self._drop_reference(block.block_id)
            return False
        publication.add_pending()
        self._queue.append((publication, block))
        self._work.set()
        return True

    async def room(self) -> None:
        """Wait until the queue has room: for prefill, whose only product is what it publishes."""
        while len(self._queue) >= PUBLISH_QUEUE_BLOCKS and self.running:
            self._room.clear()
            await self._room.wait()

    async def _publish_queued(self) -> None:
        try:
            while True:
                self._work.clear()
                while self._queue:
                    publication, batch = self._next_batch()
                    with within(publication.context):
                        await self._publish(publication, batch)
                await self._work.wait()
        finally:
            self._drop_queued()

    def _drop_queued(self) -> None:
        while self._queue:
            publication, block = self._queue.popleft()
            self._settle(publication, [block], num_stored=0)
        self._room.set()

    def _next_batch(self) -> tuple[Publication, list[FilledBlock]]:
        """The first queued blocks that belong to one publication."""
        publication = self._queue[0][0]
        batch: list[FilledBlock] = []
        while self._queue and self._queue[0][0] is publication and len(batch) < PUBLISH_BATCH_BLOCKS:
            batch.append(self._queue.popleft()[1])
        self._num_in_batch = len(batch)
        self._room.set()
        return publication, batch

    async def _publish(self, publication: Publication, batch: list[FilledBlock]) -> None:
        num_stored = 0
        try:
            sink = self._nodes.sink_at(publication.node_id) if publication.node_id else self._nodes.sink()
            if sink is None:
                self._report(StoreUnavailable("(none)", "no store node takes blocks now, so this one is not kept"))
            elif not publication.broken:
                # A batch has as long as its reservations last: after that the slots may be somebody else's.
                deadline = Deadline.after(RESERVATION_TTL_MS / 1000, self._producer.clock)
                published = await publish_blocks(
                    batch,
                    sink=sink,
                    pool=self._pool,
                    producer=self._producer,
                    deadline=deadline,
                    retention=publication.retention,
                )
                num_stored = published.num_blocks
                self.published_blocks += num_stored
                if published.fault is not None:
                    self._report(published.fault)
        finally:
            self._num_in_batch = 0
            self._settle(publication, batch, num_stored=num_stored)

    def _settle(self, publication: Publication, batch: Sequence[FilledBlock], *, num_stored: int) -> None:
        for block in batch:
            self._drop_reference(block.block_id)
        publication.settle(len(batch), num_stored=num_stored)
