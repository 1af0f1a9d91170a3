"""One prefill attempt beside the decode attempts that take its blocks as they appear: the gateway's half of a hand-off.

               .-- answer: every block is readable where it was announced --> whole
    started ---+-- answer: fewer blocks, or at another node ----------------> short
               +-- error, or the answer of another attempt -----------------> failed
               '-- the first token came without it and a grace is over,
                   or the request has ended --------------------------------> given up (its call is cancelled)

A decode attempt that has not answered when the prefill ends short or failed waits for blocks that will not come; for as
long as that is certain, `route_request.py` replaces it. Later the decode worker's own patience ends the wait
(`transfer/follow_prefill.py`). Nothing that a prefill does is fatal for its request, and what comes after its end is
nobody's.
"""

import asyncio
import logging
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import StrEnum

from headrace.core.choose_workers import Plan
from headrace.core.clock import Deadline
from headrace.core.errors import HeadraceError, WorkerUnavailable
from headrace.core.generation import AttemptId, GenerateRequest, HandOff, PrefillCall, PrefillResult
from headrace.core.limits import (
    HAND_OFF_GRACE_MS,
    HAND_OFF_PATIENCE_FACTOR,
    HAND_OFF_PATIENCE_MS_MAX,
    HAND_OFF_PATIENCE_MS_MIN,
    PREFILL_TIMEOUT_MS,
)
from headrace.core.members import WorkerRecord
from headrace.core.step_costs import PrefillCost
from headrace.gateway.router import Router

log = logging.getLogger(__name__)


class PrefillState(StrEnum):
    """Where a prefill is; see the drawing above."""

    NOT_PLANNED = "not planned"
    RUNNING = "running"
    WHOLE = "whole"
    SHORT = "short"
    FAILED = "failed"
    GIVEN_UP = "given up"


class Prefill:
    """A request's one prefill attempt, or none. `result` is there when it was whole or short."""

    def __init__(self, request: GenerateRequest, worker: WorkerRecord | None, *, known_blocks: int) -> None:
        self.state = PrefillState.NOT_PLANNED if worker is None else PrefillState.RUNNING
        self.result: PrefillResult | None = None
        self.ended = asyncio.Event()
        self.task: asyncio.Task[None] | None = None
        self._request = request
        self._worker = worker
        self._known_blocks = known_blocks
        self._giving_up: asyncio.TimerHandle | None = None

    @property
    def was_tried(self) -> bool:
        """Whether somebody else has worked on this request."""
        return self._worker is not None

    @property
    def store_node(self) -> str:
        """Where blocks that it has computed can be read, whatever became of it; "" when there is none."""
        if self.result is not None:
            return self.result.store_node
        return self._worker.store_node if self._worker is not None else ""

    @property
    def came_to_nothing(self) -> bool:
        """Whether it has ended without all that the decode workers wait for."""
        return self.state in (PrefillState.SHORT, PrefillState.FAILED)

    def hand_off(self) -> HandOff | None:
        """What a decode call that is sent now may wait for."""
        if self._worker is None or self.state is not PrefillState.RUNNING:
            return None
        return HandOff(
            store_node=self._worker.store_node,
            first_block=self._known_blocks,
            patience_ms=_patience_ms(self._worker, self._request, self._known_blocks),
        )

    def settle(self, state: PrefillState, result: PrefillResult | None = None) -> None:
        """It has ended; only the first end counts."""
        if self.state is PrefillState.RUNNING:
            self.state, self.result = state, result
            self.ended.set()

    def first_token_came(self) -> None:
        """Whoever decodes needs it no more; it may finish, for a while."""
        if self.task is not None and self._giving_up is None:
            self._giving_up = asyncio.get_running_loop().call_later(HAND_OFF_GRACE_MS / 1000, self.give_up)

    def give_up(self) -> None:
        """Cancel its call. Idempotent."""
        if self._giving_up is not None:
            self._giving_up.cancel()
        if self.task is not None:
            self.settle(PrefillState.GIVEN_UP)
            self.task.cancel()

    def whole_or_short(self, result: PrefillResult) -> PrefillState:
        """What an answer is worth to who waits: the decode worker never needs the block of the last token."""
        assert self._worker is not None
        prompt = self._request.prompt
        wanted = (len(prompt.token_ids) - 1) // prompt.block_tokens
        in_place = result.store_node == self._worker.store_node and result.published_blocks >= wanted
        return PrefillState.WHOLE if in_place else PrefillState.SHORT


