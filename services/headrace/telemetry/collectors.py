"""Gauges that are read at scrape time from their owners' own books, so that they can neither drift nor go negative."""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from headrace.core.generation import HolderStat
from headrace.core.members import WorkerRecord
from headrace.core.speculation_stats import SpeculationStats
from headrace.telemetry.metrics import CERTIFICATE_ENDS, Metrics


class _Undescribed:
    """What all collectors here answer when the registry asks for their names beforehand."""

    def describe(self) -> Iterable[Metric]:
        """Nothing to check for duplicates: the names are only declared here."""
        return []


class StoreCollector(_Undescribed):
    """A store node's books, tier by tier: slots by state, leases, token lookups and hits."""

    def __init__(self, stats: Callable[[], Sequence[HolderStat]], *, metrics: Metrics) -> None:
        """Register with the process's metrics; `stats` is called in the scraping thread and must be safe there."""
        self._stats = stats
        metrics.registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """One reading of the books; `free + committed + reserved == total` holds within it."""
        stats = self._stats()
        blocks = GaugeMetricFamily("headrace_store_blocks", "Slots of the arena by state.", labels=["tier", "state"])
        for stat in stats:
            for state in ("free", "committed", "reserved"):
                blocks.add_metric([stat.tier, state], getattr(stat, f"{state}_blocks"))
        yield blocks
        leased = GaugeMetricFamily("headrace_store_leased_blocks", "Committed slots under a lease.", labels=["tier"])
        for stat in stats:
            leased.add_metric([stat.tier], stat.leased_blocks)
        yield leased
        capacity = GaugeMetricFamily("headrace_store_bytes", "Payload capacity of the arena.", labels=["tier"])
        for stat in stats:
            capacity.add_metric([stat.tier], stat.total_blocks * stat.block_bytes)
        yield capacity
        pinned = GaugeMetricFamily("headrace_store_pinned_bytes", "Bytes that pins keep in the arena.")
        pinned.add_metric([], sum(stat.pinned_bytes for stat in stats))
        yield pinned
        for name, text, field in (
            ("headrace_store_lookup_tokens", "Tokens whose blocks were asked for.", "lookups_tokens"),
            ("headrace_store_hit_tokens", "Of those, tokens whose blocks were held.", "hits_tokens"),
        ):
            counter = CounterMetricFamily(name, text, labels=["tier"])
            for stat in stats:
                counter.add_metric([stat.tier], getattr(stat, field))
            yield counter


class ClaimsCollector(_Undescribed):
    """Claims of a store node that nobody ended: who had them died, or the word of their end was lost."""

    def __init__(self, *, leases: Callable[[], int], reservations: Callable[[], int], metrics: Metrics) -> None:
        """Register with the process's metrics; both are called in the scraping thread and must be safe there."""
        self._kinds = {"lease": leases, "reservation": reservations}
        metrics.registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """One reading of what ran out since the node started."""
        lapsed = CounterMetricFamily(
            "headrace_store_lapsed_claims", "Leases and reservations that ran out.", labels=["kind"]
        )
        for kind, count in self._kinds.items():
            lapsed.add_metric([kind], count())
        yield lapsed


class CertificateCollector(_Undescribed):
    """When the certificate ends that this process shows to its peers."""

    def __init__(self, ends_unix_s: Callable[[], float], *, metrics: Metrics) -> None:
        """Register with the process's metrics; `ends_unix_s` is called in the scraping thread, and reads the file again
        when it has changed."""
        self._ends_unix_s = ends_unix_s
        metrics.registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """A moment and not what is left, which `- time()` tells: it stays true however late it is read."""
        yield GaugeMetricFamily(
            CERTIFICATE_ENDS,
            "When the certificate in force ends, in seconds since 1970.",
            value=self._ends_unix_s(),
        )


@dataclass(frozen=True, slots=True)
class EngineCounts:
    """What an engine did since it started."""

    steps: int  # of the model, each for a batch
    preemptions: int
    reloads: int  # preempted sequences of which blocks were read back; the others were computed again
    reloaded_tokens: int
    shared_tokens: int  # taken from another sequence of the batch, instead of being computed


class EngineCollector(_Undescribed):
    """An engine's counts: who gave way, how it came back, and what was computed once for several."""

    def __init__(self, counts: Callable[[], EngineCounts], *, role: str, metrics: Metrics) -> None:
        """Register with the process's metrics; `counts` is called in the scraping thread and must be safe there."""
        self._counts = counts
        self._role = role
        metrics.registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """One reading of the engine's counts."""
        counts = self._counts()
        for name, text, value in (
            ("headrace_engine_steps", "Steps of the model, each for a batch.", counts.steps),
            ("headrace_engine_preemptions", "Sequences that gave their blocks up.", counts.preemptions),
            ("headrace_engine_reloads", "Of those, the ones whose blocks were read back.", counts.reloads),
            ("headrace_engine_reloaded_tokens", "Tokens whose blocks were read back.", counts.reloaded_tokens),
            ("headrace_engine_shared_tokens", "Tokens computed once for several of a batch.", counts.shared_tokens),
        ):
            counter = CounterMetricFamily(name, text, labels=["role"])
            counter.add_metric([self._role], value)
            yield counter


class WorkerCollector(_Undescribed):
    """A worker's load: sequences by state and free blocks of its pool."""

    def __init__(self, record: Callable[[], WorkerRecord], *, metrics: Metrics) -> None:
        """Register with the process's metrics; `record` is called in the scraping thread and must be safe there."""
        self._record = record
        metrics.registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """One reading of the worker's record."""
        record = self._record()
        sequences = GaugeMetricFamily("headrace_engine_sequences", "Sequences by state.", labels=["role", "state"])
        sequences.add_metric([record.role, "running"], record.running)
        sequences.add_metric([record.role, "waiting"], record.waiting)
        yield sequences
        blocks = GaugeMetricFamily("headrace_engine_pool_blocks", "Blocks of the pool.", labels=["role", "state"])
        blocks.add_metric([record.role, "free"], record.free_blocks)
        blocks.add_metric([record.role, "used"], record.pool_blocks - record.free_blocks)
        yield blocks


class SpeculationCollector(_Undescribed):
    """What drafts of a worker's engine came to: tokens, and seconds gained and spent by its own measured step times."""

    def __init__(self, stats: Callable[[], SpeculationStats], *, metrics: Metrics) -> None:
        """Register with the process's metrics; `stats` is called in the scraping thread and must be safe there."""
        self._stats = stats
        metrics.registry.register(self)

    def collect(self) -> Iterable[Metric]:
        """One reading; acceptance is accepted over drafted tokens, net speed is what was gained over what it cost."""
        stats = self._stats()
        for name, text, value in (
            ("headrace_engine_drafted_tokens", "Tokens of drafts that were computed.", stats.drafted_tokens),
            ("headrace_engine_accepted_draft_tokens", "Of those, what the model chose itself.", stats.accepted_tokens),
            ("headrace_engine_draft_gain_seconds", "What accepted tokens would have taken without.", stats.gain_s),
            ("headrace_engine_draft_cost_seconds", "What drafts and their rows took.", stats.cost_s),
        ):
            yield CounterMetricFamily(name, text, value=value)
        yield GaugeMetricFamily(
            "headrace_engine_drafter_failed", "1 after the drafter failed: no more drafts.", value=bool(stats.failure)
        )
