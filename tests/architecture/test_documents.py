"""What README and docs tell people to type and to open is there."""

import re
import shlex
from pathlib import Path

import click
import pytest

from headrace.admin.cli import main

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\((?!https?:)([^)#]+)")


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def commands_in(text: str) -> list[list[str]]:
    """The words behind `headrace` of each line of a code block that starts with it, without a comment or a pipe."""
    lines = [line for _, block in FENCED.findall(text) for line in block.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines if re.match(r"(\.venv/bin/)?headrace ", line)]
    return [line[1:] if "|" not in line else line[1 : line.index("|")] for line in words]


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_every_link_leads_to_a_file(path: Path):
    for target in LINK.findall(path.read_text(encoding="utf-8")):
        assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_every_command_in_a_code_block_exists_with_its_options(path: Path):
    """Fails when a command or an option is renamed and a document goes on naming the old one."""
    for words in commands_in(path.read_text(encoding="utf-8")):
        command: click.Command = main
        while isinstance(command, click.Group):
            assert words[0] in command.commands, words
            command, words = command.commands[words[0]], words[1:]
        known = {spelling for option in command.params for spelling in (*option.opts, *option.secondary_opts)}
        for word in words:
            assert not word.startswith("-") or word.partition("=")[0] in known | {"-h", "--help"}, (
                f"{command.name} {word}"
            )
