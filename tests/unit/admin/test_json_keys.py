"""What `--json` prints is what docs/cli.md says, of every command."""

import json
import re
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from headrace.admin.cli import main
from headrace.client import HeadraceClient


@pytest.fixture
def run(small_gateway, tmp_path, monkeypatch):
    """Run `headrace ...` against the small gateway, away from this user's own settings."""
    monkeypatch.setenv("HEADRACE_ADDRESS", small_gateway.address)
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(tmp_path))
    return lambda *args, **kwargs: CliRunner().invoke(main, list(args), catch_exceptions=False, **kwargs)


# Each with what it takes besides.
COMMANDS_WITH_JSON = {
    "models": "",
    "generate": "hello",
    "status": "",
    "top": "--once --every 0.2",
    "cache top": "--once --every 0.2",
    "cache ls": "",
    "cache ls --blocks": "",
    "cache stat": "",
    "cache show": "aaaabbbb",
    "cache why-miss": "aaaabbbb",
    "cache pin": "--prefix aaaabbbb",
    "cache unpin": "--prefix aaaabbbb",
    "cache ttl": "--prefix aaaabbbb --in 5m",
    "cache evict": "--all",
    "cache warm": "-",
    "nodes ls": "",
    "nodes drain": "here",
    "tenants ls": "",
    "tenants quota": "acme --none",
    "tenants new-key": "",
    "config show": "",
}


# What they print is on pages of their own.
COMMANDS_WITH_PAGES = {"demo", "verify", "diagnose", "simulate", "plan"}


def documented_keys() -> dict[str, set[str]]:
    """Of each command that the page's table has: the keys of what it prints."""
    page = (Path(__file__).parents[3] / "docs" / "cli.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (`.*) \| (`[^|]*) \|$", page.partition("| keys |")[2], re.MULTILINE)
    words = re.compile("`(.*?)`")
    return {name: set(words.findall(keys)) for names, keys in rows for name in words.findall(names)}


def commands_with_json(command: click.Command, path: tuple[str, ...] = ()) -> set[str]:
    if isinstance(command, click.Group):
        return set().union(*(commands_with_json(below, (*path, name)) for name, below in command.commands.items()))
    return {" ".join(path)} if any("--json" in option.opts for option in command.params) else set()


def test_the_documents_table_has_every_command_that_prints_json():
    """Fails when a command is added, and who writes a script finds nothing about it."""
    named = {name for name in commands_with_json(main) if name.split()[0] not in ("bench", "learn")}
    assert named - COMMANDS_WITH_PAGES == {name for name in documented_keys() if "--" not in name}


def test_the_keys_that_json_prints_are_those_of_the_documents_table(run, small_gateway):
    """Fails when a script that goes by the page finds another key, or none."""
    documented = documented_keys()
    with HeadraceClient(small_gateway.address) as client:
        client.generate("aaaabbbb.")
    small_gateway.drain_steps = [{"done": True, "state": "drained"}]
    for name, rest in COMMANDS_WITH_JSON.items():
        done = run(*name.split(), *rest.split(), "--json", input="aaaacccc.\n")
        assert set(json.loads(done.stdout)) == documented[name], name
