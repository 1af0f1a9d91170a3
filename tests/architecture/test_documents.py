"""What README and docs tell people to type and to open is there."""

import re
import shlex
from pathlib import Path

import click
import pytest

from headrace.admin.cli import main

ROOT = Path(__file__).parents[2]
DOCUMENTS = [
    ROOT / "README.md",
    *sorted((ROOT / "docs").rglob("*.md")),
    ROOT / "helm" / "headrace" / "README.md",
]
FENCED = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)
INLINE = re.compile(r"`(headrace [a-z][^`]*)`")
LINK = re.compile(r"\]\((?!https?:)([^)#\s]*)(?:#([^)\s]+))?\)")
HEADING = re.compile(r"^#+ (.*)$", re.MULTILINE)


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def commands_in(text: str) -> list[list[str]]:
    """The words behind `headrace` of each line of a code block that starts with it, without a comment or a pipe."""
    lines = [line for _, block in FENCED.findall(text) for line in block.splitlines()]
    words = [shlex.split(line, comments=True) for line in lines if re.match(r"(\.venv/bin/)?headrace ", line)]
    return [line[1:] if "|" not in line else line[1 : line.index("|")] for line in words]


def links_of(path: Path) -> list[tuple[Path, str]]:
    """The file and the heading, or "", that each link of a page leads to."""
    found = LINK.findall(path.read_text(encoding="utf-8"))
    return [((path.parent / target).resolve() if target else path, heading) for target, heading in found]


def headings_of(path: Path) -> set[str]:
    """What links call the headings of a page: in small letters, blanks as hyphens, without other signs."""
    text = FENCED.sub("", path.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in HEADING.findall(text)}


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_every_link_leads_to_a_file_and_a_heading_that_are_there(path: Path):
    for target, heading in links_of(path):
        assert target.exists(), target
        assert not heading or heading in headings_of(target), f"{name_of(target)}#{heading}"


def test_every_page_can_be_reached_from_the_readme():
    """Fails when a page is written that nobody is sent to."""
    reached, waiting = set[Path](), [ROOT / "README.md"]
    while waiting:
        path = waiting.pop()
        if path not in reached and path.suffix == ".md":
            reached.add(path)
            waiting += [target for target, _ in links_of(path)]
    assert set(DOCUMENTS) <= reached


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_every_page_says_what_it_is_about_before_it_begins(path: Path):
    """Fails when a page starts with a table, a command or a section: who reads it is to know what it is for."""
    title, _, begins = path.read_text(encoding="utf-8").partition("\n\n")
    assert re.fullmatch(r"# [^\n]+", title)
    assert begins[0].isalpha() or begins.startswith(("`", "**"))


@pytest.mark.parametrize("path", DOCUMENTS, ids=name_of)
def test_every_command_in_a_code_block_exists_with_its_options(path: Path):
    """Fails when a command or an option is renamed and a document goes on naming the old one."""
    for words in commands_in(path.read_text(encoding="utf-8")):
        check_command(words)


def test_the_documents_have_many_commands_in_code_blocks():
    """Fails when those above are no longer found, so that nothing would be checked."""
    assert sum(len(commands_in(path.read_text(encoding="utf-8"))) for path in DOCUMENTS) > 25


def check_command(words: list[str]) -> None:
    """Assert that the command line has this command, with all options that are named."""
    command: click.Command = main
    while isinstance(command, click.Group):
        assert words, "a group of commands, and none of it is named"
        assert words[0] in command.commands, words
        command, words = command.commands[words[0]], words[1:]
    known = {spelling for option in command.params for spelling in (*option.opts, *option.secondary_opts)}
    for word in words:
        assert not word.startswith("-") or word.partition("=")[0] in known | {"-h", "--help"}, f"{command.name} {word}"


def test_every_command_that_the_operators_page_names_in_passing_exists_with_its_options():
    """Fails when somebody is sent to a command that is not there, at the moment in which an alert has fired."""
    page = (ROOT / "docs" / "operations.md").read_text(encoding="utf-8")
    commands = [shlex.split(command)[1:] for command in INLINE.findall(page)]
    assert len(commands) > 40
    for words in commands:
        check_command(words)


def test_every_command_that_an_alert_names_exists():
    alerts = "".join(
        path.read_text(encoding="utf-8") for path in (ROOT / "helm" / "headrace" / "files").glob("alerts*.yaml")
    )
    named = re.findall(r"\bheadrace ([a-z][a-z-]*)(?: ([a-z][a-z-]*))?", alerts)
    assert named
    for words in named:
        command = main.commands[words[0]]
        assert not isinstance(command, click.Group) or words[1] in command.commands, words
