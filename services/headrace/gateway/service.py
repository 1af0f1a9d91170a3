"""The gateway as a whole: admission, the worker table and its refresh, and the way from a client's request to tokens.

Holds everything that a gateway process shares between requests. Knows no protocol: the HTTP and gRPC files beside this
one turn their requests into ClientRequest and render what `generate` yields.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncGenerator, Awaitable, Callable
from contextlib import aclosing
from dataclasses import replace

from headrace.config import GatewaySettings
from headrace.core.block import HashedPrompt, Namespace, hash_prompt
from headrace.core.choose_workers import RoutingRule
from headrace.core.clock import Clock, Deadline
from headrace.core.errors import ContextExceeded, IndexUnavailable, InvalidRequest, WorkerUnavailable
from headrace.core.generation import CacheControl, GenerateRequest, RequestId, SamplingParams, Usage, WorkerId
from headrace.core.limits import (
    GATEWAY_INFLIGHT_MAX,
    OUTPUT_TOKENS_DEFAULT,
    REQUEST_TIMEOUT_MS_DEFAULT,
    WORKER_TABLE_PAUSE_MS,
    WORKER_TABLE_REFRESH_MS,
)
from headrace.core.members import WorkerRecord
from headrace.core.ports import BlockIndex, Membership, WorkerCalls
from headrace.core.rate_limits import RateAccounts
from headrace.core.sequence_room import SequenceRoom
from headrace.core.tenants import KeyRing, Tenant, groups_of
from headrace.gateway.accepted import Accepted
from headrace.gateway.admit_request import Body, Places, admit_request, shortest_queue_s
from headrace.gateway.audit_log import RefusalLog
from headrace.gateway.authenticate import authenticate
from headrace.gateway.goodput import LatencyTargets, RequestObserver, RequestOutcome, observed_request
from headrace.gateway.measured_rate import PrefillRate, TimedWorkerCalls
from headrace.gateway.planner import RoutePlanner
from headrace.gateway.recent_prompts import RecentPrompt, RecentPrompts, SeenHolders
from headrace.gateway.route_request import (
    ChoiceEvent,
    ChoiceFinished,
    ChoiceToken,
    RouteObserver,
    Router,
    route_request,
)
from headrace.gateway.seen_members import SeenMembership
from headrace.gateway.tenants_file import TenantsFile
from headrace.gateway.tokenize_prompt import Tokenizers, tokenize_prompt
from headrace.gateway.trace_request import trace_request
from headrace.gateway.worker_table import ServedModel, WorkerTable
from headrace.telemetry.tracing import Tracing
from headrace.wire.client_request import ClientRequest, SamplingOptions

log = logging.getLogger(__name__)


GatewayEvent = Accepted | ChoiceEvent


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


class GatewayService:
    """One gateway replica. `start` it on the loop that serves, `stop` it there."""

    def __init__(
        self,
        *,
        index: BlockIndex,
        membership: Membership,
        calls: WorkerCalls,
        settings: GatewaySettings,
        clock: Clock,
        tokenizers: Tokenizers | None = None,
        observer: RouteObserver | None = None,
        requests: RequestObserver | None = None,
        tie_break: Callable[[WorkerId], float] | None = None,
        inflight_max: int = GATEWAY_INFLIGHT_MAX,
        key_ring: KeyRing | None = None,
        tenants_file: TenantsFile | None = None,
        tracing: Tracing | None = None,
        ray_cluster: str = "",
    ) -> None:
        """key_ring: whose API keys are let in; None lets everybody in, as one tenant.
        tenants_file: where the key ring comes from, and is taken from again when the file changes.
        ray_cluster: of which workers are called; those of others with the same index are not."""
        self.key_ring = key_ring if tenants_file is None else tenants_file.key_ring
        self._tenants_file = tenants_file
        self._tracing = tracing
        self._ray_cluster = ray_cluster
        self.membership = SeenMembership(membership, clock)
        self.calls = calls
        self.clock = clock
        self.table = WorkerTable(clock)
        self.prefill_rate = PrefillRate()
        self.index = index
        self.recent_prompts = RecentPrompts()
        self.seen_holders = SeenHolders()
        self.tokenizers = tokenizers or Tokenizers()
        self._observer = observer or Unobserved()
        self.planner = RoutePlanner(
            self.table,
            RoutingRule(local_prefill_tokens=settings.local_prefill_tokens),
            clock=clock,
            shed_ttft_ms=settings.shed_ttft_ms,
            tie_break=tie_break,
        )
        self._router = Router(
            index=index,
            calls=TimedWorkerCalls(
                calls, rate=self.prefill_rate, clock=clock, measured=self.planner.decisions.measured
            ),
            table=self.table,
            planner=self.planner,
            observer=self._observer,
        )
        self._requests = requests or Unobserved()
        self._targets = LatencyTargets(ttft_s=settings.ttft_slo_ms / 1000, itl_s=settings.itl_slo_ms / 1000)
        self.places = Places(
            requests_max=inflight_max,
            is_shared=lambda: self.key_ring is not None and len(groups_of(self.key_ring.tenants)) > 1,
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
        """Stop refreshing and the tokenizer threads. Requests under way end with their callers. Idempotent."""
        running = [task for task in (self._refreshing, *self._stepping) if task is not None]
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        self._refreshing, self._stepping = None, []
        self.tokenizers.close()

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
            if self._tenants_file is not None:
                self.key_ring = await self._tenants_file.reread() or self.key_ring

    def authenticate(self, authorization: str | None) -> Tenant:
        """Who a call is from, by its `Authorization` header or metadata. Raises Unauthenticated."""
        return authenticate(authorization, self.key_ring)

    def call_refused(self, error: Exception, peer: str) -> None:
        """One call of any API ends with an error before anything was passed on; `peer` is where it came from."""
        self._requests.call_refused(error)
        self._refusals.saw(error, peer=peer)

    def generate(
        self, request: ClientRequest, tenant: Tenant, *, body: Body | None = None
    ) -> AsyncGenerator[GatewayEvent, None]:
        """Serve one client request: Accepted, then tokens, then one ChoiceFinished per choice. body: what it came in.

        Blocks are shared within the tenant's trust group. Raises InvalidRequest (nothing was sent to a worker),
        Overloaded, WorkerUnavailable, DeadlineExceeded. Closing the stream ends the work on every worker.
        """
        events = self._generate(request, tenant, body)
        return trace_request(request, events, tracing=self._tracing, decisions=self.planner.decisions)

    async def _generate(
        self, request: ClientRequest, tenant: Tenant, body: Body | None
    ) -> AsyncGenerator[GatewayEvent, None]:
        accepted_s = self.clock.now_s()
        deadline = Deadline.after((request.timeout_ms or REQUEST_TIMEOUT_MS_DEFAULT) / 1000, self.clock)
        with (
            observed_request(
                self._requests, self._targets, tenant=tenant.name, choices=request.choices, clock=self.clock
            ) as times,
            admit_request(tenant, self.places, body=body) as place,
        ):
            requests = await self._prepare(request, tenant, deadline)
            place.hold_prompt(
                len(requests[0].prompt.token_ids),
                output_tokens_max=len(requests) * requests[0].sampling.max_tokens,
            )
            request_id = requests[0].request_id
            yield Accepted(request_id=request_id, model=requests[0].model)
            waiting = True
            try:
                async with aclosing(route_request(requests, router=self._router, deadline=deadline)) as events:
                    async for event in events:
                        times.see(event.choice, is_token=isinstance(event, ChoiceToken))
                        place.passed_on_tokens += isinstance(event, ChoiceToken)
                        if waiting and isinstance(event, ChoiceToken):
                            waiting = False
                            self._observer.first_token(self.clock.now_s() - accepted_s)
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

    async def _prepare(self, request: ClientRequest, tenant: Tenant, deadline: Deadline) -> list[GenerateRequest]:
        """Tokenise, hash and settle sampling: one GenerateRequest for each choice, all with the same prompt."""
        served = await self._served(request)
        token_ids = await tokenize_prompt(
            request.prompt,
            model_path=served.model_path,
            room=served.room,
            tokenizers=self.tokenizers,
            deadline=deadline,
        )
        sampling = settle_sampling(request.sampling, prompt_tokens=len(token_ids), room=served.room)
        prompt = hash_for(served.namespace, token_ids, cache_salt=request.cache_salt, trust_group=tenant.trust_group)
        request_id = RequestId(secrets.token_hex(12))
        recent = RecentPrompt(served.name, tenant.trust_group, prompt, came_unix_ms=self.clock.unix_ms())
        self.recent_prompts.add(request_id, recent)
        return [
            GenerateRequest(
                request_id=request_id,
                model=served.name,
                prompt=prompt,
                sampling=replace(sampling, seed=(sampling.seed + choice) % 2**64),
                cache=settle_retention(request.cache, tenant),
                trust_group=tenant.trust_group,
                cache_salt=request.cache_salt,
                decode_worker=request.decode_worker,
                prefill_worker=request.prefill_worker,
                priority=settle_priority(request.priority, tenant),
            )
            for choice in range(request.choices)
        ]

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


def hash_for(
    namespace: Namespace, token_ids: tuple[int, ...], *, cache_salt: str = "", trust_group: str = ""
) -> HashedPrompt:
    """Hash a prompt under a model's namespace, narrowed to the caller's trust group and by the caller's salt."""
    narrowed = namespace.narrowed(cache_salt, trust_group=trust_group)
    hashed = hash_prompt(
        narrowed.id, token_ids, block_tokens=namespace.layout.block_tokens, algorithm=namespace.hash_algorithm
    )
    wider = dict.fromkeys((namespace.id, namespace.narrowed("", trust_group=trust_group).id))
    return replace(hashed, narrowed_from=tuple(each for each in wider if each != narrowed.id))


