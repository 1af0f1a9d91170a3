"""The measurement of routing, small: what it promises to report is there, over the population that it describes."""

import json
from collections import Counter

import pytest

from headrace.bench.measure_routing import _Population, measure_hashing, measure_routing

TIMES = ("lookup_us", "choose_us", "lookup_choose_us", "plan_us")


def test_every_figure_is_there_for_every_number_of_workers():
    """Fails when a column is missing or a percentile is of something else."""
    said = []
    report = measure_routing(report=said.append, worker_counts=(8, 64), blocks=64, calls=40)
    found = json.loads(json.dumps(report.as_json()))
    assert found["hash_mtok_per_s"] > 0
    assert [(row["blocks"], row["workers"]) for row in found["rows"]] == [(64, 8), (64, 64)]
    for row in found["rows"]:
        assert all(0 < row[f"{name}_p50"] <= row[f"{name}_p99"] for name in TIMES)
        assert row["lookup_choose_us_p99"] > row["lookup_us_p50"]
    assert all(len(cells) == len(columns) for _, columns, rows in report.tables() for cells in rows)
    assert len(said) == 3


def test_workers_have_parts_of_a_prompt_as_described():
    """Fails when everybody has everything, which is the easy case for a lookup."""
    population = _Population(1_000, blocks=256, seed=0)
    (request, *_) = population._requests
    match = population._look_up(request)
    depths = Counter(match.of(record.holder_id) for record in population._records)
    assert depths[0] == pytest.approx(500, abs=60)
    assert depths[256 // 16] == pytest.approx(300, abs=60)
    assert depths[256] == pytest.approx(50, abs=30)
    assert len(depths) > 50
    on_host = [record for record in population._records if record.store_node == "n3"]
    assert match.of("node:n3") == max(match.of(record.holder_id) for record in on_host)


def test_somebody_has_all_of_each_prompt_however_few_workers_there_are():
    for seed in range(5):
        population = _Population(2, blocks=64, seed=seed)
        assert [population._look_up(request).num_blocks for request in population._requests] == [64] * 4


def test_the_seed_decides_the_population():
    first, second, other = (_Population(50, blocks=64, seed=seed) for seed in (1, 1, 2))
    assert first._requests == second._requests
    assert first._look_up(first._requests[0]) == second._look_up(first._requests[0])
    assert first._requests != other._requests


def test_hashing_is_measured_in_millions_of_tokens():
    assert 0.1 < measure_hashing(4_096, passes=3) < 1_000
