"""`headrace bench engine`: what prompts and decode steps take on this machine. Needs no system."""

from typing import Any

import click

from headrace.admin.bench_commands import show_report
from headrace.admin.setting_flags import setting_options
from headrace.admin.system_commands import load_function
from headrace.admin.terminal import json_option, say
from headrace.config import load_config


@click.command(short_help="Prefill and decode beside plain transformers.")
@click.option("--quick", is_flag=True, help="Fewer prompts, batches and rounds: about a minute.")
@click.option(
    "--peer-python",
    default="",
    metavar="PATH",
    help="Measure vLLM as well, by this interpreter, which must be able to import it.",
)
@setting_options("model", "engine")
@json_option
def engine(*, quick: bool, peer_python: str, flags: dict[str, Any], config_file: str | None, as_json: bool) -> None:
    """Measure the engine's steps beside transformers' `generate` and beside computing without a cache.

    Prefill in tokens a second, decode in milliseconds a step; ours and transformers' in turn, medians over rounds. The
    floor is the time in which memory can be read once from end to end of the weights. Takes about four minutes for the
    built-in model on two cores, needs no system, and should have the machine to itself.

    \b
    Examples:
      headrace bench engine --quick
      headrace bench engine --json | jq '.rows[] | [.what, .batch, .context, .ratio]'
      headrace bench engine --peer-python ~/venv-vllm/bin/python
    """
    measure_engine, full, few = (
        load_function(f"headrace.bench.measure_engine:{name}", command="bench engine", extra="all")
        for name in ("measure_engine", "FULL", "QUICK")
    )
    found = measure_engine(
        load_config(flags, config_file=config_file),
        report=say,
        extent=few if quick else full,
        peer_python=peer_python,
    )
    show_report(found, as_json=as_json)
    for remark in found.remarks():
        say(remark)
