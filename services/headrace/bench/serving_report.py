"""What `headrace bench serve` found, for scripts and for people."""

from dataclasses import dataclass
from typing import Any

from headrace.bench.latency_histogram import LatencyHistogram
from headrace.bench.serving_tally import LAG_MS_MAX, LoadTally

Table = tuple[str, list[str], list[list[str]]]  # title, columns, rows


@dataclass(frozen=True, slots=True)
class LoadReport:
    """One load against one system."""

    endpoint: str
    model: str
    workload: str
    tally: LoadTally
    interrupted: bool

    def as_json(self) -> dict[str, Any]:
        """The report for scripts. Shares and rates as numbers, times in milliseconds, None where none was measured."""
        head = {"endpoint": self.endpoint, "model": self.model, "workload": self.workload}
        found: dict[str, Any] = _rounded(head | {"interrupted": self.interrupted} | self.tally.as_json())
        return found

    def tables(self) -> list[Table]:
        """Latencies, then counts and rates."""
        tally, found = self.tally, self.tally.as_json()
        times = [
            _times("TTFT: first token", tally.ttft),
            _times("ITL: between tokens", tally.itl),
            _times("TPOT: an answer's mean ITL", tally.tpot),
            _times("E2E: whole answer", tally.e2e),
            _times("sent late by", tally.lag),
        ]
        rates, good = found["throughput"], found["goodput"]
        share = "-" if good["share_of_sent"] is None else f"{good['share_of_sent']:.1%}"
        counts = [
            ["sent", f"{tally.sent:,} in {found['seconds']:.1f} s"],
            ["answered", f"{tally.finished:,}, {rates['requests_per_s']:.2f} a second"],
            ["failed", _failures(tally)],
            ["prompt tokens", f"{tally.prompt_tokens:,}, {rates['prompt_tokens_per_s']:,.0f} a second"],
            ["of them cached", _cached(tally)],
            ["output tokens", f"{tally.completion_tokens:,}, {rates['output_tokens_per_s']:,.0f} a second"],
            [
                "goodput",
                f"{good['requests_per_s']:.2f} requests a second ({share} of those sent) with a first token within"
                f" {tally.slo.ttft_ms:,.0f} ms and tokens within {tally.slo.itl_ms:,.0f} ms",
            ],
        ]
        return [
            (
                f"{self.workload} on {self.endpoint}, model {self.model}",
                ["ms ", "p50", "p90", "p99", "mean", "max"],
                times,
            ),
            ("", ["what ", "how much "], counts),
        ]

    def remarks(self) -> list[str]:
        """What a reader must know to judge the figures."""
        tally, remarks = self.tally, []
        if self.interrupted:
            remarks.append(f"interrupted: {tally.interrupted:,} requests were under way and are in no figure")
        if not tally.kept_arrivals:
            late_ms = tally.lag.percentile(99) or 0.0
            remarks.append(
                f"this generator did NOT keep the arrival times: p99 {late_ms:,.0f} ms late (good: {LAG_MS_MAX:.0f} at"
                f" most), {tally.not_sent:,} requests never sent; send less from here, or from several machines"
            )
        remarks += [f"failed with {kind}, for example: {text}" for kind, text in tally.error_examples.items()]
        return remarks


def _times(name: str, times: LatencyHistogram) -> list[str]:
    return [name, *("-" if value is None else f"{value:,.1f}" for value in times.summary().values())]


def _failures(tally: LoadTally) -> str:
    kinds = ", ".join(f"{count:,} {kind}" for kind, count in tally.errors.most_common())
    not_sent = f"; {tally.not_sent:,} not sent" if tally.not_sent else ""
    return (f"{tally.failed:,}: {kinds}" if kinds else "0") + not_sent


def _cached(tally: LoadTally) -> str:
    if tally.cached_share is None:
        return "-"
    named = ", ".join(f"{count:,} {source}" for source, count in tally.cached_tokens.items() if count)
    return f"{tally.cached_tokens.total():,} ({tally.cached_share:.1%})" + (f": {named}" if named else "")


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    return {name: _rounded(part) for name, part in value.items()} if isinstance(value, dict) else value
