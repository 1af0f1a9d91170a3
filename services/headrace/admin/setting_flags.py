"""Command line flags made from the one table of settings, so that no flag can differ from its setting."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import click

from headrace.config import settings_table

ALL_PIECES = ("model", "engine", "store", "index", "network", "gateway", "cluster", "telemetry")


def setting_options(*pieces: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Add `--config` and a flag for every setting of these pieces of the configuration.

    The command gets `flags`, only what was given on the command line, and `config_file`. A flag that is not given is
    left to the environment, the file and the default.
    """

    def add(command: Callable[..., Any]) -> Callable[..., Any]:
        names = [name for name, (piece, _) in settings_table().items() if piece in pieces]

        @wraps(command)
        def with_flags(*args: Any, **kwargs: Any) -> Any:
            given = {name: kwargs.pop(name) for name in names}
            return command(*args, flags={k: v for k, v in given.items() if v is not None}, **kwargs)

        decorated: Callable[..., Any] = with_flags
        for name in reversed(names):
            decorated = _flag(name)(decorated)
        return click.option(
            "--config", "config_file", type=click.Path(dir_okay=False), help="YAML file of settings.", default=None
        )(decorated)

    return add


def _flag(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    _, row = settings_table()[name]
    kebab, kind = name.replace("_", "-"), type(row.default)
    shown = "" if row.default == "" or "Default:" in row.metadata["help"] else f" Default: {row.default}."
    text = row.metadata["help"] + shown
    if kind is bool:
        return click.option(f"--{kebab}/--no-{kebab}", name, default=None, help=text)
    return click.option(f"--{kebab}", name, type=kind, default=None, help=text)
