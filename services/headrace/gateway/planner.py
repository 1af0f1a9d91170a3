"""What this gateway knows when it chooses workers, and the choice itself: the state around `core/choose_workers.py`.

Lives on the event loop; nothing here waits. Knows no calls: who is asked, and what a failed call means, is
`route_request.py`'s.
"""

from collections.abc import Callable

import numpy as np

from headrace.core.block import BlockHash, HolderId
from headrace.core.candidate_costs import Snapshot
from headrace.core.choose_workers import Plan, RoutingRule, choose_workers
from headrace.core.clock import Clock
from headrace.core.errors import WorkerUnavailable
from headrace.core.generation import GenerateRequest, RequestId, WorkerId
from headrace.core.index_limits import INDEX_HOLDERS_MAX
from headrace.core.limits import CHAIN_BLOCKS_MAX, PREDICTED_CHAINS_MAX
from headrace.core.members import NO_MATCH, PrefixMatch
from headrace.core.predicted_blocks import PredictedBlocks
from headrace.gateway.admit_request import refuse_late
from headrace.gateway.recent_decisions import RecentDecisions
from headrace.gateway.worker_table import WorkerTable

# Weight of a new request in the running mean of the work that requests need.
WORK_WEIGHT = 0.02

# How long a placement is believed beyond its predicted end, in units of its work; and for the index to hear of it.
PREDICTION_SLACK = 1.0
INDEX_LAG_S = 0.5


class RoutePlanner:
    """Plans for requests, from the worker table and what was planned before. One per gateway."""

    def __init__(
        self,
        table: WorkerTable,
        rule: RoutingRule,
        *,
        clock: Clock,
        tie_break: Callable[[WorkerId], float] | None = None,
        shed_ttft_ms: int = 0,
    ) -> None:
        """shed_ttft_ms: as `admit_request.refuse_late`."""
        self.decisions = RecentDecisions()
        self._table = table
        self._rule = rule
        self._clock = clock
        self._tie_break = tie_break
        self._shed_ttft_ms = shed_ttft_ms
        self._usual_work_s = 0.0
        self._placed = _Placements(clock)

    def plan(
        self,
        request: GenerateRequest,
        match: PrefixMatch,
        *,
        failed: frozenset[WorkerId],
        instead_of: Plan | None = None,
    ) -> Plan:
        """A plan without suspects if there is one, else one with them: a suspect costs a quick failure at worst.

        instead_of: the plan of the attempt before, whose work is not done where it was to be. Other choices of the
        request have plans of their own, which stand.
        Raises WorkerUnavailable, InvalidRequest, UnknownModel; Overloaded, only when nothing of the request was planned
        before, if its first token would come too late wherever it goes."""
        for worker_id in () if instead_of is None else _workers_of(instead_of):
            self._table.take_back(request.request_id, worker_id)
        served = self._table.served(request.model, request.decode_worker)
        columns = self._table.columns(served)
        why = ""
        for excluded in (failed | served.suspects, failed):
            snapshot = Snapshot(
                workers=columns,
                match=match,
                expected=self._placed.expected(request) if request.cache.reads else NO_MATCH,
                queue_s=self._table.queue_s(columns),
                in_flight=self._table.in_flight_counts(),
                failed=excluded,
                usual_work_s=self._usual_work_s,
                waiting=self._table.waiting(columns),
            )
            plan = choose_workers(request, snapshot, self._rule, tie_break=self._tie_break)
            if isinstance(plan, Plan):
                if not failed and self.decisions.find(request.request_id) is None:
                    refuse_late(plan.decision.chosen.ttft_s, shed_ttft_ms=self._shed_ttft_ms)
                self._remember(request, plan)
                return plan
            why = plan.why
        raise WorkerUnavailable("", why)

    def _remember(self, request: GenerateRequest, plan: Plan) -> None:
        for worker_id in _workers_of(plan):
            self._table.plan_work(request.request_id, worker_id, plan.work_s(worker_id))
        self._usual_work_s += WORK_WEIGHT * (plan.decision.least_compute_s - self._usual_work_s)
        if request.cache.publish:
            self._placed.add(request, plan)
        self.decisions.planned(request, plan, unix_ms=self._clock.unix_ms())

    def first_token(self, request_id: RequestId, seconds: float) -> None:
        """A request's first token came, so long after it was accepted."""
        self._table.end_work(request_id)
        self.decisions.first_token(request_id, seconds)

    def ended(self, request_id: RequestId) -> None:
        """A request is over, well or not."""
        self._table.end_work(request_id)


def _workers_of(plan: Plan) -> list[WorkerId]:
    return [record.worker_id for record in (plan.prefill, plan.decode) if record is not None]


class _Placements:
    """`PredictedBlocks` by names of holders."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._numbers: dict[HolderId, int] = {}
        self._predicted = PredictedBlocks[BlockHash](chains_max=PREDICTED_CHAINS_MAX)

    def expected(self, request: GenerateRequest) -> PrefixMatch:
        """What holders will have of the prompt, by plans whose time is not over."""
        if not self._numbers or not len(self._predicted):
            return NO_MATCH
        chain = request.prompt.chain[:CHAIN_BLOCKS_MAX]
        depths = self._predicted.depths(chain, len(self._numbers), now_s=self._clock.now_s())
        if not depths.any():
            return NO_MATCH
        holders = list(self._numbers)
        return PrefixMatch({holders[number]: int(depths[number]) for number in np.flatnonzero(depths)})

    def add(self, request: GenerateRequest, plan: Plan) -> None:
        """Who computes or loads the prompt by this plan will have it for prompts that wait behind it. What is published
        is not counted on before it is there: nobody elsewhere would wait for it."""
        if len(self._numbers) > INDEX_HOLDERS_MAX:  # many have come and gone
            self._numbers, self._predicted = {}, PredictedBlocks(chains_max=PREDICTED_CHAINS_MAX)
        terms = plan.decision.chosen
        until_s = self._clock.now_s() + terms.ttft_s + PREDICTION_SLACK * terms.compute_s + INDEX_LAG_S
        holders = {record.holder_id for record in (plan.prefill, plan.decode) if record is not None}
        chain = request.prompt.chain[:CHAIN_BLOCKS_MAX]
        for holder in sorted(holders) if chain else ():
            self._predicted.add(self._numbers.setdefault(holder, len(self._numbers)), chain, until_s=until_s)
