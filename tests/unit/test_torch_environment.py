"""Torch reads once how its threads wait: whoever computes must have said so before."""

import json
import subprocess
import sys

import pytest

from headrace.torch_environment import TORCH_ENVIRONMENT

# Prints the environment at the first import of torch, then ends the process.
SPY = """
import json, os, sys
class Spy:
    def find_spec(self, name, path=None, target=None):
        if name == "torch":
            print(json.dumps({name: os.environ.get(name) for name in %r}), flush=True)
            os._exit(0)
sys.meta_path.insert(0, Spy())
"""
COMMAND = "from headrace.admin.cli import main; sys.argv[1:] = %r; main()"


def environment_of_torch(code):
    """The variables when `code`, in a process of its own, first asks for torch; what went wrong if it never does."""
    script = SPY % (tuple(TORCH_ENVIRONMENT),) + code
    bare = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent"}
    done = subprocess.run([sys.executable, "-c", script], env=bare, capture_output=True, text=True, timeout=60)
    return json.loads(done.stdout) if done.stdout else done.stderr


@pytest.mark.parametrize(
    "command", ["bench engine", "bench speculation", "verify", "verify --codec int8", "diagnose", "learn validity"]
)
def test_a_command_that_computes_says_how_threads_wait_before_torch_is_loaded(command):
    assert environment_of_torch(COMMAND % command.split()) == TORCH_ENVIRONMENT


def test_a_worker_says_how_threads_wait_before_torch_is_loaded():
    assert environment_of_torch("import headrace.engine.load_model") == TORCH_ENVIRONMENT
