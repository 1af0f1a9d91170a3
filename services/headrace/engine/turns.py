"""Whose turn it is in one engine: `core/queue_order.py` over this engine's clock and its measured speed.

Prompts wait twice: on the event loop for KV blocks, and in the step thread for their rows. Both are ordered here, by
one account of what everybody had. Any thread may call any method. It knows nothing of blocks or steps.
"""

import threading
from collections.abc import Callable, Sequence

from headrace.core.clock import Clock
from headrace.core.queue_order import Claim, ServiceOrder, Waiting
from headrace.core.step_costs import PrefillCost


class Turns:
    """The account, and the order that it gives. One per engine."""

    def __init__(self, clock: Clock, *, prefill_cost: Callable[[], PrefillCost]) -> None:
        """prefill_cost: what prompts cost here, as known now."""
        self._clock = clock
        self._prefill_cost = prefill_cost
        self._lock = threading.Lock()
        self._order = ServiceOrder()

    def claim(self, account: str, priority: int) -> Claim:
        """A claim of this moment, which does not wait yet."""
        return Claim(account, priority, self._clock.now_s())

    def enter(self, claim: Claim) -> None:
        """The claim waits: for blocks, or to be computed. Idempotent."""
        with self._lock:
            self._order.enter(claim, self._clock.now_s())

    def leave(self, claim: Claim) -> None:
        """It waits no more. Idempotent."""
        with self._lock:
            self._order.leave(claim)

    def admitted(self, claim: Claim) -> None:
        """It got its blocks, and does not wait until it is to be computed."""
        with self._lock:
            self._order.admitted(claim, self._clock.now_s())

    def computed(self, claim: Claim, tokens: int) -> None:
        """Tokens of its prompt were computed."""
        with self._lock:
            self._order.computed(claim, tokens, self._clock.now_s())

    def generated(self, claim: Claim) -> None:
        """Its request was given one more token."""
        with self._lock:
            self._order.generated(claim, 1)

    def in_order(self, parts: Sequence[tuple[Claim, int, int]]) -> list[int]:
        """Places in `parts`, first to be served first. Each part is a claim with the tokens [start, end) to compute."""
        if len(parts) < 2:
            return list(range(len(parts)))
        cost = self._prefill_cost()
        waiting = [
            Waiting(claim, work_s=float(cost.seconds(start, end)), serial=place)
            for place, (claim, start, end) in enumerate(parts)
        ]
        with self._lock:
            return [each.serial for each in self._order.in_order(waiting, self._clock.now_s())]

    def used_tokens(self, account: str) -> float:
        """What an account counts as having had."""
        with self._lock:
            return self._order.used_tokens(account)
