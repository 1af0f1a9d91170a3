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


# An interpreter that says, as if it were vLLM's version, which variables it was started with; and who starts it.
TELLS_NAMES = """#!%s
import json, os
print(json.dumps(" ".join(os.environ)), flush=True)
input()
"""
STARTS_PEER = """
import sys
from pathlib import Path
from headrace.torch_environment import set_torch_environment
from headrace.bench.vllm_peer import running_vllm
set_torch_environment()
with running_vllm(sys.argv[1], Path("/"), dtype="", threads=1, tokens_max=1, batch_max=1) as peer:
    print(peer.version)
"""


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


def test_vllm_gets_what_the_user_says_of_threads_and_nothing_that_we_say(tmp_path):
    """Fails when vLLM is measured otherwise than its user runs it."""
    python = tmp_path / "python"
    python.write_text(TELLS_NAMES % sys.executable)
    python.chmod(0o755)
    said = {"PATH": "/usr/bin:/bin", "HOME": "/nonexistent", "KMP_BLOCKTIME": "200"}
    command = [sys.executable, "-c", STARTS_PEER, str(python)]
    done = subprocess.run(command, env=said, capture_output=True, text=True, timeout=60)
    assert set(done.stdout.split()) & set(TORCH_ENVIRONMENT) == {"KMP_BLOCKTIME"}, done.stderr


def test_a_worker_says_how_threads_wait_before_torch_is_loaded():
    assert environment_of_torch("import headrace.engine.load_model") == TORCH_ENVIRONMENT
