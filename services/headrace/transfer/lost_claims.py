"""Claims at one store node of which this side does not know whether they still stand.

A call that was cancelled or ran out of time may have made a claim (a lease, slots) whose reply nobody read, and a
release may never have arrived. Each is kept by name until the node says that it ended, or no claim of that age can be
left. Owns no calls; the node's side of the names is `named_claims.py`.
"""

from collections.abc import Sequence

from headrace.core.clock import Clock
from headrace.core.limits import LEASE_TTL_MS, LOST_CLAIMS_MAX


class LostClaims:
    """Names of leases, reservations and unanswered calls, oldest first; beyond LOST_CLAIMS_MAX the oldest are left to
    their own expiry."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._name_to_lost_s: dict[str, float] = {}

    def add(self, name: str) -> None:
        """One more that may stand."""
        self._name_to_lost_s[name] = self._clock.now_s()
        if len(self._name_to_lost_s) > LOST_CLAIMS_MAX:
            del self._name_to_lost_s[next(iter(self._name_to_lost_s))]

    def names(self) -> tuple[str, ...]:
        """Those that may still stand; what has outlived every lease is forgotten here."""
        oldest_s = self._clock.now_s() - LEASE_TTL_MS / 1_000
        for name in [name for name, lost_s in self._name_to_lost_s.items() if lost_s < oldest_s]:
            del self._name_to_lost_s[name]
        return tuple(self._name_to_lost_s)

    def forget(self, names: Sequence[str]) -> None:
        """The node has ended these."""
        for name in names:
            self._name_to_lost_s.pop(name, None)
