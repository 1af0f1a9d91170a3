"""The queue for KV blocks: prompts wait their turn, as `turns.py` has it, until the pool has room for them.

This file owns admissions from the wish to the blocks in hand, giving back those that never ran, and who is refused when
the queue is full. It lives on the event loop. It knows nothing of steps or of models.
"""

import asyncio
import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

from headrace.core.block import HashedPrompt
from headrace.core.clock import Deadline
from headrace.core.errors import HeadraceError, InvalidRequest, Overloaded
from headrace.core.key_window import EVERYTHING, KeyWindow
from headrace.core.limits import (
    RETRY_AFTER_MS_MAX,
    WORKER_RETRY_AFTER_MS,
    WORKER_WAITING_MAX,
    WORKER_WAITING_TOKENS_MAX,
)
from headrace.core.queue_order import Claim
from headrace.engine.block_pool import BlockPool
from headrace.engine.block_table import BlockTable
from headrace.engine.pool_values import Short
from headrace.engine.turns import Turns


class AdmissionState(Enum):
    """Who must give the blocks back."""

    HELD = "held"  # whoever was admitted
    RUNNING = "running"  # the engine, when the run ends
    RELEASED = "released"  # nobody


@dataclass(slots=True, eq=False, kw_only=True)
class Admission(BlockTable):
    """A prompt with blocks to compute it in. The table is the engine's once a run started.

    Blocks [0, num_device_blocks) were found in the pool by hash, and hold the prompt's KV already, where it is needed.
    """

    prompt: HashedPrompt
    num_device_blocks: int
    use_device: bool
    num_valid_blocks: int  # leading blocks that hold the prompt's KV and may be shared: not to be written any more
    key: int  # grows in the order of admission
    ttl_s: float  # how long what this sequence uses or leaves in the pool is kept after the last use
    claim: Claim  # its place among those who wait to be computed
    state: AdmissionState = AdmissionState.HELD


@dataclass(slots=True, eq=False)
class _Waiter:
    prompt: HashedPrompt
    num_blocks: int
    use_device: bool
    ttl_s: float
    claim: Claim
    num_resident_tokens: int  # found in the pool when it came; what is left is its work
    admitted: asyncio.Future[Admission]

    @property
    def num_tokens(self) -> int:
        return len(self.prompt.token_ids)


