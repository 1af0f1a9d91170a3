"""One tokenised request becomes a stream of tokens: look up, choose, prefill and decode, try again where that is safe.

Prefill and decode go out together; the decode worker takes the blocks as they appear (`prefill_beside.py` draws it).
Rules kept here: a cache fault costs time, never the request; every try is a new attempt with an id of its own; nothing
is tried again after the first token was passed on; a worker that failed is not asked twice by one request; closing the
stream, at any moment, closes the workers'. Knows ports only: not HTTP, not gRPC, not Ray, not Redis.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, cast

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
    DecodeCall,
    DecodeEvent,
    Finished,
    GenerateRequest,
    TokenDelta,
    WorkerId,
    count_cached_tokens,
)
from headrace.core.index_limits import INDEX_TIMEOUT_MS
from headrace.core.limits import ATTEMPTS_MAX, CHAIN_BLOCKS_MAX
from headrace.core.members import NO_MATCH, PrefixMatch
from headrace.gateway.merge_streams import merge_streams
from headrace.gateway.prefill_beside import Prefill, milliseconds_left, new_attempt_id, prefill_beside
from headrace.gateway.router import Router
from headrace.transfer.run_in_thread import finish

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


async def route_request(
    requests: Sequence[GenerateRequest], *, router: Router, deadline: Deadline
) -> AsyncGenerator[ChoiceEvent, None]:
    """Serve the choices of one client request, which share one prompt, after at most one prefill.

    Ends with one ChoiceFinished for each choice, or raises InvalidRequest, Overloaded, WorkerUnavailable or
    DeadlineExceeded; the first failed choice ends all.
    """
    match = await _find_match(requests[0], router, deadline)
    plan = router.planner.plan(requests[0], match, failed=frozenset())
    prompt = requests[0].prompt
    known_blocks = (len(prompt.token_ids) - plan.missing_tokens) // prompt.block_tokens
    beside = prefill_beside(requests[0], plan, known_blocks=known_blocks, router=router, deadline=deadline)
    async with beside as prefill:
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
                if isinstance(event, ChoiceToken):
                    prefill.first_token_came()
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
class _Choice:
    """One choice of a request, and what its attempts share."""

    number: int
    request: GenerateRequest
    match: PrefixMatch
    prefill: Prefill
    known_blocks: int  # leading blocks that the first plan's decode worker could read before anybody worked on this
    shared: bool  # other choices of the same request compute the same prompt

    def call(self, plan: Plan, *, is_first: bool, deadline: Deadline) -> DecodeCall:
        """A new attempt at the plan's worker, by what is known of the prefill now."""
        return DecodeCall(
            attempt_id=new_attempt_id(),
            request=self.request,
            worker_id=plan.decode.worker_id,
            timeout_ms=milliseconds_left(deadline),
            computed_from=self._computed_from(is_first),
            hint_nodes=self._hint_nodes(plan),
            hand_off=self.prefill.hand_off(),
        )

    def _computed_from(self, is_first: bool) -> int:
        """First block that was, or may have been, computed for this request: it must not count as cached.

        A prefill worker says what it reused. Without one, whatever can be loaded was there before us, as long as
        nobody worked on this request yet; else only what could be read at the start is certainly not our own work.
        """
        chain_blocks = len(self.request.prompt.chain)
        if self.prefill.result is not None:
            return min(self.prefill.result.reused_blocks, chain_blocks)
        if is_first and not self.shared and not self.prefill.was_tried:
            return chain_blocks
        return min(self.known_blocks, chain_blocks)

    def _hint_nodes(self, plan: Plan) -> tuple[str, ...]:
        """Store nodes to try, best first: where the prefill has stored what it could, then those of the index."""
        first = (self.prefill.store_node,) if self.prefill.store_node else ()
        return first + tuple(node for node in plan.hint_nodes if node not in first)

    async def finish(self, finished: Finished, call: DecodeCall) -> ChoiceFinished:
        """The end of the choice, with what was cached settled by the prefill's own word, which may still be on its way.

        Without that word (it failed, or was given up) only what could be read at the start counts.
        """
        if call.hand_off is not None:
            self.prefill.first_token_came()  # a choice may end without one; the wait is bounded from here on
            await self.prefill.ended.wait()
            if self.prefill.result is not None:
                cached = count_cached_tokens(
                    finished.reused,
                    computed_from=self.prefill.result.reused_blocks,
                    block_tokens=self.request.prompt.block_tokens,
                )
                finished = replace(finished, usage=replace(finished.usage, cached=cached))
        result = self.prefill.result
        return ChoiceFinished(self.number, finished, result.worker_id if result else None)


