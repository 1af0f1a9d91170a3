"""Who is told what a gateway does: counts of its routing and of its clients' requests, and their traces."""

from dataclasses import dataclass

from headrace.core.generation import Usage
from headrace.gateway.goodput import RequestObserver, RequestOutcome
from headrace.gateway.router import RouteObserver
from headrace.telemetry.tracing import Tracing


class Unobserved:
    """A RouteObserver and RequestObserver that counts nothing."""

    def ended(self, outcome: RequestOutcome, *, is_good: bool) -> None:
        """As RequestObserver.ended."""

    def refused(self, tenant: str, reason: str) -> None:
        """As RequestObserver.refused."""

    def call_refused(self, error: Exception) -> None:
        """As RequestObserver.call_refused."""

    def decided(self, reason: str) -> None:
        """As RouteObserver.decided."""

    def recovered(self, kind: str) -> None:
        """As RouteObserver.recovered."""

    def first_token(self, seconds: float) -> None:
        """As RouteObserver.first_token."""

    def finished(self, usage: Usage, *, reads_cache: bool) -> None:
        """As RouteObserver.finished."""


_NOBODY = Unobserved()


@dataclass(frozen=True, slots=True)
class Observers:
    """All of them; by default nobody."""

    routes: RouteObserver = _NOBODY
    requests: RequestObserver = _NOBODY
    tracing: Tracing | None = None  # None: nothing is traced


UNOBSERVED = Observers()
