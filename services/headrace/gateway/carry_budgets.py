"""Have every store node keep the same table of budgets: what the tenants file says, and what operators said since.

Nodes keep the table, gateways carry it: each reads what the nodes have, settles what they ought to have
(`core/budgets.py`, equal on every gateway), and sends each node the rows that it lacks. Nothing is kept here, so any
gateway can do it and several do no harm.
"""

from collections.abc import Sequence
from typing import Any

import grpc

from headrace.core.budgets import Budget, merge_budgets, rows_to_send, settle_budgets
from headrace.core.errors import HeadraceError, InvalidRequest
from headrace.core.limits import STORE_CALL_TIMEOUT_MS
from headrace.core.members import StoreNodeRecord
from headrace.core.tenants import file_budgets
from headrace.gateway.fleet import Answers, Fleet, all_of, ask_each
from headrace.wire.parse import parse_budget
from headrace.wire.render import render_budget
from headrace.wire.status import error_of_call, message_of
from headrace.wire.v1 import admin_pb2

_TIMEOUT_S = STORE_CALL_TIMEOUT_MS / 1_000


async def carry_budgets(fleet: Fleet, nodes: Sequence[StoreNodeRecord], *, filed: Sequence[Budget]) -> dict[str, str]:
    """Bring the tables of these nodes up to date. Returns holder -> what kept it from taking all of it.

    filed: what the tenants file says now (`filed_budgets`)."""
    tables = await read_budgets(fleet, nodes)
    wanted = settle_budgets(merge_budgets(tables.by_holder.values()), filed)

    async def update(node: StoreNodeRecord) -> str:
        if node.holder_id in tables.errors:
            return tables.errors[node.holder_id]
        lacking = rows_to_send(wanted, tables.by_holder[node.holder_id])
        failed = await send_budgets(fleet, node, lacking) if lacking else None
        if failed is None or len(lacking) == 1 or not isinstance(failed, InvalidRequest):
            return "" if failed is None else message_of(failed)
        # One row that this node has no room to protect must not keep the others from it.
        each = [await send_budgets(fleet, node, [row]) for row in lacking]
        return "; ".join(message_of(error) for error in each if error is not None)

    complaints = await all_of([update(node) for node in nodes])
    return {node.holder_id: complaint for node, complaint in zip(nodes, complaints, strict=True) if complaint}


def filed_budgets(fleet: Fleet) -> tuple[Budget, ...]:
    """What the tenants file in force says, for the models that are served now; without one, nothing."""
    ring = fleet.service.key_ring
    bases = [worker.namespace for worker in fleet.service.table.records()]
    return () if ring is None else file_budgets(ring.tenants, bases)


async def read_budgets(fleet: Fleet, nodes: Sequence[StoreNodeRecord]) -> Answers[tuple[Budget, ...]]:
    """Ask each node for its table."""

    async def ask(node: StoreNodeRecord) -> tuple[Budget, ...]:
        reply = await fleet.node_stub(node).GetBudgets(admin_pb2.GetBudgetsRequest(), timeout=_TIMEOUT_S)
        return tuple(parse_budget(row) for row in reply.budgets)

    return await ask_each(nodes, ask)


async def send_budgets(fleet: Fleet, node: StoreNodeRecord, rows: Sequence[Budget]) -> HeadraceError | None:
    """Have a node merge rows into its table; the error when it refused or did not answer."""
    message: Any = admin_pb2.Budgets(budgets=[render_budget(row) for row in rows])
    try:
        await fleet.node_stub(node).SetBudgets(message, timeout=_TIMEOUT_S)
    except grpc.aio.AioRpcError as failed:
        return error_of_call(failed)
    return None
