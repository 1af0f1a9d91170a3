"""What a gateway tells of its routing and of its clients' requests, as metrics: implements `gateway/router.py`'s
RouteObserver and `gateway/goodput.py`'s RequestObserver."""

from headrace.core.decision import PlanReason
from headrace.core.errors import HeadraceError
from headrace.core.generation import Usage
from headrace.telemetry.metrics import RECOVERY_KINDS, REFUSAL_REASONS, REQUEST_OUTCOMES, Metrics
from headrace.telemetry.refused_calls import reason_of


class GatewayMetrics:
    """Counts decisions, recoveries, the time to each request's first token, the tokens of what ended well, and how each
    request and each refused call ended."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    def decided(self, reason: str) -> None:
        """A decode worker was chosen, for one of PlanReason."""
        self._metrics.router_decisions.labels(PlanReason(reason)).inc()

    def recovered(self, kind: str) -> None:
        """A fault became a slower answer."""
        assert kind in RECOVERY_KINDS
        self._metrics.recoveries.labels(kind).inc()

    def ended(self, outcome: str, *, is_good: bool) -> None:
        """One client request is over, for one of `gateway/goodput.py`'s outcomes."""
        assert outcome in REQUEST_OUTCOMES
        self._metrics.client_requests.labels(outcome).inc()
        if is_good:
            self._metrics.good_requests.inc()

    def refused(self, tenant: str, reason: str) -> None:
        """One of a tenant's requests had to be refused."""
        # A worker's refusal names a limit that this gateway may not know yet, while a system is being updated.
        self._metrics.refused_requests.labels(tenant, reason if reason in REFUSAL_REASONS else "full").inc()

    def call_refused(self, error: Exception) -> None:
        """A call of any API ended with an error before anything was passed on."""
        # What is not an error of ours is a bug, whatever its class.
        self._metrics.refused_calls.labels(reason_of(error) if isinstance(error, HeadraceError) else "other").inc()

    def first_token(self, seconds: float) -> None:
        """A request's first token was passed on this long after it was accepted."""
        self._metrics.time_to_first_token_seconds.observe(seconds)

    def finished(self, usage: Usage, *, reads_cache: bool) -> None:
        """Count a choice's tokens as its client is told them: hits by source sum to the cached total, exactly.

        A request that may not read the cache asks it nothing: it counts as neither query nor hit, so that a cold
        measurement does not look like a cache that misses. Attempts that another one replaced count nowhere.
        """
        assert usage.cached.total <= usage.prompt_tokens
        if not reads_cache:
            return
        self._metrics.prefix_cache_queries.inc(usage.prompt_tokens)
        self._metrics.prefix_cache_hits.inc(usage.cached.total)
        for source, tokens in usage.cached.by_source().items():
            self._metrics.cached_tokens.labels(source).inc(tokens)
