"""An operator's order about a prefix (pin, unpin, time to live), given to everybody who may hold it.

Reports holder by holder what was done. A holder that does not answer has its error in the reply, so that nobody takes
silence for success. Pins are store nodes' alone; a time to live reaches workers' own pools as well.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import grpc

from headrace.core.errors import HeadraceError, InvalidRequest
from headrace.core.generation import ControlOutcome, ControlReport, EvictSelector
from headrace.core.members import StoreNodeRecord, WorkerRecord
from headrace.core.retention import checked_ttl
from headrace.gateway.admin_scope import AdminScope
from headrace.gateway.audit_log import asked_of, audited_change, ended_at
from headrace.gateway.fleet import IS_ELSEWHERE, TIMEOUT_S, Fleet, all_of
from headrace.wire.render import render_control_report, render_selector
from headrace.wire.status import error_of_call, message_of
from headrace.wire.v1 import admin_pb2

NONE_HOLDS_IT = "none of those asked holds it: warm it first"

AUDIT_NAMES = {"Pin": "pin", "Unpin": "unpin", "SetTtl": "set ttl"}


@dataclass(frozen=True, slots=True)
class _Order:
    """`message` is the PinRequest or SetTtlRequest without its selector; `rpc` carries it."""

    rpc: str
    message: Any
    selectors: tuple[EvictSelector, ...]

    @property
    def is_taken_back(self) -> bool:
        """Whether it undoes an order: then it is no fault that there is nothing to do."""
        return self.rpc == "Unpin" or (self.rpc == "SetTtl" and not self.message.HasField("ttl_s"))


async def order_prefix(
    fleet: Fleet, rpc: str, request: admin_pb2.PinRequest | admin_pb2.SetTtlRequest, scope: AdminScope
) -> admin_pb2.ControlReply:
    """Carry out Pin, Unpin or SetTtl on every holder, or on those that the selector names; leaves an audit line.

    What nobody holds cannot be ordered about: then every report is "not held" and says the remedy. Raises
    PermissionDenied (a pin takes room from everybody; a time to live only ends what is the caller's own) and
    InvalidRequest (no prefix or block is named, a filter that an order cannot have, a time out of range, no node that
    could keep a pin).
    """
    if rpc != "SetTtl":
        scope.require_all("pin what is kept")
    times = {field.name: seconds for field, seconds in request.ListFields() if field.name in ("for_s", "ttl_s")}
    with audited_change(scope.tenant.name, AUDIT_NAMES[rpc], {**asked_of(request.selector), **times}) as change:
        _check_selector(request.selector)
        for param, seconds in times.items():
            checked_ttl(seconds, param=param)
        reports = await _order_everywhere(fleet, rpc, request, scope)
        change.effect = {
            "blocks": sum(report.blocks for report in reports),
            "bytes": sum(report.bytes for report in reports),
            "holders": {report.holder: report.error or report.outcome for report in reports},
        }
        outcomes = [report.outcome for report in reports if not report.error]
        change.ended = ended_at(outcomes, errors=len(reports) - len(outcomes))
    return admin_pb2.ControlReply(reports=reports)


async def _order_everywhere(
    fleet: Fleet, rpc: str, request: admin_pb2.PinRequest | admin_pb2.SetTtlRequest, scope: AdminScope
) -> list[admin_pb2.ControlReport]:
    selectors = await fleet.resolve(request.selector, scope)
    nodes, workers = await fleet.holders(request.selector.holders)
    message = type(request)()
    message.CopyFrom(request)
    message.ClearField("selector")
    message.who = scope.tenant.name
    order = _Order(rpc, message, selectors)
    if rpc == "Pin" and not nodes:
        raise InvalidRequest("pins are kept by store nodes, and no live one was asked", param="holders")
    reports = await all_of([_order_on_node(fleet, node, order) for node in nodes])
    if rpc == "SetTtl":
        reports += await _order_on_workers(fleet, workers, order, on_nodes=reports)
    if not order.is_taken_back and all(_is_not_held(report) for report in reports):
        for report in reports:
            report.why = report.why or NONE_HOLDS_IT
    if rpc == "SetTtl":
        elsewhere = fleet.elsewhere(request.selector.holders, selectors)
        reports += [admin_pb2.ControlReport(holder=holder, error=IS_ELSEWHERE) for holder in elsewhere]
    return reports


def _check_selector(selector: admin_pb2.Selector) -> None:
    if not (selector.prefix_text or selector.prefix_token_ids or selector.block_hashes):
        raise InvalidRequest("an order names a prefix or blocks", param="selector")
    for param in ("idle_for_s", "older_than_s", "created_before_unix_ms", "free_bytes"):
        if selector.HasField(param):
            raise InvalidRequest(f"{param} is for evictions; an order names a prefix or blocks", param=param)
    if selector.tier:
        raise InvalidRequest("an order holds in every tier; leave tier out", param="tier")


async def _order_on_node(fleet: Fleet, node: StoreNodeRecord, order: _Order) -> admin_pb2.ControlReport:
    merged = admin_pb2.ControlReport(holder=node.holder_id, outcome=ControlOutcome.NOT_HELD)
    try:
        for selector in order.selectors:
            asked = type(order.message)()
            asked.CopyFrom(order.message)
            asked.selector.CopyFrom(render_selector(selector))
            for report in (await getattr(fleet.cache_stub(node), order.rpc)(asked, timeout=TIMEOUT_S)).reports:
                merged = _add(merged, report)
    except grpc.aio.AioRpcError as failed:
        return admin_pb2.ControlReport(holder=node.holder_id, error=message_of(error_of_call(failed)))
    return merged


async def _order_on_workers(
    fleet: Fleet, workers: Sequence[WorkerRecord], order: _Order, *, on_nodes: Sequence[admin_pb2.ControlReport]
) -> list[admin_pb2.ControlReport]:
    """Have workers' pools follow. A worker keeps an order though it holds nothing yet, so nobody is told about a prefix
    that no node and no worker has: the order would surprise who warms it later."""
    concerned = [(worker, own) for worker in workers if (own := fleet.for_worker(worker, order.selectors))]
    if not order.is_taken_back and all(_is_not_held(report) for report in on_nodes):
        held = await all_of([_held_blocks(fleet, worker, own) for worker, own in concerned])
        if not any(held):
            return [_not_held(worker.holder_id) for worker, _ in concerned]
    return await all_of([_order_on_worker(fleet, worker, own, order) for worker, own in concerned])


async def _held_blocks(fleet: Fleet, worker: WorkerRecord, selectors: Sequence[EvictSelector]) -> int:
    """How many of the blocks a worker's pool has; 1 when it does not say, so that it is asked again and named."""
    try:
        return sum([(await fleet.list_device(worker, each, limit=0)).total_blocks for each in selectors])
    except HeadraceError:
        return 1


async def _order_on_worker(
    fleet: Fleet, worker: WorkerRecord, selectors: Sequence[EvictSelector], order: _Order
) -> admin_pb2.ControlReport:
    ttl_s = order.message.ttl_s if order.message.HasField("ttl_s") else None
    merged = _not_held(worker.holder_id)
    try:
        for selector in selectors:
            report = await fleet.set_device_ttl(worker, selector, ttl_s=ttl_s)
            merged = _add(merged, render_control_report(report))
    except HeadraceError as error:
        failed = ControlReport(holder=worker.holder_id, outcome=None, error=message_of(error))
        return render_control_report(failed)
    return merged


def _not_held(holder: str) -> admin_pb2.ControlReport:
    return admin_pb2.ControlReport(holder=holder, outcome=ControlOutcome.NOT_HELD)


def _is_not_held(report: admin_pb2.ControlReport) -> bool:
    return bool(report.outcome == ControlOutcome.NOT_HELD)


def _add(merged: admin_pb2.ControlReport, report: admin_pb2.ControlReport) -> admin_pb2.ControlReport:
    """Of several selectors on one holder: a refusal shows, then anything done."""
    rank = [ControlOutcome.NOT_HELD, ControlOutcome.DONE, ControlOutcome.REFUSED]
    total = admin_pb2.ControlReport()
    total.CopyFrom(max(report, merged, key=lambda each: rank.index(ControlOutcome(each.outcome))))
    for count in ("blocks", "tokens", "bytes"):
        setattr(total, count, getattr(merged, count) + getattr(report, count))
    total.holder, total.pinned_bytes, total.pin_bytes_max = merged.holder, report.pinned_bytes, report.pin_bytes_max
    return total
