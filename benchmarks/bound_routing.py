"""What any router could reach on a trace: TTFT if it knew everything, with a pool of this size and with an endless one.

    python benchmarks/bound_routing.py --traces DIR [--trace NAME ...] [--profile P] [--load L] [--seeds N] [--router R]

DIR is as for compare_routers.py, and so are traces, loads and seeds: rows of the two can be put side by side. Profiles
with separate prefill and decode workers only. Takes half a minute, as long again for each seed of `--router`, which is
simulated to see what it found: its last row says what waiting and transfers cost it. Each row is an easier world than
the simulated one:

    one queue       no prompt is at the wrong worker: all wait together, and whoever is free takes one
    free fetches    what a store has is at every worker, at no time and no cost
    at once         what a prompt brings is stored when it comes, not when it was computed
    free decodes    decode workers compute what they may (`local_prefill_tokens`) beside their batch, at once

TTFT is the wait, the prefill of what was not found, the last block's hand-off and a decode step of the mean batch. The
wait is that of the order of least p90 among three: shortest remaining first with ageing, as workers do; without ageing;
and all others before the longest tenth. So it is a yardstick and no proven bound: an order that nobody thought of may
have a lower p90. `no queue` has no wait.
"""

import argparse
import heapq
from collections.abc import Sequence
from pathlib import Path
from statistics import median

import numpy as np
from compare_routers import TRACES, load_trace

from headrace.core.eviction import DEFAULT_POLICY, make_policy
from headrace.core.queue_order import AGEING_PER_S
from headrace.simulate.clairvoyant_bound import clairvoyant_bound
from headrace.simulate.cluster_model import ClusterModel, read_cluster
from headrace.simulate.read_trace import Trace, TracedRequest
from headrace.simulate.replay_eviction import replay_policy
from headrace.simulate.replay_routing import scale_to_load
from headrace.simulate.routing_policies import NAMED_POLICIES
from headrace.simulate.simulated_fleet import SimulatedFleet, SimulatedRequest

# Share of the prompts that the third order makes wait for all others.
LONGEST_SHARE = 0.1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--traces", type=Path, required=True)
    parser.add_argument("--trace", nargs="+", choices=tuple(TRACES), default=("conversation", "synthetic"))
    parser.add_argument("--profile", default="h100-8b-pd-pool")
    parser.add_argument("--load", type=float, default=0.9)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--router", choices=tuple(NAMED_POLICIES))
    asked = parser.parse_args()
    model = read_cluster(asked.profile)
    if model.mixed_workers:
        parser.error("--profile: workers that prefill and decode share their time between both; no bound is known here")
    for name in asked.trace:
        trace = load_trace(asked.traces, name)
        loads = [
            scale_to_load(trace, model, load=asked.load, tick_s=TRACES[name][4], seed=seed)
            for seed in range(asked.seeds)
        ]
        print(f"{name}, {asked.profile}, load {asked.load:g}, median of {asked.seeds} seeds")
        print(f"  {'':58} {'p50':>6} {'p90':>6} {'found':>6}")
        for row in zip(*(bounds(requests, trace, model, router=asked.router) for requests in loads), strict=True):
            p50, p90, found = (median(column) for column in zip(*(figures for _, figures in row), strict=True))
            print(f"  {row[0][0]:58} {p50:6.2f} {p90:6.2f} {found:6.1%}")