@asynccontextmanager
async def prefill_beside(
    request: GenerateRequest, plan: Plan, *, known_blocks: int, router: Router, deadline: Deadline
) -> AsyncIterator[Prefill]:
    """Have the plan's prefill worker compute and publish while the scope lasts; when it ends, so does the attempt.

    known_blocks: leading blocks that the decode worker could read before anybody worked on this request.
    Without a store node at the prefill worker there is nothing to hand over, and no attempt.
    """
    worker = plan.prefill if plan.prefill is not None and plan.prefill.store_node else None
    prefill = Prefill(request, worker, known_blocks=known_blocks)
    if worker is None:
        yield prefill
        return
    prefill.task = asyncio.create_task(
        _run(prefill, request, worker, hint_nodes=plan.hint_nodes, router=router, deadline=deadline),
        name=f"prefill on {worker.worker_id}",
    )
    try:
        yield prefill
    finally:
        prefill.give_up()
        await asyncio.wait([prefill.task])
        if not prefill.task.cancelled():
            prefill.task.result()


async def _run(
    prefill: Prefill,
    request: GenerateRequest,
    worker: WorkerRecord,
    *,
    hint_nodes: tuple[str, ...],
    router: Router,
    deadline: Deadline,
) -> None:
    """The attempt, from its call to its end. Raises only cancellation."""
    budget = deadline.capped(PREFILL_TIMEOUT_MS / 1000)
    call = PrefillCall(
        attempt_id=new_attempt_id(),
        request=request,
        worker_id=worker.worker_id,
        timeout_ms=milliseconds_left(budget),
        hint_nodes=hint_nodes,
    )
    try:
        with router.table.in_flight(worker.worker_id):
            async with budget.scope(f"prefill on {worker.worker_id}"):
                result = await router.calls.prefill(call)
        if result.attempt_id != call.attempt_id:
            raise WorkerUnavailable(worker.worker_id, "it answered another attempt")
    except HeadraceError as error:
        if isinstance(error, WorkerUnavailable):
            router.table.suspect(worker.worker_id)
        log.warning("request %s: prefill on %s failed: %s", request.request_id, worker.worker_id, error)
        router.observer.recovered("prefill_failed")
        prefill.settle(PrefillState.FAILED)
    else:
        prefill.settle(prefill.whole_or_short(result), result)
    finally:
        prefill.settle(PrefillState.FAILED)  # no effect after another end: nobody waits for a task that is gone


def _patience_ms(worker: WorkerRecord, request: GenerateRequest, known_blocks: int) -> int:
    """How long may pass without a further block: all of the worker's queue and all of this prompt could come first."""
    cost = PrefillCost(
        base_s=worker.costs.prefill_base_s,
        tokens_per_s=worker.costs.prefill_tokens_per_s,
        attention_s=worker.costs.prefill_attention_s,
    )
    prompt = request.prompt
    computing_s = float(cost.seconds(known_blocks * prompt.block_tokens, len(prompt.token_ids)))
    patience_ms = HAND_OFF_PATIENCE_FACTOR * (worker.queue_s + computing_s) * 1000
    return int(min(max(patience_ms, HAND_OFF_PATIENCE_MS_MIN), HAND_OFF_PATIENCE_MS_MAX))


def new_attempt_id() -> AttemptId:
    """Minted here, once for each try."""
    return AttemptId(secrets.token_hex(8))


def milliseconds_left(deadline: Deadline) -> int:
    """Time left for the far side, at least 1: a call with nothing left is ended by our own scope."""
    return max(1, int(deadline.left_s() * 1000))
