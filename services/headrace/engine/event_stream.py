"""What one run says to its consumer, and the bounded way from the engine's thread to the consumer's event loop.

This file owns the events and the references that undelivered `FilledBlock` events carry. It knows nothing of
scheduling or of models.
"""

import asyncio
import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from headrace.core.block import BlockHash, NamespaceId
from headrace.core.errors import HeadraceError, Overloaded
from headrace.core.generation import FinishReason, TokenDelta
from headrace.core.limits import STREAM_EVENTS_MAX, WORKER_RETRY_AFTER_MS
from headrace.engine.block_pool import BlockPool


@dataclass(frozen=True, slots=True)
class FilledBlock:
    """A full block of a run is there: computed, or taken from another run that has computed it meanwhile.

    Comes with one pool reference: its consumer calls `pool.unref(block_id)` when done."""

    position: int  # 0-based index of the block in its sequence
    block_id: int
    block_hash: BlockHash
    parent_hash: BlockHash
    token_ids: tuple[int, ...]
    namespace: NamespaceId  # of the request: a caller's salt narrows the worker's own
    narrowed_from: tuple[NamespaceId, ...] = ()  # as in BlockHeader


@dataclass(frozen=True, slots=True)
class RunFinished:
    """The last event. `reason` is None for runs that only compute a prompt; `text` was held back until now."""

    reason: FinishReason | None
    text: str
    completion_tokens: int
    # Leading blocks of the prompt that were never computed for the run, those taken from other runs among them.
    num_reused_blocks: int = field(default=0, compare=False)  # no part of the answer
    drafted_tokens: int = field(default=0, compare=False)  # computed for the run as drafts
    accepted_draft_tokens: int = field(default=0, compare=False)  # of those, the ones that are in the answer


EngineEvent = FilledBlock | TokenDelta | RunFinished


class EventStream:
    """Events of one run, from the engine's thread to one consumer on an event loop; at most STREAM_EVENTS_MAX wait.

    `ask_wake(stream)` is called when there is something new: whoever gets it has `wake` called on the loop. Doing so
    once for all streams of a step spares each of them a switch between the two threads, 0.2 ms apiece.
    """

    def __init__(self, pool: BlockPool, ask_wake: "Callable[[EventStream], None]") -> None:
        self._pool = pool
        self._ask_wake = ask_wake
        self._lock = threading.Lock()
        self._events: deque[EngineEvent] = deque()
        self._error: HeadraceError | None = None
        self._closed = False
        self._something = asyncio.Event()

    @property
    def ended(self) -> bool:
        """Whether nothing more reaches the consumer: it has gone, or got an error."""
        return self._closed or self._error is not None

    def send(self, event: EngineEvent) -> None:
        """Hand over an event, from any thread. One too many ends the stream with Overloaded; what comes after the end
        vanishes, and its references are given back."""
        with self._lock:
            ended = self.ended
            accepted = not ended and len(self._events) < STREAM_EVENTS_MAX
            if accepted:
                self._events.append(event)
        if accepted:
            self._ask_wake(self)
            return
        self._drop(event)
        if not ended:
            self.fail(
                Overloaded(
                    f"the reader of this stream is {STREAM_EVENTS_MAX} events behind, so the stream was ended",
                    retry_after_ms=WORKER_RETRY_AFTER_MS,
                )
            )

    def fail(self, error: HeadraceError) -> None:
        """End the stream with an error, from any thread: the consumer gets it next, whatever else still waited."""
        with self._lock:
            self._error = self._error or error
        self._empty()  # after that: what another thread sends meanwhile is not kept
        self._ask_wake(self)

    def close(self) -> None:
        """The consumer has gone: give back what was not delivered. Idempotent."""
        with self._lock:
            self._closed = True
        self._empty()

    def wake(self) -> None:
        """Let the consumer look; on its loop."""
        self._something.set()

    async def next(self) -> EngineEvent:
        """The next event, in order. Raises the stream's error."""
        while True:
            with self._lock:
                if self._events:
                    return self._events.popleft()
                if self._error is not None:
                    raise self._error
                self._something.clear()
            await self._something.wait()

    def _empty(self) -> None:
        with self._lock:
            events, self._events = self._events, deque()
        for event in events:
            self._drop(event)

    def _drop(self, event: EngineEvent) -> None:
        if isinstance(event, FilledBlock):
            self._pool.unref(event.block_id)
