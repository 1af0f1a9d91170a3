"""Replay a trace against a simulated cluster under one routing policy, and sum up what came of it."""

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from headrace.simulate.cluster_model import ClusterModel
from headrace.simulate.read_trace import Trace
from headrace.simulate.simulated_fleet import (
    Outcome,
    QueueOrder,
    RoutePlan,
    SimulatedFleet,
    SimulatedRequest,
)


class RoutePolicy(Protocol):
    """Says where each request goes. Made for one fleet, which it may look at and must not change."""

    name: str
    order: QueueOrder
    keeps_chains_together: bool

    def route(self, request: SimulatedRequest) -> RoutePlan:
        """Called once for each request, at its arrival."""
        ...


class PolicyClass(Protocol):
    """Makes a policy for a fleet; says beforehand what the fleet must be like."""

    order: QueueOrder
    keeps_chains_together: bool

    def __call__(self, fleet: SimulatedFleet) -> RoutePolicy: ...


@dataclass(frozen=True, slots=True)
class RoutingResult:
    """One run in the units that people compare."""

    policy: str
    load: float
    hit_share_of_ideal: float
    device_hit_rate: float
    host_hit_rate: float
    ttft_s_p50: float
    ttft_s_p90: float
    ttft_s_p99: float
    slo_share: float  # requests within both the TTFT and the ITL target
    goodput_per_s: float  # so many of them, from the first arrival to the last token
    itl_ms_p50: float
    itl_ms_p90: float
    imbalance: float  # the busiest prefill worker's seconds over the mean
    fetched_gb: float


def replay_routing(
    requests: Sequence[SimulatedRequest],
    model: ClusterModel,
    policy_class: PolicyClass,
    *,
    block_tokens: int,
    load: float,
) -> RoutingResult:
    """Run all requests to their end. The same arguments give the same result."""
    fleet = SimulatedFleet(
        model,
        block_tokens=block_tokens,
        order=policy_class.order,
        keeps_chains_together=policy_class.keeps_chains_together,
    )
    policy = policy_class(fleet)
    outcomes = fleet.run(requests, policy.route)
    return _sum_up(policy.name, load, outcomes, fleet)


def replay_as_it_came(trace: Trace, model: ClusterModel, policy_class: PolicyClass) -> RoutingResult:
    """Run a trace at its own times."""
    requests = scale_to_load(trace, model, load=0.0, tick_s=0.0, seed=0)
    return replay_routing(requests, model, policy_class, block_tokens=trace.block_tokens, load=0.0)


def scale_to_load(
    trace: Trace, model: ClusterModel, *, load: float, tick_s: float, seed: int
) -> list[SimulatedRequest]:
    """The trace at a load: 1.0 keeps every worker that prefills busy all the time if nothing is ever cached.

    Load 0 keeps the trace's own times. Times are stretched or squeezed alike.
    Traces with coarse clocks get their requests spread over a tick at random.
    """
    timed, block_tokens = trace.requests, trace.block_tokens
    cold_s = sum(float(model.prefill.seconds(0, each.input_tokens)) for each in timed)
    draw = random.Random(seed)
    jittered = sorted((each.arrival_s + draw.uniform(0.0, tick_s), number) for number, each in enumerate(timed))
    first_s = jittered[0][0]
    span_s = (jittered[-1][0] - first_s) or 1.0
    stretch = cold_s / span_s / (load * len(model.prefillers)) if load else 1.0
    seen: set[int] = set()
    requests = []
    for number, (arrival_s, index) in enumerate(jittered):
        each = timed[index]
        chain = each.block_ids[: each.input_tokens // block_tokens]  # a partial block has no name that others know
        found = next((position for position, block in enumerate(chain) if block not in seen), len(chain))
        seen.update(chain)
        ideal_tokens = min(found * block_tokens, each.input_tokens - 1)
        at_s = (arrival_s - first_s) * stretch
        requests.append(SimulatedRequest(number, at_s, each.input_tokens, each.output_tokens, chain, ideal_tokens))
    return requests


def _sum_up(policy: str, load: float, outcomes: Sequence[Outcome], fleet: SimulatedFleet) -> RoutingResult:
    model = fleet.model
    ttft = np.array([outcome.ttft_s for outcome in outcomes])
    itl = np.array([outcome.itl_s for outcome in outcomes])
    prompt = sum(outcome.request.input_tokens for outcome in outcomes)
    device = sum(outcome.device_tokens for outcome in outcomes)
    host = sum(outcome.host_tokens for outcome in outcomes)
    ideal = sum(outcome.request.ideal_tokens for outcome in outcomes)
    busy_s = fleet.busy_s[list(model.prefillers)]
    p50, p90, p99 = (float(np.percentile(ttft, q)) for q in (50, 90, 99))
    is_good = (ttft < model.ttft_slo_s) & (itl < model.itl_slo_s)
    span_s = fleet.ended_s - min(outcome.request.arrival_s for outcome in outcomes)
    return RoutingResult(
        policy=policy,
        load=load,
        hit_share_of_ideal=(device + host) / ideal if ideal else math.nan,
        device_hit_rate=device / prompt,
        host_hit_rate=host / prompt,
        ttft_s_p50=p50,
        ttft_s_p90=p90,
        ttft_s_p99=p99,
        slo_share=float(np.mean(is_good)),
        goodput_per_s=float(np.sum(is_good) / span_s),
        itl_ms_p50=float(np.percentile(itl, 50)) * 1_000,
        itl_ms_p90=float(np.percentile(itl, 90)) * 1_000,
        imbalance=float(busy_s.max() / busy_s.mean()) if busy_s.any() else 1.0,
        fetched_gb=sum(outcome.fetched_bytes for outcome in outcomes) / 1e9,
    )
