"""A store node's metrics as a scraper reads them: across traffic, repeats, refusals, and a kill."""

import asyncio
import urllib.request

import pytest
from store_calls_kit import deadline, publish, read
from store_kit import make_header, make_prompt

from headrace.telemetry.metrics import Metrics
from headrace.wire.v1 import admin_pb2, admin_pb2_grpc

START = "process_start_time_seconds"


def scrape(port: int) -> dict[str, float]:
    """Every sample; none that is not about the process itself may be below 0."""
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as reply:
        lines = [line for line in reply.read().decode().splitlines() if not line.startswith("#")]
    samples = {series: float(value) for series, _, value in (line.rpartition(" ") for line in lines)}
    assert [sample for sample in samples.items() if sample[1] < 0] == []
    return samples


async def test_counters_fall_only_with_the_process_and_no_series_is_added_by_traffic(nodes) -> None:
    """Fails when a repeat, an abort or an eviction takes back what was counted, a namespace or writer becomes a label,
    or a node that found its arena again counts the old blocks as new work."""

    async def traffic(port: int, first: int) -> dict[str, float]:
        store = nodes.grpc(node.record)
        for number in range(first, first + 6):
            prompt = make_prompt(number, 4)
            assert await publish(store, prompt, range(4)) == 4
            assert await publish(store, prompt, range(4)) == 0
            assert len(await read(store, prompt)) == 4
            (slot,) = await store.reserve([make_header(make_prompt(500 + number, 1), 0)], deadline=deadline())
            await store.abort(slot)
            await store.abort(slot)
        admin = admin_pb2_grpc.CacheAdminStub(nodes.channels.to(node.record.address))
        await admin.Evict(admin_pb2.EvictRequest())
        return scrape(port)

    def counters(samples: dict[str, float]) -> dict[str, float]:
        return {series: value for series, value in samples.items() if series.split("{")[0].endswith("_total")}

    node = await nodes.start("numbers")
    first = await traffic(node.record.metrics_port, 0)
    second = await traffic(node.record.metrics_port, 10)
    assert set(second) == set(first)
    assert [series for series, value in counters(first).items() if second[series] < value] == []
    assert sum(counters(second).values()) > sum(counters(first).values())
    await publish(nodes.grpc(node.record), make_prompt(99, 4), range(4))
    await node.kill()
    node = await nodes.start("numbers")
    again = scrape(node.record.metrics_port)
    assert again[START] > second[START]
    assert {s: v for s, v in counters(again).items() if v and not s.startswith(("process_", "python_"))} == {}
    assert set(again) == set(first)


@pytest.mark.parametrize(("ttl", "kind"), [("lease_ttl_ms", "lease"), ("reservation_ttl_ms", "reservation")])
async def test_claims_that_nobody_ends_are_counted_when_they_run_out(nodes, ttl: str, kind: str) -> None:
    """Fails when a reader or a writer that died leaves no trace in the numbers, or one that ended well does."""
    metrics = Metrics()

    def lapsed() -> dict[str, float | None]:
        name = "headrace_store_lapsed_claims_total"
        return {kind: metrics.registry.get_sample_value(name, {"kind": kind}) for kind in ("lease", "reservation")}

    async with nodes.inside(metrics=metrics) as service:
        store, prompt = nodes.grpc(service.record), make_prompt(1, 2)
        await publish(store, prompt, range(1))
        assert len(await read(store, prompt)) == 1
        assert lapsed() == {"lease": 0, "reservation": 0}
    async with nodes.inside(metrics=(metrics := Metrics()), **{ttl: 1}) as service:
        if kind == "lease":
            await publish(nodes.grpc(service.record), prompt, range(1))
            await nodes.grpc(service.record).lease_prefix(
                prompt.namespace, prompt.chain, first_block=0, deadline=deadline()
            )
        else:
            await nodes.grpc(service.record).reserve([make_header(prompt, 0)], deadline=deadline())
        async with asyncio.timeout(60):
            while lapsed() != {"lease": 0, "reservation": 0} | {kind: 1}:  # noqa: ASYNC110 (a node has no event for this)
                await asyncio.sleep(0.05)
