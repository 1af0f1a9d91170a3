"""Traces of requests through a whole system, read from a real collector."""

import asyncio
import logging
import subprocess
import sys
from pathlib import Path

import pytest

from headrace.core.errors import ConfigInvalid
from headrace.core.telemetry_limits import TRACE_BATCH_SPANS, TRACE_QUEUE_SPANS
from headrace.telemetry.tracing import start_tracing
from headrace.wire.v1 import inference_pb2

from .traced_system import BLOCK_TOKENS, ComposedSystem, composed_system, running_collector

PROMPT = "a secret that no span may tell: " + "0123456789abcdef" * 8
CALLERS = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@pytest.fixture
async def traced(tiny_models, empty_valkey_url, tmp_path):
    """A collector, and a system that sends it spans."""
    async with running_collector() as (collector, endpoint):
        settings = {"otlp_endpoint": endpoint}
        async with composed_system(tiny_models, empty_valkey_url, tmp_path, **settings) as system:
            yield collector, system


async def test_a_request_is_one_trace_from_the_callers_span_to_the_store_nodes(traced):
    """Fails when a part begins a trace of its own, hangs under the wrong span, or counts otherwise than the reply."""
    collector, system = traced
    # So small a model computes the prompt sooner than it is handed over, and would do without a prefill worker.
    asked = {"prefill_worker": "prefill-1"}
    reply = (await system.complete(PROMPT, control=asked, traceparent=CALLERS)).json()
    await system.flushed()
    request = only(collector.named(f"text_completion {reply['model']}"))
    prefill, decode = (only(collector.named(f"headrace.{name}")) for name in ("prefill", "decode"))
    called = {name: only(collector.named(f"headrace.call_{name}")) for name in ("prefill", "decode")}
    assert {span.trace_id for span in collector.spans} == {CALLERS.split("-")[1]}
    assert request.parent_id == CALLERS.split("-")[2]
    assert {called["prefill"].parent_id, called["decode"].parent_id} == {request.span_id}
    assert (prefill.parent_id, decode.parent_id) == (called["prefill"].span_id, called["decode"].span_id)
    assert [span.service for span in (request, prefill, decode)] == [
        "headrace-gateway",
        "headrace-worker",
        "headrace-worker",
    ]
    assert [span.kind for span in (request, called["prefill"], prefill)] == ["SERVER", "CLIENT", "SERVER"]
    on_node = [span for span in collector.spans if span.service == "headrace-store"]
    asked = {span.span_id: span for span in collector.spans}
    above = {(span.name.rpartition("/")[2], asked[span.parent_id].name) for span in on_node}
    assert {("Reserve", "headrace.reserve"), ("Commit", "headrace.commit"), ("Lease", "headrace.lease")} <= above
    assert {asked[asked[span.parent_id].parent_id].name for span in on_node if "Commit" in span.name} <= {
        "headrace.prefill",
        "headrace.decode",
    }
    request_id = reply["id"].rpartition("-")[2]
    assert {span.attributes["headrace.request.id"] for span in collector.spans if span.name != "headrace.look_up"} == {
        request_id
    }
    assert not any(span.is_error for span in (request, prefill, decode))


