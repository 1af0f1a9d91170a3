"""What `headrace bench engine` found, for scripts and for people."""

from dataclasses import asdict, dataclass
from typing import Any

from headrace.bench.serving_report import Table


@dataclass(frozen=True, slots=True)
class EngineRow:
    """One kind of work. Prefill in tokens a second, decode in milliseconds a step; None where it was not measured."""

    what: str  # "prefill" | "decode"
    batch: int
    context: int  # prefill: tokens of the prompt; decode: tokens before the one that is computed
    ours: float
    transformers: float
    no_cache: float | None  # without KV: transformers computes every position again for each token
    no_cache_is_extrapolated: bool  # batch times what one sequence takes
    vllm: float | None
    unit: str  # "tokens/s" | "ms/step"

    @property
    def ratio(self) -> float:
        """How many times as fast as transformers."""
        return self.times_as_fast(self.transformers)

    def times_as_fast(self, other: float) -> float:
        """Of ours and another's figure in this row's unit."""
        return self.ours / other if self.what == "prefill" else other / self.ours


@dataclass(frozen=True, slots=True)
class EngineReport:
    """All rows of one run. The floor: a decode step of one sequence reads every weight once."""

    model: str
    dtype: str
    threads: int
    exact: bool
    rows: tuple[EngineRow, ...]
    weight_bytes: int
    read_bytes_per_s: float  # memory's, measured in the same run
    vllm: str  # its version; empty where it was not asked for
    seconds: float

    @property
    def decode_floor_ms(self) -> float:
        """Weights over bandwidth."""
        return self.weight_bytes / self.read_bytes_per_s * 1e3

    @property
    def decode_floor_ratio(self) -> float | None:
        """The least decode step over the floor."""
        alone = [row.ours for row in self.rows if row.what == "decode" and row.batch == 1]
        return min(alone) / self.decode_floor_ms if alone else None

    def as_json(self) -> dict[str, Any]:
        """The report for scripts."""
        found = asdict(self)
        for flat, row in zip(found["rows"], self.rows, strict=True):
            flat["ratio"] = row.ratio
        floor = {"decode_floor_ms": self.decode_floor_ms, "decode_floor_ratio": self.decode_floor_ratio}
        rounded: dict[str, Any] = _rounded(found | floor)
        return rounded

    def tables(self) -> list[Table]:
        """One table."""
        columns = "work,batch,context,headrace,transformers,times,no cache,times".split(",")
        if self.vllm:
            columns += ["vllm", "times"]
        return [(self._title(), columns, [self._cells(row) for row in self.rows])]

    def remarks(self) -> list[str]:
        """What the table does not say."""
        weights_mb, gbps = self.weight_bytes / 1e6, self.read_bytes_per_s / 1e9
        said = [
            f"floor of a decode step: {weights_mb:,.0f} MB of weights at {gbps:.1f} GB/s, {self.decode_floor_ms:.1f} ms"
        ]
        if self.decode_floor_ratio is not None:
            said[0] += f"; one sequence takes {self.decode_floor_ratio:.2f} times that"
        if any(row.no_cache_is_extrapolated for row in self.rows):
            said.append("~: batch times what one sequence takes, which was measured")
        if self.vllm:
            said.append(
                f"vLLM {self.vllm} ran in turn with the others, in a process of its own, with compiled graphs off"
            )
        return said

    def _title(self) -> str:
        exact = "exact mode" if self.exact else "not exact"
        return f"{self.model}, {self.dtype}, {exact}, {self.threads} threads; times: how many times as fast we are"

    def _cells(self, row: EngineRow) -> list[str]:
        def times(other: float | None) -> str:
            return "-" if other is None else f"{row.times_as_fast(other):.1f}x"

        def figure(value: float | None, mark: str = "") -> str:
            return (
                "-"
                if value is None
                else f"{mark}{value:,.0f} tok/s"
                if row.what == "prefill"
                else f"{mark}{value:,.1f} ms"
            )

        cells = [row.what, str(row.batch), f"{row.context:,}", figure(row.ours), figure(row.transformers)]
        cells += [
            times(row.transformers),
            figure(row.no_cache, "~" * row.no_cache_is_extrapolated),
            times(row.no_cache),
        ]
        return [*cells, figure(row.vllm), times(row.vllm)] if self.vllm else cells


def _rounded(value: Any) -> Any:
    """Floats to four digits behind the point, wherever they are."""
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {name: _rounded(inner) for name, inner in value.items()}
    return [_rounded(inner) for inner in value] if isinstance(value, list | tuple) else value
