"""`headrace learn`: the experiments of docs/learn, on any model. Need no system."""

from collections.abc import Callable
from typing import Any

import click

from headrace.admin.setting_flags import setting_options
from headrace.admin.system_commands import load_function
from headrace.admin.terminal import json_option, print_json, print_table, say
from headrace.config import load_config

# Function of the experiment, in a module of its name -> what it shows.
EXPERIMENTS = {
    "show_validity": "Why what was computed for a token may be kept.",
    "show_memory": "The bytes of KV by the formula, and as they are.",
    "show_positions": "Why the same words elsewhere have other keys.",
    "show_paging": "Preallocated, grown and paged KV: what each wastes.",
    "show_windows": "Layers that see only so far, and what a sequence then holds.",
    "show_codecs": "KV in half the bytes, and what that does to the next tokens.",
    "show_sharing": "What a common beginning saves.",
    "show_batching": "What decoding together buys, and what it costs in memory.",
}


@click.group(short_help="Small experiments that show how KV caching works.")
def learn() -> None:
    """Small experiments on a real model that show how KV caching works; docs/learn has the text that goes with them.

    Each takes less than two minutes with the built-in model on two cores (the first one longer: the model is checked
    once) and needs no running system.
    """


def _command(function: str, help_line: str) -> Callable[..., None]:
    name = function.removeprefix("show_")

    @learn.command(name, short_help=help_line, help=f"{help_line}\n\n\b\nExample:\n  headrace learn {name}")
    @setting_options("model", "engine")
    @json_option
    def run(*, flags: dict[str, Any], config_file: str | None, as_json: bool) -> None:
        show = load_function(f"headrace.learn.{function}:{function}", command="learn", extra="all")
        _print(show(load_config(flags, config_file=config_file), report=say), as_json=as_json)

    return run


def _print(lesson: Any, *, as_json: bool) -> None:
    if as_json:
        print_json(lesson.facts | {"conclusion": lesson.conclusion})
        return
    for title, columns, rows in lesson.tables:
        print_table(columns, rows, title=title)
        click.echo()
    for note in lesson.notes:
        click.echo(note)
    click.echo(lesson.conclusion)


for _function, _help_line in EXPERIMENTS.items():
    _command(_function, _help_line)