def bounds(
    requests: Sequence[SimulatedRequest], trace: Trace, model: ClusterModel, *, router: str | None = None
) -> list[tuple[str, tuple[float, float, float]]]:
    """(world, (TTFT p50 and p90 in seconds, share found of what an endless cache finds)), easiest first."""
    lengths = np.array([each.input_tokens for each in requests])
    ideal = np.array([each.ideal_tokens for each in requests])
    # Who computes stores, so that hosts of decode workers hold next to nothing: the last world leaves them out.
    pool_tokens = model.num_workers * model.host_tokens
    all_tokens = pool_tokens + model.num_workers * model.device_tokens
    in_order = Trace(
        tuple(TracedRequest(each.input_tokens, each.chain) for each in requests), trace.block_tokens, trace.num_blocks
    )

    def tokens(blocks: list[int]) -> np.ndarray:
        return np.minimum(np.array(blocks) * trace.block_tokens, lengths - 1)

    def kept(capacity_tokens: int) -> np.ndarray:
        capacity_blocks = capacity_tokens // trace.block_tokens
        return tokens(replay_policy(in_order, make_policy(DEFAULT_POLICY), capacity_blocks=capacity_blocks))

    worlds = [
        ("no queue, endless cache", ideal, False),
        ("one queue, endless cache", ideal, True),
        (
            "one queue, all memory as one cache that knows the future",
            tokens(clairvoyant_bound(in_order, capacity_blocks=all_tokens // trace.block_tokens)),
            True,
        ),
        ("one queue, all memory as one store", kept(all_tokens), True),
    ]
    if pool_tokens:
        worlds.append(("one queue, all host memory as one store", kept(pool_tokens), True))
        prefillers_tokens = len(model.prefillers) * model.host_tokens
        worlds.append(("one queue, prefill workers' host memory as one store", kept(prefillers_tokens), True))
    if router is not None:
        worlds.append((f"one queue, what {router} found", found_by(router, requests, trace, model), True))
    last_block_s = float(model.network.seconds(trace.block_tokens * model.kv_token_bytes))
    after_prefill_s = last_block_s + step_seconds(requests, model)
    rows = []
    for name, found, waits in worlds:
        p50, p90 = ttft_percentiles(requests, found, model, after_prefill_s=after_prefill_s, waits=waits)
        rows.append((name, (p50, p90, float(found.sum() / ideal.sum()))))
    return rows


def found_by(router: str, requests: Sequence[SimulatedRequest], trace: Trace, model: ClusterModel) -> np.ndarray:
    """Leading tokens of each prompt that this router found, where workers and stores are simulated."""
    policy = NAMED_POLICIES[router]
    fleet = SimulatedFleet(
        model,
        block_tokens=trace.block_tokens,
        order=policy.order,
        keeps_chains_together=policy.keeps_chains_together,
    )
    outcomes = fleet.run(requests, policy(fleet).route)
    in_order = sorted(outcomes, key=lambda outcome: outcome.request.number)
    return np.array([outcome.device_tokens + outcome.host_tokens for outcome in in_order])


def ttft_percentiles(
    requests: Sequence[SimulatedRequest],
    found: np.ndarray,
    model: ClusterModel,
    *,
    after_prefill_s: float,
    waits: bool,
) -> tuple[float, float]:
    """p50 and p90 in seconds. found: leading tokens of each prompt that need not be computed."""
    lengths = np.array([each.input_tokens for each in requests])
    arrivals = np.array([each.arrival_s for each in requests])
    work_s = np.asarray(model.prefill.seconds(found, lengths))
    alone_s = work_s + after_prefill_s
    if not waits:
        return float(np.percentile(alone_s, 50)), float(np.percentile(alone_s, 90))
    queued = np.flatnonzero(lengths - found > model.local_prefill_tokens)
    is_long = work_s > np.quantile(work_s, 1 - LONGEST_SHARE)
    orders = (work_s + AGEING_PER_S * arrivals, work_s, work_s + 1e6 * is_long)
    best = (np.inf, np.inf)
    for rank in orders:
        ttft = alone_s.copy()
        ttft[queued] += one_queue(arrivals[queued], work_s[queued], rank[queued], workers=len(model.prefillers))
        best = min(best, (float(np.percentile(ttft, 90)), float(np.percentile(ttft, 50))))
    return best[1], best[0]


def one_queue(arrival_s: np.ndarray, work_s: np.ndarray, rank: np.ndarray, *, workers: int) -> np.ndarray:
    """Seconds that each prompt waits where whoever is free takes the waiting one of least rank. Arrivals in order."""
    free_s = [0.0] * workers
    waiting: list[tuple[float, int]] = []
    waited_s, come = np.zeros(len(arrival_s)), 0
    for _ in range(len(arrival_s)):
        now_s = free_s[0]
        if not waiting:
            now_s = max(now_s, float(arrival_s[come]))
        while come < len(arrival_s) and arrival_s[come] <= now_s:
            heapq.heappush(waiting, (float(rank[come]), come))
            come += 1
        _, taken = heapq.heappop(waiting)
        waited_s[taken] = now_s - arrival_s[taken]
        heapq.heapreplace(free_s, now_s + float(work_s[taken]))
    return waited_s


def step_seconds(requests: Sequence[SimulatedRequest], model: ClusterModel) -> float:
    """A decode step of the mean batch: sequences and KV tokens under way are arrivals x how long they stay (Little),
    and they stay for their tokens x this step."""
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    per_worker_s = span_s * len(model.decoders)
    sequences = sum(each.output_tokens for each in requests) / per_worker_s  # for each second that a step lasts
    kv_tokens = (
        sum(each.output_tokens * (each.input_tokens + each.output_tokens / 2) for each in requests) / per_worker_s
    )
    busy = model.decode.sequence_s * sequences + model.decode.kv_token_s * kv_tokens
    assert busy < 1, "decode workers cannot keep up"
    return model.decode.base_s / (1 - busy)


if __name__ == "__main__":
    main()
