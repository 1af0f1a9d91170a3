"""Prefill and decode workers as Serve deployments: one replica is one worker, named by the replica's unique id.

Owns the replica's life (start, health, stop) and the calls that reach it. What a worker does is in `prefill/` and
`decode/`; how calls find the replica is in `plan_request_router.py`. Nothing heavy is imported before the constructor,
because the gateway and Serve's controller import this file too.
"""

from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from ray import serve

from headrace.core.errors import WorkerUnavailable
from headrace.core.generation import (
    ControlReport,
    DecodeCall,
    DecodeEvent,
    DeviceListing,
    EvictReport,
    EvictSelector,
    PrefillCall,
    PrefillResult,
    WorkerId,
)
from headrace.core.members import WorkerRole
from headrace_cluster.caller_presence import CallerGone, CallersPresent
from headrace_cluster.scale_workers import PRESSURE, pressure
from headrace_cluster.store_actor import config_here, ensure_store_actor, ray_cluster_here

# First item of every stream from a worker: the call has reached the worker it names, and work begins.
ACCEPTED = "accepted"


@dataclass(frozen=True, slots=True)
class EvictCall:
    """Gateway to worker: evict from your own pool."""

    worker_id: WorkerId
    selector: EvictSelector
    dry_run: bool


@dataclass(frozen=True, slots=True)
class ListCall:
    """Gateway to worker: say what your own pool holds."""

    worker_id: WorkerId
    selector: EvictSelector
    limit: int


@dataclass(frozen=True, slots=True)
class TtlCall:
    """Gateway to worker: have a prefix go from your own pool at a moment."""

    worker_id: WorkerId
    selector: EvictSelector
    ttl_s: float | None


class WorkerReplica:
    """One worker. Which calls it takes is its role's matter; a worker of role BOTH takes both kinds."""

    async def __init__(self, settings: dict[str, Any], role: str) -> None:  # type: ignore[misc]  # Serve awaits it
        from headrace.compose import build_worker
        from headrace.telemetry.logs import set_up_logs

        self._callers = CallersPresent()
        config = self._config = config_here(settings)
        self._worker_id = WorkerId(serve.get_replica_context().replica_id.unique_id)
        set_up_logs(config.telemetry.log_format, part="worker", instance_id=self._worker_id)
        await ensure_store_actor(config)
        self._worker = build_worker(
            config, role=WorkerRole(role), worker_id=self._worker_id, ray_cluster=ray_cluster_here()
        )
        await self._worker.start()

    async def prefill(self, call: PrefillCall, caller: str) -> AsyncIterator[str | PrefillResult]:
        """Have the prompt's full blocks in the store; yields acceptance, then the result."""
        self._check_addressed(call.worker_id)
        yield ACCEPTED

        async def result() -> AsyncGenerator[PrefillResult, None]:
            yield await self._worker.prefill(call)

        async with aclosing(self._while_present(caller, result())) as results:
            async for item in results:
                yield item

    async def decode(self, call: DecodeCall, caller: str) -> AsyncIterator[str | DecodeEvent]:
        """Stream the tokens; yields acceptance, then what `decode_tokens` yields."""
        self._check_addressed(call.worker_id)
        yield ACCEPTED
        async with aclosing(self._while_present(caller, self._worker.decode(call))) as events:
            async for event in events:
                yield event

    async def evict_device(self, call: EvictCall, caller: str) -> AsyncIterator[str | EvictReport]:
        """Evict from this worker's pool."""
        self._check_addressed(call.worker_id)
        yield ACCEPTED
        yield self._worker.evict_device(call.selector, dry_run=call.dry_run)

    async def list_device(self, call: ListCall, caller: str) -> AsyncIterator[str | DeviceListing]:
        """Say what this worker's pool holds."""
        self._check_addressed(call.worker_id)
        yield ACCEPTED
        yield self._worker.list_device(call.selector, limit=call.limit)

    async def set_device_ttl(self, call: TtlCall, caller: str) -> AsyncIterator[str | ControlReport]:
        """Have a prefix go from this worker's pool at a moment, or take that back."""
        self._check_addressed(call.worker_id)
        yield ACCEPTED
        yield self._worker.set_device_ttl(call.selector, ttl_s=call.ttl_s)

    def record_autoscaling_stats(self) -> dict[str, float]:
        """What `scale_workers.py` goes by; Serve asks for it where it scales."""
        return {PRESSURE: pressure(self._worker.record(), self._config)}

    async def check_health(self) -> None:
        """Serve replaces the replica when this raises: healthy means that it can serve a call now."""
        if not self._worker.healthy():
            raise WorkerUnavailable(self._worker_id, "the engine does not step any more")

    async def __del__(self) -> None:
        """Serve calls this once, after the last call has ended or the grace period is over."""
        worker = getattr(self, "_worker", None)
        if worker is not None:
            await worker.stop()
            self._callers.close()

    async def _while_present(self, caller: str, events: AsyncGenerator[Any, None]) -> AsyncGenerator[Any, None]:
        """The events of a call for as long as the gateway lives that made it; then the work is over, too."""
        async with aclosing(events), aclosing(self._callers.while_present(caller, events)) as items:
            try:
                async for event in items:
                    yield event
            except CallerGone:
                return

    def _check_addressed(self, worker_id: WorkerId) -> None:
        if worker_id != self._worker_id:
            raise WorkerUnavailable(worker_id, "it is gone; the call reached another worker")


PrefillWorker = serve.deployment(name="PrefillWorker")(WorkerReplica)
DecodeWorker = serve.deployment(name="DecodeWorker")(WorkerReplica)
