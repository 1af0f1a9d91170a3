"""WorkerCalls over Ray Serve handles: the gateway's way to its workers.

Owns the translation of Ray's failures into ours, the bound on how long a worker may take to accept a call, and the
cancelling of a call whose consumer has left. Knows neither routing nor what the workers do.

Every call is a stream whose first item is the worker's acceptance (`ACCEPTED`). Serve itself waits without end for a
replica; so a missing acceptance is how a dead, stopped or missing worker is told from one that computes for long.
Every call also names this process's `Presence`, so that it ends when this process does.
"""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Iterator
from contextlib import aclosing, contextmanager
from typing import Any

import ray
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve.context import _RequestContext, _serve_request_context
from ray.serve.exceptions import BackPressureError, RayServeException
from ray.serve.handle import DeploymentHandle, DeploymentResponseGenerator

from headrace.core.clock import Clock, Deadline
from headrace.core.errors import DeadlineExceeded, HeadraceError, Overloaded, WorkerUnavailable
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
from headrace.core.limits import WORKER_ACCEPT_TIMEOUT_MS, WORKER_EVICT_TIMEOUT_MS
from headrace.core.members import WorkerRecord
from headrace_cluster.caller_presence import Presence
from headrace_cluster.worker_replica import ACCEPTED, EvictCall, ListCall, TtlCall

OVERLOADED_RETRY_MS = 1_000


class RayWorkerCalls:
    """WorkerCalls over the handles of the two worker deployments; without prefill workers, decode workers take both.
    Making it blocks until Serve's controller is found."""

    def __init__(self, *, prefill: DeploymentHandle | None, decode: DeploymentHandle, clock: Clock) -> None:
        # A handle's first use looks for Serve's controller and asks it for the replicas, with this process's whole loop
        # at a stand until it is found. So it is here, before a gateway takes calls.
        self._prefill = None if prefill is None else prefill.options(stream=True)
        self._decode = decode.options(stream=True)
        self._clock = clock
        self._presence = Presence(ray.util.get_node_ip_address())

    async def prefill(self, call: PrefillCall) -> PrefillResult:
        """Run one prefill attempt; cancelling the await cancels it on the worker."""
        async with aclosing(self._stream(self._prefill or self._decode, "prefill", call, call.timeout_ms)) as results:
            async for result in results:
                return result
        raise WorkerUnavailable(call.worker_id, "ended without a result")

    async def decode(self, call: DecodeCall) -> AsyncIterator[DecodeEvent]:
        """Run one decode attempt; closing the iterator cancels it on the worker."""
        async with aclosing(self._stream(self._decode, "decode", call, call.timeout_ms)) as events:
            async for event in events:
                yield event

    async def evict_device(self, worker: WorkerRecord, selector: EvictSelector, *, dry_run: bool) -> EvictReport:
        """Evict from one worker's own pool."""
        handle = self._handle_of(worker)
        call = EvictCall(worker_id=worker.worker_id, selector=selector, dry_run=dry_run)
        async with aclosing(self._stream(handle, "evict_device", call, WORKER_EVICT_TIMEOUT_MS)) as reports:
            async for report in reports:
                return report
        raise WorkerUnavailable(worker.worker_id, "ended without a report")

    async def list_device(self, worker: WorkerRecord, selector: EvictSelector, *, limit: int) -> DeviceListing:
        """What one worker's own pool holds."""
        handle = self._handle_of(worker)
        call = ListCall(worker_id=worker.worker_id, selector=selector, limit=limit)
        async with aclosing(self._stream(handle, "list_device", call, WORKER_EVICT_TIMEOUT_MS)) as listings:
            async for listing in listings:
                return listing
        raise WorkerUnavailable(worker.worker_id, "ended without a listing")

    async def set_device_ttl(
        self, worker: WorkerRecord, selector: EvictSelector, *, ttl_s: float | None
    ) -> ControlReport:
        """Have a prefix go from one worker's own pool at a moment, or take that back."""
        handle = self._handle_of(worker)
        call = TtlCall(worker_id=worker.worker_id, selector=selector, ttl_s=ttl_s)
        async with aclosing(self._stream(handle, "set_device_ttl", call, WORKER_EVICT_TIMEOUT_MS)) as reports:
            async for report in reports:
                return report
        raise WorkerUnavailable(worker.worker_id, "ended without a report")

    def _handle_of(self, worker: WorkerRecord) -> DeploymentHandle:
        return self._decode if worker.role.decodes or self._prefill is None else self._prefill

    async def _stream(
        self,
        handle: DeploymentHandle,
        method: str,
        call: PrefillCall | DecodeCall | EvictCall | ListCall | TtlCall,
        timeout_ms: int,
    ) -> AsyncGenerator[Any, None]:
        """The worker's items after its acceptance. Whatever ends this generator ends the call on the worker."""
        deadline = Deadline.after(timeout_ms / 1000, self._clock)
        caller = await self._presence.address()
        with own_request():
            response = getattr(handle, method).remote(call, caller)
        assert isinstance(response, DeploymentResponseGenerator)
        try:
            try:
                async with deadline.capped(WORKER_ACCEPT_TIMEOUT_MS / 1000).scope("acceptance by a worker"):
                    first = await next_item(response, call.worker_id)
            except DeadlineExceeded:
                if deadline.left_s() == 0:
                    raise
                waited = f"did not accept a call within {WORKER_ACCEPT_TIMEOUT_MS} ms"
                raise WorkerUnavailable(call.worker_id, waited) from None
            assert first == ACCEPTED, f"the first item of {method} is {first!r}"
            while True:
                async with deadline.scope(method):
                    try:
                        item = await next_item(response, call.worker_id)
                    except StopAsyncIteration:
                        return
                yield item
        finally:
            response.cancel()


@contextmanager
def own_request() -> Iterator[None]:
    """Give a handle call an identity of its own instead of the client request's.

    Serve's router finds the pending call that a replica was chosen for by the request's id, which all calls made
    while serving one client request inherit. Two of them at once (two choices, say) would be exchanged and one of
    them would wait for ever.
    """
    inherited = _serve_request_context.set(_RequestContext())  # type: ignore[arg-type]
    try:
        yield
    finally:
        _serve_request_context.reset(inherited)


async def next_item(response: DeploymentResponseGenerator, worker_id: WorkerId) -> Any:
    """The next item of a worker's stream, Ray's failures as ours. StopAsyncIteration passes through."""
    try:
        return await response.__anext__()
    except RayTaskError as error:
        cause = error.cause
        if isinstance(cause, HeadraceError):
            raise cause from None
        raise WorkerUnavailable(worker_id, f"failed: {type(cause).__name__}: {cause}") from error
    except BackPressureError as error:
        raise Overloaded("the workers' queues are full", retry_after_ms=OVERLOADED_RETRY_MS) from error
    except RayActorError as error:
        raise WorkerUnavailable(worker_id, "its process ended") from error
    except (RayServeException, RayError) as error:
        raise WorkerUnavailable(worker_id, f"{type(error).__name__}: {error}") from error
    except asyncio.CancelledError:
        # Serve raises this when the call was cancelled on the other side, which is not a cancellation of ours.
        task = asyncio.current_task()
        if task is not None and task.cancelling():
            raise
        raise WorkerUnavailable(worker_id, "the call was cancelled there; the worker is stopping") from None
