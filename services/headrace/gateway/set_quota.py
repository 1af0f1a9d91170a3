"""An operator's word on what a tenant's trust group may have on each store node, and what nobody takes from it.

The nodes keep it, not the gateway: at least one of them must take it, and it is carried to the others, and to those
that come later, from there (`carry_budgets.py`).
"""

from headrace.core.budgets import TENANTS_FILE, Budget, merge_budgets
from headrace.core.errors import HeadraceError, InvalidRequest, StoreUnavailable
from headrace.core.tenants import Tenant
from headrace.gateway.admin_scope import AdminScope
from headrace.gateway.audit_log import audited_change
from headrace.gateway.carry_budgets import filed_budgets, read_budgets, send_budgets
from headrace.gateway.fleet import Fleet, all_of
from headrace.gateway.list_tenants import describe_tenant, read_usage
from headrace.wire.status import message_of
from headrace.wire.v1 import admin_pb2


async def set_quota(fleet: Fleet, scope: AdminScope, request: admin_pb2.SetQuotaRequest) -> admin_pb2.SetQuotaReply:
    """Set a tenant's bounds on every node, or give them back to the tenants file; leaves an audit line.

    Raises PermissionDenied, and InvalidRequest for bounds that contradict each other or that no node can keep; then
    nothing has changed. Nodes that refused or did not answer, while others took it, are named in the reply.
    """
    scope.require_all("set quotas")
    asked = {"reset": request.reset} | {field.name: value for field, value in request.ListFields()}
    with audited_change(scope.tenant.name, "set quota", asked) as change:
        tenant = next((each for each in scope.tenants if each.name == request.tenant), None)
        if tenant is None:
            raise InvalidRequest(f"there is no tenant {request.tenant[:80]!r}", param="tenant")
        bounds = _bounds(request)
        await fleet.service.refresh()
        nodes, _ = await fleet.holders(())
        if not nodes:
            raise InvalidRequest("no store node is live that could keep a quota; nothing was set, start one first")
        tables = await read_budgets(fleet, nodes)
        row = _row(fleet, tenant, merge_budgets(tables.by_holder.values()), bounds, who=scope.tenant.name)
        change.asked |= {"bytes_max": row.bytes_max, "bytes_min": row.bytes_min}
        outcomes = await all_of([send_budgets(fleet, node, [row]) for node in nodes])
        failed: dict[str, HeadraceError] = {
            node.holder_id: error for node, error in zip(nodes, outcomes, strict=True) if error is not None
        }
        change.effect |= {node.holder_id: "set" for node in nodes}
        change.effect |= {holder: message_of(error) for holder, error in failed.items()}
        if len(failed) == len(nodes):
            raise _refused(failed)
    usage = await read_usage(fleet, nodes)
    return admin_pb2.SetQuotaReply(
        tenant=describe_tenant(tenant, [row], usage),
        errors=[admin_pb2.HolderError(holder=holder, error=message_of(error)) for holder, error in failed.items()],
    )


def _bounds(request: admin_pb2.SetQuotaRequest) -> tuple[int | None, int] | None:
    """The bounds asked for; None: those of the tenants file."""
    bytes_max = request.bytes_max if request.HasField("bytes_max") else None
    if request.reset:
        if bytes_max is not None or request.bytes_min:
            raise InvalidRequest("give bounds or reset, not both: reset takes those of the tenants file", param="reset")
        return None
    if bytes_max is not None and bytes_max < request.bytes_min:
        raise InvalidRequest("a protected minimum cannot be larger than the quota", param="bytes_min")
    return bytes_max, request.bytes_min


def _row(
    fleet: Fleet, tenant: Tenant, known: tuple[Budget, ...], bounds: tuple[int | None, int] | None, *, who: str
) -> Budget:
    """The row to set: later than any that a node has, whatever the clocks of those who set them."""
    account = tenant.trust_group
    before = next((row for row in known if row.account == account), Budget(account))
    filed = next((row for row in filed_budgets(fleet) if row.account == account), Budget(account))
    bytes_max, bytes_min = (filed.bytes_max, filed.bytes_min) if bounds is None else bounds
    return Budget(
        account=account,
        namespaces=tuple(sorted({*before.namespaces, *filed.namespaces})),
        bytes_max=bytes_max,
        bytes_min=bytes_min,
        set_unix_ms=max(fleet.service.clock.unix_ms(), before.set_unix_ms + 1),
        set_by=TENANTS_FILE if bounds is None else who,
    )


def _refused(failed: dict[str, HeadraceError]) -> HeadraceError:
    """What to tell an operator whose word no node took: that it is wrong only if all of them said so."""
    wrong = [(holder, error) for holder, error in failed.items() if isinstance(error, InvalidRequest)]
    if len(wrong) == len(failed):
        holder, error = wrong[0]
        return InvalidRequest(f"nothing was set: {holder}: {message_of(error)}", param=error.param)
    return StoreUnavailable("of this deployment", "none took the quota; nothing was set, ask again when one answers")
