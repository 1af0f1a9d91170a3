"""Control calls to one store node: lease, release, reserve, commit, abort, as values in and values out.

Shared by the two ways of moving payloads (`GrpcStore`, `SharedMemoryStore`). Every call is bounded by its deadline and
by STORE_CALL_TIMEOUT_MS; every failure is a CacheFault. A claim is named before it is made: when the call is cancelled
or fails, or the release does, the name is kept and `end_lost_claims` ends whatever stands behind it. Knows nothing of
payload bytes.
"""

import asyncio
import secrets
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from headrace.blocks.block_codec import encode_header
from headrace.blocks.decode_headers import decode_headers
from headrace.core.block import BlockHash, BlockHeader, Chain, NamespaceId
from headrace.core.clock import Clock, Deadline
from headrace.core.errors import CacheFault, StoreUnavailable
from headrace.core.limits import CHAIN_BLOCKS_MAX, LEASE_BLOCKS_MAX, STORE_CALL_TIMEOUT_MS
from headrace.core.members import StoreNodeRecord
from headrace.core.ports import AlreadyStored, Lease, LeaseTerms, NotStored
from headrace.core.retention import Retention
from headrace.telemetry.request_context import outgoing_metadata
from headrace.transfer.channels import Channels
from headrace.transfer.fault_status import cache_faults
from headrace.transfer.lost_claims import LostClaims
from headrace.wire.v1 import block_store_pb2 as pb
from headrace.wire.v1 import block_store_pb2_grpc as pb_grpc

_SlotClaim = tuple[str, int]  # reservation id, slot
ClaimOutcome = _SlotClaim | AlreadyStored | NotStored


