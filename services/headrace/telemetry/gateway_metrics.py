"""What the gateway tells of its routing, as metrics: implements `gateway/router.py`'s RouteObserver."""

from headrace.core.decision import PlanReason
from headrace.core.generation import Usage
from headrace.telemetry.metrics import RECOVERY_KINDS, Metrics


class RouteMetrics:
    """Counts decisions, recoveries and the time to each request's first token."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def decided(self, reason: str) -> None:
        """A decode worker was chosen, for one of PlanReason."""
        self._metrics.router_decisions.labels(PlanReason(reason)).inc()

    def recovered(self, kind: str) -> None:
        """A fault became a slower answer."""
        assert kind in RECOVERY_KINDS
        self._metrics.recoveries.labels(kind).inc()

    def first_token(self, seconds: float) -> None:
        """A request's first token was passed on this long after it was accepted."""
        self._metrics.time_to_first_token_seconds.observe(seconds)
