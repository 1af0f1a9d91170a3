"""Metered ports: they count what passed and change nothing. Inner ports here are small real implementations."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from headrace.core.block import (
    BlockHash,
    BlockHeader,
    CacheSource,
    HashAlgorithm,
    HolderId,
    KvLayout,
    NamespaceId,
    Tier,
    hash_prompt,
)
from headrace.core.choose_workers import PlanReason
from headrace.core.clock import Deadline
from headrace.core.errors import IndexUnavailable
from headrace.core.generation import (
    AttemptId,
    CacheControl,
    CachedTokens,
    DecodeCall,
    EvictReport,
    EvictSelector,
    Finished,
    FinishReason,
    GenerateRequest,
    RequestId,
    SamplingParams,
    TokenDelta,
    Usage,
    WorkerId,
)
from headrace.core.members import NO_MATCH
from headrace.core.ports import Lease, Reservation
from headrace.telemetry.gateway_metrics import GatewayMetrics
from headrace.telemetry.metered_ports import (
    MeteredBlockIndex,
    MeteredBlockSink,
    MeteredBlockSource,
    MeteredWorkerCalls,
)
from headrace.telemetry.metrics import Metrics

NAMESPACE = NamespaceId("ab" * 16)


class StepClock:
    """Advances by one second at each reading."""

    def __init__(self) -> None:
        self.reading_s = 0.0

    def now_s(self) -> float:
        self.reading_s += 1.0
        return self.reading_s

    def unix_ms(self) -> int:
        return 0


def make_call(cache: CacheControl | None = None, *, prompt_tokens: int = 20) -> DecodeCall:
    prompt = hash_prompt(NAMESPACE, range(prompt_tokens), block_tokens=4, algorithm=HashAlgorithm.XXH3_128)
    request = GenerateRequest(
        request_id=RequestId("r"),
        model="m",
        prompt=prompt,
        sampling=SamplingParams(max_tokens=3),
        cache=cache or CacheControl(),
    )
    return DecodeCall(
        attempt_id=AttemptId("a"), request=request, worker_id=WorkerId("w"), timeout_ms=1000, computed_from=5
    )


class ScriptedCalls:
    """WorkerCalls that stream a script; an exception in it is raised at that point."""

    def __init__(self, script: list) -> None:
        self.script = script
        self.closed = False

    async def decode(self, call: DecodeCall) -> AsyncIterator:
        try:
            for step in self.script:
                if isinstance(step, Exception):
                    raise step
                yield step
                await asyncio.sleep(0)
        finally:
            self.closed = True

    async def evict_device(self, worker, selector, *, dry_run) -> EvictReport:
        return EvictReport(holder="worker:w", blocks=3, tokens=12, bytes=300, skipped_leased_blocks=0, dry_run=dry_run)


def finished(cached: CachedTokens, *, prompt_tokens: int = 20) -> Finished:
    return Finished(
        reason=FinishReason.LENGTH,
        usage=Usage(prompt_tokens=prompt_tokens, completion_tokens=3, cached=cached),
        worker_id=WorkerId("w"),
    )


TOKENS = [TokenDelta(token_id=i, text="x") for i in range(3)]


async def drain(stream: AsyncIterator) -> list:
    return [event async for event in stream]


def value(metrics: Metrics, name: str, **labels: str) -> float:
    found = metrics.registry.get_sample_value(name, labels)
    assert found is not None, (name, labels)
    return found


def test_cached_tokens_by_source_sum_exactly_to_the_hits_and_to_each_prompts_cached_tokens():
    """Would fail if a source were left out or counted twice."""
    metrics = Metrics()
    shares = [CachedTokens(), CachedTokens(device=8, shared_memory=4), CachedTokens(grpc=16), CachedTokens(4, 4, 4)]
    for share in shares:
        GatewayMetrics(metrics).finished(finished(share).usage, reads_cache=True)
    by_source = {s: value(metrics, "headrace_cached_tokens_total", source=s) for s in CacheSource}
    assert by_source == {"device": 12, "shared_memory": 8, "grpc": 20}
    assert sum(by_source.values()) == sum(share.total for share in shares)
    assert value(metrics, "headrace_prefix_cache_hits_total") == sum(share.total for share in shares)
    assert value(metrics, "headrace_prefix_cache_queries_total") == 80


def test_a_request_that_may_not_read_the_cache_is_neither_query_nor_hit():
    metrics = Metrics()
    GatewayMetrics(metrics).finished(finished(CachedTokens()).usage, reads_cache=False)
    assert value(metrics, "headrace_prefix_cache_queries_total") == 0


async def test_events_pass_through_unchanged_and_gaps_are_counted_between_tokens_only():
    metrics, script = Metrics(), [*TOKENS, finished(CachedTokens())]
    calls = MeteredWorkerCalls(ScriptedCalls(script), metrics=metrics, clock=StepClock())
    assert await drain(calls.decode(make_call())) == script
    assert value(metrics, "headrace_inter_token_latency_seconds_count") == 2
    assert value(metrics, "headrace_inter_token_latency_seconds_sum") == 2.0


@pytest.mark.parametrize("read", [1, 4])
async def test_closing_a_stream_closes_the_worker_and_counts_a_cancel_only_when_it_was_not_finished(read):
    metrics, inner = Metrics(), ScriptedCalls([*TOKENS, finished(CachedTokens())])
    stream = MeteredWorkerCalls(inner, metrics=metrics, clock=StepClock()).decode(make_call())
    for _ in range(read):
        await anext(stream)
    await stream.aclose()
    assert inner.closed
    outcomes = {o: value(metrics, "headrace_requests_total", outcome=o) for o in ("finished", "cancelled", "failed")}
    assert outcomes == {"finished": float(read == 4), "cancelled": float(read == 1), "failed": 0.0}


def test_routing_is_counted_under_bounded_reasons_and_kinds():
    metrics = Metrics()
    observed = GatewayMetrics(metrics)
    observed.decided(PlanReason.MATCH)
    observed.recovered("new_attempt")
    observed.first_token(0.25)
    assert value(metrics, "headrace_router_decisions_total", reason="match") == 1
    assert value(metrics, "headrace_recoveries_total", kind="new_attempt") == 1
    assert value(metrics, "headrace_time_to_first_token_seconds_sum") == 0.25
    with pytest.raises(ValueError, match="because"):
        observed.decided("because the caller said so")


@pytest.mark.parametrize("dry_run", [True, False])
async def test_only_a_real_eviction_counts_evicted_blocks(dry_run):
    metrics = Metrics()
    calls = MeteredWorkerCalls(ScriptedCalls([]), metrics=metrics, clock=StepClock())
    await calls.evict_device(None, EvictSelector(), dry_run=dry_run)
    evicted = value(metrics, "headrace_evicted_blocks_total", reason="admin", tier="device")
    assert evicted == (0 if dry_run else 3)


class SmallIndex:
    """An index that is there or not."""

    def __init__(self, *, there: bool) -> None:
        self.there = there

    async def longest_prefix(self, namespace, chain):
        if not self.there:
            raise IndexUnavailable("switched off")
        return NO_MATCH

    async def register(self, *, holder, incarnation, tier, namespace, blocks):
        self.registered = (holder, incarnation, tier, namespace, tuple(blocks))


async def test_index_calls_are_timed_and_failures_pass_through_counted():
    metrics = Metrics()
    good = MeteredBlockIndex(SmallIndex(there=True), metrics=metrics, clock=StepClock())
    bad = MeteredBlockIndex(SmallIndex(there=False), metrics=metrics, clock=StepClock())
    assert await good.longest_prefix(NAMESPACE, ()) is NO_MATCH
    with pytest.raises(IndexUnavailable):
        await bad.longest_prefix(NAMESPACE, ())
    assert value(metrics, "headrace_index_call_seconds_count", call="longest_prefix") == 2
    assert value(metrics, "headrace_index_failures_total", call="longest_prefix") == 1


async def test_registering_reaches_the_index_unchanged():
    inner = SmallIndex(there=True)
    blocks = [BlockHash(b"\1" * 16)]
    metered = MeteredBlockIndex(inner, metrics=Metrics(), clock=StepClock())
    await metered.register(holder=HolderId("node:a"), incarnation=3, tier=Tier.HOST, namespace=NAMESPACE, blocks=blocks)
    assert inner.registered == ("node:a", 3, Tier.HOST, NAMESPACE, tuple(blocks))


class OneBlockStore:
    """A source and sink of one block of 8 bytes."""

    async def fetch_blocks(self, lease, *, deadline):
        yield memoryview(b"12345678")

    async def commit(self, reservation, *, payload_xxh3, deadline):
        assert payload_xxh3 == 5


async def test_loaded_and_published_bytes_are_counted_by_direction_and_way():
    metrics, deadline = Metrics(), Deadline.after(5, StepClock())
    source = MeteredBlockSource(OneBlockStore(), metrics=metrics, via=CacheSource.GRPC)
    lease = Lease(lease_id="l", incarnation=1, headers=(), slots=(), expires_in_ms=1)
    assert [bytes(p) async for p in source.fetch_blocks(lease, deadline=deadline)] == [b"12345678"]
    layout = KvLayout(dtype="float32", num_layers=1, num_kv_heads=1, head_dim=1, block_tokens=1)
    header = BlockHeader(
        namespace=NAMESPACE,
        block_hash=BlockHash(b"\1" * 16),
        parent_hash=BlockHash(b"\0" * 16),
        position=0,
        token_ids=(1,),
        layout=layout,
        payload_bytes=8,
        payload_xxh3=0,
        producer="w",
        created_unix_ms=0,
    )
    sink = MeteredBlockSink(OneBlockStore(), metrics=metrics, via=CacheSource.SHARED_MEMORY)
    reservation = Reservation(reservation_id="r", header=header, buffer=memoryview(bytearray(8)))
    await sink.commit(reservation, payload_xxh3=5, deadline=deadline)
    name = "headrace_kv_transfer_bytes_total"
    assert value(metrics, name, direction="load", tier="host", via="grpc") == 8
    assert value(metrics, name, direction="publish", tier="host", via="shared_memory") == 8
    assert value(metrics, name, direction="load", tier="host", via="shared_memory") == 0
