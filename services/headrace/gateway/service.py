"""The gateway as a whole: admission, the worker table and its refresh, and the way from a client's request to tokens.

Holds everything that a gateway process shares between requests. Knows no protocol: the HTTP and gRPC files beside this
one turn their requests into ClientRequest and render what `generate` yields.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Awaitable, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass

from headrace.config import GatewaySettings
from headrace.core.choose_workers import RoutingRule
from headrace.core.clock import Clock, Deadline
from headrace.core.errors import IndexUnavailable, InvalidRequest, WorkerUnavailable
from headrace.core.front_door_limits import BODY_THREADS
from headrace.core.generation import WorkerId
from headrace.core.limits import (
    GATEWAY_INFLIGHT_MAX,
    REQUEST_TIMEOUT_MS_DEFAULT,
    WORKER_TABLE_PAUSE_MS,
    WORKER_TABLE_REFRESH_MS,
)
from headrace.core.members import WorkerRecord
from headrace.core.ports import BlockIndex, Membership, WorkerCalls
from headrace.core.rate_limits import RateAccounts
from headrace.core.tenants import KeyRing, Tenant
from headrace.gateway.accepted import Accepted
from headrace.gateway.admit_request import Body, Places, admit_request, shortest_queue_s
from headrace.gateway.audit_log import RefusalLog
from headrace.gateway.authenticate import authenticate
from headrace.gateway.goodput import LatencyTargets, observed_request
from headrace.gateway.known_keys import NO_KEYS, KnownKeys
from headrace.gateway.measured_rate import PrefillRate, TimedWorkerCalls
from headrace.gateway.observers import UNOBSERVED, Observers
from headrace.gateway.planner import RoutePlanner
from headrace.gateway.prepare_request import prepare_request
from headrace.gateway.recent_prompts import RecentPrompt, RecentPrompts, SeenHolders
from headrace.gateway.route_request import ChoiceEvent, ChoiceFinished, ChoiceToken, route_request
from headrace.gateway.router import Router
from headrace.gateway.seen_members import SeenMembership
from headrace.gateway.tokenize_prompt import Tokenizers
from headrace.gateway.trace_request import trace_request
from headrace.gateway.worker_table import ServedModel, WorkerTable
from headrace.wire.client_request import ClientRequest

log = logging.getLogger(__name__)

GatewayEvent = Accepted | ChoiceEvent


@dataclass(frozen=True, slots=True)
class Backend:
    """What a gateway serves from: who holds what, who is there, and how workers are called."""

    index: BlockIndex
    membership: Membership
    calls: WorkerCalls
    ray_cluster: str = ""  # that of the workers which `calls` reaches; the index may know those of others


class GatewayService:
    """One gateway replica. `start` it on the loop that serves, `stop` it there."""

    def __init__(
        self,
        backend: Backend,
        settings: GatewaySettings,
        *,
        clock: Clock,
        keys: KnownKeys = NO_KEYS,
        observers: Observers = UNOBSERVED,
        tokenizers: Tokenizers | None = None,
        inflight_max: int = GATEWAY_INFLIGHT_MAX,
        tie_break: Callable[[WorkerId], float] | None = None,
    ) -> None:
        """tokenizers: closed with this. tie_break: as RoutePlanner's."""
        self.membership = SeenMembership(backend.membership, clock)
        self.calls = backend.calls
        self.index = backend.index
        self._ray_cluster = backend.ray_cluster
        self.clock = clock
        self.keys = keys
        self.table = WorkerTable(clock)
        self.prefill_rate = PrefillRate()
        self.recent_prompts = RecentPrompts()
        self.seen_holders = SeenHolders()
        self.tokenizers = tokenizers or Tokenizers()
        self.body_thread = ThreadPoolExecutor(BODY_THREADS, thread_name_prefix="bodies")
        self._observers = observers
        self._targets = LatencyTargets(ttft_s=settings.ttft_slo_ms / 1000, itl_s=settings.itl_slo_ms / 1000)
        self.planner = RoutePlanner(
            self.table,
            RoutingRule(local_prefill_tokens=settings.local_prefill_tokens),
            clock=clock,
            shed_ttft_ms=settings.shed_ttft_ms,
            tie_break=tie_break,
        )
        self._router = Router(
            index=self.index,
            calls=TimedWorkerCalls(
                self.calls, rate=self.prefill_rate, clock=clock, measured=self.planner.decisions.measured
            ),
            table=self.table,
            planner=self.planner,
            observer=observers.routes,
        )
        self.places = Places(
            requests_max=inflight_max,
            is_shared=lambda: self.key_ring is not None and len(self.key_ring.trust_groups) > 1,
            queue_s=lambda: shortest_queue_s(self.table),
            rates=RateAccounts(clock),
        )
        self._refusals = RefusalLog(clock)
        self._index_available = True
        self._refresh_now = asyncio.Event()
        self._refresh_began_s = float("-inf")
        self._one_refresh = asyncio.Lock()
        self._refreshing: asyncio.Task[None] | None = None
        self._beside: list[Callable[[], Awaitable[None]]] = []
        self._stepping: list[asyncio.Task[None]] = []

    @property
    def key_ring(self) -> KeyRing | None:
        """Whose API keys are let in now; None lets everybody in, as one tenant."""
        return self.keys.key_ring

    def run_beside(self, step: Callable[[], Awaitable[None]]) -> None:
        """Have `step` awaited again and again while the service runs, as often as the table is refreshed but apart from
        it: a slow step delays itself only. Before `start`."""
        self._beside.append(step)

    async def start(self) -> None:
        """Read who is alive and keep reading. A membership service that is away does not stop the start."""
        await self.refresh()
        self._refreshing = asyncio.create_task(self._keep_refreshing(), name="the worker table")
        self._stepping = [asyncio.create_task(_keep_stepping(step), name=step.__qualname__) for step in self._beside]
        for task in (self._refreshing, *self._stepping):
            task.add_done_callback(_log_end)

    async def stop(self) -> None:
        """Stop refreshing and the threads. Requests under way end with their callers. Idempotent."""
        running = [task for task in (self._refreshing, *self._stepping) if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._refreshing, self._stepping = None, []
        self.tokenizers.close()
        self.body_thread.shutdown(wait=False, cancel_futures=True)

    def ready(self) -> bool:
        """Whether a request could be served now: this gateway follows the workers, knows one that decodes, and does
        not still load a tokenizer."""
        following = self._refreshing is not None and not self._refreshing.done()
        loading = any(self.tokenizers.is_loading(served.model_path) for served in self.table.models())
        return following and self.table.can_decode() and not loading

    def healthy(self) -> bool:
        """Whether all that this gateway follows is followed still. What ended did so of a bug and for good: only
        another process serves as well. That there are no workers is no fault of this one."""
        following = (self._refreshing, *self._stepping)
        return all(task is not None and not task.done() for task in following)

    @property
    def inflight(self) -> int:
        """Requests under way, all stages together; 0 at rest."""
        return self.places.num_requests

    @property
    def index_available(self) -> bool:
        """Whether the last reading of the membership succeeded."""
        return self._index_available

    def models(self) -> tuple[ServedModel, ...]:
        """Models that are served now."""
        return self.table.models()

    def workers_elsewhere(self) -> list[WorkerRecord]:
        """Workers of other Ray clusters with the same index, as last read: only their own gateways can call them."""
        return [worker for worker in self.membership.last_workers() if worker.ray_cluster != self._ray_cluster]

    async def refresh(self) -> None:
        """Read the workers once. When that fails the table stays as it is: dead workers show by failing calls."""
        self._refresh_began_s = self.clock.now_s()
        try:
            workers = await self.membership.workers()
            self.table.replace([worker for worker in workers if worker.ray_cluster == self._ray_cluster])
        except IndexUnavailable as error:
            if self._index_available:  # once per outage, not once per second
                log.warning("the worker table is not refreshed: %s", error)
            self._index_available = False
        else:
            self._index_available = True
        known = self.table.records()
        holders = {w.holder_id for w in known} | {f"node:{w.store_node}" for w in known if w.store_node}
        self.seen_holders.saw(holders, unix_ms=self.clock.unix_ms())
        for served in self.table.models():
            if served.model_path:
                self.tokenizers.preload(served.model_path)

    async def _keep_refreshing(self) -> None:
        while True:
            try:
                async with asyncio.timeout(WORKER_TABLE_REFRESH_MS / 1000):
                    await self._refresh_now.wait()
            except TimeoutError:
                pass
            self._refresh_now.clear()
            self._refusals.flush()
            await self.refresh()
            await self.keys.reread()

    def authenticate(self, authorization: str | None) -> Tenant:
        """Who a call is from, by its `Authorization` header or metadata. Raises Unauthenticated."""
        return authenticate(authorization, self.key_ring)

    def call_refused(self, error: Exception, peer: str) -> None:
        """One call of any API ends with an error before anything was passed on; `peer` is where it came from."""
        self._observers.requests.call_refused(error)
        self._refusals.saw(error, peer=peer)

    def generate(
        self, request: ClientRequest, tenant: Tenant, *, body: Body | None = None
    ) -> AsyncGenerator[GatewayEvent, None]:
        """Serve one client request: Accepted, then tokens, then one ChoiceFinished per choice. body: what it came in.

        Blocks are shared within the tenant's trust group. Raises InvalidRequest (nothing was sent to a worker),
        Overloaded, WorkerUnavailable, DeadlineExceeded. Closing the stream ends the work on every worker.
        """
        events = self._generate(request, tenant, body)
        return trace_request(request, events, tracing=self._observers.tracing, decisions=self.planner.decisions)

    async def _generate(
        self, request: ClientRequest, tenant: Tenant, body: Body | None
    ) -> AsyncGenerator[GatewayEvent, None]:
        accepted_s = self.clock.now_s()
        deadline = Deadline.after((request.timeout_ms or REQUEST_TIMEOUT_MS_DEFAULT) / 1000, self.clock)
        with (
            observed_request(
                self._observers.requests, self._targets, tenant=tenant.name, choices=request.choices, clock=self.clock
            ) as times,
            admit_request(tenant, self.places, body=body) as place,
        ):
            requests = await prepare_request(
                request, tenant, await self._served(request), tokenizers=self.tokenizers, deadline=deadline
            )
            request_id, model, prompt = requests[0].request_id, requests[0].model, requests[0].prompt
            recent = RecentPrompt(model, tenant.trust_group, prompt, came_unix_ms=self.clock.unix_ms())
            self.recent_prompts.add(request_id, recent)
            output_tokens_max = len(requests) * requests[0].sampling.max_tokens
            place.hold_prompt(len(prompt.token_ids), output_tokens_max=output_tokens_max)
            yield Accepted(request_id=request_id, model=model, prompt_tokens=len(prompt.token_ids))
            waiting = True
            try:
                async with aclosing(route_request(requests, router=self._router, deadline=deadline)) as events:
                    async for event in events:
                        times.see(event.choice, is_token=isinstance(event, ChoiceToken))
                        place.passed_on_tokens += isinstance(event, ChoiceToken)
                        if waiting and isinstance(event, ChoiceToken):
                            waiting = False
                            self._observers.routes.first_token(self.clock.now_s() - accepted_s)
                            self.planner.first_token(request_id, self.clock.now_s() - accepted_s)
                        if isinstance(event, ChoiceFinished) and event.choice == 0:
                            self.planner.decisions.finished(request_id, event.finished)
                            cached_tokens = event.finished.usage.cached.total
                            self.recent_prompts.served(request_id, cached_tokens=cached_tokens)
                        yield event
            except WorkerUnavailable:
                self._refresh_now.set()
                raise
            finally:
                self.planner.ended(request_id)

    async def _served(self, request: ClientRequest) -> ServedModel:
        """The model that is asked for. A model or a worker that is not known here may be new, and known to the gateway
        that the caller heard of it from: the members are read before it is refused, once for all who wait for that."""
        asked_s = self.clock.now_s()
        named = {request.decode_worker, request.prefill_worker} - {None}
        try:
            served = self.table.served(request.model, request.decode_worker)
            if named <= {record.worker_id for record in self.table.records()}:
                return served
        except InvalidRequest:
            pass
        async with self._one_refresh:
            if self._refresh_began_s <= asked_s:
                await asyncio.sleep(self._refresh_began_s + WORKER_TABLE_PAUSE_MS / 1000 - self.clock.now_s())
                await self.refresh()
        return self.table.served(request.model, request.decode_worker)


async def _keep_stepping(step: Callable[[], Awaitable[None]]) -> None:
    while True:
        await step()
        await asyncio.sleep(WORKER_TABLE_REFRESH_MS / 1000)


def _log_end(task: asyncio.Task[None]) -> None:
    """Work that ends by itself is a bug: say so. When it is the refresh, `ready` turns false."""
    if not task.cancelled():
        log.critical("%s is followed no more", task.get_name(), exc_info=task.exception())
