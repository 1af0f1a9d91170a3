"""How much of what Redis held did not parse: counted always, logged seldom."""

import logging

from headrace.core.clock import Clock
from headrace.core.index_limits import JUNK_LOG_INTERVAL_MS

_log = logging.getLogger(__name__)


class JunkCount:
    """Junk is skipped where it is found; this is the only trace it leaves."""

    def __init__(self, clock: Clock) -> None:
        self.total = 0
        self._clock = clock
        self._quiet_until_s = float("-inf")

    def add(self, number: int, what: str) -> None:
        """Count `number` pieces (0 is fine) and log, at most once per JUNK_LOG_INTERVAL_MS."""
        self.total += number
        if number and self._clock.now_s() >= self._quiet_until_s:
            self._quiet_until_s = self._clock.now_s() + JUNK_LOG_INTERVAL_MS / 1000
            _log.warning("ignored %d broken %s in Redis (%d since the start)", number, what, self.total)
