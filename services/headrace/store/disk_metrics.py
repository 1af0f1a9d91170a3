"""A disk tier's counters as metrics: what moved between arena and disk, and what left the disk and why."""

from collections.abc import Callable
from typing import Any

from headrace.core.block import Tier
from headrace.store.disk_counters import DiskCounters
from headrace.telemetry.metrics import EvictionReason, Metrics, TransferDirection


class DiskMetrics:
    """Adds to the process's metrics what its node counted since the last look. Blocks that were dropped because others
    or their prefix had to go count as evicted for capacity."""

    def __init__(self, counters: DiskCounters, metrics: Metrics) -> None:
        self._counters = counters
        transfer, evicted = metrics.kv_transfer_bytes, metrics.evicted_blocks
        self._series: list[tuple[Any, Callable[[], int]]] = [
            (transfer.labels(TransferDirection.LOAD, Tier.DISK, "file"), lambda: counters.promoted_bytes),
            (transfer.labels(TransferDirection.PUBLISH, Tier.DISK, "file"), lambda: counters.demoted_bytes),
            (evicted.labels(EvictionReason.ADMIN, Tier.DISK), lambda: counters.evicted_by_operator),
            (
                evicted.labels(EvictionReason.CAPACITY, Tier.DISK),
                lambda: counters.evicted_for_room + counters.dropped_orphans,
            ),
        ]
        self._seen = [0] * len(self._series)

    def count(self) -> None:
        """Bring the metrics up to date."""
        for place, (series, read) in enumerate(self._series):
            now = read()
            series.inc(now - self._seen[place])
            self._seen[place] = now
