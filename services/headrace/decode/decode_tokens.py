"""The decode worker's step: load the prefix, compute what is left of the prompt, join the batch, stream tokens.

With a hand-off, blocks that a prefill worker computes meanwhile are loaded as they appear. Owns the account of cached
tokens (by source, and only those that nobody computed for this request, as far as the call says) and the background
publication of what is computed here, so that the next turn of a conversation starts from it.
"""

import itertools
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import replace

from headrace.core.block import CacheSource
from headrace.core.clock import Deadline
from headrace.core.generation import (
    DecodeCall,
    DecodeEvent,
    Finished,
    GenerateRequest,
    MeasuredWork,
    ReusedRun,
    TokenDelta,
    Usage,
    count_cached_tokens,
)
from headrace.engine.event_stream import EngineEvent, FilledBlock, RunFinished
from headrace.transfer.hold_prefix import HeldPrefix, hold_prefix, take_reused
from headrace.transfer.publish_blocks import Publication
from headrace.transfer.stored_run import StoredRun
from headrace.transfer.worker import Worker


async def decode_tokens(call: DecodeCall, worker: Worker) -> AsyncGenerator[DecodeEvent, None]:
    """Stream the tokens of one attempt, then exactly one Finished.

    The last prompt token is always computed here, so at most (prompt_tokens - 1) // block_tokens blocks are reused.
    Raises Overloaded, InvalidRequest, WorkerUnavailable, DeadlineExceeded; a fault of the cache is a recompute.
    Closing the iterator at any moment stops the engine at its next step and gives every block back.
    """
    deadline = Deadline.after(call.timeout_ms / 1000, worker.clock)
    request = call.request
    prompt_tokens, block_tokens = len(request.prompt.token_ids), request.prompt.block_tokens
    assert prompt_tokens > 0
    with worker.attempt(call):
        async with hold_prefix(
            worker,
            request,
            num_blocks=prompt_tokens // block_tokens + 1,  # the prompt and one token; the engine takes more as it grows
            reusable_blocks=(prompt_tokens - 1) // block_tokens,
            hint_nodes=call.hint_nodes,
            deadline=deadline,
            hand_off=call.hand_off,
        ) as held:
            backup = StoredRun(
                worker, held, request, hint_nodes=call.hint_nodes, deadline=deadline, node_id=held.home_node
            )
            published = _BackgroundPublication(worker, held, request, backup)
            work: MeasuredWork | None = None
            run = worker.engine.run(
                held.admission,
                cached_tokens=held.num_blocks * block_tokens,
                sampling=request.sampling,
                leaves_blocks=request.cache.publish,
                backup=backup if request.cache.publish and backup.keeps_numbers else None,
            )
            async with aclosing(run) as events:
                while True:
                    event = await _next_event(events, deadline)
                    if isinstance(event, FilledBlock):
                        published.add(event)
                    elif isinstance(event, TokenDelta):
                        work = work or held.work(worker.clock)
                        yield event
                    else:
                        yield replace(_finished(event, call, held, worker), work=work)
                        return


async def _next_event(events: AsyncGenerator[EngineEvent, None], deadline: Deadline) -> EngineEvent:
    """The scope is around each wait, not around the loop: no timeout may fire while the consumer has control."""
    async with deadline.scope("generate tokens"):
        return await anext(events)


def _finished(event: RunFinished, call: DecodeCall, held: HeldPrefix, worker: Worker) -> Finished:
    assert event.reason is not None, "a sampled run ends for a reason"
    block_tokens, num_reused = call.request.prompt.block_tokens, event.num_reused_blocks
    # What other requests' runs computed meanwhile was found in the pool; what was recomputed was not reused after all.
    beside = (CacheSource.DEVICE,) * max(0, num_reused - held.num_blocks)
    reused = reused_runs((*held.sources[:num_reused], *beside))
    usage = Usage(
        prompt_tokens=len(call.request.prompt.token_ids),
        completion_tokens=event.completion_tokens,
        cached=count_cached_tokens(reused, computed_from=call.computed_from, block_tokens=block_tokens),
        drafted_tokens=event.drafted_tokens,
        accepted_draft_tokens=event.accepted_draft_tokens,
    )
    assert usage.cached.total < usage.prompt_tokens, "the last token is always computed"
    return Finished(reason=event.reason, usage=usage, worker_id=worker.worker_id, text=event.text, reused=reused)


def reused_runs(sources: Sequence[CacheSource]) -> tuple[ReusedRun, ...]:
    """Where each reused block came from, as runs."""
    return tuple(ReusedRun(source, len(list(run))) for source, run in itertools.groupby(sources))


class _BackgroundPublication:
    """Offers computed blocks without waiting; the reused ones before the first of them, and only if there is one."""

    def __init__(self, worker: Worker, held: HeldPrefix, request: GenerateRequest, backup: StoredRun) -> None:
        self._worker = worker
        self._backup = backup
        self._held = held
        self._request = request
        self._publication: Publication | None = None

    def add(self, block: FilledBlock) -> None:
        """Take over a computed block and its pool reference."""
        if self._publication is None:
            self._publication = Publication(self._request.cache.retention, node_id=self._held.home_node)
            reused_blocks = [] if self._held.home_node else take_reused(self._worker, self._held, self._request)
            self._backup.publishes(self._publication, first_block=(reused_blocks or [block])[0].position)
            for reused in reused_blocks:
                self._worker.publisher.offer(self._publication, reused)
        self._worker.publisher.offer(self._publication, block)
