"""Whether a node serves, drains or is drained, and the one drain that may run at a time.

A drain lasts as long as the call that asked for it: when its stream is closed the moving stops, what peers had reserved
is given back, and the node goes on refusing new blocks until it is told to serve again or its process starts anew.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing
from enum import StrEnum
from typing import Any

from headrace.core.clock import Clock
from headrace.core.errors import IndexUnavailable, InvalidRequest
from headrace.core.members import StoreNodeRecord
from headrace.core.store_limits import DRAIN_PROGRESS_MS
from headrace.store.carry_orders import carry_orders
from headrace.store.drain_node import MovingBlocks, ReadDisk, drain_node
from headrace.store.drain_peer import DrainPeer
from headrace.store.store_node import StoreNode
from headrace.transfer.channels import Channels
from headrace.transfer.fetch_blocks import GrpcStore
from headrace.transfer.tls_files import Tls
from headrace.wire.v1 import admin_pb2 as pb
from headrace.wire.v1 import admin_pb2_grpc

_log = logging.getLogger(__name__)


class DrainState(StrEnum):
    """What a node does with new blocks, and whether those that it had are with others."""

    SERVING = "serving"
    DRAINING = "draining"
    DRAINED = "drained"


class NodeDrain:
    """Owner of a node's `draining` flag."""

    def __init__(
        self,
        node: StoreNode,
        *,
        clock: Clock,
        announce: Callable[[], Awaitable[object]],
        read_disk: ReadDisk | None = None,
        tls: Tls | None = None,
    ) -> None:
        """announce: puts the node's record now, which says whether it drains; may raise IndexUnavailable."""
        self._node = node
        self._clock = clock
        self._announce = announce
        self._read_disk = read_disk
        self._tls = tls
        self._state = DrainState.SERVING
        self._running = False

    async def follow(self, order: Any) -> AsyncGenerator[Any, None]:
        """Carry out a `DrainRequest`; a `DrainNodeProgress` every DRAIN_PROGRESS_MS, and a last one that is `done`.

        Raises InvalidRequest while another drain runs. Close it to stop the moving.
        """
        if order.undo:
            await self._set(DrainState.SERVING, order.who)
            yield pb.DrainNodeProgress(done=True, state=self._state)
            return
        if self._running:
            raise InvalidRequest(f"node {self._node.node_id} is being drained already; stop that call, or wait for it")
        if not order.peers and not order.without_moving:
            raise InvalidRequest("no peer is named that could take the blocks", param="peers")
        self._running = True
        try:
            await self._set(DrainState.DRAINING, order.who)
            if order.without_moving:
                yield pb.DrainNodeProgress(done=True, state=self._state)
                return
            channels = Channels(self._tls)
            try:
                async with aclosing(self._move(self._peers(order, channels))) as steps:
                    async for progress in steps:
                        yield progress
            finally:
                await channels.close()
        finally:
            self._running = False

    async def _move(self, peers: Sequence[DrainPeer]) -> AsyncGenerator[Any, None]:
        moving = MovingBlocks(self._node, peers, read_disk=self._read_disk)
        work = asyncio.create_task(drain_node(moving), name=f"drain {self._node.node_id}")
        try:
            while not work.done():
                await asyncio.wait([work], timeout=DRAIN_PROGRESS_MS / 1_000)
                if not work.done():
                    yield self._progress(moving)
            work.result()
            if moving.can_go_on:
                self._state = DrainState.DRAINED
            yield self._progress(moving, done=True)
        finally:
            work.cancel()
            await asyncio.wait([work])

    def _progress(self, moving: MovingBlocks, *, done: bool = False) -> Any:
        count = moving.count()
        taken_back = "" if self._node.draining else "the node was told to serve again"
        return pb.DrainNodeProgress(
            total_blocks=count.total_blocks,
            moved_blocks=count.moved_blocks,
            present_blocks=count.present_blocks,
            refused_blocks=count.refused_blocks,
            moved_bytes=count.moved_bytes,
            moved_to=count.moved_to,
            done=done,
            state=self._state,
            error="; ".join(why for why in (count.error, taken_back) if why),
        )

    def _peers(self, order: Any, channels: Channels) -> list[DrainPeer]:
        """One for each node that the request names. Of a record, a store over gRPC needs name and address only."""
        records = [StoreNodeRecord(peer.node_id, 0, "", peer.address, "", 0) for peer in order.peers]
        return [self._peer(record, channels, f"{order.who}, draining {self._node.node_id}") for record in records]

    def _peer(self, record: StoreNodeRecord, channels: Channels, who: str) -> DrainPeer:
        stub_of: Any = admin_pb2_grpc.CacheAdminStub
        admin = stub_of(channels.to(record.address))
        return DrainPeer(
            node_id=record.node_id,
            sink=GrpcStore(record, channels, self._clock),
            clock=self._clock,
            carry=lambda block: carry_orders(block, peer=admin, unix_ms=self._clock.unix_ms(), who=who),
        )

    async def _set(self, state: DrainState, who: str) -> None:
        """Take the state and have everybody know it at once, or within MEMBER_REFRESH_MS while the index is away."""
        self._state = state
        self._node.draining = state is not DrainState.SERVING
        if self._node.draining:
            self._node.waiters.close()
        else:
            self._node.waiters.open()
        _log.info("%s, by order of %s", state, who or "this node's operator")
        try:
            await self._announce()
        except IndexUnavailable as away:
            _log.warning("not announced yet: %s", away)
