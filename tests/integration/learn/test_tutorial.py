"""docs/learn: every command in it runs, and prints the tables that stand there."""

import re
import shlex
from pathlib import Path

import pytest
from click.testing import CliRunner
from tiny_model import make_tiny_model

from headrace.admin.cli import main
from headrace.admin.learn_commands import EXPERIMENTS

ROOT = Path(__file__).resolve().parents[3]
CHAPTERS = sorted((ROOT / "docs" / "learn").glob("[0-9]*.md"))
BLOCK = re.compile(r"```console\n\$ headrace ([^\n]*)\n(.*?)```", re.DOTALL)
BLOCKS = [(path.stem, *block) for path in CHAPTERS for block in BLOCK.findall(path.read_text(encoding="utf-8"))]

# What takes a whole system of its own is run by another test.
RUN_ELSEWHERE = {"demo": "tests/e2e/test_demo.py"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("tutorial") / "tiny-llama", context_tokens_max=1_024)


@pytest.mark.parametrize(("chapter", "command", "printed"), BLOCKS, ids=[f"{b[0]}: {b[1][:30]}" for b in BLOCKS])
def test_a_command_of_the_tutorial_prints_what_stands_there(
    chapter: str, command: str, printed: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """Numbers are the machine's and the model's; lines without any (columns, most conclusions) must be the same."""
    assert printed.strip(), f"{chapter} does not say what {command} prints"
    if command in RUN_ELSEWHERE:
        assert f'"{command}"' in (ROOT / RUN_ELSEWHERE[command]).read_text(encoding="utf-8")
        return
    monkeypatch.chdir(tmp_path)
    own_model = [] if "--layers" in command else [f"--model={model}", "--block-tokens=16", "--torch-threads=1"]
    done = CliRunner().invoke(main, [*shlex.split(command), *own_model], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    lines = {words(line) for line in done.stdout.splitlines()}
    missing = [line for line in printed.splitlines() if not re.search(r"\d", line) and words(line) not in lines]
    assert not missing


@pytest.mark.parametrize("path", CHAPTERS, ids=[path.stem for path in CHAPTERS])
def test_a_command_of_the_tutorial_is_one_that_the_test_above_runs(path: Path):
    """Fails for a command, or a block of output, that stands there in another form and so is run by nobody."""
    text = path.read_text(encoding="utf-8")
    assert re.findall(r"^\$ (.*)", text, re.MULTILINE) == [f"headrace {b[1]}" for b in BLOCKS if b[0] == path.stem]
    assert set(re.findall(r"^```(\w+)", text, re.MULTILINE)) <= {"console"}


def test_what_a_plan_works_out_without_a_machine_is_what_stands_there():
    """Arithmetic and a replay: every number, up to the table of simulated clusters."""
    ((command, printed),) = [block[1:] for block in BLOCKS if block[1].startswith("plan ")]
    done = CliRunner().invoke(main, shlex.split(command), catch_exceptions=False)
    worked_out, _, simulated = printed.partition("prefill   decode")
    assert simulated
    assert done.stdout.startswith(worked_out)


def test_every_experiment_has_a_place_in_the_tutorial():
    commands = {command for _, command, _ in BLOCKS}
    assert {f"learn {function.removeprefix('show_')}" for function in EXPERIMENTS} <= commands


def words(line: str) -> str:
    """A line whatever the width of its columns."""
    return " ".join(line.split())
