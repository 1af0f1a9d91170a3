"""The report as a picture: time to first token by path, decoding speed and memory as the text grows."""

from pathlib import Path

from headrace.verify.report import VerifyReport


def plot_report(report: VerifyReport, path: Path) -> None:
    """Write a PNG of three panels, replacing what was there."""
    # matplotlib is slow to import and chooses a display on import; neither is wanted before a plot is drawn.
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (first, speed, memory) = pyplot.subplots(1, 3, figsize=(15, 4.5), layout="constrained")
    paths = list(report.runs)
    times_ms = [report.runs[name][0].ttft_ms for name in paths]
    bars = first.barh([name.replace("_", " ") for name in paths], times_ms, color="#3a6ea5")
    first.bar_label(bars, labels=[f"{value:,.0f} ms" for value in times_ms], padding=3)
    first.set(xlabel="ms", title=f"Time to first token, prompt of {report.runs['cold'][0].prompt_tokens:,} tokens")
    first.invert_yaxis()
    # Linear from 0, so that lengths compare as times do; with room for the label behind the longest bar.
    first.set_xlim(0, max(times_ms) * 1.3)
    growth = report.kv_cache.growth
    text = [row.text_tokens for row in growth]
    speed.plot(text, [row.with_cache_tokens_per_s for row in growth], marker="o", label="with KV cache")
    speed.plot(text, [row.without_cache_tokens_per_s for row in growth], marker="o", label="without")
    speed.set(ylim=(0, None), xlabel="tokens of text", ylabel="tokens/s", title="Decoding as the text grows")
    speed.legend()
    memory.plot(text, [row.kv_bytes / 2**20 for row in growth], marker="o", color="#a5563a")
    memory.set(ylim=(0, None), xlabel="tokens of text", ylabel="MiB", title="KV memory as the text grows")
    figure.suptitle(f"{report.model}: {report.verdict().split(';')[0]}")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    pyplot.close(figure)
