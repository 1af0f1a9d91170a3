"""The BlockStore service in front of a store node: parse, call the node, answer.

Owns the mapping between the wire and a node's synchronous steps. Payloads are copied once, from the arena into the
message; a lease is asked for again before every copy, so that a reader who is slower than its lease is refused rather
than served somebody else's bytes. Knows nothing of leases' rules, of eviction or of the index.
"""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from typing import Any, Protocol, TypeVar

import grpc
import grpc.aio
from google.protobuf.message import DecodeError

from headrace.blocks.block_waiters import BlockWaiters
from headrace.blocks.claims import LeasedRun, SlotOutcome, SlotReserved
from headrace.blocks.decode_headers import decode_headers
from headrace.core.block import BlockHash, BlockHeader, Chain, NamespaceId
from headrace.core.errors import BlockCorrupt, CacheFault, LeaseExpired
from headrace.core.limits import (
    CHAIN_BLOCKS_MAX,
    CLAIM_NAME_CHARS_MAX,
    FETCH_CHUNK_BYTES,
    LEASE_TTL_MS,
    LEASE_WAIT_MS_MAX,
    LOST_CLAIMS_MAX,
    RESERVATION_TTL_MS,
    RESERVE_BLOCKS_MAX,
    TTL_S_MAX,
    TTL_S_MIN,
)
from headrace.core.ports import AlreadyStored, NotStored
from headrace.core.retention import KEEP, Retention
from headrace.transfer.fault_status import status_of
from headrace.transfer.named_claims import NamedClaims
from headrace.wire.v1 import block_store_pb2 as pb
from headrace.wire.v1 import block_store_pb2_grpc as pb_grpc

_SERVICE = "headrace.v1.BlockStore"
_HASH_BYTES = (16, 32)
_T = TypeVar("_T")
Promote = Callable[[NamespaceId, Chain, int], Awaitable[None]]
Tell = Callable[[Exception], None]


class BlockKeeper(Protocol):
    """What the service asks of a store node; `store.store_node.StoreNode` is one."""

    incarnation: int
    waiters: BlockWaiters

    def lookup(self, namespace: NamespaceId, chain: Chain) -> int: ...

    def lease(
        self,
        namespace: NamespaceId,
        chain: Chain,
        *,
        first_block: int,
        retention: Retention = KEEP,
        whole_from: int = 0,
    ) -> LeasedRun: ...

    def leased_payloads(self, lease_id: str) -> Iterator[memoryview]: ...

    def holds_lease(self, lease_id: str) -> bool: ...

    def release(self, lease_id: str, suspects: Sequence[int] = ()) -> None: ...

    def reserve(self, headers: Sequence[BlockHeader], *, retention: Retention = KEEP) -> tuple[SlotOutcome, ...]: ...

    def reserved_buffer(self, reservation_id: str) -> memoryview: ...

    def commit(self, reservation_id: str, payload_xxh3: int) -> None: ...

    def abort(self, reservation_id: str) -> None: ...


def serve_blocks(
    server: grpc.aio.Server, keeper: BlockKeeper, *, promote: Promote | None = None, tell: Tell = lambda refused: None
) -> None:
    """Register BlockStore on a server: generated handlers for control, identity serialisers for payloads.

    promote: awaited before each lease, to bring what a slower tier has of the chain within reach; bounds its own time.
    tell: hears why a call is refused.
    """
    service = _BlockStoreService(keeper, promote, tell)
    pb_grpc.add_BlockStoreServicer_to_server(service, server)  # type: ignore[no-untyped-call]
    raw_handlers = {
        "Fetch": grpc.unary_stream_rpc_method_handler(service.fetch_payloads),
        "Fill": grpc.stream_unary_rpc_method_handler(service.fill_slot),
    }
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(_SERVICE, raw_handlers),))


def parse_chain(packed: bytes, hash_bytes: int) -> Chain:
    """Concatenated hashes to a chain. Raises ValueError when it is not one."""
    if hash_bytes not in _HASH_BYTES or len(packed) % hash_bytes:
        raise ValueError("chain is not a sequence of 16 or 32 byte hashes")
    if len(packed) // hash_bytes > CHAIN_BLOCKS_MAX:
        raise ValueError(f"chain is longer than {CHAIN_BLOCKS_MAX} blocks")
    return tuple(BlockHash(packed[at : at + hash_bytes]) for at in range(0, len(packed), hash_bytes))


