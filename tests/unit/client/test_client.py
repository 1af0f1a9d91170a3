"""The clients against a real gRPC server. Each fails if events, errors or cancellation get lost."""

import asyncio
import inspect
import socket
import subprocess
import sys
import time
from dataclasses import dataclass

import pytest

from headrace.client import (
    COLD,
    Accepted,
    AsyncGenerateStream,
    AsyncHeadraceClient,
    CacheOptions,
    CacheSource,
    Done,
    GatewayUnreachable,
    GenerateStream,
    HeadraceClient,
    Message,
    Sampling,
    Selector,
    StoredBlock,
)
from headrace.client.admin_messages import selector_message
from headrace.core.errors import InvalidRequest, WorkerUnavailable
from headrace.core.limits import CLIENT_DEADLINE_GRACE_MS


@pytest.fixture
def client(small_gateway):
    with HeadraceClient(small_gateway.address) as made:
        yield made


def test_a_stream_begins_with_accepted_and_ends_with_done(client):
    events = list(client.stream("hello"))
    assert isinstance(events[0], Accepted)
    assert isinstance(events[-1], Done)
    assert "".join(token.text for token in events[1:-1]) == "hello"


def test_a_collected_result_holds_what_the_stream_said(client):
    result = client.generate("hello", sampling=Sampling(max_tokens=3))
    assert (result.text, result.token_ids, result.finish_reason) == ("hel", (104, 101, 108), "length")
    assert (result.usage.prompt_tokens, result.usage.completion_tokens) == (5, 3)
    assert (result.request_id, result.model, result.decode_worker) == ("req-1", "echo-1", "d0")
    assert 0 < result.ttft_ms <= result.total_ms


def test_cached_tokens_are_reported_by_source(client):
    client.generate("twelve chars.")
    again = client.generate("twelve chars.")
    assert again.usage.cached.by_source() == {"device": 4, "shared_memory": 8, "grpc": 0}


def test_a_cold_request_neither_reads_nor_fills_the_cache(client, small_gateway):
    first = client.generate("twelve chars.", cache=COLD)
    assert first.usage.cached.total == 0
    assert not any(small_gateway.holder_blocks.values())
    assert small_gateway.requests[0].cache.bypass
    assert small_gateway.requests[0].cache.no_publish


@pytest.mark.parametrize("prompt", ["Hi", [Message("user", "Hi")], [72, 105]], ids=["text", "chat", "token ids"])
def test_every_kind_of_prompt_arrives_as_what_it_is(client, small_gateway, prompt):
    client.generate(prompt)
    sent = small_gateway.requests[0]
    expected = {str: "text", Message: "chat", int: "token_ids"}
    assert sent.WhichOneof("prompt") == expected[type(prompt if isinstance(prompt, str) else prompt[0])]


def test_options_arrive_at_the_server(client, small_gateway):
    client.generate(
        "x",
        model="echo-1",
        sampling=Sampling(max_tokens=2, temperature=0.5, top_k=3, top_p=0.9, seed=7, stop=("q",), logprobs=2),
        cache=CacheOptions(sources=frozenset({CacheSource.GRPC}), decode_worker="d1"),
        timeout_s=12.5,
        cache_salt="tenant",
        priority=-2,
    )
    sent = small_gateway.requests[0]
    assert (sent.model, sent.timeout_ms, sent.cache_salt, sent.priority) == ("echo-1", 12_500, "tenant", -2)
    assert (sent.sampling.top_k, sent.sampling.seed, list(sent.sampling.stop)) == (3, 7, ["q"])
    assert list(sent.cache.sources) == [3]
    assert (sent.cache.decode_worker, sent.cache.bypass) == ("d1", False)


def test_what_is_not_set_is_left_to_the_server(client, small_gateway):
    client.generate("x")
    sampling = small_gateway.requests[0].sampling
    assert not any(sampling.HasField(name) for name in ("max_tokens", "temperature", "top_k", "top_p", "seed"))
    assert not small_gateway.requests[0].HasField("priority")


@pytest.mark.parametrize("prompt", [[], [1, "a"], None, [-1], [2**40], [True]])
def test_a_prompt_that_cannot_be_sent_is_refused_before_any_call(client, small_gateway, prompt):
    with pytest.raises(InvalidRequest):
        client.generate(prompt)
    assert not small_gateway.requests


