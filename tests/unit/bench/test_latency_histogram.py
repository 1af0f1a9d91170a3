"""Percentiles from buckets: as good as promised, in memory that does not grow with what is counted."""

import random
import statistics

import pytest

from headrace.bench.latency_histogram import LatencyHistogram


def test_percentiles_are_within_one_percent_of_the_sorted_values():
    """Fails when a bucket's middle or the rank is wrong."""
    draw = random.Random(3)
    values = [draw.lognormvariate(3, 2) for _ in range(20_000)]
    times = LatencyHistogram()
    for value in values:
        times.add(value)
    ranked = statistics.quantiles(values, n=100, method="inclusive")
    for percent in (1, 50, 90, 99):
        assert times.percentile(percent) == pytest.approx(ranked[percent - 1], rel=0.015)
    assert times.summary()["max"] == max(values)
    assert times.summary()["mean"] == pytest.approx(statistics.fmean(values))


def test_a_single_value_is_every_percentile_and_no_value_is_none():
    times = LatencyHistogram()
    assert set(times.summary().values()) == {None}
    times.add(7.25)
    assert times.summary() == {"p50": 7.25, "p90": 7.25, "p99": 7.25, "mean": 7.25, "max": 7.25}


def test_a_million_different_values_need_few_buckets():
    """Fails when values are kept."""
    times = LatencyHistogram()
    for number in range(1, 200_000):
        times.add(number / 7)
    assert len(times._buckets) < 1_300
