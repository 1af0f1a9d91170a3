"""`headrace config ...`: the settings as they would be used, and where each comes from."""

import json
from typing import Any

import click

from headrace.admin.setting_flags import ALL_PIECES, setting_options
from headrace.admin.terminal import json_option, print_json, print_table
from headrace.config import config_to_flat, load_config, setting_sources, settings_table
from headrace.core.hide_secrets import hide_secrets


@click.group(short_help="Show settings and where each comes from.")
def config() -> None:
    """Settings: flags, then HEADRACE_* variables, then the file, then defaults."""


@config.command("show", short_help="Show every setting, its value and its source.")
@setting_options(*ALL_PIECES)
@json_option
def show_config(*, flags: dict[str, Any], config_file: str | None, as_json: bool) -> None:
    """Show every setting with its value, as a YAML file has it, its source and what it means. Passwords in URLs are
    shown as ***.

    \b
    Examples:
      headrace config show
      headrace config show --config headrace.yaml --json | jq '.settings[] | select(.source != "default")'
    """
    values = config_to_flat(load_config(flags, config_file=config_file))
    sources = setting_sources(flags, config_file=config_file)
    rows = [
        {
            "name": name,
            "value": hide_secrets(values[name]) if isinstance(values[name], str) else values[name],
            "source": sources[name],
            "piece": piece,
            "help": row.metadata["help"],
        }
        for name, (piece, row) in settings_table().items()
    ]
    if as_json:
        print_json({"settings": rows})
        return
    shown = [[row["name"], json.dumps(row["value"], ensure_ascii=False), row["source"], row["help"]] for row in rows]
    print_table(["setting ", "value ", "source ", "meaning "], shown)