NOT_UNICODE = "ab\udcff"
UNSENDABLE = {
    "list_blocks": [{"limit": -1}],
    "price_eviction": [{"selector": Selector(model=NOT_UNICODE)}],
    "why_miss": [{"request_id": NOT_UNICODE}],
    "explain_route": [{"request_id": NOT_UNICODE}],
    "read_block": [{"holder": NOT_UNICODE, "namespace": "", "chain": []}],
    "write_block": [{"holder": NOT_UNICODE, "block": StoredBlock(b"", b"", {})}],
    "pin": [{"selector": Selector(tenant=NOT_UNICODE)}, {"selector": Selector(), "for_s": "long"}],
    "unpin": [{"selector": Selector(tenant=NOT_UNICODE)}],
    "set_ttl": [{"selector": Selector(), "ttl_s": "long"}],
    "set_quota": [{"tenant": "acme", "bytes_max": -1}, {"tenant": NOT_UNICODE, "bytes_max": 1}],
    "reset_quota": [{"tenant": NOT_UNICODE}],
    "drain_node": [{"holder": NOT_UNICODE}],
}


def ask(client: HeadraceClient, method: str, arguments: dict[str, object]) -> None:
    """A drain is sent with the first look at how far it is."""
    found = getattr(client, method)(**arguments)
    if method == "drain_node":
        next(found)


async def ask_async(client: AsyncHeadraceClient, method: str, arguments: dict[str, object]) -> None:
    found = getattr(client, method)(**arguments)
    await (anext(found) if method == "drain_node" else found)


@pytest.mark.parametrize("method", UNSENDABLE)
async def test_what_no_message_can_carry_is_refused_as_an_invalid_request(client, small_gateway, method):
    """Fails when a caller gets protobuf's own error, of which the client's documentation says nothing."""
    async with AsyncHeadraceClient(small_gateway.address) as other:
        for arguments in UNSENDABLE[method]:
            with pytest.raises(InvalidRequest):
                ask(client, method, arguments)
            with pytest.raises(InvalidRequest):
                await ask_async(other, method, arguments)


def test_a_selector_with_a_field_that_no_message_has_is_our_own_mistake():
    """Fails when a field that was misspelt here is told to the caller as an invalid request."""

    @dataclass(frozen=True, slots=True)
    class Misspelt(Selector):
        modle: str = ""

    with pytest.raises(AssertionError):
        selector_message(Misspelt())


def test_leaving_a_stream_early_cancels_it_on_the_server(client, small_gateway):
    small_gateway.hang_after_tokens = 1
    with client.stream("hello") as stream:
        events = iter(stream)
        next(events)
        assert small_gateway.hanging.wait(60)
    assert small_gateway.cancelled.wait(60)


def test_breaking_out_of_the_loop_over_a_stream_cancels_it(client, small_gateway):
    """Without a with statement: the loop's own end must be enough."""
    small_gateway.hang_after_tokens = 1
    for event in client.stream("hello"):
        if not isinstance(event, Accepted):
            break
    assert small_gateway.hanging.wait(60)
    assert small_gateway.cancelled.wait(60)


def test_closing_the_client_cancels_a_stream_under_way(small_gateway):
    small_gateway.hang_after_tokens = 1
    client = HeadraceClient(small_gateway.address)
    events = iter(client.stream("hello"))
    next(events)
    assert small_gateway.hanging.wait(60)
    client.close()
    assert small_gateway.cancelled.wait(60)


def test_the_transport_gives_up_soon_after_the_requests_own_deadline(client, small_gateway):
    """The server's typed answer at the deadline must still arrive, so the transport waits a little longer."""
    began_s = time.monotonic()
    client.generate("hello", timeout_s=2.0)
    took_s = time.monotonic() - began_s  # some of it before the server read how long is left
    assert small_gateway.requests[0].timeout_ms == 2_000
    longest_s, rounding_s = 2.0 + CLIENT_DEADLINE_GRACE_MS / 1e3, 0.1  # gRPC rounds deadlines up on the wire
    assert longest_s - took_s < small_gateway.time_remaining_s <= longest_s + rounding_s


def test_nothing_at_the_address_is_an_error_that_names_it():
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{unused.getsockname()[1]}"
    with (
        HeadraceClient(address) as client,
        pytest.raises(GatewayUnreachable, match=rf"{address} \(Connection refused\)"),
    ):
        client.status()


