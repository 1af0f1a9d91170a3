"""A cluster fitted to what workers announced: means of seconds, of those who measured, in a file that reads back."""

from dataclasses import replace

import pytest
from tiny_gateway import make_worker_record

from headrace.core.block import CacheSource
from headrace.core.errors import InvalidRequest
from headrace.core.members import ASSUMED_COSTS, LearnedCosts, MeasuredLink, WorkerRole
from headrace.simulate.cluster_model import read_cluster, write_cluster
from headrace.simulate.fit_cluster import FittedTo, fit_cluster

GIVEN = FittedTo(
    name="fitted",
    host_bytes=4 * 2**20,
    prefill_chunk_tokens=100,
    local_prefill_tokens=32,
    request_s=0.004,
    mean_context_tokens=1_000.0,
    ttft_slo_s=2.0,
    itl_slo_s=0.1,
)


def make_costs(*, tokens_per_s: float, decode_base_s: float = 0.02) -> LearnedCosts:
    return LearnedCosts(0.010, tokens_per_s, 0.0, decode_base_s, 0.001, 1e-6)


def test_rates_are_averaged_as_the_seconds_that_they_cost():
    """Fails for the mean of rates: 100 and 300 tokens/s take 10 and 3.3 ms a token, so that 150 is their mean."""
    slow, fast = make_costs(tokens_per_s=100.0), make_costs(tokens_per_s=300.0)
    model = fit_cluster([[make_worker_record("d0", costs=slow), make_worker_record("d1", costs=fast)]], GIVEN)
    # Beside its tokens a step costs 10 ms: 0.1 ms for each of its 100 tokens, and half a step more for each prompt.
    assert 1 / model.prefill.tokens_per_s == pytest.approx(1 / 150 + 0.010 / 100)
    assert model.prefill.base_s == pytest.approx(0.005)


def test_a_prompt_of_several_steps_costs_what_its_steps_do():
    costs = make_costs(tokens_per_s=1_000.0)
    model = fit_cluster([[make_worker_record("d0", costs=costs)]], GIVEN)
    in_steps = [sum(0.010 + min(100, n - at) / 1_000 for at in range(0, n, 100)) for n in range(300, 400)]
    simulated = [float(model.prefill.seconds(0, n)) for n in range(300, 400)]
    assert sum(simulated) == pytest.approx(sum(in_steps), rel=0.005)


def test_what_nobody_measured_does_not_count_beside_what_somebody_did():
    measured = make_costs(tokens_per_s=100.0, decode_base_s=0.3)
    listings = [
        [make_worker_record("d0"), make_worker_record("d1")],
        [make_worker_record("d0", costs=measured), make_worker_record("d1")],
    ]
    model = fit_cluster(listings, GIVEN)
    assert model.decode.base_s == 0.3
    assert fit_cluster(listings[:1], GIVEN).decode.base_s == ASSUMED_COSTS.decode_base_s


def test_workers_that_decode_prefill_too_where_nobody_else_does():
    decoders = [make_worker_record(name) for name in ("d0", "d1")]
    prefiller = make_worker_record("p0", role=WorkerRole.PREFILL)
    alone, apart = fit_cluster([decoders], GIVEN), fit_cluster([[*decoders, prefiller]], GIVEN)
    assert (alone.prefill_workers, alone.decode_workers, alone.mixed_workers) == (0, 0, 2)
    assert (apart.prefill_workers, apart.decode_workers, apart.mixed_workers) == (1, 2, 0)


def test_the_network_is_the_way_by_which_workers_read():
    """On one host that is shared memory: a slow way over gRPC, used by nobody but at the start, must not count."""
    links = (
        MeasuredLink("n0", CacheSource.SHARED_MEMORY, 2e9, 0.001),
        MeasuredLink("n0", CacheSource.GRPC, 1e6, 0.5),
    )
    near = make_worker_record("d0", links=links)
    assert fit_cluster([[near]], GIVEN).network.bytes_per_s == pytest.approx(2e9)
    far = make_worker_record("d1", links=links, store_node="n1")
    assert fit_cluster([[near, far]], GIVEN).network.bytes_per_s == pytest.approx(1e6)


def test_a_fitted_cluster_is_read_back_from_its_file(tmp_path):
    model = fit_cluster([[make_worker_record("d0", costs=make_costs(tokens_per_s=123.0))]], GIVEN)
    write_cluster(model, tmp_path / "mine.yaml", remarks=("Of this machine.",))
    assert read_cluster(str(tmp_path / "mine.yaml")) == model
    assert (tmp_path / "mine.yaml").read_text().startswith("# Of this machine.\n")
    assert replace(model, request_s=0.0) != model


def test_a_system_without_workers_is_refused():
    with pytest.raises(InvalidRequest, match="no worker"):
        fit_cluster([[]], GIVEN)
