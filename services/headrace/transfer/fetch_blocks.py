"""Payloads of a store node over gRPC: read a leased run as a stream, and send blocks to be stored.

Owns the assembly of messages into blocks: blocks that came whole are handed out as views of their message, which lives
as long as they do; one that is longer than a message is gathered in a buffer of its own. Checks lengths only; the
reader checks headers and checksums.
"""

import mmap
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import Any

import grpc.aio

from headrace.core.block import BlockHeader, Chain, NamespaceId, payload_digest
from headrace.core.clock import Clock, Deadline
from headrace.core.errors import BlockMissing, StoreUnavailable
from headrace.core.limits import FETCH_CHUNK_BYTES
from headrace.core.members import StoreNodeRecord
from headrace.core.ports import PLAIN_LEASE, Lease, LeaseTerms, Reservation, ReserveOutcome
from headrace.core.retention import KEEP, Retention
from headrace.telemetry.request_context import outgoing_metadata
from headrace.transfer.channels import Channels
from headrace.transfer.fault_status import cache_faults
from headrace.transfer.store_calls import StoreCalls
from headrace.wire.v1 import block_store_pb2 as pb

_FETCH = "/headrace.v1.BlockStore/Fetch"
_FILL = "/headrace.v1.BlockStore/Fill"


async def fetch_blocks(calls: StoreCalls, lease: Lease, *, deadline: Deadline) -> AsyncGenerator[memoryview, None]:
    """Payloads of the leased blocks in order; each view stays good as long as it is kept.

    Raises LeaseExpired, BlockMissing (the stream ended early), StoreUnavailable. Closing the iterator cancels the call.
    """
    if not lease.headers:
        return
    node_id = calls.record.node_id
    with cache_faults(node_id):
        method = calls.channel.unary_stream(_FETCH)
        request = pb.FetchRequest(lease_id=lease.lease_id).SerializeToString()
        call = method(request, timeout=deadline.left_s(), metadata=outgoing_metadata())
    arriving = _Arriving(call, lease, node_id=node_id)
    try:
        for header, wanted in zip(lease.headers, _wanted_bytes(lease), strict=True):
            with cache_faults(node_id, lease_id=lease.lease_id):
                block = await arriving.block(header, wanted)
            yield block
    finally:
        call.cancel()


def _wanted_bytes(lease: Lease) -> list[int]:
    """How much of each leased block is sent."""
    return [
        header.layout.wide_bytes if index < lease.num_wide else header.payload_bytes
        for index, header in enumerate(lease.headers)
    ]


class _Arriving:
    """One stream's messages, cut into blocks. A message holds whole blocks, or one piece of a long one."""

    def __init__(self, call: Any, lease: Lease, *, node_id: str) -> None:
        self._call = call
        self._node_id = node_id
        self._due_bytes = sum(_wanted_bytes(lease))
        self._rest = memoryview(b"")  # of the last message: the blocks after the one handed out

    async def block(self, header: BlockHeader, wanted: int) -> memoryview:
        """The next block, read to the length that was asked for."""
        pieces = [self._rest or await self._message(header)]
        filled = len(pieces[0])
        while filled < wanted:
            pieces.append(await self._message(header))
            filled += len(pieces[-1])
        if len(pieces) == 1:
            block, self._rest = pieces[0][:wanted], pieces[0][wanted:]
            return block
        if filled > wanted:
            raise StoreUnavailable(self._node_id, "mixed a piece of a block with others")
        self._rest = memoryview(b"")
        return memoryview(b"".join(pieces))

    async def _message(self, header: BlockHeader) -> memoryview:
        message = await self._call.read()
        if message is grpc.aio.EOF:
            raise BlockMissing(header.block_hash)
        self._due_bytes -= len(message)
        if self._due_bytes < 0:
            raise StoreUnavailable(self._node_id, "sent more bytes than the blocks have")
        return memoryview(message)


class GrpcStore:
    """BlockSource and BlockSink for any node, payloads over gRPC."""

    def __init__(self, record: StoreNodeRecord, channels: Channels, clock: Clock) -> None:
        self.record = record
        self._calls = StoreCalls(record, channels, clock)

    async def held_blocks(self, namespace: NamespaceId, chain: Chain, *, deadline: Deadline) -> int:
        """As BlockSource.held_blocks."""
        return await self._calls.lookup(namespace, chain, deadline=deadline)

    async def lease_prefix(
        self,
        namespace: NamespaceId,
        chain: Chain,
        *,
        first_block: int,
        deadline: Deadline,
        terms: LeaseTerms = PLAIN_LEASE,
    ) -> Lease:
        """As `BlockSource.lease_prefix`."""
        return await self._calls.lease(namespace, chain, first_block=first_block, deadline=deadline, terms=terms)

    async def fetch_blocks(self, lease: Lease, *, deadline: Deadline) -> AsyncGenerator[memoryview, None]:
        """As `BlockSource.fetch_blocks`."""
        async with aclosing(fetch_blocks(self._calls, lease, deadline=deadline)) as payloads:
            async for payload in payloads:
                yield payload

    async def release(self, lease: Lease, *, suspects: Sequence[int] = ()) -> None:
        """As `BlockSource.release`."""
        await self._calls.release(lease.lease_id, suspects)

    async def reserve(
        self, headers: Sequence[BlockHeader], *, deadline: Deadline, retention: Retention = KEEP
    ) -> tuple[ReserveOutcome, ...]:
        """As `BlockSink.reserve`; buffers are private memory whose pages exist only once they are written."""
        _, outcomes = await self._calls.reserve(headers, deadline=deadline, retention=retention)
        return tuple(
            Reservation(outcome[0], header, memoryview(mmap.mmap(-1, header.payload_bytes)))
            if isinstance(outcome, tuple)
            else outcome
            for header, outcome in zip(headers, outcomes, strict=True)
        )

    async def commit(self, reservation: Reservation, *, payload_xxh3: int, deadline: Deadline) -> None:
        """As `BlockSink.commit`: sends the buffer, and the node commits when all of it has come and checks out."""
        node_id, block_hash = self.record.node_id, reservation.header.block_hash
        assert payload_digest(reservation.buffer) == payload_xxh3, "the buffer does not have the stated checksum"

        async def messages() -> AsyncIterator[bytes]:
            start = pb.FillStart(reservation_id=reservation.reservation_id, payload_xxh3=payload_xxh3)
            yield start.SerializeToString()
            for at in range(0, len(reservation.buffer), FETCH_CHUNK_BYTES):
                yield bytes(reservation.buffer[at : at + FETCH_CHUNK_BYTES])

        with cache_faults(node_id, lease_id=reservation.reservation_id, block_hash=block_hash):
            fill = self._calls.channel.stream_unary(_FILL)
            await fill(messages(), timeout=deadline.left_s(), metadata=outgoing_metadata())

    async def abort(self, reservation: Reservation) -> None:
        """As `BlockSink.abort`."""
        await self._calls.abort(reservation.reservation_id)

    async def end_lost_claims(self) -> None:
        """As `StoreCalls.end_lost_claims`."""
        await self._calls.end_lost_claims()
