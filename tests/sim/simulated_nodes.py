"""Store nodes of a simulated world: the real `StoreNode` over a small arena, behind a network that misbehaves.

`DirectStore` is a BlockSource and a BlockSink without gRPC. Between a call and its effect, and between the effect and
the reply, time passes and anything may happen: the node crashes and recovers from its arena, a request is lost, a reply
is lost, a request arrives twice. Every step of a node is followed by its own integrity check.
"""

import asyncio
import random
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from simulated_engine import LAYOUT
from virtual_loop import VirtualClock

from headrace.blocks.claims import SlotReserved
from headrace.blocks.host_arena import UNIT_BYTES, HostArena
from headrace.core.block import BlockHeader, Chain, NamespaceId
from headrace.core.clock import Deadline
from headrace.core.errors import BlockMissing, CacheFault, LeaseExpired, StoreUnavailable
from headrace.core.generation import EvictSelector
from headrace.core.limits import STORE_CALL_TIMEOUT_MS
from headrace.core.ports import (
    PLAIN_LEASE,
    BlockSink,
    BlockSource,
    Lease,
    LeaseTerms,
    Reservation,
    ReserveOutcome,
)
from headrace.core.retention import KEEP, Retention
from headrace.store.recover_arena import recover_arena
from headrace.store.store_node import StoreNode

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True)
class FaultRates:
    """Probabilities per call, and the longest one-way delay."""

    lost: float = 0.0
    reply_lost: float = 0.0
    duplicated: float = 0.0
    stalled: float = 0.0  # the caller sleeps for longer than a reservation or lease lives
    delay_s: float = 0.01


class SimulatedNode:
    """One node that can crash at any step and comes back with what its arena holds."""

    def __init__(self, node_id: str, *, num_slots: int, clock: VirtualClock, rng: random.Random) -> None:
        self.node_id = node_id
        self.rng = rng
        self.clock = clock
        self.arena = HostArena.in_memory((num_slots + 2) * UNIT_BYTES)
        self.node: StoreNode | None = StoreNode(self.arena, node_id=node_id, clock=clock)

    def crash(self) -> None:
        if self.node is not None:
            self.node.waiters.close()  # a connection that breaks ends the calls on it
        self.node = None

    def restart(self) -> None:
        self.arena = self.arena.reattached()
        recovered = recover_arena(self.arena)
        self.node = StoreNode(self.arena, node_id=self.node_id, clock=self.clock, recovered=recovered)
        self.node.check_integrity()

    def live(self) -> StoreNode:
        if self.node is None:
            raise StoreUnavailable(self.node_id, "crashed")
        return self.node

    def evict_all(self) -> None:
        if self.node is not None:
            self.node.evict(EvictSelector(), dry_run=False)
            self.node.check_integrity()

    def flip_a_byte(self) -> None:
        """Damage one slot's payload behind the node's back."""
        slots = list(self.arena.slot_units())
        if slots:
            slot = self.rng.choice(slots)
            payload = self.arena.payload(slot, LAYOUT.block_bytes)
            payload[self.rng.randrange(len(payload))] ^= 1 << self.rng.randrange(8)


