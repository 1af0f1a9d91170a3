"""What routing a request works with, and who counts what comes of it."""

from dataclasses import dataclass
from typing import Protocol

from headrace.core.generation import Usage
from headrace.core.ports import BlockIndex, WorkerCalls
from headrace.gateway.planner import RoutePlanner
from headrace.gateway.worker_table import WorkerTable


class RouteObserver(Protocol):
    """What is counted about routing; `compose.py` joins it to metrics."""

    def decided(self, reason: str) -> None:
        """A decode worker was chosen, for one of `PlanReason`."""
        ...

    def recovered(self, kind: str) -> None:
        """A fault became a slower answer: index_unavailable, prefill_failed, new_attempt."""
        ...

    def first_token(self, seconds: float) -> None:
        """Request accepted to its first token passed on."""
        ...

    def finished(self, usage: Usage, *, reads_cache: bool) -> None:
        """A choice has ended well, and its client is told this usage."""
        ...


@dataclass(frozen=True, slots=True)
class Router:
    """What routing works with."""

    index: BlockIndex
    calls: WorkerCalls
    table: WorkerTable
    planner: RoutePlanner
    observer: RouteObserver
