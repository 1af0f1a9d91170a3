"""When a gateway carries budgets between store nodes: soon after something changed, and now and then in any case.

Owns what it saw last. What is carried is `carry_budgets.py`'s.
"""

import logging

from headrace.core.block import Namespace
from headrace.core.budgets import Budget
from headrace.core.errors import IndexUnavailable
from headrace.core.limits import CARRY_BUDGETS_MS
from headrace.core.members import StoreNodeRecord
from headrace.core.tenants import KeyRing
from headrace.gateway.carry_budgets import carry_budgets, filed_budgets
from headrace.gateway.fleet import Fleet

log = logging.getLogger(__name__)


class BudgetCarrier:
    """One gateway's. `step` is called again and again, one at a time."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._seen: tuple[frozenset[tuple[str, int]], KeyRing | None, frozenset[Namespace]] | None = None
        self._filed: tuple[Budget, ...] = ()
        self._complaints: dict[str, str] = {}
        self._next_s = 0.0

    async def step(self) -> None:
        """Carry when nodes came or left, the tenants file or the models changed, or CARRY_BUDGETS_MS have passed.

        A node that did not take all is tried again at the next step; when that ends alike, in its turn. It is logged
        once."""
        try:
            nodes: tuple[StoreNodeRecord, ...] = await self._fleet.service.membership.store_nodes()
        except IndexUnavailable:
            return
        service = self._fleet.service
        bases = frozenset(worker.namespace for worker in service.table.records())
        seen = (frozenset((node.node_id, node.incarnation) for node in nodes), service.key_ring, bases)
        now_s = service.clock.now_s()
        if seen == self._seen and now_s < self._next_s:
            return
        if seen != self._seen:  # a thousand tenants are 20 ms of hashing for each model: not at every step
            self._filed = filed_budgets(self._fleet)
        complaints = await carry_budgets(self._fleet, nodes, filed=self._filed)
        for holder, complaint in complaints.items():
            if self._complaints.get(holder) != complaint:
                log.warning("budgets of tenants are not all in force on %s: %s", holder, complaint)
        again = complaints and complaints != self._complaints
        self._next_s = now_s if again else now_s + CARRY_BUDGETS_MS / 1_000
        self._seen, self._complaints = seen, complaints
