"""StoreNodes that measure how fast each node delivers, for whoever decides where to load from and for how long.

A transfer lasts from the wish for a lease to its release: what a reader waits for, copying and checking included. Only
whole transfers that delivered something are measured, in bytes of payload. A round trip lasts from the wish for a lease
until the first block is there: nothing is saved sooner. One that was given up took at least so long. A node that says
that it has nothing has answered, too: until blocks have come from it, that says how long its way is. Everything passes
through unchanged; what a lease says of operators' orders is told besides.
"""

import asyncio
from collections import OrderedDict, deque
from collections.abc import AsyncGenerator, Callable, Iterable, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field

from headrace.core.block import BlockHash, CacheSource, Chain, NamespaceId
from headrace.core.clock import Clock, Deadline
from headrace.core.learned_costs import PRIOR_GRPC, PRIOR_SHARED_MEMORY, LinkFit
from headrace.core.limits import WORKER_LINKS_MAX
from headrace.core.members import MeasuredLink
from headrace.core.overtake_limits import (
    OVERTAKE_END_MS,
    OVERTAKE_ROUND_TRIP_MAX_MS,
    OVERTAKE_ROUND_TRIP_MIN_MS,
    ROUND_TRIPS_KEPT,
    ROUND_TRIPS_KNOWN,
)
from headrace.core.ports import PLAIN_LEASE, BlockSink, BlockSource, Lease, LeaseTerms, StoreNodes

Way = tuple[str, CacheSource]  # a store node, and how its blocks come
TellEnds = Callable[[NamespaceId, Sequence[tuple[BlockHash, float]]], None]  # `Lease.ends` of blocks of a namespace

# How often the way is gone for a first block: over gRPC for the lease and for the payload, which is in place otherwise.
# A node that has nothing was asked for the lease alone.
_TRIPS = {CacheSource.GRPC: 2, CacheSource.SHARED_MEMORY: 1}


@dataclass(slots=True)
class _Link:
    fit: LinkFit
    has_delivered: bool = False
    round_trips_s: deque[float] = field(default_factory=lambda: deque(maxlen=ROUND_TRIPS_KEPT))
    empty_s: deque[float] = field(default_factory=lambda: deque(maxlen=ROUND_TRIPS_KEPT))  # had there been a block
    num_answers: int = 0  # first blocks, and the word that there are none
    silent_s: float = 0.0  # the longest that was waited in vain since a block came last


class LinkTimes:
    """What was measured of each way that was used lately, at most WORKER_LINKS_MAX of them."""

    def __init__(self, *, patience_s: float = OVERTAKE_ROUND_TRIP_MIN_MS / 1000) -> None:
        """patience_s: no round trip counts as shorter."""
        self.patience_s = patience_s
        self._links: OrderedDict[Way, _Link] = OrderedDict()

    def add(self, node_id: str, via: CacheSource, *, num_bytes: int, seconds: float) -> None:
        """One transfer."""
        link = self._link((node_id, via))
        link.fit.add(num_bytes, seconds)
        link.has_delivered = True

    def add_round_trip(self, way: Way, seconds: float) -> None:
        """The first block came after so long."""
        link = self._link(way)
        link.num_answers += 1
        link.round_trips_s.append(seconds)
        link.silent_s = 0.0

    def add_nothing(self, way: Way, seconds: float) -> None:
        """The node said after so long that it has nothing of what was asked for."""
        link = self._link(way)
        link.num_answers += 1
        link.empty_s.append(_TRIPS[way[1]] * seconds)

    def add_given_up(self, way: Way, seconds: float) -> None:
        """Nobody waits for the first block any more, after so long: it would have taken longer."""
        link = self._link(way)
        link.silent_s = max(link.silent_s, seconds + OVERTAKE_END_MS / 1000)

    def round_trip_s(self, ways: Iterable[Way]) -> float:
        """How long the slowest of these may take for its first block: as long as any lately took, within limits. While
        few have come, also as long as one would have taken where there was none."""
        longest_s, most_s = self.patience_s, max(self.patience_s, OVERTAKE_ROUND_TRIP_MAX_MS / 1000)
        for way in ways:
            link = self._links.get(way)
            if link is None or link.num_answers < ROUND_TRIPS_KNOWN:
                return most_s
            few = len(link.round_trips_s) < ROUND_TRIPS_KNOWN
            longest_s = max(longest_s, link.silent_s, *link.round_trips_s, *(link.empty_s if few else ()))
        return min(longest_s, most_s)

    def links(self) -> tuple[MeasuredLink, ...]:
        """Those that have delivered, as known now, least lately used first."""
        costs = [(way, link.fit.cost()) for way, link in self._links.items() if link.has_delivered]
        return tuple(MeasuredLink(node_id, via, c.bytes_per_s, c.round_trip_s) for (node_id, via), c in costs)

    def _link(self, way: Way) -> _Link:
        if way not in self._links:
            prior = PRIOR_GRPC if way[1] is CacheSource.GRPC else PRIOR_SHARED_MEMORY
            self._links[way] = _Link(LinkFit(prior))
            if len(self._links) > WORKER_LINKS_MAX:
                self._links.popitem(last=False)
        self._links.move_to_end(way)
        return self._links[way]


