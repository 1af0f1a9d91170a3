"""The diagnosis as a picture: the machine's roofline with the measured steps, and where KV passes the weights."""

from pathlib import Path

from headrace.diagnose.diagnose_model import Diagnosis


def plot_roofline(found: Diagnosis, path: Path) -> None:
    """Write a PNG of two panels, replacing what was there."""
    # matplotlib is slow to import and chooses a display on import; neither is wanted before a plot is drawn.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    limits, work = found.limits, found.work
    figure, (roof, memory) = pyplot.subplots(1, 2, figsize=(13, 5), layout="constrained")
    intensities = [row.work.intensity for row in found.steps]
    lowest, highest = min(0.3, *intensities), max(4 * limits.balance, 2 * max(intensities))
    line = [lowest, limits.balance, highest]
    roof.plot(line, [min(limits.flops_per_s, x * limits.bytes_per_s) / 1e9 for x in line], color="black", label="limit")
    roof.axvline(limits.balance, color="grey", linestyle=":", linewidth=1)
    # Points of different kinds lie close together: the numbers of each kind stand on another side of them.
    styles = [("prefill", None, "s", "#a5563a", (-4, 8))] + [
        ("decode", context, marker, color, place)
        for context, marker, color, place in zip(
            sorted({row.tokens for row in found.steps if row.what == "decode"}),
            "o^",
            ("#3a6ea5", "#5aa55a"),
            ((5, -12), (-14, 5)),
            strict=False,
        )
    ]
    for what, context, marker, color, place in styles:
        rows = [row for row in found.steps if row.what == what and context in (None, row.tokens)]
        if not rows:
            continue
        reached = [row.work.flops / row.measured_ms / 1e6 for row in rows]
        label = "prefill, by tokens" if context is None else f"decode at context {context:,}, by batch"
        roof.plot([row.work.intensity for row in rows], reached, marker, color=color, label=label)
        for row, height in zip(rows, reached, strict=True):
            number = row.tokens if what == "prefill" else row.batch
            roof.annotate(
                str(number), (row.work.intensity, height), xytext=place, textcoords="offset points",
                fontsize=8, color=color,
            )  # fmt: skip
    roof.set(
        xscale="log", yscale="log", xlabel="operations a byte", ylabel="GFLOP/s",
        title=f"Roofline: {limits.bytes_per_s / 1e9:.1f} GB/s, {limits.flops_per_s / 1e9:,.0f} GFLOP/s",
    )  # fmt: skip
    roof.legend(loc="lower right")

    passes, windows = work.kv_passes_weights_tokens(), work.windows
    most = 2 * (passes or windows.widest or 1)
    tokens = [most * step / 64 for step in range(65)]
    kv_mb = [windows.keys_read(count) * work.layer_kv_bytes / 1e6 for count in tokens]
    memory.plot(tokens, kv_mb, color="#a5563a", label="KV")
    memory.axhline(work.step_bytes / 1e6, color="#3a6ea5", label="weights")
    if passes is not None:
        memory.axvline(passes, color="grey", linestyle=":", linewidth=1)
        memory.annotate(f"{passes:,} tokens", (passes, 0), xytext=(4, 8), textcoords="offset points")
    together = "in all sequences together" if windows.widest is None else "of one sequence"
    memory.set(
        xlim=(0, None), ylim=(0, None), xlabel=f"tokens of context, {together}",
        ylabel="MB read in a decode step", title="When KV passes the weights",
    )  # fmt: skip
    memory.legend(loc="upper left")
    figure.suptitle(f"{found.model} ({found.dtype}, {found.device}, {found.threads} threads)")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
