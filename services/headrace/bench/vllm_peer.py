"""vLLM on the same work, in an interpreter of its own: it needs other libraries than ours.

Owns the script that runs there and what goes to and fro. The script imports nothing of ours. It stays loaded between
two trials, so that its trials and ours can be taken in turn: on a shared machine the minute decides as much as the
engine does.
"""

import json
import os
import signal
import subprocess
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from headrace.core.errors import InvalidRequest
from headrace.torch_environment import names_set_here

# Loading on a slow disk takes minutes; more than this is a process that hangs.
LOAD_TIMEOUT_S = 600.0

# The longest prompt took 7 s where this was measured; a busy machine takes several times that.
TRIAL_TIMEOUT_S = 300.0

# To end by itself: it stops its engine and takes away what the two shared. Both are idle then, so seconds are plenty.
END_TIMEOUT_S = 20.0

# That one trial makes of one sequence, and some to spare.
VLLM_NEW_TOKENS_MAX = 32

SCRIPT = '''
import json, os, sys, time

answers = os.fdopen(os.dup(1), "w")
os.dup2(2, 1)  # whatever else is printed, by its children too, is no answer
asked = json.loads(sys.argv[1])
import vllm
from vllm import LLM, SamplingParams

llm = LLM(model=asked["path"], dtype=asked["dtype"], enforce_eager=True, enable_prefix_caching=True,
          max_model_len=asked["tokens_max"], max_num_seqs=asked["batch_max"], disable_log_stats=True)
count = 0

def prompts(batch, tokens):
    """Token ids that no earlier prompt began with."""
    global count
    made = []
    for _ in range(batch):
        count += 1
        made.append({"prompt_token_ids": [count % 1000 + 1] + [7919 * i * count % 1000 + 1 for i in range(1, tokens)]})
    return made

def seconds(batch, new):
    params = SamplingParams(temperature=0.0, max_tokens=new, min_tokens=new, ignore_eos=True, detokenize=False)
    started = time.perf_counter()
    llm.generate(batch, params, use_tqdm=False)
    return time.perf_counter() - started

seconds(prompts(1, 32), 4)
print(json.dumps(vllm.__version__), file=answers, flush=True)
for line in sys.stdin:
    what, batch, context = json.loads(line)
    made = prompts(batch, context)
    if what == "prefill":
        took = seconds(made, 1)
    else:
        seconds(made, 1)  # its KV is cached from here on, all but the last block
        took = (seconds(made, 17) - seconds(made, 1)) / 16
    print(json.dumps(took), file=answers, flush=True)
'''


class VllmPeer:
    """A loaded vLLM; `running_vllm` makes one."""

    def __init__(self, process: subprocess.Popen[str], python: str, errors: IO[str]) -> None:
        """errors: where the process writes what goes wrong. Waits until it has loaded: a minute or more."""
        self._process = process
        self._python = python
        self._errors = errors
        self.version = str(self._answer(LOAD_TIMEOUT_S))
        self._halt()

    def trial(self, what: str, batch: int, context: int) -> float:
        """Seconds of a whole prompt ("prefill"), or of one decode step of `batch` sequences behind `context` tokens.

        Raises InvalidRequest when it fails.
        """
        assert self._process.stdin is not None
        _signal_group(self._process, signal.SIGCONT)
        try:
            self._process.stdin.write(json.dumps([what, batch, context]) + "\n")
            self._process.stdin.flush()
        except OSError as error:
            raise self._failed() from error
        seconds = float(self._answer(TRIAL_TIMEOUT_S))
        self._halt()
        return seconds

    def _halt(self) -> None:
        """Until the next trial: its threads go on looking for work for a while, and would take it from the others'."""
        _signal_group(self._process, signal.SIGSTOP)

    def _answer(self, timeout_s: float) -> str | float:
        """The next line that it prints. It is killed when none comes in time, which ends the wait for it."""
        assert self._process.stdout is not None
        is_late = threading.Event()

        def kill_late() -> None:
            is_late.set()
            _kill(self._process)

        alarm = threading.Timer(timeout_s, kill_late)
        alarm.start()
        try:
            line = self._process.stdout.readline()
        finally:
            alarm.cancel()
        if is_late.is_set():
            raise InvalidRequest(f"vLLM did not answer within {timeout_s:.0f} s in {self._python}", param="peer_python")
        if not line:
            raise self._failed()
        answer: str | float = json.loads(line)
        return answer

    def _failed(self) -> InvalidRequest:
        _kill(self._process)
        self._errors.seek(0)
        last = (self._errors.read().strip().splitlines() or ["it said nothing"])[-1]
        return InvalidRequest(f"vLLM failed in {self._python}: {last}", param="peer_python")


@contextmanager
def running_vllm(
    python: str,
    model: Path,
    *,
    dtype: str,
    threads: int,
    tokens_max: int,
    batch_max: int,
    end_timeout_s: float = END_TIMEOUT_S,
) -> Iterator[VllmPeer]:
    """Load the model in another interpreter, with vLLM; leaving ends that process and its children.

    tokens_max: of one sequence, its new tokens included. end_timeout_s: when it has not ended by then, it is killed.
    Raises InvalidRequest when that interpreter cannot be started, has no vllm, or fails: it says with which words.
    """
    asked = {"path": str(model), "dtype": dtype, "tokens_max": tokens_max, "batch_max": batch_max}
    # How our threads wait is no matter of vLLM's, which runs as it would alone: as the user has it.
    environment = {name: value for name, value in os.environ.items() if name not in names_set_here} | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:threads]),
    }
    with tempfile.TemporaryFile("w+") as errors:
        try:
            # It leads a group of its own: vLLM's engine is a child that would outlive it.
            process = subprocess.Popen(
                [python, "-c", SCRIPT, json.dumps(asked)],
                env=environment,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                start_new_session=True,
            )
        except OSError as error:
            raise InvalidRequest(f"{python} did not run vLLM: {error}", param="peer_python") from error
        try:
            yield VllmPeer(process, python, errors)
        finally:
            _end(process, end_timeout_s)


def _end(process: subprocess.Popen[str], timeout_s: float) -> None:
    """Let it end by itself, which it does when nothing more can be asked, and kill what is left."""
    assert process.stdin is not None
    assert process.stdout is not None
    _signal_group(process, signal.SIGCONT)
    with suppress(OSError):  # what it did not read any more
        process.stdin.close()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout_s)
    _kill(process)
    process.stdout.close()


def _kill(process: subprocess.Popen[str]) -> None:
    """End the whole group at once, with whoever would take away its shared memory: that is done here."""
    shared = _shared_memory(process.pid)
    _signal_group(process, signal.SIGKILL)
    process.wait()
    for path in shared:
        path.unlink(missing_ok=True)


def _shared_memory(group: int) -> set[Path]:
    """Files that the group's processes have mapped, of those that Python names for shared memory."""
    found: set[Path] = set()
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with suppress(OSError):  # it has ended, or is somebody else's
            if os.getpgid(int(maps.parent.name)) == group:
                paths = (line.split(maxsplit=5)[5:] for line in maps.read_text(encoding="utf-8").splitlines())
                found |= {Path(path) for (path,) in filter(None, paths) if path.startswith("/dev/shm/psm_")}
    return found


def _signal_group(process: subprocess.Popen[str], number: signal.Signals) -> None:
    with suppress(ProcessLookupError):
        os.killpg(process.pid, number)