def settle_retention(cache: CacheControl, tenant: Tenant) -> CacheControl:
    """The tenant's time to live for the blocks of a request that names none itself."""
    if tenant.ttl_s is None or cache.retention.ttl_s is not None:
        return cache
    return replace(cache, retention=replace(cache.retention, ttl_s=tenant.ttl_s))


def settle_priority(priority: int | None, tenant: Tenant) -> int:
    """A request's own priority, else the normal one or the tenant's highest, if that is lower."""
    if priority is None:
        return min(0, tenant.priority_max)
    if priority > tenant.priority_max:
        raise InvalidRequest(
            f"priority {priority} is above {tenant.priority_max}, the highest for tenant {tenant.name}; leave it out",
            param="priority",
        )
    return priority


def settle_sampling(options: SamplingOptions, *, prompt_tokens: int, room: SequenceRoom) -> SamplingParams:
    """Fill in what the caller left open: the output's bound (what fits, at most the default) and the seed (a draw)."""
    left = room.tokens_max - prompt_tokens
    assert left >= 1, "tokenize_prompt leaves room for one token"
    max_tokens = options.max_tokens
    if max_tokens is None:
        max_tokens = min(left, options.max_tokens_default or OUTPUT_TOKENS_DEFAULT)
    if max_tokens > left:
        raise ContextExceeded(
            f"{prompt_tokens} prompt tokens and max_tokens {max_tokens} make {prompt_tokens + max_tokens}, and at most"
            f" max_tokens {left} would fit: {room.why_not(prompt_tokens + max_tokens)}",
            tokens_max=room.tokens_max,
            param="max_tokens",
        )
    return SamplingParams(
        max_tokens=max_tokens,
        temperature=options.temperature,
        top_k=options.top_k,
        top_p=options.top_p,
        seed=secrets.randbits(63) if options.seed is None else options.seed,
        stop=options.stop,
        logprobs=options.logprobs,
        ignore_eos=options.ignore_eos,
    )
