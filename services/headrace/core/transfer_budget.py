"""When computing overtakes a fetch: at each moment a load must have saved what it has cost, but for an allowance.

    seconds        0 ------ t --------------------------------------> cold
    fetched so far [saved by then |
    left to compute               |---------------------------------]
    the load goes on while  t + left <= (1 + share) * cold + round trip

So whatever a source does (slow from the start, stalled in the middle, dripping), a request that gives up then has lost
no more than that against one which never asked. And a load that is behind its own prediction ends sooner, when what is
left of it would come later than it can be computed. The round trip is what this way takes for one, as measured: nobody
can know sooner that nothing comes. Pure; the time comes in.
"""

import math
from dataclasses import dataclass, replace

from headrace.core.overtake_limits import (
    OVERTAKE_END_MS,
    OVERTAKE_LATE_FACTOR,
    OVERTAKE_ROUND_TRIP_MAX_MS,
    OVERTAKE_SHARE,
)
from headrace.core.step_costs import PrefillCost


@dataclass(frozen=True, slots=True)
class TransferBudget:
    """What one load may cost, on a worker that computes as fast as `prefill` says."""

    prefill: PrefillCost
    first_token: int  # the load begins here: what is before is valid already
    end_token: int  # the load ends here at the latest
    prompt_tokens: int  # what is not loaded is computed, up to here
    predicted_s: float  # of the whole load, by what is known of the way
    round_trip_s: float = OVERTAKE_ROUND_TRIP_MAX_MS / 1000  # to the slowest of those that are asked

    def left_s(self, *, seconds: float, loaded_tokens: int) -> float:
        """How long the load may still go on if nothing more arrives; below 0: the rest had to be computed before."""
        cold_s = self._compute_s(self.first_token, self.prompt_tokens)
        rest_s = self._compute_s(self.first_token + loaded_tokens, self.prompt_tokens)
        end_s = seconds + OVERTAKE_END_MS / 1000 + rest_s
        return (1 + OVERTAKE_SHARE) * cold_s + self.round_trip_s - end_s

    def is_over(self, *, seconds: float, loaded_tokens: int, arrived_tokens: int) -> bool:
        """Whether to compute the rest, when so many tokens from `first_token` on are there after so many seconds.

        arrived_tokens: with those behind a gap, and those that are not verified yet: they tell the pace.
        """
        at = self.first_token + loaded_tokens
        if at >= self.end_token:
            return False
        if self.left_s(seconds=seconds, loaded_tokens=loaded_tokens) <= 0:
            return True
        if seconds <= OVERTAKE_LATE_FACTOR * self.predicted_s + self.round_trip_s:
            return False
        missing = self.end_token - self.first_token - arrived_tokens
        fetch_left_s = seconds / arrived_tokens * missing if arrived_tokens else math.inf
        return fetch_left_s >= self._compute_s(at, self.end_token)

    def of_the_rest(self, at_token: int, *, spent_s: float, patience_s: float) -> "TransferBudget":
        """What is left of it, from a token on, when what is before was loaded in so many seconds, and the whole may
        take `patience_s` beyond what it saves. Nothing is predicted: nobody knows how much can be had already."""
        saved_s = self._compute_s(self.first_token, self.prompt_tokens) - self._compute_s(at_token, self.prompt_tokens)
        left_s = patience_s + (1 + OVERTAKE_SHARE) * saved_s - spent_s
        return replace(self, first_token=at_token, predicted_s=math.inf, round_trip_s=left_s)

    def _compute_s(self, start: int, end: int) -> float:
        return float(self.prefill.seconds(start, end))
