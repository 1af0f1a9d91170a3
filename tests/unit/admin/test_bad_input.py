"""Whatever is typed, an operator gets a sentence and an exit code, and never a traceback or a wider selection."""

import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from headrace.admin.cli import main

NOT_UNICODE = "ab\udcff"  # what a shell hands over for a byte that is no UTF-8


@pytest.fixture
def run(small_gateway, tmp_path, monkeypatch):
    """Run `headrace ...` in a directory with bad files; an exception that is not told as one fails the test."""
    monkeypatch.setenv("HEADRACE_ADDRESS", small_gateway.address)
    monkeypatch.setenv("HEADRACE_STATE_DIR", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bad.txt").write_bytes(b"ab\xff\xfe")
    (tmp_path / "empty.txt").touch()
    return lambda *args, **kwargs: CliRunner().invoke(main, list(args), catch_exceptions=False, **kwargs)


@pytest.mark.parametrize(
    ("code", "words"),
    [
        (3, ["generate", NOT_UNICODE]),
        (3, ["generate", "x", "--model", NOT_UNICODE]),
        (3, ["generate", "x", "--affinity-key", NOT_UNICODE]),
        (3, ["generate", "x", "--seed", "9" * 30]),
        (3, ["generate", "x", "--timeout", "9" * 12 + "d"]),
        (3, ["generate", "x", "--ttl", "0s"]),
        (3, ["status", "--address", NOT_UNICODE + ":1"]),
        (2, ["status", "--address", "127.0.0.1"]),
        (2, ["status", "--address", "http://127.0.0.1:9000"]),
        (2, ["demo", "--connect", ""]),
        (3, ["cache", "why-miss", NOT_UNICODE]),
        (3, ["cache", "why-miss", "--file", "bad.txt"]),
        (3, ["cache", "warm", "bad.txt"]),
        (3, ["cache", "warm", "empty.txt"]),
        (2, ["cache", "warm", "none.txt"]),
        (3, ["cache", "import", "bad.txt"]),
        (3, ["cache", "import", "empty.txt"]),
        (2, ["cache", "ls", "--limit", "9" * 30]),
        (3, ["cache", "ls", "--prefix", NOT_UNICODE]),
        (3, ["cache", "ls", "--tenant", NOT_UNICODE]),
        (3, ["cache", "ls", "--prefix-file", "bad.txt"]),
        (3, ["cache", "ls", "--prefix-file", "empty.txt"]),
        (2, ["cache", "ls", "--token-ids", "4294967296"]),
        (2, ["cache", "ls", "--token-ids", "1,,2"]),
        (2, ["cache", "ls", "--idle", "9" * 400]),
        (2, ["cache", "evict", "--free", "9" * 30]),
        (2, ["cache", "evict", "--free", "9" * 400 + "GiB"]),
        (2, ["cache", "show", ""]),
        (3, ["cache", "show", NOT_UNICODE]),
        (2, ["cache", "top", "--every", "nan", "--once"]),
        (2, ["cache", "top", "--every", "0s", "--once"]),
        (3, ["cache", "pin", "--prefix", NOT_UNICODE]),
        (2, ["nodes", "drain", ""]),
        (3, ["nodes", "drain", NOT_UNICODE]),
        (3, ["explain", NOT_UNICODE]),
        (2, ["cache", "import", "bad.txt", "--node", ""]),
        (2, ["cache", "why-miss", "--request", ""]),
        (3, ["generate", "--file", "bad.txt"]),
        (3, ["generate", "--file", "empty.txt"]),
        (2, ["tenants", "quota", "", "--none"]),
        (3, ["tenants", "quota", NOT_UNICODE, "--none"]),
        (8, ["config", "show", "--config", "bad.txt"]),
        (3, ["simulate", "--eviction", "--trace", "bad.txt"]),
        (2, ["cache", "events", "--endpoint", "garbage"]),
        (2, ["cache", "export", "none/x.hrx", "--prefix", "aaaabbbb"]),
        (2, ["simulate", "--generate", "bursts", "--write", "none/x.jsonl"]),
        (2, ["verify", "--plot", "none/x.png"]),
        (2, ["diagnose", "--plot", "x.txt"]),
        (1, ["certs", "create", "bad.txt/certs"]),
        (2, ["bench", "sweep", "--plot", "bad.txt/x.png"]),
    ],
    ids=lambda value: " ".join(value)[:50].encode("ascii", "replace").decode() if isinstance(value, list) else None,
)
def test_bad_input_is_told_with_the_exit_code_of_its_class(run, code, words):
    done = run(*words)
    assert done.exit_code == code
    assert "rror: " in done.stderr


# Runs `headrace ...` in a directory that may not be written. Root may write anywhere, so `access`, which asks for the
# real user, gets another one. Ends at the first use of torch.
IN_A_CLOSED_DIRECTORY = """
import os, sys
os.chdir(sys.argv.pop(1))
if os.geteuid() == 0:
    os.setreuid(65534, 0)
class Spy:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print("computes", flush=True)
            os._exit(0)
sys.meta_path.insert(0, Spy())
from headrace.admin.cli import main
main()
"""
CLOSED = "nothing can be written to the directory"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["verify"], CLOSED),
        (["verify", "--codec", "int8"], "computes"),
        (["cache", "export", "there.hrx", "--address", "127.0.0.1:1"], CLOSED),
    ],
    ids=["a plot by default", "no plot", "a file that is replaced"],
)
def test_a_directory_that_may_not_be_written_is_told_at_once_and_only_where_a_file_would_go_there(
    tmp_path, words, told
):
    closed = tmp_path / "closed"
    closed.mkdir()
    (closed / "there.hrx").touch()
    (closed / "there.hrx").chmod(0o666)
    closed.chmod(0o555)
    command = [sys.executable, "-c", IN_A_CLOSED_DIRECTORY, str(closed), *words]
    bare = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    done = subprocess.run(command, env=bare, capture_output=True, text=True, timeout=60)
    assert told in done.stdout + done.stderr
    assert done.returncode == (2 if told == CLOSED else 0)