async def test_the_async_client_streams_collects_and_administers(small_gateway):
    async with AsyncHeadraceClient(small_gateway.address) as client:
        result = await client.generate("hello there")
        assert result.text == "hello there"
        assert [model.id for model in await client.list_models()] == ["echo-1"]
        assert (await client.status()).workers[0].worker_id == "d0"
        assert {stat.holder for stat in await client.stat()} == {"node:here", "worker:d0"}
        assert (await client.list_blocks()).total_blocks == 4
        assert sum(report.blocks for report in await client.evict(Selector(), dry_run=False)) == 4
        assert (await client.list_blocks()).total_blocks == 0


def test_both_clients_have_the_same_methods_with_the_same_arguments():
    """Fails when one of them is given something that the other lacks."""
    for blocking, other in ((HeadraceClient, AsyncHeadraceClient), (GenerateStream, AsyncGenerateStream)):
        ours, theirs = ({name for name in vars(kind) if not name.startswith("_")} for kind in (blocking, other))
        assert ours == theirs
        for name in ours:
            has, lacks = (inspect.signature(getattr(kind, name)).parameters for kind in (blocking, other))
            assert has == lacks, name


async def test_cancelling_the_task_that_reads_cancels_the_request(small_gateway):
    small_gateway.hang_after_tokens = 1
    async with AsyncHeadraceClient(small_gateway.address) as client:
        task = asyncio.create_task(client.generate("hello"))
        await asyncio.to_thread(small_gateway.hanging.wait, 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
    assert await asyncio.to_thread(small_gateway.cancelled.wait, 60)


async def test_closing_the_async_client_ends_its_streams_with_an_error_not_a_cancelled_task(small_gateway):
    small_gateway.hang_after_tokens = 1
    client = AsyncHeadraceClient(small_gateway.address)
    events = aiter(client.stream("hello"))
    await anext(events)
    await anext(events)
    reading = asyncio.create_task(anext(events))
    assert await asyncio.to_thread(small_gateway.hanging.wait, 60)
    await client.close()
    with pytest.raises(WorkerUnavailable):
        await reading


def test_a_selector_means_the_intersection_of_what_it_names(client, small_gateway):
    client.generate("aaaabbbbcccc.")
    client.generate("aaaadddd.")
    by_text = client.list_blocks(Selector(prefix_text="aaaabbbb"), with_text=True)
    assert {block.text for block in by_text.blocks} == {"bbbb", "cccc"}
    assert client.list_blocks(Selector(prefix_text="aaaabbbb", idle_for_s=5.0)).total_blocks == 0
    reports = client.evict(Selector(prefix_text="aaaabbbb"))
    assert all(report.dry_run and report.blocks == 2 for report in reports)
    assert client.list_blocks().total_blocks == 8


BLOCKED = ("torch", "ray", "redis", "transformers", "numpy", "prometheus_client")


@pytest.mark.parametrize("module", ["headrace.client", "headrace.admin.cli"])
def test_the_base_install_imports_without_torch_ray_redis_or_transformers(module):
    """Fails when any import on the way needs an extra."""
    block = "import sys\n" + "".join(f"sys.modules[{name!r}] = None\n" for name in BLOCKED)
    done = subprocess.run(
        [sys.executable, "-c", f"{block}import {module}"], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr


def call_in_every_way(client: HeadraceClient) -> None:
    """Six calls, of both services."""
    client.generate("x")
    client.list_models()
    client.status()
    client.stat()
    client.list_blocks()
    client.evict(Selector())


def test_an_api_key_goes_with_every_call_and_without_one_nothing_does(small_gateway):
    """Fails when a kind of call forgets the key, or an anonymous client sends a header."""
    for api_key, expected in (("hr-0123456789abcdefgh", "Bearer hr-0123456789abcdefgh"), ("", None)):
        small_gateway.authorizations.clear()
        with HeadraceClient(small_gateway.address, api_key=api_key) as client:
            call_in_every_way(client)
        assert small_gateway.authorizations == [expected] * 6


@pytest.mark.parametrize("api_key", ["short", "with spaces " * 3, "line\nbreak" * 5, "é" * 30])
def test_what_cannot_be_an_api_key_is_refused_before_it_is_sent(small_gateway, api_key):
    """Fails when a mistake surfaces as a transport error, or the refusal shows the key."""
    with pytest.raises(InvalidRequest) as refused:
        HeadraceClient(small_gateway.address, api_key=api_key)
    assert api_key not in str(refused.value)
