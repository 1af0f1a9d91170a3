"""One tokenised request becomes a stream of tokens: look up, choose, prefill, decode, and try again where that is safe.

Rules kept here: a cache fault costs time, never the request; every try is a new attempt with an id of its own; nothing
is tried again after the first token was passed on; a worker that failed is not asked twice by one request; closing the
stream, at any moment, closes the worker's. Knows ports only: not HTTP, not gRPC, not Ray, not Redis.
"""

import logging
import secrets
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Protocol, cast

from headrace.core.choose_workers import Plan
from headrace.core.clock import Deadline
from headrace.core.errors import (
    DeadlineExceeded,
    HeadraceError,
    IndexUnavailable,
    InvalidRequest,
    Overloaded,
    WorkerUnavailable,
)
from headrace.core.generation import (
    AttemptId,
    DecodeCall,
    DecodeEvent,
    Finished,
    GenerateRequest,
    PrefillCall,
    PrefillResult,
    TokenDelta,
    WorkerId,
)
from headrace.core.limits import ATTEMPTS_MAX, CHAIN_BLOCKS_MAX, INDEX_TIMEOUT_MS, PREFILL_TIMEOUT_MS
from headrace.core.members import NO_MATCH, PrefixMatch
from headrace.core.ports import BlockIndex, WorkerCalls
from headrace.gateway.merge_streams import merge_streams
from headrace.gateway.planner import RoutePlanner
from headrace.gateway.worker_table import WorkerTable

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ChoiceToken:
    """One token of one choice."""

    choice: int
    delta: TokenDelta


@dataclass(frozen=True, slots=True)
class ChoiceFinished:
    """One choice has ended well."""

    choice: int
    finished: Finished
    prefill_worker: WorkerId | None


ChoiceEvent = ChoiceToken | ChoiceFinished


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


@dataclass(frozen=True, slots=True)
class Router:
    """What routing works with."""

    index: BlockIndex
    calls: WorkerCalls
    table: WorkerTable
    planner: RoutePlanner
    observer: RouteObserver


async def route_request(
    requests: Sequence[GenerateRequest], *, router: Router, deadline: Deadline
) -> AsyncGenerator[ChoiceEvent, None]:
    """Serve the choices of one client request, which share one prompt, after at most one prefill.

    Ends with one ChoiceFinished for each choice, or raises InvalidRequest, Overloaded, WorkerUnavailable or
    DeadlineExceeded; the first failed choice ends all.
    """
    match = await _find_match(requests[0], router, deadline)
    plan = router.planner.plan(requests[0], match, failed=frozenset())
    prefill = await _run_prefill(requests[0], plan, router, deadline)
    prompt = requests[0].prompt
    known_blocks = (len(prompt.token_ids) - plan.missing_tokens) // prompt.block_tokens
    choices = [
        _decode_choice(
            _Choice(number, request, match, prefill, known_blocks=known_blocks, shared=len(requests) > 1),
            first_plan=plan if number == 0 else None,
            router=router,
            deadline=deadline,
        )
        for number, request in enumerate(requests)
    ]
    async with aclosing(merge_streams(choices)) as events:
        async for event in events:
            yield event


async def _find_match(request: GenerateRequest, router: Router, deadline: Deadline) -> PrefixMatch:
    """Who holds how much of the prompt, as the index believes; nothing when it cannot be asked."""
    if not request.cache.reads or not request.prompt.chain:
        return NO_MATCH
    chain = request.prompt.chain[:CHAIN_BLOCKS_MAX]
    try:
        async with deadline.capped(2 * INDEX_TIMEOUT_MS / 1000).scope("look up the prefix"):
            return await router.index.longest_prefix(request.prompt.namespace, chain)
    except (IndexUnavailable, DeadlineExceeded) as error:
        log.warning("request %s goes on without reuse: %s", request.request_id, error)
        router.observer.recovered("index_unavailable")
        return NO_MATCH


@dataclass(frozen=True, slots=True)
class _Prefill:
    """How the prefill went. `result` is None when there was none or it failed; then `tried` tells which."""

    tried: bool
    result: PrefillResult | None


async def _run_prefill(request: GenerateRequest, plan: Plan, router: Router, deadline: Deadline) -> _Prefill:
    """Let the plan's prefill worker compute and publish. Its failure is not the request's: decode computes instead."""
    if plan.prefill is None:
        return _Prefill(tried=False, result=None)
    worker_id = plan.prefill.worker_id
    budget = deadline.capped(PREFILL_TIMEOUT_MS / 1000)
    call = PrefillCall(
        attempt_id=_new_attempt_id(),
        request=request,
        worker_id=worker_id,
        timeout_ms=_milliseconds(budget),
        hint_nodes=plan.hint_nodes,
    )
    try:
        with router.table.in_flight(worker_id):
            async with budget.scope(f"prefill on {worker_id}"):
                return _Prefill(tried=True, result=await router.calls.prefill(call))
    except HeadraceError as error:
        if isinstance(error, WorkerUnavailable):
            router.table.suspect(worker_id)
        if not deadline.left_s():
            raise
        log.warning("request %s: prefill on %s failed, decode computes: %s", request.request_id, worker_id, error)
        router.observer.recovered("prefill_failed")
        return _Prefill(tried=True, result=None)


