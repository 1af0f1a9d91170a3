"""What a load's tables say of a cache: how much, nothing, or that nobody knows."""

import pytest

from headrace.bench.serving_report import LoadReport
from headrace.bench.serving_tally import LoadTally, Slo
from headrace.bench.serving_targets import AnswerUsage


@pytest.mark.parametrize(
    ("told", "row"),
    [
        ([None, None], "-"),
        ([{"any": 0}, None], "0 (0.0%)"),
        ([{"any": 30}, None], "30 (15.0%): 30 any"),  # an answer that says nothing beside one that does: nothing found
    ],
)
def test_a_cache_of_which_the_server_says_nothing_is_a_dash_and_no_zero(told, row):
    tally = LoadTally(Slo(ttft_ms=1.0, itl_ms=1.0))
    tally.begin(0.0)
    for cached in told:
        tally.send(planned_s=0.0, now_s=0.0).finish(AnswerUsage(100, 2, cached), now_s=1.0)
    report = LoadReport(endpoint="e", model="m", workload="w", tally=tally, interrupted=False)
    counts = dict(report.tables()[1][2])
    assert counts["of them cached"] == row
    tally.check_integrity()
