"""vLLM on the same work, in an interpreter of its own: it needs other libraries than ours.

Owns the script that runs there and what it prints. That script imports nothing of ours.
"""

import json
import os
import signal
import subprocess
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import InvalidRequest

Place = tuple[str, int, int]  # what, batch, context

# Loading on a slow disk and the work itself take minutes together; more than this is a process that hangs.
PEER_TIMEOUT_S = 900.0

SCRIPT = '''
import json, sys, time
import vllm
from vllm import LLM, SamplingParams

asked = json.loads(sys.argv[1])
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

print("VERSION", vllm.__version__, flush=True)
seconds(prompts(1, 32), 4)
for what, batch, context in asked["work"]:
    tries = []
    for _ in range(3):
        made = prompts(batch, context)
        if what == "prefill":
            tries.append(context / seconds(made, 1))
        else:
            seconds(made, 1)  # its KV is cached from here on, all but the last block
            tries.append((seconds(made, 17) - seconds(made, 1)) / 16 * 1e3)
    print("FIGURE", json.dumps([what, batch, context, sorted(tries)[1]]), flush=True)
'''


@dataclass(frozen=True, slots=True)
class VllmFigures:
    """Its version, and medians of three: tokens a second of prefill, milliseconds a step of decode."""

    version: str
    figures: dict[Place, float]


def run_vllm(
    python: str, model: Path, work: Sequence[Place], *, dtype: str, threads: int, report: Callable[[str], None]
) -> VllmFigures:
    """Have another interpreter do the work with vLLM; a minute or more passes before the first figure. Blocks.

    Raises InvalidRequest when that interpreter cannot be started, has no vllm, or fails: it says with which words.
    """
    asked = {
        "path": str(model),
        "dtype": dtype,
        "tokens_max": max(context for _, _, context in work) + 32,
        "batch_max": max(batch for _, batch, _ in work),
        "work": list(work),
    }
    environment = os.environ | {
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_HOST_IP": "127.0.0.1",
        "VLLM_CPU_KVCACHE_SPACE": "2",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in sorted(os.sched_getaffinity(0))[:threads]),
    }
    report("vLLM: loading")
    output = _run([python, "-c", SCRIPT, json.dumps(asked)], environment)
    lines = [line.split(" ", 1) for line in output.splitlines() if line.startswith(("VERSION ", "FIGURE "))]
    found = [json.loads(rest) for kind, rest in lines if kind == "FIGURE"]
    version = next((rest for kind, rest in lines if kind == "VERSION"), "")
    return VllmFigures(version, {(what, batch, context): value for what, batch, context, value in found})


def _run(command: Sequence[str], environment: dict[str, str]) -> str:
    """What the command prints. It leads a group of its own: vLLM's engine is a child that would outlive it."""
    python = command[0]
    try:
        process = subprocess.Popen(
            command,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    except OSError as error:
        raise InvalidRequest(f"{python} did not run vLLM: {error}", param="peer_python") from error
    try:
        output, errors = process.communicate(timeout=PEER_TIMEOUT_S)
    except subprocess.TimeoutExpired as error:
        raise InvalidRequest(
            f"vLLM was not done within {PEER_TIMEOUT_S:.0f} s in {python}", param="peer_python"
        ) from error
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if process.returncode:
        last = (errors.strip().splitlines() or ["it said nothing"])[-1]
        raise InvalidRequest(f"vLLM failed in {python}: {last}", param="peer_python")
    return output