class StoreCalls:
    """One node's control plane. Safe for concurrent use on one event loop."""

    def __init__(self, record: StoreNodeRecord, channels: Channels, clock: Clock) -> None:
        self.record = record
        self.clock = clock
        self.channel = channels.to(record.address)
        self._stub = pb_grpc.BlockStoreStub(self.channel)  # type: ignore[no-untyped-call]
        self._lost = LostClaims(clock)
        self._claims = secrets.token_hex(8)  # no other caller's names begin with it
        self._num_claims = 0
        self._telling: set[asyncio.Task[None]] = set()  # releases under way; each ends by its own time limit

    async def lookup(self, namespace: NamespaceId, chain: Chain, *, deadline: Deadline) -> int:
        """How many leading blocks of the chain the node holds. Raises StoreUnavailable."""
        sent = chain[:CHAIN_BLOCKS_MAX]
        if not sent:
            return 0
        request = pb.LookupRequest(namespace=namespace, chain=b"".join(sent), hash_bytes=len(sent[0]))
        reply = await self._call(self._stub.Lookup, request, deadline)
        return min(int(reply.num_blocks), len(sent))

    async def lease(
        self,
        namespace: NamespaceId,
        chain: Chain,
        *,
        first_block: int,
        deadline: Deadline,
        terms: LeaseTerms,
    ) -> Lease:
        """One round trip, and the wait. Raises StoreUnavailable, BlockCorrupt (a header that does not parse)."""
        sent = chain[: min(CHAIN_BLOCKS_MAX, first_block + LEASE_BLOCKS_MAX)]
        if first_block >= len(sent):
            return Lease(lease_id="", incarnation=self.record.incarnation, headers=(), slots=(), expires_in_ms=0)
        name = self._new_name()
        request = pb.LeaseRequest(
            namespace=namespace,
            chain=b"".join(sent),
            hash_bytes=len(sent[0]),
            first_block=first_block,
            ttl_s=terms.retention.ttl_s or 0.0,
            not_on_disk=not terms.retention.on_disk,
            claim_name=name,
            wait_ms=int(max(0.0, min(terms.wait_s, deadline.left_s())) * 1_000),
            whole_from=terms.whole_from,
        )
        with self._lost_on_failure(name):
            reply = await self._call(self._stub.Lease, request, deadline, wait_s=terms.wait_s)
        try:
            headers = decode_headers(block.header for block in reply.blocks)
        except CacheFault:
            await self.release(reply.lease_id)
            raise
        return Lease(
            lease_id=reply.lease_id,
            incarnation=reply.incarnation,
            headers=headers,
            slots=tuple(block.slot for block in reply.blocks),
            expires_in_ms=reply.expires_in_ms,
            num_wide=min(len(headers), max(0, terms.whole_from - first_block)),
            ends=tuple((BlockHash(end.block_hash), end.in_ms / 1_000) for end in reply.ends),
        )

    async def release(self, lease_id: str, suspects: Sequence[int] = ()) -> None:
        """Tell the node; its answer is waited for only when there are suspects. Raises only cancellation.

        A reader has its blocks by now, and an answer takes a tenth as long as fetching 10 MB. Until the node confirms
        it, the lease counts as a lost one: whatever becomes of this call, it is ended later, or expires.
        """
        if not lease_id:
            return
        self._lost.add(lease_id)
        telling = asyncio.create_task(self._tell_released(lease_id, suspects), name="release a lease")
        self._telling.add(telling)
        telling.add_done_callback(self._telling.discard)
        if suspects:
            await asyncio.wait([telling])

    async def _tell_released(self, lease_id: str, suspects: Sequence[int]) -> None:
        request = pb.ReleaseRequest(lease_id=lease_id, suspect_blocks=suspects)
        with suppress(CacheFault), cache_faults(self.record.node_id):
            await self._stub.Release(request, timeout=STORE_CALL_TIMEOUT_MS / 1_000)
            self._lost.forget([lease_id])

    async def reserve(
        self, headers: Sequence[BlockHeader], *, deadline: Deadline, retention: Retention
    ) -> tuple[int, tuple[ClaimOutcome, ...]]:
        """The node's incarnation and one outcome per header. Raises StoreUnavailable, BlockCorrupt."""
        name = self._new_name()
        request = pb.ReserveRequest(
            headers=[encode_header(header) for header in headers],
            ttl_s=retention.ttl_s or 0.0,
            not_on_disk=not retention.on_disk,
            claim_name=name,
        )
        with self._lost_on_failure(name):
            reply = await self._call(self._stub.Reserve, request, deadline)
            if len(reply.outcomes) != len(headers):
                raise StoreUnavailable(self.record.node_id, "answered with another number of outcomes than asked for")
        outcomes = tuple(
            self._parse_outcome(header, outcome) for header, outcome in zip(headers, reply.outcomes, strict=True)
        )
        return reply.incarnation, outcomes

    async def commit(self, reservation_id: str, *, header: BlockHeader, payload_xxh3: int, deadline: Deadline) -> None:
        """Raises BlockCorrupt, LeaseExpired, StoreUnavailable."""
        request = pb.CommitRequest(reservation_id=reservation_id, payload_xxh3=payload_xxh3)
        await self._call(self._stub.Commit, request, deadline, lease_id=reservation_id, block_hash=header.block_hash)

    async def abort(self, reservation_id: str) -> None:
        """Never raises but for cancellation: what cannot be aborted now is ended later, or expires."""
        request = pb.AbortRequest(reservation_id=reservation_id)
        with suppress(CacheFault), self._lost_on_failure(reservation_id), cache_faults(self.record.node_id):
            await self._stub.Abort(request, timeout=STORE_CALL_TIMEOUT_MS / 1_000)

    def give_up(self, claim_ids: Iterable[str]) -> None:
        """End these with the lost ones, without waiting."""
        for claim_id in claim_ids:
            self._lost.add(claim_id)

    async def end_lost_claims(self) -> None:
        """Tell the node which claims to end; what it does not confirm is told again. Raises only cancellation."""
        names = self._lost.names()
        if not names:
            return
        with suppress(CacheFault), cache_faults(self.record.node_id):
            await self._stub.EndClaims(pb.EndClaimsRequest(names=names), timeout=STORE_CALL_TIMEOUT_MS / 1_000)
            self._lost.forget(names)

    @contextmanager
    def _lost_on_failure(self, name: str) -> Iterator[None]:
        """Around a call after which a claim of this name may stand unless the call was answered."""
        answered = False
        try:
            yield
            answered = True
        finally:
            if not answered:
                self._lost.add(name)

    def _new_name(self) -> str:
        self._num_claims += 1
        return f"{self._claims}-{self._num_claims:x}"

    def _parse_outcome(self, header: BlockHeader, outcome: Any) -> ClaimOutcome:
        kinds = pb.ReserveOutcome
        if outcome.kind == kinds.KIND_RESERVED:
            return (outcome.reservation_id, outcome.slot)
        if outcome.kind == kinds.KIND_ALREADY_STORED:
            return AlreadyStored(header.block_hash)
        return NotStored(header.block_hash)

    async def _call(
        self,
        method: Any,
        request: Any,
        deadline: Deadline,
        *,
        lease_id: str = "",
        block_hash: bytes = b"",
        wait_s: float = 0.0,
    ) -> Any:
        timeout_s = min(deadline.left_s(), wait_s + STORE_CALL_TIMEOUT_MS / 1_000)
        with cache_faults(self.record.node_id, lease_id=lease_id, block_hash=block_hash):
            return await method(request, timeout=timeout_s, metadata=outgoing_metadata())
