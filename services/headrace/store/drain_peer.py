"""One node that takes blocks of a node that is being drained, and what it has of them.

Owns the reservations on it: whatever happens, what was reserved and not committed is given back.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from headrace.core.block import BlockHeader
from headrace.core.clock import Clock, Deadline
from headrace.core.errors import CacheFault, DeadlineExceeded, StoreUnavailable
from headrace.core.ports import AlreadyStored, BlockSink, Reservation
from headrace.core.retention import Retention
from headrace.core.store_limits import DRAIN_BLOCK_TIMEOUT_MS, DRAIN_BLOCKS_IN_FLIGHT
from headrace.store.held_blocks import BlockKey
from headrace.store.plan_drain import MovingBlock
from headrace.transfer.reservations import give_back, leading_outcomes
from headrace.transfer.run_in_thread import finish


@dataclass(frozen=True, slots=True)
class BlockCopy:
    """A whole block, checked against its header."""

    header: BlockHeader
    payload: bytes | memoryview

    @property
    def key(self) -> BlockKey:
        """Its name in a node."""
        return (self.header.namespace, self.header.block_hash)


@dataclass(slots=True)
class DrainPeer:
    """A peer under its node id, and the names of blocks that it has: those it was sent and those it had already."""

    node_id: str
    sink: BlockSink
    clock: Clock
    carry: Callable[[MovingBlock], Awaitable[str]]  # operators' orders about a block; "" or why they do not hold
    sent: set[BlockKey] = field(default_factory=set)
    had: set[BlockKey] = field(default_factory=set)
    sent_bytes: int = 0

    def has(self, key: BlockKey | None) -> bool:
        """Whether it has a block, as far as this drain has found out; everybody has what comes before the first."""
        return key is None or key in self.sent or key in self.had

    async def store(self, copies: Sequence[BlockCopy], *, retention: Retention) -> int:
        """Have it keep blocks of one chain, in order; how many leading ones it has then. Raises StoreUnavailable when
        it does not answer, for the whole batch within DRAIN_BLOCK_TIMEOUT_MS."""
        assert len(copies) <= DRAIN_BLOCKS_IN_FLIGHT
        deadline = Deadline.after(DRAIN_BLOCK_TIMEOUT_MS / 1_000, self.clock)
        unused: list[Reservation] = []
        try:
            async with deadline.scope(f"hand blocks to {self.node_id}"):
                headers = [copy.header for copy in copies]
                outcomes = await self.sink.reserve(headers, deadline=deadline, retention=retention)
                unused = [outcome for outcome in outcomes if isinstance(outcome, Reservation)]
                return await self._fill(copies, leading_outcomes(outcomes), unused, deadline)
        except DeadlineExceeded as late:
            raise StoreUnavailable(self.node_id, "it takes blocks too slowly") from late
        finally:
            if unused:
                await finish(give_back(self.sink, tuple(unused)))

    async def _fill(
        self,
        copies: Sequence[BlockCopy],
        outcomes: Sequence[Reservation | AlreadyStored],
        unused: list[Reservation],
        deadline: Deadline,
    ) -> int:
        """Send what was reserved, all at once; takes what was committed off `unused`."""
        async with asyncio.TaskGroup() as group:
            sending = [
                group.create_task(self._send(copy, outcome, deadline))
                for copy, outcome in zip(copies, outcomes, strict=False)
            ]
        for stored, (copy, outcome, sent) in enumerate(zip(copies, outcomes, sending, strict=False)):
            fault = sent.result()
            if isinstance(fault, StoreUnavailable):
                raise fault
            if fault is not None:
                return stored  # what stands on it will never be seen there
            if isinstance(outcome, Reservation):
                unused.remove(outcome)
                self.sent.add(copy.key)
                self.sent_bytes += len(copy.payload)
            else:
                self.had.add(copy.key)
        return len(outcomes)

    async def _send(
        self, copy: BlockCopy, outcome: Reservation | AlreadyStored, deadline: Deadline
    ) -> CacheFault | None:
        """What went wrong with this block; StoreUnavailable is about the peer."""
        if isinstance(outcome, AlreadyStored):
            return None
        outcome.buffer[:] = copy.payload
        try:
            await self.sink.commit(outcome, payload_xxh3=copy.header.payload_xxh3, deadline=deadline)
        except CacheFault as fault:
            return fault
        return None
