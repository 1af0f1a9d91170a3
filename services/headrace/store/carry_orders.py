"""Operators' orders about a block (a pin, a moment at which it goes), given again to a node that takes the block."""

from typing import Any

import grpc
import grpc.aio

from headrace.core.limits import ADMIN_CALL_TIMEOUT_MS, TTL_S_MAX, TTL_S_MIN
from headrace.core.retention import NO_END_UNIX_MS
from headrace.store.plan_drain import MovingBlock
from headrace.wire.status import error_of_call, message_of
from headrace.wire.v1 import admin_pb2 as pb

TIMEOUT_S = ADMIN_CALL_TIMEOUT_MS / 1_000


async def carry_orders(block: MovingBlock, *, peer: Any, unix_ms: int, who: str) -> str:
    """Have a peer that holds a block keep it pinned, or let it go, as it was ordered here. "" or why it does not. What
    the peer was told itself stands where it keeps a pin longer, or has the block go sooner.

    peer: its CacheAdmin.  unix_ms: now, from which what is left is counted.
    """
    namespace, block_hash = block.key
    selector = pb.Selector(namespace=namespace, block_hashes=[block_hash])
    asked = []
    if block.pinned_until_unix_ms:
        pin = pb.PinRequest(selector=selector, who=who, carried=True)
        if block.pinned_until_unix_ms < NO_END_UNIX_MS:
            pin.for_s = max(block.pinned_until_unix_ms - unix_ms, 1) / 1_000
        asked.append((peer.Pin, pin))
    if block.ordered_unix_ms:
        left_s = min(max((block.ordered_unix_ms - unix_ms) / 1_000, TTL_S_MIN), TTL_S_MAX)
        asked.append((peer.SetTtl, pb.SetTtlRequest(selector=selector, ttl_s=left_s, who=who, carried=True)))
    try:
        for call, request in asked:
            for report in (await call(request, timeout=TIMEOUT_S)).reports:
                if report.outcome != "done":
                    return str(report.error or report.why or report.outcome)
    except grpc.aio.AioRpcError as failed:
        return message_of(error_of_call(failed))
    return ""