class DirectStore:
    """One node as one worker sees it; `mapped`: payloads in place, as on the same host."""

    def __init__(self, node: SimulatedNode, *, mapped: bool, rates: FaultRates) -> None:
        self.node = node
        self._mapped = mapped
        self._rates = rates
        self._lease_ends_s: dict[str, float] = {}

    async def held_blocks(self, namespace: NamespaceId, chain: Chain, *, deadline: Deadline) -> int:
        """As BlockSource.held_blocks."""
        return await self._call(lambda node: node.lookup(namespace, chain))

    async def lease_prefix(
        self,
        namespace: NamespaceId,
        chain: Chain,
        *,
        first_block: int,
        deadline: Deadline,
        terms: LeaseTerms = PLAIN_LEASE,
    ) -> Lease:
        asked_s = self.node.clock.now_s()
        if terms.wait_s and first_block < len(chain):
            await self._travel()
            node = self.node.live()
            if node.lookup(namespace, chain[: first_block + 1]) <= first_block:
                await node.waiters.wait(namespace, chain[first_block], timeout_s=terms.wait_s)
        run = await self._call(
            lambda node: node.lease(
                namespace, chain, first_block=first_block, retention=terms.retention, whole_from=terms.whole_from
            )
        )
        self._lease_ends_s[run.lease_id] = asked_s + run.expires_in_ms / 1000
        return Lease(
            lease_id=run.lease_id,
            incarnation=run.incarnation,
            headers=tuple(block.header for block in run.blocks),
            slots=tuple(block.slot for block in run.blocks),
            expires_in_ms=run.expires_in_ms,
            num_wide=min(len(run.blocks), max(0, terms.whole_from - first_block)),
            ends=tuple((block_hash, in_ms / 1000) for block_hash, in_ms in run.ends_ms),
        )

    async def fetch_blocks(self, lease: Lease, *, deadline: Deadline) -> AsyncGenerator[memoryview, None]:
        if self._mapped:
            for index, (header, slot) in enumerate(zip(lease.headers, lease.slots, strict=True)):
                if self.node.arena.incarnation != lease.incarnation:
                    raise StoreUnavailable(self.node.node_id, "was restarted meanwhile")
                if self._lease_ends_s[lease.lease_id] <= self.node.clock.now_s():
                    raise LeaseExpired(lease.lease_id)
                payload_view = self.node.arena.payload(slot, header.payload_bytes).toreadonly()
                yield payload_view[: header.layout.wide_bytes] if index < lease.num_wide else payload_view
            return
        await self._travel()
        payloads = self.node.live().leased_payloads(lease.lease_id)
        for header in lease.headers:
            await self._travel()
            self.node.live()
            payload = bytes(next(payloads))
            if self.node.rng.random() < self._rates.lost:
                raise BlockMissing(header.block_hash)
            yield memoryview(payload)

    async def release(self, lease: Lease, *, suspects: Sequence[int] = ()) -> None:
        self._lease_ends_s.pop(lease.lease_id, None)
        await self._call(lambda node: node.release(lease.lease_id, suspects))

    async def reserve(
        self, headers: Sequence[BlockHeader], *, deadline: Deadline, retention: Retention = KEEP
    ) -> tuple[ReserveOutcome, ...]:
        outcomes = await self._call(lambda node: node.reserve(headers, retention=retention))
        return tuple(
            Reservation(
                outcome.reservation_id,
                outcome.header,
                outcome.buffer if self._mapped else memoryview(bytearray(len(outcome.buffer))),
            )
            if isinstance(outcome, SlotReserved)
            else outcome
            for outcome in outcomes
        )

    async def commit(self, reservation: Reservation, *, payload_xxh3: int, deadline: Deadline) -> None:
        if not self._mapped:
            half = len(reservation.buffer) // 2
            for part in (slice(0, half), slice(half, None)):
                await self._travel()
                with checked(self.node.live()) as node:
                    node.reserved_buffer(reservation.reservation_id)[part] = reservation.buffer[part]
        await self._call(lambda node: node.commit(reservation.reservation_id, payload_xxh3))

    async def abort(self, reservation: Reservation) -> None:
        await self._call(lambda node: node.abort(reservation.reservation_id))

    async def _call(self, step: Callable[[StoreNode], Result]) -> Result:
        """One control call over the network: there, the step, back, each of which may go wrong."""
        rng, rates = self.node.rng, self._rates
        await self._travel()
        if rng.random() < rates.lost:
            await asyncio.sleep(STORE_CALL_TIMEOUT_MS / 1000)
            raise StoreUnavailable(self.node.node_id, "request lost")
        with checked(self.node.live()) as node:
            result = step(node)
        if rng.random() < rates.duplicated:
            await self._travel()
            if self.node.node is not None:
                try:
                    with checked(self.node.node) as node:
                        step(node)
                except CacheFault:
                    pass  # the answer to a duplicate goes nowhere
        await self._travel()
        if rng.random() < rates.reply_lost:
            await asyncio.sleep(STORE_CALL_TIMEOUT_MS / 1000)
            raise StoreUnavailable(self.node.node_id, "reply lost")
        return result

    async def _travel(self) -> None:
        rng = self.node.rng
        await asyncio.sleep(rng.uniform(0, self._rates.delay_s))
        if rng.random() < self._rates.stalled:
            await asyncio.sleep(rng.uniform(5, 40))


@contextmanager
def checked(node: StoreNode) -> Iterator[StoreNode]:
    """One step of a node, with its books checked after it, whether it raised or not."""
    try:
        yield node
    finally:
        node.check_integrity()


class SimulatedNodes:
    """StoreNodes of one worker, and (doing nothing) their table's life."""

    following = True

    def __init__(self, host: str, nodes: dict[str, SimulatedNode], rates: FaultRates) -> None:
        """nodes: host name -> its node; node ids equal host names here."""
        self._host = host
        self._mapped = {host: DirectStore(nodes[host], mapped=True, rates=rates)} if host in nodes else {}
        self._remote = {name: DirectStore(node, mapped=False, rates=rates) for name, node in nodes.items()}

    async def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    async def sink_moved(self, node_id: str) -> None:
        await asyncio.Event().wait()

    def local(self) -> BlockSource | None:
        return self._mapped.get(self._host)

    def remote(self, node_id: str) -> BlockSource | None:
        return self._remote.get(node_id)

    def sink(self) -> BlockSink | None:
        return self._mapped.get(self._host) or next(iter(self._remote.values()), None)

    def sink_at(self, node_id: str) -> BlockSink | None:
        return self._mapped.get(node_id) or self._remote.get(node_id)

    def local_node_id(self) -> str:
        return self._host if self._mapped else ""

    def sink_node_id(self) -> str:
        return self._host if self._mapped else next(iter(self._remote), "")
