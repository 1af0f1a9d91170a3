"""`headrace diagnose`: what limits this model on this machine. Needs no system."""

from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from headrace.admin.output_file import PLOT_ENDINGS, OutputFile
from headrace.admin.setting_flags import setting_options
from headrace.admin.system_commands import load_function
from headrace.admin.terminal import json_option, print_json, print_table, say
from headrace.config import load_config


@click.command(short_help="Find out whether compute or memory limits a model here.")
@setting_options("model", "engine")
@click.option("--plot", type=OutputFile(PLOT_ENDINGS), default="headrace-diagnose.png", help="Where the plot goes.")
@json_option
def diagnose(*, flags: dict[str, Any], config_file: str | None, plot: Path, as_json: bool) -> None:
    """Find out whether arithmetic or memory limits prefill and decode of a model on this machine.

    Measures what the machine reaches and what the engine's steps take, and says what follows: which of the two is the
    limit, from which batch on, when KV passes the weights, when memory runs out. Takes about a minute for the built-in
    model on two cores, needs no system, and should have the machine to itself.

    \b
    Examples:
      headrace diagnose
      headrace diagnose --model /models/qwen3-0.6b --torch-threads 8 --json
    """
    diagnose_model, give_advice, plot_roofline = (
        load_function(f"headrace.diagnose.{name}:{name}", command="diagnose", extra="all")
        for name in ("diagnose_model", "give_advice", "plot_roofline")
    )
    found = diagnose_model(load_config(flags, config_file=config_file), report=say)
    plot_roofline(found, plot)
    advice = give_advice(found)
    if as_json:
        print_json(_as_json(found) | {"advice": advice, "plot": str(plot)})
        return
    _show(found)
    click.echo()
    for sentence in advice:
        click.echo(f"- {sentence}")
    click.echo(f"\nplot: {plot}")


def _as_json(found: Any) -> dict[str, Any]:
    flat: dict[str, Any] = asdict(found)
    flat["limits"]["balance_flops_per_byte"] = found.limits.balance
    flat["work"]["step_bytes"] = found.work.step_bytes
    for row, step in zip(flat["steps"], found.steps, strict=True):
        row["intensity_flops_per_byte"], row["ratio"] = step.work.intensity, step.ratio
    return flat


def _show(found: Any) -> None:
    print_table(
        ["step ", "batch", "tokens", "operations a byte", "limit ", "least", "measured", "ratio"],
        [
            [
                row.what, str(row.batch), f"{row.tokens:,}", f"{row.work.intensity:,.1f}", row.limit,
                f"{row.least_ms:,.1f} ms", f"{row.measured_ms:,.1f} ms", f"{row.ratio:.1f}",
            ]
            for row in found.steps
        ],
        title=f"{found.model}: steps (tokens: computed by prefill, context of each sequence in decode)",
    )  # fmt: skip
    click.echo()
    print_table(
        ["context", "batch from which arithmetic limits decode"],
        [[f"{c:,}", "none" if b is None else f"{b:,.0f}"] for c, b in found.compute_bound_batch.items()],
    )
    click.echo()
    print_table(
        ["sequences", "KV passes the weights at", "memory is full at"],
        [
            [str(row.sequences), _tokens_each(row.kv_passes_weights_tokens), _tokens_each(row.fit_tokens)]
            for row in found.memory
        ],
    )


def _tokens_each(tokens: int | None) -> str:
    return "never (windows)" if tokens is None else f"{tokens:,} tokens each"
