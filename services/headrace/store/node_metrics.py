"""A store node's numbers for whoever scrapes them: its books as they were at the last look, what happened since it
started, and the server that tells both."""

from collections.abc import Callable
from typing import Any

from headrace.config import StoreSettings
from headrace.core.block import Tier
from headrace.store.disk_counters import DiskCounters
from headrace.store.node_counters import NodeCounters
from headrace.store.store_node import StoreNode
from headrace.telemetry.collectors import CertificateCollector, ClaimsCollector, StoreCollector
from headrace.telemetry.metrics import EvictionReason, Metrics, TransferDirection
from headrace.telemetry.metrics_server import start_metrics_server
from headrace.transfer.https_context import HttpsContext

Series = tuple[Any, Callable[[], int]]  # a counter of the process, and what its node has counted so far


class NodeMetrics:
    """Served from the beginning; `look` belongs to the node's event loop, scrapes come from threads."""

    def __init__(
        self, node: StoreNode, metrics: Metrics, *, settings: StoreSettings, context: HttpsContext | None
    ) -> None:
        """context: what makes it HTTPS."""
        self._node = node
        self._stats = node.stats()
        counters = node.counters
        StoreCollector(lambda: self._stats, metrics=metrics)
        ClaimsCollector(
            leases=lambda: counters.expired_leases,
            reservations=lambda: counters.expired_reservations,
            metrics=metrics,
        )
        if context is not None:
            CertificateCollector(lambda: context.ends_unix_s, metrics=metrics)
        self._series = _of_host(counters, metrics)
        if node.disk.tier is not None:
            self._series += _of_disk(node.disk.counters, metrics)
        self._seen = [0] * len(self._series)
        self._server = start_metrics_server(
            metrics.registry, settings.store_host, (settings.metrics_port,), context=context
        )

    @property
    def port(self) -> int:
        """Where it is scraped."""
        return self._server.port

    def look(self) -> None:
        """Take the node's numbers as they are now."""
        self._stats = self._node.stats()
        for place, (series, read) in enumerate(self._series):
            now = read()
            series.inc(now - self._seen[place])
            self._seen[place] = now

    def close(self) -> None:
        """Be scraped no more."""
        self._server.close()


def _of_host(counters: NodeCounters, metrics: Metrics) -> list[Series]:
    evicted = metrics.evicted_blocks
    return [
        (evicted.labels(EvictionReason.CAPACITY, Tier.HOST), lambda: counters.evicted_for_room),
        (evicted.labels(EvictionReason.QUOTA, Tier.HOST), lambda: counters.evicted_for_quota),
        (evicted.labels(EvictionReason.ADMIN, Tier.HOST), lambda: counters.evicted_by_operator),
        (evicted.labels(EvictionReason.TTL, Tier.HOST), lambda: counters.expired_blocks),
    ]


def _of_disk(counters: DiskCounters, metrics: Metrics) -> list[Series]:
    """Blocks that were dropped because others or their prefix had to go count as evicted for capacity."""
    transfer, evicted = metrics.kv_transfer_bytes, metrics.evicted_blocks
    return [
        (transfer.labels(TransferDirection.LOAD, Tier.DISK, "file"), lambda: counters.promoted_bytes),
        (transfer.labels(TransferDirection.PUBLISH, Tier.DISK, "file"), lambda: counters.demoted_bytes),
        (evicted.labels(EvictionReason.ADMIN, Tier.DISK), lambda: counters.evicted_by_operator),
        (
            evicted.labels(EvictionReason.CAPACITY, Tier.DISK),
            lambda: counters.evicted_for_room + counters.dropped_orphans,
        ),
    ]
