"""What `doctor` says of one store node by itself: does it answer, do its clock and version agree with ours, do its
books balance, does it take new blocks?"""

from dataclasses import dataclass
from typing import Any

import grpc

from headrace import __version__
from headrace.core.generation import EvictSelector
from headrace.core.limits import CLOCK_SKEW_MS_MAX
from headrace.core.members import StoreNodeRecord
from headrace.gateway.finding import Finding
from headrace.gateway.fleet import TIMEOUT_S, Fleet
from headrace.wire.render import render_selector
from headrace.wire.status import error_of_call, message_of
from headrace.wire.v1 import admin_pb2


@dataclass(frozen=True, slots=True)
class ExaminedNode:
    """What was found, and what the node lists; None when it does not answer."""

    node: StoreNodeRecord
    findings: tuple[Finding, ...]
    blocks: tuple[Any, ...] | None


async def examine_node(node: StoreNodeRecord, fleet: Fleet, *, taking_nodes: int, list_blocks_max: int) -> ExaminedNode:
    """Ask a node about itself. taking_nodes: how many live nodes take new blocks, this one included if it does."""
    clock, holder = fleet.service.clock, node.holder_id
    try:
        asked_ms = clock.unix_ms()
        status = await fleet.cache_stub(node).Status(admin_pb2.StatusRequest(), timeout=TIMEOUT_S)
        answered_ms = clock.unix_ms()
        asked = admin_pb2.ListBlocksRequest(selector=render_selector(EvictSelector()), limit=list_blocks_max)
        listing = await fleet.cache_stub(node).ListBlocks(asked, timeout=TIMEOUT_S)
        integrity = await fleet.node_stub(node).CheckIntegrity(admin_pb2.CheckIntegrityRequest(), timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as failed:
        return ExaminedNode(node, (Finding("store node", holder, False, message_of(error_of_call(failed))),), None)
    # Its clock lies between our two readings, or is off by at least the distance.
    off_ms = max(asked_ms - status.unix_ms, status.unix_ms - answered_ms, 0)
    version = status.version or "unknown"
    balances = not integrity.broken
    findings = [
        Finding("store node", holder, True, f"answers; holds {listing.total_blocks:,} blocks"),
        Finding("clock", holder, off_ms <= CLOCK_SKEW_MS_MAX, f"{off_ms:,} ms from this gateway's, or less"),
        Finding("version", holder, version == __version__, f"{version}, here {__version__}"),
        Finding("books", holder, balances, "every account balances" if balances else f"broken: {integrity.broken}"),
    ]
    if node.draining:
        findings.append(_draining(node, taking_nodes))
    return ExaminedNode(node, tuple(findings), tuple(listing.blocks))


def _draining(node: StoreNodeRecord, taking_nodes: int) -> Finding:
    """Somebody's order, and well where others take what is new."""
    undo = f"`headrace nodes drain {node.node_id} --undo` has it take new blocks again"
    if taking_nodes:
        return Finding("draining", node.holder_id, True, f"takes no new blocks, {taking_nodes} others do; {undo}")
    return Finding("draining", node.holder_id, False, f"takes no new blocks and no other node does; {undo}")
