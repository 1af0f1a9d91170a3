"""`headrace bench serve` as a process of its own against a real gateway over HTTP and gRPC: counts, JSON, Ctrl-C."""

import asyncio
import json
from contextlib import asynccontextmanager

import pytest
from tiny_gateway import make_worker_record, tiny_gateway, write_tokenizer

from headrace.bench.http_stream import HttpServer, ProtocolBroken, http_request
from headrace.bench.planned_requests import PlannedRequest
from headrace.bench.serving_targets import AnswerUsage, CacheUse, HttpTarget, RequestFailed, TokenArrived
from headrace.client import GatewayUnreachable
from headrace.core.errors import InvalidRequest, Overloaded
from headrace.gateway.openai_http import build_http_app
from headrace.gateway.serve_grpc import serve_grpc
from headrace.transfer.channels import Channels

WORKERS = tuple(make_worker_record(name, context_tokens_max=4_096) for name in ("d0", "d1"))
PROMPT = PlannedRequest(0.0, tuple(range(32, 72)), 6)


@pytest.fixture(scope="module")
def model_path(tmp_path_factory):
    return write_tokenizer(tmp_path_factory.mktemp("tiny-model"))


@pytest.fixture
def served(model_path, serve_http):
    """Starts a tiny gateway on free ports: (gateway, base URL, gRPC address)."""

    @asynccontextmanager
    async def start():
        async with tiny_gateway(*WORKERS, model_path=model_path) as gateway:
            channels = Channels()
            grpc_server, grpc_port = await serve_grpc(gateway.service, address="127.0.0.1:0", channel_to=channels.to)
            try:
                async with serve_http(build_http_app(gateway.service)) as url:
                    await warm_up(gateway, HttpServer.of(url))
                    yield gateway, url, f"127.0.0.1:{grpc_port}"
            finally:
                await channels.close()
                await grpc_server.stop(grace=0)

    return start


async def warm_up(gateway, server):
    """The first request loads the tokenizer, which takes a loaded machine many seconds."""
    target = HttpTarget(server, "tiny", chat=False, cache=CacheUse(reads=False, publishes=False))
    assert [event async for event in target.stream(PROMPT, timeout_s=60)][-1] == AnswerUsage(
        40, 6, {"device": 0, "shared_memory": 0, "grpc": 0}
    )
    for worker in gateway.calls.workers.values():
        worker.calls.clear()


async def test_each_request_is_sent_once_and_each_answer_counted_whole(served, bench_serve):
    """Fails when a request is lost or doubled, a token is not counted, or what was cached is not told by source."""
    async with served() as (gateway, url, address):
        for way in (["--address", address], ["--url", url], ["--url", url, "--chat"]):
            code, found, said = await bench_serve(*way, "--requests", 20, "--rate", 40, "--max-tokens", 7)
            assert code == 0, said
            calls = [call for worker in gateway.calls.workers.values() for call in worker.calls]
            gateway.assert_at_rest()
            assert_counts_are_exact(found, calls)
            for worker in gateway.calls.workers.values():
                worker.calls.clear()


def assert_counts_are_exact(found, calls):
    assert found["requests"] == {"sent": 20, "finished": 20, "failed": 0, "interrupted": 0, "not_sent": 0}
    assert len(calls) == 20
    assert found["completion_tokens"] == sum(call.request.sampling.max_tokens for call in calls)
    assert found["prompt_tokens"] == sum(len(call.request.prompt.token_ids) for call in calls)
    cached = found["cached_tokens"]
    assert 0 < cached["shared_memory"] < found["prompt_tokens"]
    assert cached["device"] == cached["grpc"] == 0
    assert found["cached_share"]["total"] == pytest.approx(cached["shared_memory"] / found["prompt_tokens"], abs=1e-3)
    for name in ("ttft_ms", "itl_ms", "tpot_ms", "e2e_ms"):
        assert 0 <= found[name]["p50"] <= found[name]["p90"] <= found[name]["p99"] <= found[name]["max"]
    assert found["goodput"]["requests"] <= 20


async def test_a_trace_keeps_its_shared_prefixes_and_bypassing_reuses_nothing(served, tmp_path, bench_serve):
    """Fails when equal ids of a trace are not equal tokens for the server, or --bypass reads the cache."""
    trace = tmp_path / "trace.jsonl"
    lines = [
        {
            "timestamp": 20 * n,
            "input_length": 96,
            "output_length": 4,
            "hash_ids": [0, 1, 2, 3, 100 + 2 * n, 101 + 2 * n],
        }
        for n in range(8)
    ]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    async with served() as (gateway, _, address):
        _, bypassed, _ = await bench_serve("--address", address, "--trace", trace, "--bypass")
        assert not gateway.calls.stored
        _, found, _ = await bench_serve("--address", address, "--trace", trace, "--rate", 20)
    assert bypassed["requests"]["finished"] == found["requests"]["finished"] == 8
    assert bypassed["cached_share"]["total"] == 0
    assert found["cached_tokens"]["shared_memory"] == 7 * 64  # four blocks of sixteen, for all but the first


async def test_ctrl_c_prints_what_was_measured(served, bench_serve):
    """Fails when an interrupted load prints nothing, prints no JSON, or says that it ended well."""
    async with served() as (gateway, _, address):
        for worker in gateway.calls.workers.values():
            worker.token_seconds = 0.05
        slowly = ("--rate", 20, "--max-tokens", 6)
        code, found, said = await bench_serve("--address", address, *slowly, interrupt_after=r"[1-9]\d* answered")
    assert code == 130
    assert found["interrupted"]
    assert found["requests"]["finished"] > 0
    assert found["requests"]["sent"] == found["requests"]["finished"] + found["requests"]["interrupted"]
    assert "interrupted" in said


