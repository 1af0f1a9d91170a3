"""The metrics of a process: names, registries, the endpoint. Fails if a name changes or state is shared."""

import re
import urllib.request

import pytest
from prometheus_client import generate_latest

from headrace.core.errors import BlockCorrupt, BlockMissing
from headrace.core.generation import HolderStat
from headrace.telemetry.collectors import ClaimsCollector, StoreCollector
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.metrics_server import start_metrics_server

PROMISED_NAMES = {
    "headrace_prefix_cache_queries_total",
    "headrace_prefix_cache_hits_total",
    "headrace_cached_tokens_total",
    "headrace_time_to_first_token_seconds",
    "headrace_inter_token_latency_seconds",
    "headrace_kv_transfer_bytes_total",
    "headrace_evicted_blocks_total",
    "headrace_router_decisions_total",
    "headrace_verify_failures_total",
}


def scrape(metrics: Metrics) -> str:
    return generate_latest(metrics.registry).decode()


def make_stat(*, committed: int) -> HolderStat:
    return HolderStat(
        holder="node:a",
        tier="host",
        incarnation=1,
        total_blocks=10,
        free_blocks=10 - committed,
        committed_blocks=committed,
        reserved_blocks=0,
        leased_blocks=1,
        block_bytes=100,
        lookups_tokens=640,
        hits_tokens=64,
        evicted_blocks=0,
    )


def test_every_promised_metric_is_exported_before_anything_happened():
    text = scrape(Metrics())
    declared = set(re.findall(r"^# TYPE (\S+)", text, re.MULTILINE))
    assert declared >= PROMISED_NAMES


def test_every_metric_of_ours_has_the_prefix_and_a_unit_or_total():
    units = ("_total", "_seconds", "_bytes", "_blocks", "_sequences")
    names = re.findall(r"^# TYPE (\S+) (counter|gauge|histogram)", scrape(Metrics()), re.MULTILINE)
    ours = [n for n, _ in names if not n.startswith("process_") and not n.endswith("_created")]
    assert ours
    assert all(n.startswith("headrace_") and n.endswith(units) for n in ours), ours


def test_two_instances_in_one_process_do_not_share_a_count():
    first, second = Metrics(), Metrics()
    first.prefix_cache_queries.inc(7)
    assert "headrace_prefix_cache_queries_total 7.0" in scrape(first)
    assert "headrace_prefix_cache_queries_total 0.0" in scrape(second)


@pytest.mark.parametrize(
    ("why", "kind"), [("payload checksum differs", "checksum"), ("token ids differ at 'x' 123", "header")]
)
def test_a_refused_block_counts_once_under_a_bounded_kind(why, kind):
    metrics = Metrics()
    metrics.count_fault(BlockCorrupt(b"\1" * 16, why))
    assert metrics.registry.get_sample_value("headrace_verify_failures_total", {"kind": kind}) == 1
    assert metrics.registry.get_sample_value("headrace_cache_faults_total", {"kind": "block_corrupt"}) == 1
    assert "123" not in re.sub(r".*process_.*", "", "\n".join(re.findall(r"\{.*?\}", scrape(metrics))))


def test_a_missing_block_is_a_fault_but_not_a_failed_verification():
    metrics = Metrics()
    metrics.count_fault(BlockMissing(b"\1" * 16))
    assert metrics.registry.get_sample_value("headrace_cache_faults_total", {"kind": "block_missing"}) == 1
    assert metrics.registry.get_sample_value("headrace_verify_failures_total", {"kind": "checksum"}) == 0


def test_store_gauges_are_read_from_the_books_at_scrape_time():
    metrics, books = Metrics(), {"committed": 3}
    StoreCollector(lambda: [make_stat(**books)], metrics=metrics)
    labels = {"tier": "host", "state": "committed"}
    assert metrics.registry.get_sample_value("headrace_store_blocks", labels) == 3
    books["committed"] = 5
    assert metrics.registry.get_sample_value("headrace_store_blocks", labels) == 5
    assert metrics.registry.get_sample_value("headrace_store_blocks", {"tier": "host", "state": "free"}) == 5


def test_claims_that_ran_out_are_counted_by_kind_at_scrape_time():
    metrics, counts = Metrics(), {"leases": 2, "reservations": 0}
    ClaimsCollector(leases=lambda: counts["leases"], reservations=lambda: counts["reservations"], metrics=metrics)
    counts["leases"] = 3
    name = "headrace_store_lapsed_claims_total"
    assert metrics.registry.get_sample_value(name, {"kind": "lease"}) == 3
    assert metrics.registry.get_sample_value(name, {"kind": "reservation"}) == 0


def test_two_servers_take_free_ports_and_give_them_back():
    metrics = Metrics()
    first = start_metrics_server(metrics.registry, "127.0.0.1")
    second = start_metrics_server(Metrics().registry, "127.0.0.1")
    try:
        assert first.port != second.port
        with urllib.request.urlopen(f"http://127.0.0.1:{first.port}/metrics", timeout=60) as answer:
            assert b"headrace_cached_tokens_total" in answer.read()
    finally:
        first.close()
        second.close()
    again = start_metrics_server(metrics.registry, "127.0.0.1", (first.port,))
    again.close()
    again.close()
