"""Counts of milliseconds in buckets that grow by 2 %: percentiles of any number of values in bounded memory.

A percentile is the middle of its bucket, so it is at most 1 % off; the least, the largest and the mean are exact.
From a microsecond to a day there are about 1,300 buckets.
"""

import math
from collections import Counter

GROWTH = 1.02
_LOG_GROWTH = math.log(GROWTH)
_LEAST_MS = 1e-3  # below a microsecond nothing is told apart

# A distribution as reports show it: names of `LatencyHistogram.summary`.
Summary = dict[str, float | None]


class LatencyHistogram:
    """A distribution of times in milliseconds."""

    def __init__(self) -> None:
        self.count = 0
        self._sum_ms = 0.0
        self._min_ms = math.inf
        self._max_ms = 0.0
        self._buckets: Counter[int] = Counter()

    def add(self, value_ms: float) -> None:
        """Count one value; what is below 0 (clocks of two machines) counts as 0."""
        value_ms = max(0.0, value_ms)
        self.count += 1
        self._sum_ms += value_ms
        self._min_ms, self._max_ms = min(self._min_ms, value_ms), max(self._max_ms, value_ms)
        self._buckets[math.floor(math.log(max(_LEAST_MS, value_ms)) / _LOG_GROWTH)] += 1

    def percentile(self, percent: float) -> float | None:
        """The value that `percent` of all values do not exceed (nearest rank); None when there are none."""
        if not self.count:
            return None
        rank, seen = max(1, math.ceil(self.count * percent / 100)), 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= rank:
                return min(self._max_ms, max(self._min_ms, math.exp((bucket + 0.5) * _LOG_GROWTH)))
        raise AssertionError("a rank lies within the count")

    def summary(self) -> Summary:
        """p50, p90, p99, mean and max, in milliseconds; None where there are no values."""
        if not self.count:
            return dict.fromkeys(("p50", "p90", "p99", "mean", "max"))
        found = {f"p{percent}": self.percentile(percent) for percent in (50, 90, 99)}
        return found | {"mean": self._sum_ms / self.count, "max": self._max_ms}