async def test_failures_are_reported_by_kind(served, bench_serve):
    async with served() as (gateway, url, address):
        for worker in gateway.calls.workers.values():
            worker.fails = Overloaded("the worker is full", retry_after_ms=10)
        code, over_grpc, said = await bench_serve("--address", address, "--requests", 3, "--rate", 50)
        assert code == 0
        _, over_http, _ = await bench_serve("--url", url, "--requests", 3, "--rate", 50)
    assert over_grpc["errors"] == {"Overloaded": 3}
    assert sum(over_http["errors"].values()) == 3
    assert all(kind.startswith("http_") for kind in over_http["errors"])
    assert "failed with Overloaded" in said


async def answer_of(server, *, chat=False, prompt=PROMPT):
    target = HttpTarget(server, "tiny", chat=chat)
    return [event async for event in target.stream(prompt, timeout_s=60)]


@asynccontextmanager
async def scripted_server(answer):
    """A server that sends these bytes whatever it is asked."""

    async def reply(reader, writer):
        await reader.readuntil(b"\r\n\r\n")
        writer.write(answer)
        await writer.drain()
        writer.close()

    server = await asyncio.start_server(reply, "127.0.0.1", 0)
    async with server:
        yield HttpServer.of(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1")


EVENTS = b'data: {"choices":[{"text":"a"}]}\n\ndata: {"choices":[{"text":"bc"}]}\n\n'
USAGE = (
    b'data: {"choices":[],"usage":{"prompt_tokens":9,"completion_tokens":3,'
    b'"prompt_tokens_details":{"cached_tokens":4}}}'
)


async def test_answers_of_other_servers_are_read_too():
    """Fails when only our own chunks, our own usage or chunked bodies can be read."""
    head = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\n"
    async with scripted_server(head + EVENTS + USAGE + b"\n\ndata: [DONE]\n\n") as server:
        assert await answer_of(server) == [TokenArrived(), TokenArrived(), AnswerUsage(9, 3, {"any": 4})]
    async with scripted_server(head + EVENTS + b"data: [DONE]\n\n") as server:
        assert (await answer_of(server))[-1] == AnswerUsage(0, 2, None)
    chunks = b"".join(
        f"{len(piece):x}\r\n".encode() + piece + b"\r\n" for piece in (EVENTS[:20], EVENTS[20:], b"data: [DONE]\n")
    )
    chunked = head.replace(b"\r\n\r\n", b"\r\nTransfer-Encoding: chunked\r\n\r\n") + chunks + b"0\r\n\r\n"
    async with scripted_server(chunked) as server:
        assert (await answer_of(server))[:2] == [TokenArrived(), TokenArrived()]


@pytest.mark.parametrize(
    ("sent", "kind"),
    [
        (b"", "stream_cut"),
        (b"nonsense\r\n\r\n", "stream_cut"),
        (b"HTTP/1.1 200 OK\r\n\r\n" + EVENTS, "stream_cut"),
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n40\r\nabc", "stream_cut"),
        (b"HTTP/1.1 200 OK\r\n\r\ndata: {broken\n\n", "stream_cut"),
        (b'HTTP/1.1 200 OK\r\n\r\ndata: {"error":{"code":"gone","message":"m"}}\n\n', "error_gone"),
        (b'HTTP/1.1 503 No\r\n\r\n{"error":{"code":"overloaded","message":"m"}}', "http_503_overloaded"),
        (b"HTTP/1.1 502 No\r\n\r\n<html>", "http_502"),
    ],
)
async def test_an_answer_that_is_not_whole_is_a_failure_with_a_kind(sent, kind):
    """Fails when a cut stream counts as an answer, or a strange one raises something that nobody counts."""
    async with scripted_server(sent) as server:
        with pytest.raises(RequestFailed) as failed:
            await answer_of(server)
    assert failed.value.kind == kind


async def test_nobody_there_is_said_before_anything_is_sent(unused_tcp_port, bench_serve):
    server = HttpServer.of(f"127.0.0.1:{unused_tcp_port}")
    with pytest.raises(RequestFailed) as failed:
        await answer_of(server)
    assert failed.value.kind == "connection"
    with pytest.raises(GatewayUnreachable):
        await HttpTarget.find_model(server, "")
    code, found, _ = await bench_serve("--url", server)
    assert (code, found["error"]["type"]) == (6, "GatewayUnreachable")


async def test_urls_that_are_none_are_refused():
    for url in ("ftp://x", "http://", "http://x:99999"):
        with pytest.raises(InvalidRequest):
            HttpServer.of(url)
    assert str(HttpServer.of("https://host/v1/")) == "https://host:443"
    assert str(HttpServer.of("http://[::1]:8000")) == "http://[::1]:8000"


async def test_a_body_with_a_length_is_read_to_its_end():
    async with (
        scripted_server(b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nhello and more") as server,
        http_request(server, "GET", "/", headers={}) as reply,
    ):
        assert await reply.whole() == b"hello"
    async with (
        scripted_server(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\nhello") as server,
        http_request(server, "GET", "/", headers={}) as reply,
    ):
        with pytest.raises(ProtocolBroken):
            await reply.whole()
