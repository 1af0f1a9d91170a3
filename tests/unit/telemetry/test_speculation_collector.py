"""What drafts came to, as a scrape shows it."""

from headrace.core.speculation_stats import SpeculationStats
from headrace.telemetry.collectors import SpeculationCollector
from headrace.telemetry.metrics import Metrics


def test_a_scrape_shows_drafted_and_accepted_tokens_and_the_seconds_gained_and_spent():
    metrics = Metrics()
    SpeculationCollector(lambda: SpeculationStats(10, 4, gain_s=0.5, cost_s=0.25, failure="broken"), metrics=metrics)
    samples = {s.name: s.value for family in metrics.registry.collect() for s in family.samples if "draft" in s.name}
    assert samples == {
        "headrace_engine_drafted_tokens_total": 10,
        "headrace_engine_accepted_draft_tokens_total": 4,
        "headrace_engine_draft_gain_seconds_total": 0.5,
        "headrace_engine_draft_cost_seconds_total": 0.25,
        "headrace_engine_drafter_failed": 1,
    }
