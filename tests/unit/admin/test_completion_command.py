"""`headrace completion`: scripts that shells take, and completions that are right."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from headrace.admin.cli import main


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_is_of_the_shell_that_is_named(shell):
    done = CliRunner().invoke(main, ["completion", shell])
    assert done.exit_code == 0
    assert f"_HEADRACE_COMPLETE={shell}_complete" in done.stdout
    assert CliRunner().invoke(main, ["completion", "csh"]).exit_code == 2


def test_bash_completes_a_command_and_an_option_with_the_script(tmp_path):
    """Fails when the script does not load, or calls a program that does not answer it."""
    bash = shutil.which("bash")
    if bash is None:
        pytest.skip("no bash here")
    script = CliRunner().invoke(main, ["completion", "bash"]).stdout
    (tmp_path / "headrace").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m headrace.admin.cli "$@"\n')
    (tmp_path / "headrace").chmod(0o755)
    tried = """
COMP_WORDS=(headrace cache unp); COMP_CWORD=2; _headrace_completion headrace; echo "${COMPREPLY[@]}"
COMPREPLY=(); COMP_WORDS=(headrace cache ttl --cl); COMP_CWORD=3; _headrace_completion headrace; echo "${COMPREPLY[@]}"
"""
    # The program answers completions under the name by which it was called.
    env = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{tmp_path}:{os.environ['PATH']}"}
    done = subprocess.run([bash, "--norc", "-c", script + tried], capture_output=True, text=True, env=env, timeout=60)
    assert done.stdout.split("\n")[:2] == ["unpin", "--clear"], done.stderr
