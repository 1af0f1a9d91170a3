"""What this gateway knows when it chooses workers, and the choice itself: the state around `core/choose_workers.py`.

Lives on the event loop; nothing here waits. Knows no calls: who is asked, and what a failed call means, is
`route_request.py`'s.
"""

from collections.abc import Callable

from headrace.core.choose_workers import Plan, RoutingRule, Snapshot, choose_workers
from headrace.core.errors import WorkerUnavailable
from headrace.core.generation import GenerateRequest, WorkerId
from headrace.core.members import PrefixMatch
from headrace.gateway.worker_table import WorkerTable


class RoutePlanner:
    """Plans for requests, from the worker table and what was planned before. One per gateway."""

    def __init__(self, table: WorkerTable, rule: RoutingRule, *, tie_break: Callable[[WorkerId], float]) -> None:
        self._table = table
        self._rule = rule
        self._tie_break = tie_break

    def plan(self, request: GenerateRequest, match: PrefixMatch, *, failed: frozenset[WorkerId]) -> Plan:
        """A plan without suspects if there is one, else one with them: a suspect costs a quick failure at worst.

        Raises WorkerUnavailable, InvalidRequest, UnknownModel."""
        served = self._table.served(request.model, request.decode_worker)
        why = ""
        for excluded in (failed | served.suspects, failed):
            snapshot = Snapshot(
                workers=served.workers, match=match, in_flight=self._table.in_flight_counts(), failed=excluded
            )
            plan = choose_workers(request, snapshot, self._rule, tie_break=self._tie_break)
            if isinstance(plan, Plan):
                return plan
            why = plan.why
        raise WorkerUnavailable("", why)
