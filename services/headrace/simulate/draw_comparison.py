"""Routers side by side as a picture: seconds to the first token, what was found, and who was in time, by load."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

# The router that the eye should find; others share muted colours.
OURS, OURS_COLOUR = "headrace", "#c8452c"

# Longest bar or highest point shown, in times of ours: routers far beyond would squeeze all others together.
SHOWN_TIMES_MAX = 5.0


def draw_comparison(rows: Sequence[Mapping[str, Any]], path: Path, *, title: str) -> None:
    """Write a PNG: bars for one load, lines over load for several. `rows`: as `headrace simulate --json` has them."""
    # matplotlib is slow to import and chooses a display on import; neither is wanted before a plot is drawn.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    loads = sorted({row["load"] for row in rows})
    figure, panels = pyplot.subplots(1, 5, figsize=(20, 5.2), layout="constrained")
    if len(loads) == 1:
        _draw_bars(panels, sorted(rows, key=lambda row: -row["ttft_s_p90"]))
    else:
        _draw_lines(panels, rows, loads)
    figure.suptitle(title)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=80)
    pyplot.close(figure)


_PANELS = (
    ("ttft_s_p50", 1.0, "TTFT, median", "seconds"),
    ("ttft_s_p90", 1.0, "TTFT, 90th percentile", "seconds"),
    ("ttft_s_p99", 1.0, "TTFT, 99th percentile", "seconds"),
    ("hit_share_of_ideal", 100.0, "Prompt tokens found", "% of an endless cache"),
    ("slo_share", 100.0, "Requests in time", "% within TTFT and ITL targets"),
)


def _draw_bars(panels: Sequence[Any], rows: Sequence[Mapping[str, Any]]) -> None:
    """The best at the top; bars that dwarf all others are cut, with an arrow."""
    names = [row["policy"] for row in rows]
    colours = [OURS_COLOUR if name == OURS else "#5b7a99" for name in names]
    for panel, (field, scale, label, unit) in zip(panels, _PANELS, strict=True):
        values = [row[field] * scale for row in rows]
        if scale == 1.0:
            limit = SHOWN_TIMES_MAX * min(values)
            bars = panel.barh(names, [min(value, limit) for value in values], color=colours)
            panel.set_xlim(0, limit * 1.25 if max(values) > limit else max(values) * 1.25)
            labels = [f"{value:,.{0 if value >= 100 else 2}f} s" + (" →" if value > limit else "") for value in values]
        else:
            bars = panel.barh(names, values, color=colours)
            panel.set_xlim(0, 118)
            labels = [f"{value:.0f} %" for value in values]
        panel.bar_label(bars, labels=labels, padding=3, fontsize=9)
        panel.set(title=label, xlabel=unit)
        panel.spines[["top", "right"]].set_visible(False)
        if panel is not panels[0]:
            panel.set_yticklabels([])


def _draw_lines(panels: Sequence[Any], rows: Sequence[Mapping[str, Any]], loads: Sequence[float]) -> None:
    names = list(dict.fromkeys(row["policy"] for row in rows))
    muted = [
        "#2f4b7c",
        "#7a9cc6",
        "#5e9c76",
        "#b0903d",
        "#8f6bb1",
        "#7f7f7f",
        "#3aa6a6",
        "#a05195",
        "#999933",
        "#444444",
    ]
    for panel, (field, scale, label, unit) in zip(panels, _PANELS, strict=True):
        ours = [row[field] for row in rows if row["policy"] == OURS] or [min(row[field] for row in rows)]
        for number, name in enumerate(names):
            at = {row["load"]: row[field] * scale for row in rows if row["policy"] == name}
            colour, width = (OURS_COLOUR, 2.6) if name == OURS else (muted[number % len(muted)], 1.3)
            marker = "os^vDPX*"[number % 8]
            panel.plot([load for load in loads if load in at], [at[load] for load in loads if load in at],
                       marker=marker, markersize=5, label=name, color=colour, linewidth=width,
                       zorder=3 if name == OURS else 2)  # fmt: skip
        panel.set(title=label, ylabel=unit, xlabel="load (cold prefill work / capacity)", xticks=loads)
        highest = max(row[field] for row in rows) * 1.05
        panel.set_ylim(0, min(highest, SHOWN_TIMES_MAX * max(ours)) if scale == 1.0 else 103)
        panel.spines[["top", "right"]].set_visible(False)
        panel.grid(axis="y", alpha=0.25)
    panels[0].figure.legend(*panels[0].get_legend_handles_labels(), loc="outside right center", frameon=False)
