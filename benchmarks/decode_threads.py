"""From how many rows on a second thread pays in a step: decode steps on one thread and on all, in turn.

The answer belongs into `PARALLEL_WORK_MIN` of engine/model_runner.py, which is in multiplications of the middle linear
layer. Run it on a machine that does nothing else: a thread that waits for a busy core costs milliseconds.

    .venv/bin/python benchmarks/decode_threads.py [model directory]
"""

import sys
import time
from statistics import median

from headrace.config import EngineSettings, ModelSettings
from headrace.core.block import HashAlgorithm
from headrace.engine.load_model import load_model
from headrace.engine.model_runner import ModelRunner, SequenceStep

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64)
CONTEXT, ROUNDS = 128, 15


def main() -> None:
    """Print the medians, and how many times as fast all threads are."""
    settings = ModelSettings(model=sys.argv[1]) if len(sys.argv) > 1 else ModelSettings()
    loaded = load_model(
        settings, EngineSettings(), trust_group="bench", hash_algorithm=HashAlgorithm.XXH3_128, report=print
    )
    count_to_runner = {count: _pinned(loaded.runner, count) for count in (1, loaded.runner.threads)}
    print(f"{'rows':>5} " + " ".join(f"{count} threads ms" for count in count_to_runner) + "  times")
    for batch in BATCHES:
        blocks = -(-(CONTEXT + ROUNDS + 1) // loaded.kv.layout.block_tokens)
        tables = [tuple(range(which * blocks, (which + 1) * blocks)) for which in range(batch)]
        times: dict[int, list[float]] = {count: [] for count in count_to_runner}
        for number in range(ROUNDS):
            steps = [SequenceStep((1,), CONTEXT + number, table, 1) for table in tables]
            for count, runner in count_to_runner.items():
                started_s = time.perf_counter()
                runner.run_step(steps)
                times[count].append((time.perf_counter() - started_s) * 1e3)
        medians = [median(found[1:]) for found in times.values()]
        print(f"{batch:>5} " + " ".join(f"{ms:>12.1f}" for ms in medians) + f"  {medians[0] / medians[-1]:.2f}x")


def _pinned(runner: ModelRunner, threads: int) -> ModelRunner:
    """Every step on so many threads."""
    pinned = ModelRunner(runner.model, runner.kv, row_multiple=runner.row_multiple, threads=threads)
    pinned.pin_threads(threads)
    return pinned


if __name__ == "__main__":
    main()
