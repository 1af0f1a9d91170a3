"""The queue for KV blocks: prompts wait their turn, in order, until the pool has room for them.

This file owns admissions from the wish to the blocks in hand, and giving back those that never ran. It lives on the
event loop. It knows nothing of steps or of models.
"""

import asyncio
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from headrace.core.block import HashedPrompt
from headrace.core.clock import Deadline
from headrace.core.errors import HeadraceError, InvalidRequest, Overloaded
from headrace.core.limits import WORKER_RETRY_AFTER_MS, WORKER_WAITING_MAX
from headrace.engine.block_pool import BlockPool, Short


class AdmissionState(Enum):
    """Who must give the blocks back."""

    HELD = "held"  # whoever was admitted
    RUNNING = "running"  # the engine, when the run ends
    RELEASED = "released"  # nobody


@dataclass(slots=True, eq=False)
class Admission:
    """A prompt with blocks to compute it in. `block_ids` is the block table, and is the engine's once a run started.

    Blocks [0, num_device_blocks) were found in the pool by hash and hold the prompt's KV already.
    """

    prompt: HashedPrompt
    block_ids: list[int]
    num_device_blocks: int
    use_device: bool
    num_valid_blocks: int  # leading blocks that hold the prompt's KV and may be shared: not to be written any more
    key: int  # grows in the order of admission
    ttl_s: float  # how long what this sequence uses or leaves in the pool is kept after the last use
    state: AdmissionState = field(default=AdmissionState.HELD)


@dataclass(slots=True, eq=False)
class _Waiter:
    prompt: HashedPrompt
    num_blocks: int
    use_device: bool
    ttl_s: float
    admitted: asyncio.Future[Admission]


class AdmissionQueue:
    """First come, first served: a large prompt at the head is not overtaken by small ones, so it cannot starve."""

    def __init__(self, pool: BlockPool, *, may_grant: Callable[[], bool]) -> None:
        """may_grant: whether blocks may be given to new prompts now (not while a preempted sequence waits for them)."""
        self._pool = pool
        self._may_grant = may_grant
        self._waiters: deque[_Waiter] = deque()
        self._num_admitted = 0

    @property
    def num_waiting(self) -> int:
        """Prompts in the queue."""
        return len(self._waiters)

    async def admit(
        self, prompt: HashedPrompt, *, num_blocks: int, use_device: bool, deadline: Deadline, ttl_s: float = math.inf
    ) -> Admission:
        """Wait for `num_blocks` blocks. Raises InvalidRequest, Overloaded, DeadlineExceeded; then nothing is held."""
        self._refuse_oversized(prompt, num_blocks)
        if len(self._waiters) >= WORKER_WAITING_MAX:
            raise Overloaded(
                f"{WORKER_WAITING_MAX} sequences already wait for KV blocks here", retry_after_ms=WORKER_RETRY_AFTER_MS
            )
        waiter = _Waiter(prompt, num_blocks, use_device, ttl_s, asyncio.get_running_loop().create_future())
        self._waiters.append(waiter)
        self.grant()
        delivered = False
        try:
            async with deadline.scope(f"waiting for {num_blocks} KV blocks"):
                admission = await waiter.admitted
                delivered = True
        finally:
            if not delivered:
                self._withdraw(waiter)
        return admission

    def grant(self) -> None:
        """Serve the queue's head as long as there is room for it."""
        while self._waiters and self._may_grant():
            waiter = self._waiters[0]
            if waiter.admitted.done():  # cancelled, and its task has not run since
                self._waiters.popleft()
                continue
            prompt = waiter.prompt
            # More room than the full blocks need means that tokens follow: then the last one must be computed.
            shared_max = len(prompt.chain)
            if waiter.num_blocks > shared_max:
                shared_max = (len(prompt.token_ids) - 1) // prompt.block_tokens
            taken = self._pool.take(
                waiter.num_blocks,
                prompt=prompt,
                shared_max=shared_max if waiter.use_device else 0,
                ttl_s=waiter.ttl_s,
            )
            if isinstance(taken, Short):
                return
            self._waiters.popleft()
            self._num_admitted += 1
            if waiter.use_device:
                self._pool.count_lookup(asked_blocks=shared_max, hit_blocks=taken.num_shared)
            waiter.admitted.set_result(
                Admission(
                    prompt=prompt,
                    block_ids=list(taken.block_ids),
                    num_device_blocks=taken.num_shared,
                    use_device=waiter.use_device,
                    num_valid_blocks=taken.num_shared,
                    key=self._num_admitted,
                    ttl_s=waiter.ttl_s,
                )
            )

    def fail(self, error: HeadraceError) -> None:
        """End all waiting with an error."""
        while self._waiters:
            waiter = self._waiters.popleft()
            if not waiter.admitted.done():
                waiter.admitted.set_exception(error)

    def _withdraw(self, waiter: _Waiter) -> None:
        """Leave the queue; an admission that was granted in the same turn of the loop is given back."""
        if waiter in self._waiters:
            self._waiters.remove(waiter)
            self.grant()  # whoever stood behind may fit
        elif waiter.admitted.done() and not waiter.admitted.cancelled() and waiter.admitted.exception() is None:
            admission = waiter.admitted.result()
            admission.state = AdmissionState.RELEASED
            self._pool.unref_all(admission.block_ids)

    def _refuse_oversized(self, prompt: HashedPrompt, num_blocks: int) -> None:
        needed, block_tokens, total = max(num_blocks, len(prompt.chain)), prompt.block_tokens, self._pool.num_blocks
        if needed > total:
            raise InvalidRequest(
                f"a prompt of {len(prompt.token_ids)} tokens asks for {needed} KV blocks of {block_tokens} tokens "
                f"({needed * block_tokens}), and this worker's whole pool has {total} ({total * block_tokens}): "
                "shorten the prompt or the output, or give workers more pool_tokens",
                param="prompt",
            )
