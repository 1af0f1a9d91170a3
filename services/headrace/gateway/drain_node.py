"""Take a store node out of service: it takes no new blocks and hands what it holds to the others.

The gateway names the peers and passes on how far the node is; the moving is between the nodes. Leaving the stream stops
the moving, and the node goes on draining.
"""

from collections.abc import AsyncGenerator
from typing import Any

import grpc

from headrace.core.clock import Deadline
from headrace.core.errors import InvalidRequest
from headrace.core.members import StoreNodeRecord
from headrace.gateway.audit_log import AuditedChange, ChangeEnd, audited_change
from headrace.gateway.fleet import TIMEOUT_S, Fleet
from headrace.wire.status import error_of_call
from headrace.wire.v1 import admin_pb2


async def drain_node(
    request: admin_pb2.DrainNodeRequest, fleet: Fleet, *, who: str
) -> AsyncGenerator[admin_pb2.DrainNodeProgress, None]:
    """How far the node is, again and again, last with `done`. Leaves one audit line, however it ends.

    Raises InvalidRequest for an unknown node, one that is being drained already, and where nobody is left to move to.
    """
    asked = {"holder": request.holder, "undo": request.undo, "without_moving": request.without_moving}
    with audited_change(who, "drain", asked) as change:
        node = await fleet.node_named(request.holder)
        order = admin_pb2.DrainRequest(undo=request.undo, without_moving=request.without_moving, who=who)
        if not (request.undo or request.without_moving):
            order.peers.extend(await _peers_of(node, fleet))
            change.asked["peers"] = [peer.node_id for peer in order.peers]
        # A drain takes as long as it takes; what is bounded is how long the node may say nothing.
        call = fleet.node_stub(node).Drain(order)
        try:
            while (progress := await _next(call, node, fleet)) is not None:
                _note(progress, change)
                yield progress
        except grpc.aio.AioRpcError as failed:
            raise error_of_call(failed) from failed
        finally:
            call.cancel()


async def _peers_of(node: StoreNodeRecord, fleet: Fleet) -> list[admin_pb2.DrainPeer]:
    """Live nodes that take new blocks, other than this one."""
    nodes = await fleet.service.membership.store_nodes()
    peers = [peer for peer in nodes if peer.node_id != node.node_id and not peer.draining]
    if not peers:
        why = "no other live store node takes new blocks, so there is nowhere to move its blocks to"
        remedy = "start another node, or drain without moving and lose what it holds when it is stopped"
        raise InvalidRequest(f"{node.holder_id} is not drained: {why}; {remedy}", param="holder")
    return [admin_pb2.DrainPeer(node_id=peer.node_id, address=peer.address) for peer in peers]


async def _next(call: Any, node: StoreNodeRecord, fleet: Fleet) -> admin_pb2.DrainNodeProgress | None:
    """The next message; None at the end. Raises DeadlineExceeded for a node that fell silent."""
    async with Deadline.after(TIMEOUT_S, fleet.service.clock).scope(f"draining {node.holder_id}"):
        progress: admin_pb2.DrainNodeProgress = await call.read()
    return None if progress is grpc.aio.EOF else progress


def _note(progress: admin_pb2.DrainNodeProgress, change: AuditedChange) -> None:
    """What is known of the drain, whoever leaves after this."""
    change.effect = {
        "state": progress.state or "unknown",
        "moved_blocks": progress.moved_blocks,
        "moved_bytes": progress.moved_bytes,
        "total_blocks": progress.total_blocks,
        **({"error": progress.error} if progress.error else {}),
    }
    if progress.done:
        # One that is drained may still lack an order that its peers could not take; the error says so.
        change.ended = ChangeEnd.FAILED if progress.error and progress.state != "drained" else ChangeEnd.DONE
