"""Tenants, their budgets and what their trust groups have on each store node, as far as the caller may see them.

Tenants of one trust group share its blocks, and therefore its figures. A user sees its own row: neither who else there
is nor what they have.
"""

from collections.abc import Iterable, Sequence

from headrace.core.budgets import TENANTS_FILE, Budget, merge_budgets, settle_budgets
from headrace.core.members import StoreNodeRecord
from headrace.core.tenants import Tenant
from headrace.gateway.admin_scope import AdminScope
from headrace.gateway.carry_budgets import filed_budgets, read_budgets
from headrace.gateway.fleet import TIMEOUT_S, Answers, Fleet, ask_each
from headrace.wire.v1 import admin_pb2


async def list_tenants(fleet: Fleet, scope: AdminScope) -> admin_pb2.ListTenantsReply:
    """One entry for each tenant in sight, in the order of the file; and the nodes that did not answer."""
    nodes, _ = await fleet.holders(())
    tables = await read_budgets(fleet, nodes)
    settled = settle_budgets(merge_budgets(tables.by_holder.values()), filed_budgets(fleet))
    usage = await read_usage(fleet, nodes)
    tenants = scope.tenants if scope.sees_all else (scope.tenant,)
    return admin_pb2.ListTenantsReply(
        tenants=[describe_tenant(tenant, settled, usage) for tenant in tenants],
        errors=[admin_pb2.HolderError(holder=h, error=e) for h, e in {**tables.errors, **usage.errors}.items()],
    )


NodeUsage = Answers[dict[str, admin_pb2.AccountUsage]]  # account -> what it has there


async def read_usage(fleet: Fleet, nodes: Sequence[StoreNodeRecord]) -> NodeUsage:
    """Ask each node what its accounts have."""

    async def ask(node: StoreNodeRecord) -> dict[str, admin_pb2.AccountUsage]:
        reply = await fleet.node_stub(node).Usage(admin_pb2.UsageRequest(), timeout=TIMEOUT_S)
        return {usage.account: usage for usage in reply.accounts}

    return await ask_each(nodes, ask)


def describe_tenant(tenant: Tenant, budgets: Iterable[Budget], usage: NodeUsage) -> admin_pb2.TenantEntry:
    """One tenant's row. Where its bounds come from is said only when there are some, or an operator took them away."""
    account = tenant.trust_group
    budget = next((row for row in budgets if row.account == account), Budget(account, set_by=TENANTS_FILE))
    filed = budget.set_by == TENANTS_FILE
    bounded = budget.bytes_max is not None or budget.bytes_min > 0
    return admin_pb2.TenantEntry(
        name=tenant.name,
        trust_group=account,
        role=tenant.role.value,
        bytes_max=budget.bytes_max,
        bytes_min=budget.bytes_min,
        ttl_s=tenant.ttl_s or 0.0,
        requests_per_minute=tenant.rates.requests_per_minute,
        tokens_per_minute=tenant.rates.tokens_per_minute,
        concurrent_max=tenant.rates.concurrent_max,
        budget_from=("tenants file" if bounded else "") if filed else "operator",
        nodes=[
            admin_pb2.TenantOnNode(holder=holder, usage=of_node.get(account, admin_pb2.AccountUsage(account=account)))
            for holder, of_node in usage.by_holder.items()
        ],
    )