class _HandOffFailed(Exception):
    """A decode attempt waits for blocks that will not come; it has been closed, and nothing came of it."""


async def _decode_choice(
    choice: _Choice, *, first_plan: Plan | None, router: Router, deadline: Deadline
) -> AsyncGenerator[ChoiceEvent, None]:
    """Decode one choice, at another worker when one fails before its first token."""
    plan = first_plan
    failed: frozenset[WorkerId] = frozenset()
    last_error: HeadraceError | None = None
    while len(failed) <= ATTEMPTS_MAX:
        if plan is None or failed:
            try:
                plan = router.planner.plan(choice.request, choice.match, failed=failed, instead_of=plan)
            except (WorkerUnavailable, InvalidRequest) as none_left:
                # After a failed attempt the caller hears of that; a worker it named may meanwhile have left the table.
                raise last_error or none_left from None
        router.observer.decided(plan.reason)
        worker_id, passed_on = plan.decode.worker_id, False
        try:
            async with aclosing(_decode_at(plan, choice, router, deadline, is_first=not failed)) as events:
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


async def _decode_at(
    plan: Plan, choice: _Choice, router: Router, deadline: Deadline, *, is_first: bool
) -> AsyncGenerator[ChoiceEvent, None]:
    """Decode at one worker: one attempt, and a second one if the first was waiting for a prefill that has failed."""
    try:
        call = choice.call(plan, is_first=is_first, deadline=deadline)
        async with aclosing(_decode_once(choice, call, router, deadline)) as events:
            async for event in events:
                yield event
    except _HandOffFailed:
        log.warning("request %s: %s is to wait no more for its prefill", choice.request.request_id, call.worker_id)
        call = choice.call(plan, is_first=is_first, deadline=deadline)
        assert call.hand_off is None, "a prefill that has ended is nothing to wait for"
        async with aclosing(_decode_once(choice, call, router, deadline)) as events:
            async for event in events:
                yield event


async def _decode_once(
    choice: _Choice, call: DecodeCall, router: Router, deadline: Deadline
) -> AsyncGenerator[ChoiceEvent, None]:
    """One attempt at one worker; every event of it, or the worker's error, or _HandOffFailed before any event."""
    worker_id = call.worker_id
    with router.table.in_flight(worker_id):
        # Adapters give async generators; the port promises no more than an iterator that can be closed.
        stream = cast(AsyncGenerator[DecodeEvent, None], router.calls.decode(call))
        async with aclosing(stream):
            async with deadline.scope(f"decode on {worker_id}"):
                event = await _first_event(stream, call, choice.prefill, deadline)
            while True:
                match event:
                    case TokenDelta():
                        yield ChoiceToken(choice.number, event)
                    case Finished():
                        ended = await choice.finish(event, call)
                        router.observer.finished(ended.finished.usage, reads_cache=choice.request.cache.reads)
                        yield ended
                        return
                    case None:
                        raise WorkerUnavailable(worker_id, "its stream ended without a result")
                async with deadline.scope(f"decode on {worker_id}"):
                    event = await anext(stream, None)


async def _first_event(
    stream: AsyncGenerator[DecodeEvent, None], call: DecodeCall, prefill: Prefill, deadline: Deadline
) -> DecodeEvent | None:
    """The first event. Raises _HandOffFailed, with the stream closed, when the prefill has come to nothing while the
    decode worker is certain to wait still: its patience has not passed since the call."""
    if call.hand_off is None:
        return await anext(stream, None)
    certain = deadline.capped(call.hand_off.patience_ms / 1000)
    first = asyncio.ensure_future(anext(stream, None))
    ended = asyncio.ensure_future(prefill.ended.wait())
    try:
        await asyncio.wait([first, ended], return_when=asyncio.FIRST_COMPLETED)
        if not first.done() and prefill.came_to_nothing and certain.left_s() > 0:
            raise _HandOffFailed
        return await first
    finally:
        await finish(_end([first, ended]))


async def _end(tasks: Sequence["asyncio.Future[Any]"]) -> None:
    """Cancel what runs, and wait for its end, whatever that is."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
