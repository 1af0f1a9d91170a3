"""The seams: what the request path asks of the world, each with its contract.

Adapters do not inherit from these; `compose.py` joins them. Every port has two real implementations that pass one
conformance suite. All calls may be cancelled at any await and then leave nothing held that a lease does not end.
"""

from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.core.block import BlockHash, BlockHeader, Chain, HolderId, NamespaceId, Tier
from headrace.core.clock import Deadline
from headrace.core.generation import (
    ControlReport,
    DecodeCall,
    DecodeEvent,
    DeviceListing,
    EvictReport,
    EvictSelector,
    PrefillCall,
    PrefillResult,
)
from headrace.core.members import GatewayRecord, MemberRecord, PrefixMatch, StoreNodeRecord, WorkerRecord
from headrace.core.retention import KEEP, Retention


class BlockIndex(Protocol):
    """Which holders say they keep which blocks. Raises IndexUnavailable when it cannot be asked in time.

    Entries carry the holder's incarnation; entries of an incarnation that is not alive are never returned.
    Registering twice is harmless; deregistering what is not there is harmless.
    """

    async def longest_prefix(self, namespace: NamespaceId, chain: Chain) -> PrefixMatch:
        """For every live holder, the length of its leading run. At most two round trips for 8,192 blocks."""
        ...

    async def register(
        self, *, holder: HolderId, incarnation: int, tier: Tier, namespace: NamespaceId, blocks: Sequence[BlockHash]
    ) -> None:
        """Say that `holder` keeps `blocks`. Called only after the bytes are readable."""
        ...

    async def deregister(
        self, *, holder: HolderId, incarnation: int, namespace: NamespaceId, blocks: Sequence[BlockHash]
    ) -> None:
        """Take entries back. Called before the bytes are freed. An older incarnation cannot remove a newer entry."""
        ...

    async def sweep(self, live: dict[HolderId, int], *, limit: int) -> int:
        """Remove up to `limit` entries whose holder is not live under that incarnation; returns how many.

        A holder is live when `live` says so or its membership record stands: it may have started after the caller
        looked. Work per call is bounded, so 0 does not mean that nothing is left.
        """
        ...


class Membership(Protocol):
    """Liveness of store nodes, workers and gateways: records under a TTL. Raises IndexUnavailable."""

    async def announce(self, record: MemberRecord, *, ttl_ms: int) -> bool:
        """Put or refresh a record; it vanishes `ttl_ms` after the last call.

        True: the record did not stand before under this incarnation (first call, expired, Redis came back empty) or
        that is not known (the call before failed): the owner registers everything it holds again. A standing record
        of a newer incarnation is left alone (False).
        """
        ...

    async def withdraw(self, record: MemberRecord) -> None:
        """Remove a record now, unless a newer incarnation has replaced it."""
        ...

    async def store_nodes(self) -> tuple[StoreNodeRecord, ...]:
        """Live store nodes."""
        ...

    async def workers(self) -> tuple[WorkerRecord, ...]:
        """Live workers."""
        ...

    async def gateways(self) -> tuple[GatewayRecord, ...]:
        """Live gateways."""
        ...


@dataclass(frozen=True, slots=True)
class Lease:
    """A reader's claim on the leading `headers` of a chain on one store node; `lease_id` is "" when there are none."""

    lease_id: str
    incarnation: int
    headers: tuple[BlockHeader, ...]
    slots: tuple[int, ...]  # slot number of each block, for readers that map the arena
    expires_in_ms: int
    num_wide: int = 0  # of so many leading blocks the wide part only is read, where payloads have two
    # Blocks of the chain that an operator has go at a moment, with all that stands on them, and the seconds until then.
    ends: tuple[tuple[BlockHash, float], ...] = ()


@dataclass(frozen=True, slots=True)
class LeaseTerms:
    """What a reader asks for with a lease, beyond the blocks."""

    retention: Retention = KEEP  # the leased blocks are kept by the longest of their own retention and this one
    wait_s: float = 0.0  # so long the answer waits for the first block where it is not there, if the node lets it
    whole_from: int = 0  # of blocks before this one the wide part only is read, where payloads have two


PLAIN_LEASE = LeaseTerms()