class _BlockStoreService(pb_grpc.BlockStoreServicer):
    def __init__(self, keeper: BlockKeeper, promote: Promote | None, tell: Tell) -> None:
        self._keeper = keeper
        self._promote = promote
        self._tell = tell
        self._claims = NamedClaims()

    async def _answer(self, context: grpc.aio.ServicerContext, step: Callable[[], _T]) -> _T:
        """Run one step of the node; the faults that it may raise become statuses."""
        try:
            return step()
        except (CacheFault, ValueError) as fault:
            self._tell(fault)
            aborted: Awaitable[Any] = context.abort(*status_of(fault))
            await aborted
            raise AssertionError("abort raises") from fault

    async def Lookup(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        def lookup() -> Any:
            chain = parse_chain(request.chain, request.hash_bytes)
            num_blocks = self._keeper.lookup(_namespace(request.namespace), chain)
            return pb.LookupReply(num_blocks=num_blocks, incarnation=self._keeper.incarnation)

        return await self._answer(context, lookup)

    async def Lease(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        def parse() -> tuple[NamespaceId, Chain]:
            return _namespace(request.namespace), parse_chain(request.chain, request.hash_bytes)

        namespace, chain = await self._answer(context, parse)
        if self._promote is not None:
            await self._promote(namespace, chain, request.first_block)
        if request.wait_ms and request.first_block < len(chain):
            await self._wait_for_block(namespace, chain[: request.first_block + 1], request.wait_ms)

        def lease() -> Any:
            name = _claim_name(request.claim_name)
            if not self._claims.admit(name):
                return pb.LeaseReply(incarnation=self._keeper.incarnation)
            run = self._keeper.lease(
                namespace,
                chain,
                first_block=request.first_block,
                retention=_retention(request),
                whole_from=request.whole_from,
            )
            self._claims.made(name, [run.lease_id])
            return pb.LeaseReply(
                lease_id=run.lease_id,
                incarnation=run.incarnation,
                expires_in_ms=run.expires_in_ms,
                blocks=[pb.LeasedBlock(slot=block.slot, header=block.header_bytes) for block in run.blocks],
                ends=[pb.OrderedEnd(block_hash=block_hash, in_ms=in_ms) for block_hash, in_ms in run.ends_ms],
            )

        return await self._answer(context, lease)

    async def _wait_for_block(self, namespace: NamespaceId, chain: Chain, wait_ms: int) -> None:
        """Until the chain's last block can be read, or not for so long. A caller that is gone waits no more."""
        if self._keeper.lookup(namespace, chain) < len(chain):
            timeout_s = min(wait_ms, LEASE_WAIT_MS_MAX) / 1_000
            await self._keeper.waiters.wait(namespace, chain[-1], timeout_s=timeout_s)

    async def Release(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        self._keeper.release(request.lease_id, tuple(request.suspect_blocks))
        return pb.ReleaseReply()

    async def Reserve(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        def reserve() -> Any:
            if len(request.headers) > RESERVE_BLOCKS_MAX:
                raise ValueError(f"more than {RESERVE_BLOCKS_MAX} blocks in one reserve call")
            name, headers = _claim_name(request.claim_name), decode_headers(request.headers)
            outcomes: Sequence[SlotOutcome] = [NotStored(header.block_hash) for header in headers]
            if self._claims.admit(name):
                outcomes = self._keeper.reserve(headers, retention=_retention(request))
                self._claims.made(name, [slot.reservation_id for slot in outcomes if isinstance(slot, SlotReserved)])
            return pb.ReserveReply(
                incarnation=self._keeper.incarnation, outcomes=[_render_outcome(outcome) for outcome in outcomes]
            )

        return await self._answer(context, reserve)

    async def Commit(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        def commit() -> Any:
            self._keeper.commit(request.reservation_id, request.payload_xxh3)
            return pb.CommitReply()

        return await self._answer(context, commit)

    async def Abort(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        self._keeper.abort(request.reservation_id)
        return pb.AbortReply()

    async def EndClaims(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        def end_claims() -> Any:
            if len(request.names) > LOST_CLAIMS_MAX:
                raise ValueError(f"more than {LOST_CLAIMS_MAX} claims in one call")
            for name in request.names:
                for claim_id in (name, *self._claims.end(_claim_name(name))):
                    self._keeper.release(claim_id)
                    self._keeper.abort(claim_id)
            return pb.EndClaimsReply()

        return await self._answer(context, end_claims)

    async def fetch_payloads(self, request: bytes, context: grpc.aio.ServicerContext) -> None:
        """Stream the leased blocks' payloads, block after block, in the messages of `_messages_of`.

        Ends after LEASE_TTL_MS whatever the reader does: no lease lasts longer.
        """
        try:
            async with asyncio.timeout(LEASE_TTL_MS / 1_000):
                for message in self._messages_of(_parse(pb.FetchRequest, request).lease_id):
                    await context.write(message)
        except TimeoutError as late:
            self._tell(late)
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the reader is slower than any lease")
        except (CacheFault, ValueError) as fault:
            self._tell(fault)
            await context.abort(*status_of(fault))

    def _messages_of(self, lease_id: str) -> Iterator[bytes]:
        """As many whole blocks in a message as FETCH_CHUNK_BYTES has room for; a longer block in pieces of its own.

        A message costs the reader some 0.1 ms whatever is in it, as much as copying 1 MiB. Raises LeaseExpired.
        """
        together: list[memoryview] = []
        together_bytes = 0
        for payload in self._keeper.leased_payloads(lease_id):
            if together and together_bytes + len(payload) > FETCH_CHUNK_BYTES:
                yield self._message(lease_id, together)
                together, together_bytes = [], 0
            if len(payload) > FETCH_CHUNK_BYTES:
                for start in range(0, len(payload), FETCH_CHUNK_BYTES):
                    yield self._message(lease_id, [payload[start : start + FETCH_CHUNK_BYTES]])
            else:
                together.append(payload)
                together_bytes += len(payload)
        if together:
            yield self._message(lease_id, together)

    def _message(self, lease_id: str, payloads: list[memoryview]) -> bytes:
        """A copy, made while the lease protects what is copied: the stream may have waited since the views were had."""
        if not self._keeper.holds_lease(lease_id):
            raise LeaseExpired(lease_id)
        return b"".join(payloads)

    async def fill_slot(self, requests: AsyncIterator[bytes], context: grpc.aio.ServicerContext) -> bytes:
        """Write a stream of chunks into a reserved slot and commit it; whatever goes wrong gives the slot back.

        Ends after RESERVATION_TTL_MS whatever the writer does: no reservation lasts longer.
        """
        reservation_id = ""
        try:
            async with asyncio.timeout(RESERVATION_TTL_MS / 1_000):
                start = _parse(pb.FillStart, await anext(requests, b""))
                reservation_id = start.reservation_id
                await self._fill(reservation_id, requests)
                self._keeper.commit(reservation_id, start.payload_xxh3)
            return bytes(pb.CommitReply().SerializeToString())
        except TimeoutError as late:
            self._tell(late)
            await context.abort(grpc.StatusCode.DEADLINE_EXCEEDED, "the writer is slower than any reservation")
        except (CacheFault, ValueError) as fault:
            self._tell(fault)
            await context.abort(*status_of(fault))
        finally:
            self._keeper.abort(reservation_id)  # no effect after a commit
        raise AssertionError("abort raises")

    async def _fill(self, reservation_id: str, chunks: AsyncIterator[bytes]) -> None:
        filled = 0
        async for chunk in chunks:
            buffer = self._keeper.reserved_buffer(reservation_id)  # asked for again: it may have expired meanwhile
            if filled + len(chunk) > len(buffer):
                raise BlockCorrupt(b"", "the payload is longer than was reserved")
            buffer[filled : filled + len(chunk)] = chunk
            filled += len(chunk)
        if filled != len(self._keeper.reserved_buffer(reservation_id)):
            raise BlockCorrupt(b"", "the payload is shorter than was reserved")


def _parse(kind: Any, raw: bytes) -> Any:
    """A message of a method with identity serialisers. ValueError when the bytes are not one."""
    try:
        return kind.FromString(raw)
    except DecodeError as error:
        raise ValueError(f"not a {kind.DESCRIPTOR.name}") from error


def _retention(request: Any) -> Retention:
    """Of a lease or reserve request. Raises ValueError for a time out of range: callers check theirs at the edge."""
    if request.ttl_s and not TTL_S_MIN <= request.ttl_s <= TTL_S_MAX:
        raise ValueError(f"ttl_s must lie in {TTL_S_MIN}..{TTL_S_MAX}, or be 0")
    return Retention(ttl_s=request.ttl_s or None, on_disk=not request.not_on_disk)


def _claim_name(text: str) -> str:
    if len(text) > CLAIM_NAME_CHARS_MAX:
        raise ValueError(f"a claim's name has at most {CLAIM_NAME_CHARS_MAX} characters")
    return text


def _namespace(text: str) -> NamespaceId:
    if len(text) != 32 or not set(text) <= set("0123456789abcdef"):
        raise ValueError("namespace is not 32 hexadecimal digits")
    return NamespaceId(text)


def _render_outcome(outcome: SlotOutcome) -> Any:
    match outcome:
        case SlotReserved():
            return pb.ReserveOutcome(
                kind=pb.ReserveOutcome.KIND_RESERVED, reservation_id=outcome.reservation_id, slot=outcome.slot
            )
        case AlreadyStored():
            return pb.ReserveOutcome(kind=pb.ReserveOutcome.KIND_ALREADY_STORED)
        case NotStored():
            return pb.ReserveOutcome(kind=pb.ReserveOutcome.KIND_NOT_STORED)
