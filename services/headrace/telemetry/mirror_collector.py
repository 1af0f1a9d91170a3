"""The books of a gateway's mirror of the index as metrics, read at scrape time."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from headrace.telemetry.metrics import Metrics


@dataclass(frozen=True, slots=True)
class MirrorStat:
    """The mirror's books."""

    answers: bool  # whether it answers by itself now
    blocks: int
    holders: int
    lag_s: float  # since it last knew all that Redis knew; since it was made, if it never did
    rereads: Mapping[str, int]  # by reason, all of them


class MirrorCollector:
    """How much a gateway's mirror holds, how far it is behind, how often it began anew."""

    def __init__(self, stat: Callable[[], MirrorStat], *, metrics: Metrics) -> None:
        """Register with the process's metrics; `stat` is called in the scraping thread and must be safe there."""
        self._stat = stat
        metrics.registry.register(self)

    def describe(self) -> Iterable[Metric]:
        """Nothing to check for duplicates: the names are only declared here."""
        return []

    def collect(self) -> Iterable[Metric]:
        """One reading of the books."""
        stat = self._stat()
        for name, text, value in (
            ("answers", "1 while lookups are answered from memory, 0 while each asks Redis.", float(stat.answers)),
            ("blocks", "Blocks that the mirror of the index knows.", stat.blocks),
            ("holders", "Holders that the mirror knows, each incarnation by itself.", stat.holders),
            ("lag_seconds", "Time since the mirror last knew all that Redis knew.", stat.lag_s),
        ):
            gauge = GaugeMetricFamily(f"headrace_index_mirror_{name}", text)
            gauge.add_metric([], value)
            yield gauge
        rereads = CounterMetricFamily(
            "headrace_index_mirror_rereads", "Times that all of the index was read again.", labels=["reason"]
        )
        for reason, total in stat.rereads.items():
            rereads.add_metric([reason], total)
        yield rereads