def test_a_key_that_is_no_text_is_no_key(run):
    assert run("tenants", "hash-key", input=b"ab\xff\n").exit_code == 3


@pytest.mark.parametrize("command", ["generate", "chat"])
def test_standard_input_that_is_no_text_is_told_as_such(run, command):
    """Fails when a pipe of something else ends in a traceback."""
    assert run(command, input=b"ab\xff\n").exit_code == 3


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_disk_that_is_full_is_told_in_one_line(options):
    """Fails when an operator gets a traceback, or an exit code of the interpreter's own."""
    with open("/dev/full", "wb") as full:
        done = subprocess.run(
            [sys.executable, "-m", "headrace.admin.cli", "config", "show", *options],
            stdout=full, stderr=subprocess.PIPE, text=True, timeout=120, check=False,
        )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "error: No space left on device\n")


@pytest.mark.parametrize("option", ["--prefix", "--model", "--tenant", "--namespace", "--node", "--worker"])
def test_an_empty_option_is_refused_and_never_means_any(run, small_gateway, option):
    """Fails when `--prefix "$UNSET" --yes` evicts everything."""
    assert run("cache", "evict", "--idle", "0s", option, "", "--yes").exit_code == 2
    assert small_gateway.evictions == []


def leaf_commands(command: click.Command, path: tuple[str, ...] = ()) -> list[tuple[tuple[str, ...], click.Command]]:
    if not isinstance(command, click.Group):
        return [(path, command)]
    return [leaf for name, below in command.commands.items() for leaf in leaf_commands(below, (*path, name))]


@pytest.mark.parametrize(("path", "command"), leaf_commands(main), ids=lambda value: str(value)[:30])
def test_every_command_has_an_example_that_is_a_command_and_offers_json(path, command):
    """Fails when a command comes without an example, or an example names what does not exist. A script for a shell and
    a node in the foreground have nothing to say as JSON."""
    lines = [line.strip() for line in (command.help or "").splitlines()]
    examples = [line for line in lines if f"headrace {' '.join(path)}" in line and not line.startswith(("`", "Take"))]
    assert examples, "no example"
    options = {spelling for option in command.params for spelling in (*option.opts, *option.secondary_opts)}
    for example in examples:
        words = example.partition("headrace ")[2].partition("|")[0].split()
        assert all(word in options for word in words if word.startswith("--")), example
    assert "--json" in options or path in (("completion",), ("store-node",))


def groups(command: click.Command, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    if not isinstance(command, click.Group):
        return []
    return [path, *(group for name, below in command.commands.items() for group in groups(below, (*path, name)))]


@pytest.mark.parametrize("path", groups(main), ids=lambda path: " ".join(path) or "headrace")
def test_no_line_of_a_list_of_commands_is_cut_off_in_a_narrow_terminal(path):
    """Fails when an operator has to guess what a command does."""
    shown = CliRunner().invoke(main, [*path, "--help"], terminal_width=80).stdout
    assert "..." not in shown.partition("Show this message and exit.")[2]
