"""How many workers are wanted, from what each of them says, and that Serve is told so only where it is switched on."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from ray.serve.config import AutoscalingPolicy

from headrace.config import Config, EngineSettings, GatewaySettings, load_config
from headrace.core.block import HashAlgorithm, KvLayout, Namespace
from headrace.core.errors import ConfigInvalid
from headrace.core.generation import WorkerId
from headrace.core.members import LearnedCosts, WorkerRecord, WorkerRole
from headrace_cluster.scale_workers import SCALE_IN_BELOW, pressure, scale_workers, wanted_workers
from headrace_cluster.serve_app import REPLICA_GRACE_S, replicas

WORKER = WorkerRecord(
    worker_id=WorkerId("w"),
    incarnation=1,
    role=WorkerRole.DECODE,
    host="h",
    store_node="n",
    model="m",
    namespace=Namespace(
        model_id="m",
        weights_digest="w",
        tokenizer_digest="t",
        adapter_digest="",
        layout=KvLayout(dtype="float32", num_layers=1, num_kv_heads=1, head_dim=4, block_tokens=4),
        position_digest="p",
        numerics_probe="",
        hash_algorithm=HashAlgorithm.XXH3_128,
        trust_group="all",
    ),
    context_tokens_max=100,
    pool_blocks=10,
    pid=1,
    costs=LearnedCosts(0.01, 1_000.0, 1e-9, 0.02, 0.01, 1e-9),
)
CONFIG = Config(engine=EngineSettings(batch_sequences_max=10))


@pytest.mark.parametrize(
    ("pressures", "running", "wanted"),
    [
        ([], 3, 3),
        ([1.2, 1.4], 2, 3),
        ([9.0], 1, 9),
        ([0.9, 0.9], 2, 2),
        ([0.5, 0.5, 0.5], 3, 3),
        ([0.1, 0.1, 0.1], 3, 1),
        ([0.0, 0.0], 2, 1),
        ([0.8], 2, 2),
    ],
)
def test_workers_come_with_the_load_and_go_when_others_can_carry_it(pressures, running, wanted):
    assert wanted_workers(pressures, running=running) == wanted


@given(st.lists(st.integers(0, 1_280).map(lambda number: number / 64), min_size=1, max_size=12))
def test_the_number_settles(pressures):
    """It carries the load, and with the same load it does not change again: fails when scaling in is undone at once."""
    load, running = sum(pressures), len(pressures)
    wanted = wanted_workers(pressures, running=running)
    assert wanted >= max(load, 1)
    assert wanted_workers([load] + [0.0] * (wanted - 1), running=wanted) == wanted
    if 1 < wanted < running:
        assert load <= SCALE_IN_BELOW * wanted + 1e-9


def test_a_prefill_worker_is_pressed_by_its_queue_against_half_of_what_the_first_token_may_take():
    worker = replace(WORKER, role=WorkerRole.PREFILL, queue_s=2.0, running=10)
    assert pressure(worker, CONFIG) == 2.0
    assert pressure(worker, replace(CONFIG, gateway=GatewaySettings(ttft_slo_ms=8_000))) == 0.5


def test_a_decode_worker_is_pressed_by_its_batch_and_its_steps_too():
    """Fails when a full batch, or one whose tokens come too slowly, counts as idle."""
    assert pressure(replace(WORKER, running=6, waiting=2), CONFIG) == 1.0
    slow = replace(CONFIG, gateway=GatewaySettings(itl_slo_ms=20))
    assert pressure(replace(WORKER, running=2), slow) == pytest.approx(2.0)
    assert pressure(WORKER, slow) == 0.0


def test_the_policy_reads_serves_report():
    class Report:  # what Serve hands over; its own class takes twenty more arguments
        target_num_replicas = 2
        aggregated_metrics = {"headrace_pressure": {"a": 1.5, "b": 1.1}, "other": {"a": 90.0}}  # noqa: RUF012

    assert scale_workers(Report()) == (3, {})
    Report.aggregated_metrics = None
    assert scale_workers(Report()) == (2, {})


def test_workers_are_a_fixed_number_unless_a_higher_one_is_set():
    """Fails when autoscaling is on by default, ends at another bound, or cuts streams short when it scales in."""
    assert (
        replicas(2, 0, grace_s=7) == replicas(2, 2, grace_s=7) == {"num_replicas": 2, "graceful_shutdown_timeout_s": 7}
    )
    scaled = replicas(2, 5, grace_s=7)
    assert "num_replicas" not in scaled
    assert scaled["graceful_shutdown_timeout_s"] == REPLICA_GRACE_S >= 300
    assert (scaled["autoscaling_config"].min_replicas, scaled["autoscaling_config"].max_replicas) == (2, 5)
    policy: AutoscalingPolicy = scaled["autoscaling_config"].policy
    assert policy.policy_function == "headrace_cluster.scale_workers:scale_workers"


@pytest.mark.parametrize(
    ("key", "value"), [("decode_workers_max", 1), ("prefill_workers_max", 2), ("decode_workers_max", -1)]
)
def test_an_upper_bound_below_the_number_that_is_always_there_is_refused(key, value):
    with pytest.raises(ConfigInvalid, match=key):
        load_config({"decode_workers": 2, "prefill_workers": 0, key: value}, environ={})
