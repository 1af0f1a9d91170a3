"""`headrace bench speculation`: what drafts bring for a model on this machine. Needs no system."""

from typing import Any

import click

from headrace.admin.bench_commands import show_report
from headrace.admin.setting_flags import setting_options
from headrace.admin.system_commands import load_function
from headrace.admin.terminal import json_option, say
from headrace.config import load_config


@click.command(short_help="What speculative decoding brings for a model here.")
@click.option("--tokens", type=click.IntRange(min=8), default=128, show_default=True, help="Of each answer.")
@click.option(
    "--batch",
    "batches",
    multiple=True,
    type=click.IntRange(1, 64),
    default=(1, 4),
    show_default=True,
    help="Sequences at once; repeat.",
)
@click.option("--rounds", type=click.IntRange(1, 20), default=3, show_default=True, help="Of each measurement.")
@setting_options("model", "engine")
@json_option
def speculation(
    *, tokens: int, batches: tuple[int, ...], rounds: int, flags: dict[str, Any], config_file: str | None, as_json: bool
) -> None:
    """Measure tokens a second with and without drafts, and how many drafted tokens are accepted.

    Three texts: code that is repeated, answers to questions, and the same drawn at a temperature of 0.8. Both engines
    answer in turn and every token is compared. Takes some minutes for the built-in model on two cores, needs no system,
    and should have the machine to itself. Without --speculation the drafts are looked up (ngram).

    \b
    Examples:
      headrace bench speculation
      headrace bench speculation --speculation ./small-model --batch 1 --json
    """
    measure_speculation = load_function(
        "headrace.bench.measure_speculation:measure_speculation", command="bench speculation", extra="all"
    )
    config = load_config(flags, config_file=config_file)
    found = measure_speculation(config, tokens=tokens, batches=batches, rounds=rounds, report=say)
    show_report(found, as_json=as_json)
