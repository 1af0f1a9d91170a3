"""A sweep as a picture: throughput, time to first token and cost of each combination over the rate that was sent."""

from pathlib import Path

from headrace.bench.sweep_optimisations import SweepReport

PANELS = (
    ("output_tokens_per_s", "output tokens/s", "Throughput"),
    ("ttft_ms_p90", "ms", "Time to first token, p90"),
    ("cpu_s_per_1000_tokens", "CPU s", "Cost of 1,000 output tokens"),
)


def plot_sweep(report: SweepReport, path: Path) -> None:
    """Write a PNG of three panels, replacing what was there: curves over the rates, or bars where there is one only."""
    # matplotlib is slow to import and chooses a display on import; neither is wanted before a plot is drawn.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(1, len(PANELS), figsize=(15, 4.8), layout="constrained")
    names = list(dict.fromkeys(row.combination for row in report.rows))
    rates = sorted({row.rate for row in report.rows})
    for panel, (field, unit, title) in zip(axes, PANELS, strict=True):
        for place, name in enumerate(names):
            points = [(r.rate, getattr(r, field)) for r in report.rows if r.combination == name]
            points = sorted((rate, value) for rate, value in points if value is not None)
            if len(rates) == 1:
                bars = panel.bar([place], [value for _, value in points] or [0.0], label=name)
                panel.bar_label(bars, fmt="{:,.0f}", padding=2)
            else:
                # Curves may lie upon each other: what is below must still be seen.
                style = {"marker": "osD^vP"[place % 6], "markersize": 10 - 1.5 * place, "linewidth": 3 - 0.4 * place}
                panel.plot([rate for rate, _ in points], [value for _, value in points], label=name, **style)
        panel.margins(y=0.1)  # room for a bar's label
        panel.set(ylabel=unit, title=title, ylim=(0, None))
        if len(rates) == 1:
            panel.set_xticks([])
            panel.set_xlabel(f"{rates[0]:g} requests/s sent")
        else:
            panel.set_xlabel("requests/s sent")
    # One legend for all panels, below them: it must not cover a curve.
    handles, labels = axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=len(names), frameon=False)
    figure.suptitle(f"{report.model}: the same conversations, one optimisation more each")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
