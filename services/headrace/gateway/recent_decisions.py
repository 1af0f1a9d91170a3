"""What a gateway decided for its last requests, what it predicted, and what in fact happened. In bounds.

Predictions are corrected by what they lately lacked: the model knows computing, loading and waiting, and not the way
of a request through tokenizer and calls. The correction is the median of what was missing, apart for requests with and
without a hand-over, so that a few stalled ones do not count.
"""

from collections import deque
from dataclasses import dataclass, field
from statistics import median

from headrace.core.choose_workers import Plan
from headrace.core.decision import PlanReason, RouteDecision
from headrace.core.generation import Finished, GenerateRequest, MeasuredWork, RequestId
from headrace.core.limits import RECENT_DECISIONS_MAX

# What was missing in so many requests of a kind is remembered.
RESIDUALS = 32


@dataclass(slots=True)
class DecidedRequest:
    """One request: its last decision, and what is known of its outcome so far."""

    request_id: RequestId
    model: str
    trust_group: str
    unix_ms: int
    decision: RouteDecision
    reason: PlanReason
    overhead_s: float  # added to the decision's own ttft_s
    attempts: int = 1
    ttft_s: float | None = None  # measured: request accepted to first token
    finished: Finished | None = None
    work: MeasuredWork | None = None

    @property
    def predicted_ttft_s(self) -> float:
        """As it was when the request was placed."""
        return max(0.0, self.decision.chosen.ttft_s + self.overhead_s)


@dataclass(slots=True)
class RecentDecisions:
    """Requests by id, oldest out first."""

    requests_max: int = RECENT_DECISIONS_MAX
    _requests: dict[str, DecidedRequest] = field(default_factory=dict)
    _missing_s: dict[bool, deque[float]] = field(
        default_factory=lambda: {kind: deque(maxlen=RESIDUALS) for kind in (False, True)}
    )

    def planned(self, request: GenerateRequest, plan: Plan, *, unix_ms: int) -> None:
        """A plan was made; a later one of the same request is another attempt, or another choice."""
        known = self._requests.get(request.request_id)
        missing_s = self._missing_s[plan.prefill is not None]
        decided = DecidedRequest(
            request_id=request.request_id,
            model=request.model,
            trust_group=request.trust_group,
            unix_ms=unix_ms,
            decision=plan.decision,
            reason=plan.reason,
            overhead_s=median(missing_s) if missing_s else 0.0,
        )
        if known is not None:
            known.attempts += 1
            if known.ttft_s is not None:
                return  # another choice, after the first token of one: what was predicted for that stands
            decided.attempts = known.attempts
        self._requests[request.request_id] = decided
        while len(self._requests) > self.requests_max:
            del self._requests[next(iter(self._requests))]

    def first_token(self, request_id: str, seconds: float) -> None:
        """Its first token came so long after it was accepted."""
        decided = self._requests.get(request_id)
        if decided is None or decided.ttft_s is not None:
            return
        decided.ttft_s = seconds
        if decided.attempts == 1:
            kind = decided.decision.chosen.prefill_worker is not None
            self._missing_s[kind].append(seconds - decided.decision.chosen.ttft_s)

    def finished(self, request_id: str, finished: Finished) -> None:
        """One of its choices has ended well; the first one counts."""
        decided = self._requests.get(request_id)
        if decided is not None and decided.finished is None:
            decided.finished = finished
            if finished.work is not None:
                self.measured(request_id, finished.work)

    def measured(self, request_id: str, work: MeasuredWork) -> None:
        """A worker says what the prompt took; the first one counts."""
        decided = self._requests.get(request_id)
        if decided is not None and decided.work is None:
            decided.work = work

    def find(self, request_id: str) -> DecidedRequest | None:
        """The request, if it is still remembered."""
        return self._requests.get(request_id)

    def __len__(self) -> int:
        return len(self._requests)