@dataclass(frozen=True, slots=True)
class _Choice:
    """One choice of a request, and what is known by the time it is decoded."""

    number: int
    request: GenerateRequest
    match: PrefixMatch
    prefill: _Prefill
    known_blocks: int  # leading blocks that the first plan's decode worker could read before anybody worked on this
    shared: bool  # other choices of the same request compute the same prompt

    def computed_from(self, attempt: int) -> int:
        """First block that was, or may have been, computed for this request: it must not count as cached.

        A prefill worker says what it reused. Without one, whatever can be loaded was there before us, as long as
        nobody worked on this request yet; else only what could be read at the start is certainly not our own work.
        """
        chain_blocks = len(self.request.prompt.chain)
        if self.prefill.result is not None:
            return min(self.prefill.result.reused_blocks, chain_blocks)
        if attempt == 0 and not self.shared and not self.prefill.tried:
            return chain_blocks
        return min(self.known_blocks, chain_blocks)

    def hint_nodes(self, plan: Plan) -> tuple[str, ...]:
        """Store nodes to try, best first: the prefill worker's own, then those that the index named."""
        result = self.prefill.result
        first = (result.store_node,) if result and result.published_blocks and result.store_node else ()
        return first + tuple(node for node in plan.hint_nodes if node not in first)


async def _decode_choice(
    choice: _Choice, *, first_plan: Plan | None, router: Router, deadline: Deadline
) -> AsyncGenerator[ChoiceEvent, None]:
    """Decode one choice, at another worker when one fails before its first token."""
    failed: frozenset[WorkerId] = frozenset()
    last_error: HeadraceError | None = None
    for attempt in range(1 + ATTEMPTS_MAX):
        try:
            plan = first_plan or router.planner.plan(choice.request, choice.match, failed=failed)
        except (WorkerUnavailable, InvalidRequest) as none_left:
            # After a failed attempt the caller hears of that; a worker it named may meanwhile have left the table.
            raise last_error or none_left from None
        first_plan = None
        router.observer.decided(plan.reason)
        worker_id, passed_on = plan.decode.worker_id, False
        try:
            async with aclosing(_decode_once(choice, attempt, plan, router, deadline)) as events:
                async for event in events:
                    passed_on = True
                    yield event
            return
        except (WorkerUnavailable, Overloaded) as error:
            if isinstance(error, WorkerUnavailable):
                router.table.suspect(worker_id)
            if passed_on:
                raise
            failed |= {worker_id}
            last_error = error
            log.warning("request %s: attempt at %s failed: %s", choice.request.request_id, worker_id, error)
            router.observer.recovered("new_attempt")
    assert last_error is not None
    raise last_error


async def _decode_once(
    choice: _Choice, attempt: int, plan: Plan, router: Router, deadline: Deadline
) -> AsyncGenerator[ChoiceEvent, None]:
    """One attempt at one worker; every event of it, or the worker's error."""
    worker_id = plan.decode.worker_id
    call = DecodeCall(
        attempt_id=_new_attempt_id(),
        request=choice.request,
        worker_id=worker_id,
        timeout_ms=_milliseconds(deadline),
        computed_from=choice.computed_from(attempt),
        hint_nodes=choice.hint_nodes(plan),
    )
    prefill = choice.prefill.result
    with router.table.in_flight(worker_id):
        # Adapters give async generators; the port promises no more than an iterator that can be closed.
        stream = cast(AsyncGenerator[DecodeEvent, None], router.calls.decode(call))
        async with aclosing(stream):
            while True:
                async with deadline.scope(f"decode on {worker_id}"):
                    event = await anext(stream, None)
                match event:
                    case TokenDelta():
                        yield ChoiceToken(choice.number, event)
                    case Finished():
                        yield ChoiceFinished(choice.number, event, prefill.worker_id if prefill else None)
                        return
                    case None:
                        raise WorkerUnavailable(worker_id, "its stream ended without a result")


def _new_attempt_id() -> AttemptId:
    return AttemptId(secrets.token_hex(8))


def _milliseconds(deadline: Deadline) -> int:
    """Time left for the far side, at least 1: a call with nothing left is ended by our own scope."""
    return max(1, int(deadline.left_s() * 1000))
