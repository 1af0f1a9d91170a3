"""What a trust group may take of each store node, and what nobody may take from it.

An *account* is a trust group by its full name, since blocks of two tenants in one group cannot be told apart. Its
blocks are those of its namespaces (one for each model) and of what a `cache_salt` narrowed from them. `bytes_max` is a
quota: more is refused, and the account's own oldest blocks make room. `bytes_min` is protected: no other account's
blocks push it below that. Both hold on each node by itself, in the arena; on disk the quota holds too.

Every node keeps the whole table and gateways carry newer entries from node to node, so that an operator's word survives
any restart that leaves one node standing. An entry is a register: the last one set wins.
"""

from collections.abc import Iterable
from dataclasses import dataclass, replace

from headrace.core.block import NamespaceId

# `set_by` of rows that come from the gateways' tenants file; no tenant's name has a space.
TENANTS_FILE = "tenants file"


@dataclass(frozen=True, slots=True)
class Budget:
    """One account's bounds on each node. Without `bytes_max` there is no quota; `bytes_min` 0 protects nothing."""

    account: str  # the trust group's full name; "" is the deployment's own
    namespaces: tuple[NamespaceId, ...] = ()  # the account's, sorted; gateways know them, operators do not
    bytes_max: int | None = None
    bytes_min: int = 0
    # When an operator said so. The tenants file's first row has 0, and a later one just more than what it replaces: it
    # never beats an operator's word that some node has and others lack.
    set_unix_ms: int = 0
    set_by: str = ""

    def __post_init__(self) -> None:
        assert self.bytes_min >= 0
        assert self.bytes_max is None or self.bytes_max >= self.bytes_min
        assert self.namespaces == tuple(sorted(self.namespaces))


@dataclass(frozen=True, slots=True)
class AccountUsage:
    """What one account has on one node, and what its quota did since the node started; `admin.proto:AccountUsage`."""

    account: str
    host_blocks: int
    host_bytes: int
    disk_blocks: int
    disk_bytes: int
    pinned_bytes: int
    refused_blocks: int
    evicted_blocks: int


def merge_budgets(tables: Iterable[Iterable[Budget]]) -> tuple[Budget, ...]:
    """One table of several nodes': for each account the entry set last, with the namespaces that any of them knows."""
    newest: dict[str, Budget] = {}
    for table in tables:
        for budget in table:
            known = newest.get(budget.account)
            if known is None:
                newest[budget.account] = budget
                continue
            winner = max(known, budget, key=_order)
            namespaces = tuple(sorted({*known.namespaces, *budget.namespaces}))
            newest[budget.account] = replace(winner, namespaces=namespaces)
    return tuple(newest[account] for account in sorted(newest))


def settle_budgets(known: Iterable[Budget], filed: Iterable[Budget]) -> tuple[Budget, ...]:
    """The table that every node ought to have, from what nodes have (merged) and what the tenants file says now.

    An operator's row stands. A row of the file, or one that an operator gave back to the file, follows it: when bounds
    differ, the file's go into a row that is set just after the one it replaces. An account that has left the file has
    no bounds. Namespaces only ever become more: blocks of a model that is not served now are still somebody's.
    """
    now = {budget.account: budget for budget in filed}
    settled = {}
    for row in known:
        meant = now.pop(row.account, Budget(row.account, set_by=TENANTS_FILE))
        namespaces = tuple(sorted({*row.namespaces, *meant.namespaces}))
        if row.set_by != TENANTS_FILE or (row.bytes_max, row.bytes_min) == (meant.bytes_max, meant.bytes_min):
            settled[row.account] = replace(row, namespaces=namespaces)
        else:
            settled[row.account] = replace(meant, namespaces=namespaces, set_unix_ms=row.set_unix_ms + 1)
    settled |= now
    return tuple(settled[account] for account in sorted(settled))


def rows_to_send(wanted: Iterable[Budget], has: Iterable[Budget]) -> list[Budget]:
    """Rows of the wanted table that a node lacks, those that protect least first: what is lowered makes room for what
    is raised. A node that has more namespaces of an account than are wanted lacks nothing."""
    held = {row.account: row for row in has}
    lacking = []
    for row in wanted:
        own = held.get(row.account)
        if own is None or replace(own, namespaces=row.namespaces) != row or set(row.namespaces) - set(own.namespaces):
            lacking.append(row)
    return sorted(lacking, key=lambda row: (row.bytes_min, row.account))


def _order(budget: Budget) -> tuple[int, str, int, int]:
    """Later first; of two set in one millisecond every gateway takes the same."""
    return (budget.set_unix_ms, budget.set_by, -1 if budget.bytes_max is None else budget.bytes_max, budget.bytes_min)
