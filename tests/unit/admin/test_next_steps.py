"""The commands that `up` prints can be pasted."""

import shlex
from types import SimpleNamespace

import pytest
from click.testing import CliRunner

from headrace.admin.cli import main
from headrace.admin.system_commands import print_next_steps
from headrace.config import load_config
from headrace.core.errors import ConfigInvalid

STATE = SimpleNamespace(grpc_target="127.0.0.1:7", tls_ca_file="/its ca.pem", tls_cert_file="", tls_key_file="")
BY_ADDRESS = ["--address", "127.0.0.1:7", "--tls-ca-file", "/its ca.pem"]


def told_commands(capsys) -> list[list[str]]:
    """As a shell takes the lines apart, without the program."""
    return [shlex.split(line.partition(":")[2])[1:] for line in capsys.readouterr().out.splitlines()]


def test_the_commands_that_up_prints_reach_a_system_whose_directory_a_file_named(tmp_path, capsys):
    """Fails when they are those of the usual directory, where another system is or none, or when a shell takes a path
    with blanks and quotes to pieces."""
    there = str(tmp_path / "John's files")
    print_next_steps(load_config({"state_dir": there}, environ={}), STATE)
    assert told_commands(capsys) == [
        ["chat", *BY_ADDRESS],
        ["cache", "ls", *BY_ADDRESS],
        ["down", "--state-dir", there],
    ]
    print_next_steps(load_config(environ={}), STATE)
    assert told_commands(capsys) == [["chat"], ["cache", "ls"], ["down"]]


def test_what_up_prints_works_where_its_settings_hold_only_together_with_its_flags(tmp_path, monkeypatch, capsys):
    """Fails when `up` ends with an error although the system is up, or when the line that ends it is refused."""
    monkeypatch.setenv("HEADRACE_TENANTS_FILE", str(tmp_path / "tenants.yaml"))
    config = load_config({"hash_algorithm": "sha256", "state_dir": str(tmp_path / "nothing")})
    with pytest.raises(ConfigInvalid):
        load_config()
    print_next_steps(config, STATE)
    chat, _, down = told_commands(capsys)
    assert chat == ["chat", *BY_ADDRESS]
    done = CliRunner().invoke(main, down, catch_exceptions=False)
    assert (done.exit_code, done.stdout) == (0, f"nothing was up ({tmp_path / 'nothing'})\n")
