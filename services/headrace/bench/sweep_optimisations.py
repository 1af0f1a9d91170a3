"""`headrace bench sweep`: what each optimisation adds to throughput, and what a token costs with it.

The same conversations at the same rates on one system after another, each with one optimisation more. All systems have
two workers, so that no row is better by more hardware. Owns the combinations and the figures; how a system is started
is the caller's.
"""

from collections.abc import Callable, Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, replace
from typing import Any

from headrace.bench.generate_load import LoadBounds, Report
from headrace.bench.measure_serving import ServingEndpoint, Workload, measure_serving
from headrace.bench.processor_time import cpu_seconds
from headrace.bench.serving_report import LoadReport, Table
from headrace.bench.serving_tally import Slo
from headrace.bench.serving_targets import CacheUse


@dataclass(frozen=True, slots=True)
class Combination:
    """One system: its settings, and what requests may do with its cache."""

    name: str
    settings: Mapping[str, Any]
    cache: CacheUse


_ALONE = {"prefill_workers": 0, "decode_workers": 2, "batch_sequences_max": 1}
_BATCHED = {"prefill_workers": 0, "decode_workers": 2}
_APART = {"prefill_workers": 1, "decode_workers": 1}
COMBINATIONS = (
    Combination("no cache", _ALONE, CacheUse(reads=False, publishes=False)),
    Combination("cache", _ALONE, CacheUse(salted_by_conversation=True)),
    Combination("+ prefix sharing", _ALONE, CacheUse()),
    Combination("+ batching", _BATCHED, CacheUse()),
    Combination("+ separate workers", _APART, CacheUse()),
    Combination("+ int8 store", {**_APART, "store_codec": "int8"}, CacheUse()),
)
NOT_EXACT = "answers with int8 in the store are not exact: headrace verify --codec int8 measures what that means"


@dataclass(frozen=True, slots=True)
class RunningSystem:
    """A system under test: where it and its index serve, and the ids of its processes as they are now."""

    grpc_address: str
    process_ids: Callable[[], Iterable[int]]
    redis_url: str = ""


# Starts a system with these settings; it ends with the scope.
StartSystem = Callable[[Mapping[str, Any]], AbstractContextManager[RunningSystem]]


@dataclass(frozen=True, slots=True)
class SweepRow:
    """One combination at one rate."""

    combination: str
    rate: float  # requests a second that were sent
    requests: int
    failed: int
    requests_per_s: float
    output_tokens_per_s: float
    ttft_ms_p50: float | None
    ttft_ms_p90: float | None
    itl_ms_p50: float | None
    good_share: float | None
    cached_share: float | None  # of prompt tokens
    cpu_s_per_1000_tokens: float | None  # of all of the system's processes, for 1,000 output tokens
    kept_arrivals: bool


@dataclass(frozen=True, slots=True)
class SweepReport:
    """All rows."""

    model: str
    rows: tuple[SweepRow, ...]

    def as_json(self) -> dict[str, Any]:
        """The report for scripts."""
        rows = [
            {name: round(value, 4) if isinstance(value, float) else value for name, value in asdict(row).items()}
            for row in self.rows
        ]
        return {"model": self.model, "rows": rows, "remarks": self.remarks()}

    def remarks(self) -> list[str]:
        """What the figures do not say."""
        return [NOT_EXACT]

    def tables(self) -> list[Table]:
        """Title, columns and rows."""
        columns = "with ,sent/s,answered/s,failed,tokens/s,TTFT p50 ms,p90 ms,ITL p50 ms,within SLO,cached"
        rows = [
            [
                row.combination,
                f"{row.rate:g}",
                f"{row.requests_per_s:.2f}",
                f"{row.failed:,}",
                f"{row.output_tokens_per_s:,.1f}",
                *(_number(value, ",.0f") for value in (row.ttft_ms_p50, row.ttft_ms_p90)),
                _number(row.itl_ms_p50, ",.1f"),
                _number(row.good_share, ".0%"),
                _number(row.cached_share, ".0%"),
                _number(row.cpu_s_per_1000_tokens, ",.1f") + ("" if row.kept_arrivals else " (sent late)"),
            ]
            for row in self.rows
        ]
        title = f"{self.model}: the same conversations, one optimisation more in each block of rows"
        return [(title, [*columns.split(","), "CPU s per 1,000 tokens"], rows)]


def sweep_optimisations(
    start_system: StartSystem,
    *,
    workload: Workload,
    rates: Iterable[float],
    bounds: LoadBounds,
    slo: Slo,
    report: Report,
    combinations: Iterable[Combination] = COMBINATIONS,
) -> SweepReport:
    """Measure every combination at every rate. Each rate has conversations of its own, so that none is cached before.

    Ctrl-C ends the sweep with the rows that are whole. Raises what starting a system raises.
    """
    rows: list[SweepRow] = []
    model = ""
    for combination in combinations:
        report(f"{combination.name}: starting a system")
        with start_system(combination.settings) as system:
            for number, rate in enumerate(rates):
                endpoint = ServingEndpoint(grpc_address=system.grpc_address, cache=combination.cache)
                asked = replace(workload, rate=rate, seed=workload.seed + number)
                before_s = cpu_seconds(system.process_ids())
                found = measure_serving(endpoint, asked, bounds=bounds, slo=slo, report=report)
                if found.interrupted:
                    return SweepReport(model, tuple(rows))
                spent_s = cpu_seconds(system.process_ids()) - before_s
                model = found.model
                rows.append(_row(combination.name, rate, found, spent_s))
    return SweepReport(model, tuple(rows))


def _row(name: str, rate: float, found: LoadReport, cpu_s: float) -> SweepRow:
    tally, figures = found.tally, found.tally.as_json()
    tokens = tally.completion_tokens
    return SweepRow(
        combination=name,
        rate=rate,
        requests=tally.sent,
        failed=tally.failed,
        requests_per_s=figures["throughput"]["requests_per_s"],
        output_tokens_per_s=figures["throughput"]["output_tokens_per_s"],
        ttft_ms_p50=tally.ttft.percentile(50),
        ttft_ms_p90=tally.ttft.percentile(90),
        itl_ms_p50=tally.itl.percentile(50),
        good_share=figures["goodput"]["share_of_sent"],
        cached_share=tally.cached_share,
        cpu_s_per_1000_tokens=cpu_s / tokens * 1_000 if tokens else None,
        kept_arrivals=tally.kept_arrivals,
    )


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