async def test_a_span_says_what_the_reply_says_and_what_was_predicted(traced):
    """Fails when tokens, sources or the decision are left out, or differ from what the client is told."""
    collector, system = traced
    await system.complete(PROMPT)
    await system.flushed()
    collector.spans.clear()
    reply = (await system.complete(PROMPT)).json()
    await system.flushed()
    usage, request = reply["usage"], only(collector.named(f"text_completion {reply['model']}"))
    said, cached = request.attributes, usage["prompt_tokens_details"]["cached_tokens"]
    assert cached >= BLOCK_TOKENS
    assert said["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
    assert said["gen_ai.usage.output_tokens"] == usage["completion_tokens"] == 3
    assert said["gen_ai.usage.cache_read.input_tokens"] == cached
    assert sum(value for name, value in said.items() if name.startswith("headrace.cached_tokens.")) == cached
    assert said["headrace.outcome"] == "finished"
    assert said["headrace.decision.reason"]
    assert said["headrace.decision.predicted_ttft_seconds"] >= 0
    assert said["gen_ai.response.time_to_first_chunk"] > 0
    assert said["gen_ai.response.finish_reasons"] == ["length"]
    decode = only(collector.named("headrace.decode"))
    assert decode.attributes["headrace.compute_seconds"] > 0
    assert decode.attributes["headrace.worker.id"] == "decode-1"


async def test_no_span_tells_of_the_prompt_or_the_answer(traced):
    """Fails when a text or token ids become an attribute, a name or a status."""
    collector, system = traced
    reply = (await system.complete(PROMPT, max_tokens=24)).json()
    refused = await system.complete(PROMPT * 100)
    await system.flushed()
    assert refused.status_code == 400
    assert collector.raw
    assert b"secret" not in collector.raw
    assert b"0123456789abcdef" not in collector.raw
    assert reply["choices"][0]["text"].encode() not in collector.raw


async def test_what_failed_is_the_status_of_its_span_and_a_callers_mistake_is_not(traced):
    """Fails when a failed attempt looks like one that ended well, or bad requests fill the list of errors."""
    collector, system = traced
    system.calls.fails = True
    assert (await system.complete(PROMPT)).status_code >= 500
    await system.complete(PROMPT * 100)
    await system.flushed()
    attempt = collector.named("headrace.call_decode")[0]
    assert (attempt.is_error, attempt.attributes["error.type"]) == (True, "WorkerUnavailable")
    assert "its process ended" in attempt.status
    failed, invalid = [span for span in collector.spans if span.name.startswith("text_completion")]
    assert (failed.is_error, failed.attributes["headrace.outcome"]) == (True, "failed")
    assert (invalid.is_error, invalid.attributes["headrace.outcome"]) == (False, "invalid")
    assert invalid.attributes["error.type"] == "ContextExceeded"


async def test_a_caller_that_does_not_sample_gets_no_spans(traced):
    """Fails when the sampling that was decided outside is decided again here."""
    collector, system = traced
    assert (await system.complete(PROMPT, traceparent=CALLERS[:-2] + "00")).status_code == 200
    await system.flushed()
    assert collector.spans == []


class GrpcContext:
    """A call's context as a gRPC server gives it, with a caller's trace."""

    def invocation_metadata(self):
        return (("user-agent", "a client"), ("traceparent", CALLERS))


async def test_a_grpc_callers_trace_is_taken_up_and_a_stream_that_its_client_leaves_is_no_failure(traced):
    """Fails when only HTTP carries a trace, or a span stays open, or is an error, after its client has gone."""
    collector, system = traced
    model = system.gateway._service.models()[0].name
    asked = inference_pb2.GenerateRequest(model=model, text=PROMPT, sampling=inference_pb2.Sampling(max_tokens=64))
    events = system.gateway.inference.Generate(asked, GrpcContext())
    assert (await anext(events)).HasField("accepted")
    assert (await anext(events)).HasField("token")
    await events.aclose()
    await system.flushed()
    left = {span.name: span for span in collector.spans}
    request, attempt, worker = (
        left[name] for name in (f"text_completion {model}", "headrace.call_decode", "headrace.decode")
    )
    assert (request.trace_id, request.parent_id) == tuple(CALLERS.split("-")[1:3])
    assert request.attributes["headrace.outcome"] == "cancelled"
    assert not any(span.is_error for span in (request, attempt, worker))


async def test_a_collector_that_is_slow_or_away_harms_no_request_and_is_told_of_once(
    tiny_models, empty_valkey_url, tmp_path, caplog
):
    """Fails when a request waits for the collector, or each message to it that fails is a line."""
    caplog.set_level(logging.WARNING)
    async with running_collector() as (collector, endpoint):
        collector.takes.clear()
        settings = {"otlp_endpoint": endpoint}
        async with composed_system(tiny_models, empty_valkey_url, tmp_path, **settings) as system:
            await answered(system)
            async with asyncio.timeout(60):
                await collector.asked.wait()
            await answered(system)  # while a message to the collector is under way
            collector.takes.set()
            await system.flushed()
        assert collector.spans
        caplog.clear()
        collector.refuses = True
        tracing = start_tracing(endpoint, part="gateway")
        for _ in range(3):
            with tracing.start("a request", begins=True).ended():
                pass
            await tracing.flush()
        await tracing.close()
    told = [record for record in caplog.records if "collector" in record.message or "xport" in record.message]
    assert len(told) == 1, [record.message for record in told]


async def test_a_process_ends_although_its_collector_is_away():
    """Fails when the end of a process waits for a collector that is not there, or a span is lost by an exception."""
    tracing = start_tracing("http://127.0.0.1:1", part="gateway")
    with tracing.start("a request", begins=True).ended():
        pass
    async with asyncio.timeout(60):
        await tracing.close()


async def answered(system: ComposedSystem) -> None:
    reply = await system.complete(PROMPT)
    assert reply.status_code == 200, reply.text


async def test_what_the_collector_does_not_take_is_bounded(caplog):
    """Fails when spans pile up behind a collector that does not answer."""
    async with running_collector() as (collector, endpoint):
        collector.takes.clear()
        tracing = start_tracing(endpoint, part="gateway")
        for _ in range(TRACE_QUEUE_SPANS + 1_000):
            with tracing.start("a request", begins=True).ended():
                pass
        async with asyncio.timeout(60):
            await collector.asked.wait()
        collector.takes.set()
        await tracing.flush()
        await tracing.close()
    assert 0 < len(collector.spans) <= TRACE_QUEUE_SPANS + TRACE_BATCH_SPANS


def test_without_an_endpoint_nothing_is_traced_and_the_library_is_not_imported():
    """Fails when a process pays for tracing that nobody asked for."""
    assert start_tracing("", part="gateway") is None
    code = "import headrace.compose, headrace.gateway.trace_request, headrace.telemetry.served_calls, sys"
    code += "; import headrace.transfer.trace_rpcs"
    code += "; print([name for name in sys.modules if name.startswith('opentelemetry')])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def test_calls_to_store_nodes_carry_nothing_when_nothing_is_traced(tiny_models, empty_valkey_url, tmp_path):
    """Fails when each call pays for metadata that nobody reads, or a caller's header switches tracing on."""
    async with composed_system(tiny_models, empty_valkey_url, tmp_path) as system:
        assert (await system.complete(PROMPT, traceparent=CALLERS)).status_code == 200
        await system.published()
        assert system.gateway._service._observers.tracing is None


def test_an_endpoint_without_the_library_names_the_extra(tmp_path: Path):
    """Fails when the first request fails instead of the start, or nobody is told what to install."""
    hidden = "import sys; sys.modules['opentelemetry'] = None\nfrom headrace.telemetry.tracing import *\n"
    for call in ("start_tracing('http://127.0.0.1:4317', part='x')", "check_tracing('http://127.0.0.1:4317')"):
        done = subprocess.run([sys.executable, "-c", hidden + call], capture_output=True, text=True)
        assert done.returncode == 1
        assert "headrace[otel]" in done.stderr
        assert ConfigInvalid.__name__ in done.stderr


def only(spans: list) -> object:
    assert len(spans) == 1, spans
    return spans[0]
