"""The measurement of routing, small: what it promises to report is there, over the population that it describes."""

import json
from collections import Counter

import pytest

from headrace.bench.measure_routing import _Population, measure_hashing, measure_routing

TIMES = ("lookup_us", "choose_us", "lookup_choose_us", "plan_us")


class PricedClock:
    """What is timed takes 1 ms, then 2, then 3, and so on."""

    def __init__(self):
        self.now_s, self._timed = 0.0, 0

    def __call__(self):
        """Each second reading ends what is timed."""
        self._timed += 1
        self.now_s += self._timed // 2 * 1e-3 if self._timed % 2 == 0 else 0.0
        return self.now_s


def test_every_figure_is_there_for_every_number_of_workers():
    """20 passes of hashing take 1 to 20 ms, 10.5 in the median; the parts' 4 x 40 calls go on from there, for 8 workers
    and then for 64. Fails when a column is missing, a unit is wrong or a percentile is of something else."""
    said = []
    report = measure_routing(report=said.append, worker_counts=(8, 64), blocks=64, calls=40, clock=PricedClock())
    found = json.loads(json.dumps(report.as_json()))
    assert found["hash_mtok_per_s"] == pytest.approx(64 * 16 / 10.5e-3 / 1e6, abs=0.01)
    assert [(row["blocks"], row["workers"]) for row in found["rows"]] == [(64, 8), (64, 64)]
    for number, row in enumerate(found["rows"]):
        for part, name in enumerate(TIMES):
            first_ms = 21 + 40 * (4 * number + part)
            assert row[f"{name}_p50"] == pytest.approx((first_ms + 19.5) * 1e3)
            assert row[f"{name}_p99"] == pytest.approx((first_ms + 0.99 * 39) * 1e3)
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
    """Passes of 1, 2 and 3 ms."""
    assert measure_hashing(4_096, passes=3, clock=PricedClock()) == pytest.approx(4_096 / 2e-3 / 1e6)
