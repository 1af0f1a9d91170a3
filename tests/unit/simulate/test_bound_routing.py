"""`benchmarks/bound_routing.py`: what it says can be reached is never later than what is simulated."""

import importlib
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest

from headrace.simulate.cluster_model import ClusterModel, read_cluster
from headrace.simulate.generate_trace import Workload, WorkloadShape, generate_trace
from headrace.simulate.replay_routing import replay_routing, scale_to_load
from headrace.simulate.routing_policies import NAMED_POLICIES


@pytest.fixture
def bound_routing(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[3] / "benchmarks"))
    return importlib.import_module("bound_routing")


def make_pool_cluster() -> ClusterModel:
    return replace(read_cluster("h100-8b-pd-pool"), prefill_workers=3, decode_workers=1, host_tokens=60_000)


def test_one_queue_gives_whoever_is_free_the_waiting_prompt_of_least_rank(bound_routing: ModuleType):
    """Two workers; the third and fourth prompt wait, and the shorter of them goes first. Fails for first come."""
    arrival_s, work_s = np.array([0.0, 0.0, 0.1, 0.2]), np.array([2.0, 3.0, 5.0, 1.0])
    waited_s = bound_routing.one_queue(arrival_s, work_s, work_s, workers=2)
    assert waited_s.tolist() == pytest.approx([0.0, 0.0, 2.9, 1.8])


def test_a_step_of_the_mean_batch_is_what_a_decode_worker_under_that_load_would_take(bound_routing: ModuleType):
    """Fails for a batch that does not grow with its own steps: sequences stay for as many steps as they have tokens."""
    model = make_pool_cluster()
    trace = generate_trace(Workload.MULTI_TURN, requests=200, seed=1)
    requests = scale_to_load(trace, model, load=0.5, tick_s=0.0, seed=0)
    step_s = bound_routing.step_seconds(requests, model)
    span_s = requests[-1].arrival_s - requests[0].arrival_s
    stay_s = [each.output_tokens * step_s for each in requests]
    sequences = sum(stay_s) / span_s
    kv_tokens = (
        sum(s * (each.input_tokens + each.output_tokens / 2) for s, each in zip(stay_s, requests, strict=True)) / span_s
    )
    assert step_s == pytest.approx(float(model.decode.step_seconds(sequences, kv_tokens)))


def test_each_world_is_easier_than_the_next_and_all_are_easier_than_what_is_simulated(bound_routing: ModuleType):
    model = make_pool_cluster()
    shape = WorkloadShape(prefixes=8, prefix_tokens=2_048, turn_tokens=2_000, output_tokens=50, turns=5, gap_s=20)
    trace = generate_trace(Workload.MULTI_TURN, requests=300, seed=2, shape=shape)
    requests = scale_to_load(trace, model, load=0.9, tick_s=0.0, seed=0)
    worlds = bound_routing.bounds(requests, trace, model, router="headrace")
    alone, endless, knowing, store, pool, prefillers, as_found = (figures for _, figures in worlds)
    for easier, harder in ((alone, endless), (endless, knowing), (store, pool), (pool, prefillers)):
        assert easier[1] <= harder[1] * 1.001
        assert easier[2] >= harder[2]
    assert knowing[2] >= store[2]
    for name in ("headrace", "mooncake-together", "least-work-together"):
        found = replay_routing(requests, model, NAMED_POLICIES[name], block_tokens=trace.block_tokens, load=0.9)
        assert found.ttft_s_p90 >= endless[1]
        if name == "headrace":
            assert found.ttft_s_p90 >= as_found[1]
            assert found.hit_share_of_ideal == pytest.approx(as_found[2])
        assert found.hit_share_of_ideal <= 1.0