class BlockSource(Protocol):
    """Read side of one store node. A bad payload is delivered as it is: the reader checks it against its header."""

    async def lease_prefix(
        self,
        namespace: NamespaceId,
        chain: Chain,
        *,
        first_block: int,
        deadline: Deadline,
        terms: LeaseTerms = PLAIN_LEASE,
    ) -> Lease:
        """Lease blocks `first_block..` of the chain, as far as the node holds them without a gap. One round trip, and
        the wait that `terms` ask for."""
        ...

    async def held_blocks(self, namespace: NamespaceId, chain: Chain, *, deadline: Deadline) -> int:
        """How many leading blocks of the chain the node holds, in memory or on disk: a hint, which keeps nothing and
        counts as no use. One round trip. Raises StoreUnavailable."""
        ...

    def fetch_blocks(self, lease: Lease, *, deadline: Deadline) -> AsyncGenerator[memoryview, None]:
        """Payloads of the leased blocks in order, as an async generator (close it to stop early); of the first
        `lease.num_wide` the leading `layout.wide_bytes`. Each view is valid
        while the reader keeps it and the lease stands, so that copying may lag behind receiving. May raise
        BlockMissing, LeaseExpired, StoreUnavailable; what was delivered before stays good."""
        ...

    async def release(self, lease: Lease, *, suspects: Sequence[int] = ()) -> None:
        """End the lease. Idempotent; never raises for a lease that is already gone. Without suspects it may return
        before the node has answered; the lease ends all the same.

        `suspects`: indices of leased blocks whose bytes did not check out; the node looks at them again and drops
        broken ones, so that the next publisher can store them anew."""
        ...


@dataclass(frozen=True, slots=True)
class Reservation:
    """A writer's claim on one slot; expires by itself."""

    reservation_id: str
    header: BlockHeader
    buffer: memoryview  # writable, `payload_bytes` long: the slot itself (same host) or a buffer to be sent


@dataclass(frozen=True, slots=True)
class AlreadyStored:
    """The block is committed (or being written by someone else): nothing to do."""

    block_hash: BlockHash


@dataclass(frozen=True, slots=True)
class NotStored:
    """The node has no room for this block and those after it, or lacks its parent."""

    block_hash: BlockHash


ReserveOutcome = Reservation | AlreadyStored | NotStored


class BlockSink(Protocol):
    """Write side of one store node: reserve, fill `buffer`, commit. Nothing is visible before commit."""

    async def reserve(
        self, headers: Sequence[BlockHeader], *, deadline: Deadline, retention: Retention = KEEP
    ) -> tuple[ReserveOutcome, ...]:
        """Claim a slot for each header, in chain order; one outcome for each, in the same order. `retention` is that of
        new blocks, and extends that of blocks which are stored already."""
        ...

    async def commit(self, reservation: Reservation, *, payload_xxh3: int, deadline: Deadline) -> None:
        """Make the block readable, after the node has checked the payload. Raises BlockCorrupt, LeaseExpired."""
        ...

    async def abort(self, reservation: Reservation) -> None:
        """Give the slot back unwritten. Idempotent."""
        ...


class StoreNodes(Protocol):
    """How a worker reaches store nodes: its own host's by shared memory, others by gRPC."""

    def local(self) -> BlockSource | None:
        """This host's node through shared memory; None while there is none."""
        ...

    def remote(self, node_id: str) -> BlockSource | None:
        """Any live node over gRPC (also this host's own); None when it is not alive."""
        ...

    def sink(self) -> BlockSink | None:
        """Where this worker publishes: the local node when there is one, else a remote node; none that drains."""
        ...

    def sink_at(self, node_id: str) -> BlockSink | None:
        """The same for what stands on a prefix of that node; None when it is gone, or drains."""
        ...

    def local_node_id(self) -> str:
        """Node id of what `local()` gives now; "" when there is none. Not the sink's while that node drains."""
        ...

    def sink_node_id(self) -> str:
        """Node id of what `sink()` gives now; "" when there is none."""
        ...


class PrefixPool(Protocol):
    """What loading and publishing ask of the engine's KV pool. Thread-safe; copies run off the event loop."""

    def write_block(self, block_id: int, payload: memoryview) -> int:
        """Copy a payload into a block the caller owns; returns xxh3-64 of the bytes now in the pool."""
        ...

    def read_block(self, block_id: int, out: memoryview) -> int:
        """Copy a block out in payload layout; returns xxh3-64 of the bytes copied.

        Raises BlockCorrupt when the layout's codec has no code for one of its numbers: such a block is not stored."""
        ...


class WorkerCalls(Protocol):
    """Gateway to workers. Raises WorkerUnavailable, Overloaded, DeadlineExceeded, InvalidRequest."""

    async def prefill(self, call: PrefillCall) -> PrefillResult:
        """Run one prefill attempt. Cancelling the await cancels it on the worker."""
        ...

    def decode(self, call: DecodeCall) -> AsyncIterator[DecodeEvent]:
        """Run one decode attempt. Closing the iterator cancels it on the worker. Ends with exactly one Finished."""
        ...

    async def evict_device(self, worker: WorkerRecord, selector: EvictSelector, *, dry_run: bool) -> EvictReport:
        """Evict from a worker's own pool."""
        ...

    async def list_device(self, worker: WorkerRecord, selector: EvictSelector, *, limit: int) -> DeviceListing:
        """What a worker's own pool holds, heads first, and its books as they are now."""
        ...

    async def set_device_ttl(
        self, worker: WorkerRecord, selector: EvictSelector, *, ttl_s: float | None
    ) -> ControlReport:
        """Have a prefix go from a worker's own pool `ttl_s` seconds from now, also what comes there until then; None
        takes such an order back. "not held": nothing of it is there now; the order stands all the same."""
        ...
