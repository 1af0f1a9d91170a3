"""A mirror's books as a scrape shows them."""

from headrace.telemetry.metrics import Metrics
from headrace.telemetry.mirror_collector import MirrorCollector, MirrorStat


def test_a_scrape_shows_the_books_as_they_are_then():
    metrics, rereads = Metrics(), {"events_lost": 2, "too_large": 0}
    stats = [MirrorStat(True, 9, 2, 0.25, rereads), MirrorStat(False, 0, 0, 3.0, rereads)]
    MirrorCollector(lambda: stats.pop(0), metrics=metrics)

    def scrape() -> dict[str, float]:
        return {
            sample.name + "".join(sample.labels.values()): sample.value
            for family in metrics.registry.collect()
            for sample in family.samples
            if "mirror" in sample.name
        }

    assert scrape() == {
        "headrace_index_mirror_answers": 1,
        "headrace_index_mirror_blocks": 9,
        "headrace_index_mirror_holders": 2,
        "headrace_index_mirror_lag_seconds": 0.25,
        "headrace_index_mirror_rereads_totalevents_lost": 2,
        "headrace_index_mirror_rereads_totaltoo_large": 0,
    }
    assert scrape()["headrace_index_mirror_answers"] == 0