class TimedStoreNodes:
    """`StoreNodes` over another; `times` has what was measured."""

    def __init__(
        self,
        nodes: StoreNodes,
        clock: Clock,
        *,
        patience_s: float = OVERTAKE_ROUND_TRIP_MIN_MS / 1000,
        tell_ends: TellEnds = lambda namespace, ends: None,
    ) -> None:
        """patience_s: as for LinkTimes. tell_ends: hears of orders before the blocks are there."""
        self.times = LinkTimes(patience_s=patience_s)
        self._nodes = nodes
        self._clock = clock
        self._tell_ends = tell_ends

    def local(self) -> BlockSource | None:
        """As StoreNodes.local."""
        return self._timed(self._nodes.local(), self._nodes.local_node_id(), CacheSource.SHARED_MEMORY)

    def remote(self, node_id: str) -> BlockSource | None:
        """As StoreNodes.remote."""
        return self._timed(self._nodes.remote(node_id), node_id, CacheSource.GRPC)

    def sink(self) -> BlockSink | None:
        """As StoreNodes.sink."""
        return self._nodes.sink()

    def sink_at(self, node_id: str) -> BlockSink | None:
        """As StoreNodes.sink_at."""
        return self._nodes.sink_at(node_id)

    def local_node_id(self) -> str:
        """As StoreNodes.local_node_id."""
        return self._nodes.local_node_id()

    def sink_node_id(self) -> str:
        """As StoreNodes.sink_node_id."""
        return self._nodes.sink_node_id()

    def _timed(self, source: BlockSource | None, node_id: str, via: CacheSource) -> BlockSource | None:
        return source and _TimedSource(
            source, (node_id, via), times=self.times, clock=self._clock, tell_ends=self._tell_ends
        )


class _TimedSource:
    """One `BlockSource` for the length of one load."""

    def __init__(self, source: BlockSource, key: Way, *, times: LinkTimes, clock: Clock, tell_ends: TellEnds) -> None:
        self._source = source
        self._key = key
        self._times = times
        self._clock = clock
        self._tell_ends = tell_ends
        self._begun: dict[str, tuple[float, int]] = {}  # lease to (time of the wish, bytes delivered)

    async def held_blocks(self, namespace: NamespaceId, chain: Chain, *, deadline: Deadline) -> int:
        """As BlockSource.held_blocks."""
        return await self._source.held_blocks(namespace, chain, deadline=deadline)

    async def lease_prefix(
        self,
        namespace: NamespaceId,
        chain: Chain,
        *,
        first_block: int,
        deadline: Deadline,
        terms: LeaseTerms = PLAIN_LEASE,
    ) -> Lease:
        """As BlockSource.lease_prefix. One that may wait for a block to be computed says nothing about the way."""
        asked_s = self._clock.now_s()
        try:
            lease = await self._source.lease_prefix(
                namespace, chain, first_block=first_block, deadline=deadline, terms=terms
            )
        except asyncio.CancelledError:
            if not terms.wait_s:
                self._times.add_given_up(self._key, self._clock.now_s() - asked_s)
            raise
        if not terms.wait_s and lease.headers:
            self._begun[lease.lease_id] = (asked_s, 0)
        elif not terms.wait_s:
            self._times.add_nothing(self._key, self._clock.now_s() - asked_s)
        if lease.ends:
            self._tell_ends(namespace, lease.ends)
        return lease

    async def fetch_blocks(self, lease: Lease, *, deadline: Deadline) -> AsyncGenerator[memoryview, None]:
        """As BlockSource.fetch_blocks."""
        try:
            async with aclosing(self._source.fetch_blocks(lease, deadline=deadline)) as payloads:
                async for payload in payloads:
                    self._delivered(lease, payload.nbytes)
                    yield payload
        finally:
            asked_s, num_bytes = self._begun.get(lease.lease_id, (0.0, 1))
            if not num_bytes:
                self._times.add_given_up(self._key, self._clock.now_s() - asked_s)

    def _delivered(self, lease: Lease, num_bytes: int) -> None:
        if lease.lease_id in self._begun:
            asked_s, before = self._begun[lease.lease_id]
            self._begun[lease.lease_id] = (asked_s, before + num_bytes)
            if not before:
                self._times.add_round_trip(self._key, self._clock.now_s() - asked_s)

    async def release(self, lease: Lease, *, suspects: Sequence[int] = ()) -> None:
        """As BlockSource.release."""
        asked_s, num_bytes = self._begun.pop(lease.lease_id, (0.0, 0))
        if num_bytes and not suspects:
            node_id, via = self._key
            self._times.add(node_id, via, num_bytes=num_bytes, seconds=self._clock.now_s() - asked_s)
        await self._source.release(lease, suspects=suspects)
