"""The study behind docs/routing.md: routers on public traces, at several loads and seeds, in one JSON file.

    python benchmarks/compare_routers.py --traces DIR --out FILE [--profile P ...] [--load L ...] [--seeds N]
        [--router R ...] [--trace NAME ...] [--bytes-per-s B ...] [--processes N]

DIR holds mooncake_conversation.jsonl.gz and mooncake_synthetic.jsonl.gz (and coding_weka.jsonl.gz for `coding-24` and
`coding-128`). A run that FILE has already is not run again, so a study can be stopped and continued, and grows by
options. Runs with the lowest priority (nice 19). Prints a line for each run; judges nothing.
"""

import argparse
import json
import os
from collections.abc import Iterable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from itertools import product
from pathlib import Path
from typing import Any

from headrace.core.step_costs import LinkCost
from headrace.simulate.cluster_model import read_cluster
from headrace.simulate.read_trace import Trace, read_trace
from headrace.simulate.replay_routing import replay_routing, scale_to_load
from headrace.simulate.routing_policies import NAMED_POLICIES, ROUTING_POLICIES

# Name of a trace here: file, users (of a file of conversations), requests at most, blocks merged, tick of its clock.
TRACES: dict[str, tuple[str, int, int, int, float]] = {
    "conversation": ("mooncake_conversation.jsonl.gz", 0, 0, 1, 3.0),
    "synthetic": ("mooncake_synthetic.jsonl.gz", 0, 0, 1, 3.0),
    "coding-24": ("coding_weka.jsonl.gz", 24, 4_000, 8, 0.0),
    "coding-128": ("coding_weka.jsonl.gz", 128, 4_000, 8, 0.0),
}
LOADS = (0.4, 0.7, 0.9, 1.1)


@dataclass(frozen=True, slots=True)
class Run:
    """One simulation. `bytes_per_s` 0: the profile's own network; `load` 0: the trace's own times."""

    trace: str
    profile: str
    load: float
    seed: int
    router: str
    bytes_per_s: float = 0.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--trace", nargs="+", choices=tuple(TRACES), default=("conversation", "synthetic"))
    parser.add_argument("--profile", nargs="+", default=("h100-8b-pd", "h100-8b-pd-pool", "h100-8b-mixed"))
    parser.add_argument("--load", nargs="+", type=float, default=LOADS)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--router", nargs="+", choices=tuple(NAMED_POLICIES), default=tuple(ROUTING_POLICIES))
    parser.add_argument("--bytes-per-s", nargs="+", type=float, default=(0.0,))
    parser.add_argument("--processes", type=int, default=1)
    asked = parser.parse_args()
    rows: list[dict[str, Any]] = json.loads(asked.out.read_text())["rows"] if asked.out.exists() else []
    done = {tuple(row["run"].values()) for row in rows}
    runs = [
        Run(trace, profile, load, seed, router, rate)
        for seed, profile, load, trace, rate, router in product(
            range(asked.seeds), asked.profile, asked.load, asked.trace, asked.bytes_per_s, asked.router
        )
    ]
    wanted = [run for run in runs if tuple(asdict(run).values()) not in done]
    for row in results(wanted, asked.traces, processes=asked.processes):
        rows.append(row)
        asked.out.write_text(json.dumps({"rows": rows}))
        print(f"{row['run']}  p50 {row['ttft_s_p50']:.2f} p90 {row['ttft_s_p90']:.2f}", flush=True)


def results(runs: list[Run], folder: Path, *, processes: int) -> Iterable[dict[str, Any]]:
    """A row for each run, in order, as each ends."""
    with ProcessPoolExecutor(processes, initializer=os.nice, initargs=(19,)) as pool:
        yield from pool.map(simulate_run, runs, [folder] * len(runs))


def simulate_run(run: Run, folder: Path) -> dict[str, Any]:
    """One run's row: what it was, and what came of it."""
    model = read_cluster(run.profile)
    if run.bytes_per_s:
        model = replace(model, network=LinkCost(run.bytes_per_s, model.network.round_trip_s))
    trace = load_trace(folder, run.trace)
    requests = scale_to_load(trace, model, load=run.load, tick_s=TRACES[run.trace][4], seed=run.seed)
    router = NAMED_POLICIES[run.router]
    result = replay_routing(requests, model, router, block_tokens=trace.block_tokens, load=run.load)
    return {"run": asdict(run), **asdict(result)}


@lru_cache(maxsize=2)
def load_trace(folder: Path, name: str) -> Trace:
    """A trace, read once in each process."""
    file, users, requests_max, merge_blocks, _ = TRACES[name]
    return read_trace(
        folder / file,
        report=lambda line: None,
        merge_blocks=merge_blocks,
        users=users or 1,
        requests_max=requests_max or None,
    )


if __name__ == "__main__":
    main()
