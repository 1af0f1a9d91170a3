"""StoreNodes that measure how fast each node delivers, for whoever decides where to load from.

A transfer lasts from the wish for a lease to its release: what a reader waits for, copying and checking included. Only
whole transfers that delivered something are measured, in bytes of payload. Everything passes through unchanged.
"""

from collections import OrderedDict
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing

from headrace.core.block import CacheSource, Chain, NamespaceId
from headrace.core.clock import Clock, Deadline
from headrace.core.learned_costs import PRIOR_GRPC, PRIOR_SHARED_MEMORY, LinkFit
from headrace.core.limits import WORKER_LINKS_MAX
from headrace.core.members import MeasuredLink
from headrace.core.ports import BlockSink, BlockSource, Lease, StoreNodes
from headrace.core.retention import KEEP, Retention


class LinkTimes:
    """A fit for each (node, way) that was used lately, at most WORKER_LINKS_MAX of them."""

    def __init__(self) -> None:
        self._fits: OrderedDict[tuple[str, CacheSource], LinkFit] = OrderedDict()

    def add(self, node_id: str, via: CacheSource, *, num_bytes: int, seconds: float) -> None:
        """One transfer."""
        key = (node_id, via)
        if key not in self._fits:
            self._fits[key] = LinkFit(PRIOR_GRPC if via is CacheSource.GRPC else PRIOR_SHARED_MEMORY)
            if len(self._fits) > WORKER_LINKS_MAX:
                self._fits.popitem(last=False)
        self._fits.move_to_end(key)
        self._fits[key].add(num_bytes, seconds)

    def links(self) -> tuple[MeasuredLink, ...]:
        """As known now, least lately used first."""
        costs = [(key, fit.cost()) for key, fit in self._fits.items()]
        return tuple(MeasuredLink(node_id, via, c.bytes_per_s, c.round_trip_s) for (node_id, via), c in costs)


class TimedStoreNodes:
    """`StoreNodes` over another; `times` has what was measured."""

    def __init__(self, nodes: StoreNodes, clock: Clock) -> None:
        self.times = LinkTimes()
        self._nodes = nodes
        self._clock = clock

    def local(self) -> BlockSource | None:
        """As StoreNodes.local."""
        return self._timed(self._nodes.local(), self._nodes.local_node_id(), CacheSource.SHARED_MEMORY)

    def remote(self, node_id: str) -> BlockSource | None:
        """As StoreNodes.remote."""
        return self._timed(self._nodes.remote(node_id), node_id, CacheSource.GRPC)

    def sink(self) -> BlockSink | None:
        """As StoreNodes.sink."""
        return self._nodes.sink()

    def local_node_id(self) -> str:
        """As StoreNodes.local_node_id."""
        return self._nodes.local_node_id()

    def sink_node_id(self) -> str:
        """As StoreNodes.sink_node_id."""
        return self._nodes.sink_node_id()

    def _timed(self, source: BlockSource | None, node_id: str, via: CacheSource) -> BlockSource | None:
        return source and _TimedSource(source, (node_id, via), times=self.times, clock=self._clock)


class _TimedSource:
    """One `BlockSource` for the length of one load."""

    def __init__(self, source: BlockSource, key: tuple[str, CacheSource], *, times: LinkTimes, clock: Clock) -> None:
        self._source = source
        self._key = key
        self._times = times
        self._clock = clock
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
        retention: Retention = KEEP,
        wait_s: float = 0.0,
    ) -> Lease:
        """As BlockSource.lease_prefix. One that may wait for a block to be computed says nothing about the way."""
        asked_s = self._clock.now_s()
        lease = await self._source.lease_prefix(
            namespace, chain, first_block=first_block, deadline=deadline, retention=retention, wait_s=wait_s
        )
        if not wait_s:
            self._begun[lease.lease_id] = (asked_s, 0)
        return lease

    async def fetch_blocks(self, lease: Lease, *, deadline: Deadline) -> AsyncGenerator[memoryview, None]:
        """As BlockSource.fetch_blocks."""
        async with aclosing(self._source.fetch_blocks(lease, deadline=deadline)) as payloads:
            async for payload in payloads:
                if lease.lease_id in self._begun:
                    asked_s, num_bytes = self._begun[lease.lease_id]
                    self._begun[lease.lease_id] = (asked_s, num_bytes + payload.nbytes)
                yield payload

    async def release(self, lease: Lease, *, suspects: Sequence[int] = ()) -> None:
        """As BlockSource.release."""
        asked_s, num_bytes = self._begun.pop(lease.lease_id, (0.0, 0))
        if num_bytes and not suspects:
            node_id, via = self._key
            self._times.add(node_id, via, num_bytes=num_bytes, seconds=self._clock.now_s() - asked_s)
        await self._source.release(lease, suspects=suspects)
