"""An operator's order about a prefix (pin, unpin, time to live), given to every store node that may hold it.

Reports node by node what was done. A node that does not answer has its error in the reply, so that nobody takes
silence for success.
"""

from collections.abc import Sequence
from typing import Any

import grpc

from headrace.core.generation import ControlOutcome, EvictSelector
from headrace.core.members import StoreNodeRecord
from headrace.gateway.fleet import TIMEOUT_S, Fleet, all_of
from headrace.wire.render import render_selector
from headrace.wire.status import error_of_call, message_of
from headrace.wire.v1 import admin_pb2


async def order_prefix(
    fleet: Fleet, rpc: str, order: Any, selectors: Sequence[EvictSelector], *, holders: Sequence[str] = ()
) -> admin_pb2.ControlReply:
    """Send `order` (a PinRequest or SetTtlRequest, without its selector) by `rpc` for each selector to each node."""
    nodes, _ = await fleet.holders(holders)

    async def ask(node: StoreNodeRecord) -> admin_pb2.ControlReport:
        merged = admin_pb2.ControlReport(holder=node.holder_id, outcome=ControlOutcome.NOT_HELD)
        try:
            for selector in selectors:
                asked = type(order)()
                asked.CopyFrom(order)
                asked.selector.CopyFrom(render_selector(selector))
                for report in (await getattr(fleet.cache_stub(node), rpc)(asked, timeout=TIMEOUT_S)).reports:
                    merged = _add(merged, report)
        except grpc.aio.AioRpcError as failed:
            return admin_pb2.ControlReport(holder=node.holder_id, error=message_of(error_of_call(failed)))
        return merged

    return admin_pb2.ControlReply(reports=await all_of([ask(node) for node in nodes]))


def _add(merged: admin_pb2.ControlReport, report: admin_pb2.ControlReport) -> admin_pb2.ControlReport:
    """Of several selectors on one node: a refusal shows, then anything done."""
    rank = [ControlOutcome.NOT_HELD, ControlOutcome.DONE, ControlOutcome.REFUSED]
    total = admin_pb2.ControlReport()
    total.CopyFrom(max(merged, report, key=lambda each: rank.index(ControlOutcome(each.outcome))))
    for count in ("blocks", "tokens", "bytes"):
        setattr(total, count, getattr(merged, count) + getattr(report, count))
    total.holder, total.pinned_bytes, total.pin_bytes_max = merged.holder, report.pinned_bytes, report.pin_bytes_max
    return total