class AdmissionQueue:
    """Whoever is first by `turns` gets the blocks that are free: a large prompt whose turn it is waits for enough of
    them and is not overtaken by small ones, so it cannot starve."""

    def __init__(
        self,
        pool: BlockPool,
        *,
        may_grant: Callable[[], bool],
        turns: Turns,
        queue_s: Callable[[], float] = lambda: 0.0,
        window: KeyWindow = EVERYTHING,
    ) -> None:
        """may_grant: whether blocks may be given to new prompts now (not while a preempted sequence waits for them).
        queue_s: predicted seconds of the work that is here, for what refused callers are told.
        window: what the model reads of a sequence: nobody gets more blocks than it can need at once."""
        self._pool = pool
        self._may_grant = may_grant
        self._turns = turns
        self._queue_s = queue_s
        self._window = window
        self._waiters: list[_Waiter] = []  # in order of arrival
        self._num_admitted = 0

    @property
    def num_waiting(self) -> int:
        """Prompts in the queue."""
        return len(self._waiters)

    @property
    def num_waiting_tokens(self) -> int:
        """Tokens of their prompts."""
        return sum(waiter.num_tokens for waiter in self._waiters)

    async def admit(
        self,
        prompt: HashedPrompt,
        *,
        num_blocks: int,
        use_device: bool,
        deadline: Deadline,
        ttl_s: float = math.inf,
        account: str = "",
        priority: int = 0,
    ) -> Admission:
        """Wait for `num_blocks` blocks. Raises InvalidRequest, Overloaded, DeadlineExceeded; then nothing is held."""
        self._refuse_oversized(prompt, num_blocks)
        self._make_place(account, len(prompt.token_ids))
        waiter = _Waiter(
            prompt,
            num_blocks,
            use_device,
            ttl_s,
            self._turns.claim(account, priority),
            self._pool.resident_blocks(prompt) * prompt.block_tokens if use_device else 0,
            asyncio.get_running_loop().create_future(),
        )
        self._waiters.append(waiter)
        self._turns.enter(waiter.claim)
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
        """Serve whoever is first, as long as there is room for it."""
        while self._waiters and self._may_grant():
            waiter = self._first()
            if waiter.admitted.done():  # cancelled, and its task has not run since
                self._remove(waiter)
                continue
            admission = self._take(waiter)
            if admission is None:
                return
            self._waiters.remove(waiter)
            self._turns.admitted(waiter.claim)
            waiter.admitted.set_result(admission)

    def _first(self) -> _Waiter:
        parts = [(w.claim, w.num_resident_tokens, w.num_tokens) for w in self._waiters]
        return self._waiters[self._turns.in_order(parts)[0]]

    def _take(self, waiter: _Waiter) -> Admission | None:
        """The waiter's blocks, if the pool has so many."""
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
            return None
        self._num_admitted += 1
        if waiter.use_device:
            self._pool.count_lookup(asked_blocks=shared_max, hit_blocks=taken.num_shared)
        return Admission(
            prompt=prompt,
            block_ids=list(taken.block_ids),
            first_block=taken.first_block,
            num_device_blocks=taken.num_shared,
            use_device=waiter.use_device,
            num_valid_blocks=taken.num_shared,
            key=self._num_admitted,
            ttl_s=waiter.ttl_s,
            claim=waiter.claim,
            first_near=taken.first_near,
            end_near=taken.end_near,
        )

    def _make_place(self, account: str, num_tokens: int) -> None:
        """Have room in the queue for one more, or raise Overloaded.

        An account that has more than its share of a full queue gives way to one that has less: its newest waiter is
        refused instead, as often as it takes. So nobody's flood keeps others out.
        """
        while len(self._waiters) >= WORKER_WAITING_MAX or (
            self._waiters and self.num_waiting_tokens + num_tokens > WORKER_WAITING_TOKENS_MAX
        ):
            waiting = Counter(waiter.claim.account for waiter in self._waiters)
            greedy, count = waiting.most_common(1)[0]
            if count <= waiting[account] + 1:
                raise self._overloaded()
            newest = next(waiter for waiter in reversed(self._waiters) if waiter.claim.account == greedy)
            self._remove(newest)
            if not newest.admitted.done():
                newest.admitted.set_exception(self._overloaded())

    def _overloaded(self) -> Overloaded:
        predicted_ms = int(1000 * self._queue_s())
        return Overloaded(
            f"{len(self._waiters)} sequences of {self.num_waiting_tokens} tokens already wait for KV blocks here",
            retry_after_ms=min(max(WORKER_RETRY_AFTER_MS, predicted_ms), RETRY_AFTER_MS_MAX),
        )

    def _remove(self, waiter: _Waiter) -> None:
        self._waiters.remove(waiter)
        self._turns.leave(waiter.claim)

    def fail(self, error: HeadraceError) -> None:
        """End all waiting with an error."""
        while self._waiters:
            waiter = self._waiters[-1]
            self._remove(waiter)
            if not waiter.admitted.done():
                waiter.admitted.set_exception(error)

    def _withdraw(self, waiter: _Waiter) -> None:
        """Leave the queue; an admission that was granted in the same turn of the loop is given back."""
        if waiter in self._waiters:
            self._remove(waiter)
            self.grant()  # whoever stood behind may fit
        elif waiter.admitted.done() and not waiter.admitted.cancelled() and waiter.admitted.exception() is None:
            admission = waiter.admitted.result()
            admission.state = AdmissionState.RELEASED
            self._pool.unref_all(admission.block_ids)

    def _refuse_oversized(self, prompt: HashedPrompt, num_blocks: int) -> None:
        needed = self._window.held_blocks(max(num_blocks, len(prompt.chain)))
        block_tokens, total = prompt.block_tokens, self._pool.num_blocks
        if needed > total:
            raise InvalidRequest(
                f"a prompt of {len(prompt.token_ids)} tokens asks for {needed} KV blocks of {block_tokens} tokens "
                f"({needed * block_tokens}), and this worker's whole pool has {total} ({total * block_tokens}): "
                "shorten the prompt or the output, or give workers more pool_tokens",
                param="prompt",
            )
