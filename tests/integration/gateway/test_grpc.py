"""A plain gRPC client against the gateway's services on a real server: streams, errors, cancellation, health."""

import asyncio
from contextlib import asynccontextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2, reflection_pb2_grpc
from tiny_gateway import BLOCK_TOKENS, answer_text, make_namespace, make_worker_record, tiny_gateway, until

from headrace.core.errors import Overloaded, WorkerUnavailable
from headrace.core.front_door_limits import HEALTH_WATCHES_MAX
from headrace.core.members import WorkerRole
from headrace.gateway.inference_grpc import InferenceRpc
from headrace.gateway.refuse_call import CallRefused, refuse_by_raising
from headrace.gateway.serve_grpc import serve_grpc
from headrace.transfer.channels import Channels
from headrace.wire.v1 import inference_pb2, inference_pb2_grpc

WORKERS = (make_worker_record("d0"), make_worker_record("d1"), make_worker_record("p0", WorkerRole.PREFILL))
IDS = {"ids": list(range(1, 31))}


@asynccontextmanager
async def served(model_path, *records, **limits):
    """A tiny gateway on a free port, and what `serve_grpc` is told beside it: (gateway, channel)."""
    async with tiny_gateway(*(records or WORKERS), model_path=model_path) as gateway:
        channels = Channels()
        server, port = await serve_grpc(gateway.service, address="127.0.0.1:0", channel_to=channels.to, **limits)
        try:
            yield gateway, channels.to(f"127.0.0.1:{port}")
        finally:
            await channels.close()
            await server.stop(grace=0)


def generate(channel, timeout=20, **fields):
    request = inference_pb2.GenerateRequest(**({"token_ids": IDS, "sampling": {"max_tokens": 5}} | fields))
    return inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=timeout)


async def test_a_stream_begins_with_its_name_and_ends_with_exact_usage(model_path):
    """Fails when an event is missing, doubled or out of order, or the hand-over counts as cached."""
    async with served(model_path) as (gateway, channel):
        events = [event async for event in generate(channel)]
        kinds = [event.WhichOneof("event") for event in events]
        assert kinds == ["accepted", *["token"] * 5, "done"]
        assert events[0].accepted.model == "tiny"
        text = "".join(event.token.text for event in events[1:-1])
        assert text == answer_text(gateway.worker("d0").calls[0].request)
        done = events[-1].done
        assert (done.finish_reason, done.decode_worker, done.prefill_worker) == ("length", "d0", "p0")
        assert (done.usage.prompt_tokens, done.usage.completion_tokens) == (30, 5)
        assert done.usage.cached_tokens == inference_pb2.CachedTokens()
        warm = [event async for event in generate(channel)][-1].done
        assert warm.usage.cached_tokens == inference_pb2.CachedTokens(shared_memory=7 * BLOCK_TOKENS)
        gateway.assert_at_rest()


async def test_text_and_chat_are_tokenised_here(model_path):
    """Fails when only token ids work."""
    async with served(model_path) as (gateway, channel):
        chat = {"messages": [{"role": "user", "content": "hi"}]}
        for prompt in ({"text": "hi"}, {"chat": chat}):
            request = inference_pb2.GenerateRequest(**prompt, sampling={"max_tokens": 2, "logprobs": 2})
            events = [e async for e in inference_pb2_grpc.InferenceStub(channel).Generate(request, timeout=20)]
            assert len(events[1].token.top_logprobs) == 2
        lengths = [len(call.request.prompt.token_ids) for call in gateway.worker("d0").calls]
        assert lengths == [2, len("<user>hi\n<assistant>")]


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"model": "other"}, grpc.StatusCode.NOT_FOUND, "model"),
        ({"token_ids": {}}, grpc.StatusCode.INVALID_ARGUMENT, "token_ids"),
        ({"sampling": {"max_tokens": -1}}, grpc.StatusCode.INVALID_ARGUMENT, "max_tokens"),
        ({"sampling": {"max_tokens": 300}}, grpc.StatusCode.INVALID_ARGUMENT, "max_tokens"),
        ({"cache": {"decode_worker": "nobody"}}, grpc.StatusCode.INVALID_ARGUMENT, "decode_worker"),
    ],
)
async def test_wrong_requests_have_a_code_and_name_the_field(model_path, fields, code, param):
    """Fails when an error is UNKNOWN, or reaches a worker."""
    async with served(model_path) as (gateway, channel):
        call = generate(channel, **fields)
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await drain(call)
        assert raised.value.code() is code
        assert dict(raised.value.trailing_metadata())["headrace-param"] == param
        assert not any(worker.calls for worker in gateway.calls.workers.values())
        gateway.assert_at_rest()


async def drain(call):
    async for _ in call:
        pass


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (Overloaded("full", retry_after_ms=700), grpc.StatusCode.RESOURCE_EXHAUSTED),
        (WorkerUnavailable("d0", "died"), grpc.StatusCode.UNAVAILABLE),
    ],
)
async def test_faults_of_workers_have_their_codes(model_path, error, code):
    """Fails when a full or dead cluster cannot be told from a wrong request."""
    async with served(model_path, WORKERS[0]) as (gateway, channel):
        gateway.worker("d0").fails = error
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await drain(generate(channel))
        assert raised.value.code() is code
        assert raised.value.details() == str(error)
        if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
            assert dict(raised.value.trailing_metadata())["retry-after-ms"] == "700"


async def test_the_requests_own_deadline_ends_it(model_path):
    """Fails when timeout_ms is ignored."""
    async with served(model_path) as (gateway, channel):
        gateway.worker("p0").hangs = gateway.worker("d0").hangs = gateway.worker("d1").hangs = True
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await drain(generate(channel, timeout_ms=100))
        assert raised.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
        gateway.assert_at_rest()


@pytest.mark.parametrize("how", ["cancelled", "client deadline", "channel closed"])
@pytest.mark.parametrize("when", ["before the first token", "in mid-stream"])
async def test_a_call_that_its_client_gives_up_ends_on_the_worker(model_path, how, when):
    """Fails when a cancelled, expired or cut call keeps a worker busy: it would be for a minute at least."""
    async with served(model_path, WORKERS[0]) as (gateway, channel):
        worker = gateway.worker("d0")
        worker.hangs, worker.token_seconds = when == "before the first token", 0.3
        if how == "client deadline":
            for timeout_s in (2, 8, 32):  # until it begins before its time is over, which it need not on a busy machine
                with pytest.raises(grpc.aio.AioRpcError):
                    await drain(generate(channel, sampling={"max_tokens": 200}, timeout=timeout_s))
                if worker.calls:
                    break
            assert worker.calls
        else:
            call = generate(channel, sampling={"max_tokens": 200}, timeout=120)
            await until(lambda: worker.open_calls and (worker.hangs or worker.tokens_made))
        if how == "cancelled":
            call.cancel()
        elif how == "channel closed":
            await channel.close()
        await until(lambda: gateway.service.inflight == 0)
        gateway.assert_at_rest()


async def test_models_are_listed_with_their_limits(model_path):
    """Fails when a client cannot learn what fits."""
    async with served(model_path) as (_, channel):
        (model,) = (
            await inference_pb2_grpc.InferenceStub(channel).ListModels(inference_pb2.ListModelsRequest())
        ).models
        assert (model.id, model.context_tokens_max, model.block_tokens) == ("tiny", 256, BLOCK_TOKENS)
        assert model.namespace == make_namespace().id


async def test_health_follows_the_workers(model_path):
    """Fails when health is a constant, or a watcher is not told of a change."""
    async with served(model_path, WORKERS[2]) as (gateway, channel):
        health = health_pb2_grpc.HealthStub(channel)
        watching = health.Watch(health_pb2.HealthCheckRequest(), timeout=60)
        states = aiter(watching)
        assert (await anext(states)).status == health_pb2.HealthCheckResponse.NOT_SERVING
        await gateway.membership.announce(WORKERS[0], ttl_ms=60_000)
        await gateway.service.refresh()
        assert (await anext(states)).status == health_pb2.HealthCheckResponse.SERVING
        watching.cancel()
        request = health_pb2.HealthCheckRequest(service="headrace.v1.Inference")
        assert (await health.Check(request)).status == health_pb2.HealthCheckResponse.SERVING
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await health.Check(health_pb2.HealthCheckRequest(service="nobody"))
        assert raised.value.code() is grpc.StatusCode.NOT_FOUND


async def test_watchers_of_health_who_show_no_key_cannot_take_all_calls_of_a_gateway(model_path):
    """Fails when streams that never end are let in without a bound, or a place is not given back."""
    async with served(model_path, WORKERS[0]) as (_, channel):
        health, asked = health_pb2_grpc.HealthStub(channel), health_pb2.HealthCheckRequest()
        watching = [health.Watch(asked, timeout=120) for _ in range(HEALTH_WATCHES_MAX)]
        for call in watching:
            await call.read()
        with pytest.raises(grpc.aio.AioRpcError) as raised:
            await health.Watch(asked, timeout=120).read()
        assert raised.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        watching.pop().cancel()

        async def is_let_in() -> bool:
            try:
                return await health.Watch(asked, timeout=120).read() is not grpc.aio.EOF
            except grpc.aio.AioRpcError:
                return False

        async with asyncio.timeout(60):
            while not await is_let_in():  # noqa: ASYNC110 - the server tells nobody
                await asyncio.sleep(0.05)


async def test_generic_clients_find_the_services_by_reflection(model_path):
    """Fails when a tool without our protos cannot list what is served."""
    async with served(model_path) as (_, channel):
        asked = reflection_pb2.ServerReflectionRequest(list_services="")
        stream = reflection_pb2_grpc.ServerReflectionStub(channel).ServerReflectionInfo(iter([asked]))
        names = {service.name async for reply in stream for service in reply.list_services_response.service}
        assert {"headrace.v1.Inference", "headrace.v1.CacheAdmin", "grpc.health.v1.Health"} <= names


@pytest.mark.parametrize(
    "method",
    [
        "headrace.v1.Inference/ListModels",
        "headrace.v1.Inference/Generate",
        "headrace.v1.CacheAdmin/DrainNode",
        "grpc.health.v1.Health/Watch",
        "grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo",
    ],
)
async def test_a_call_that_says_nothing_ends_whichever_service_it_is_to(model_path, method):
    """Fails when somebody without a key keeps a place of the server by silence."""
    async with served(model_path, message_timeout_ms=50) as (_, channel):
        silent = channel.stream_stream(f"/{method}")()
        async with asyncio.timeout(60):
            with pytest.raises(grpc.aio.AioRpcError) as ended:
                await silent.read()
        assert ended.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


class PlainContext:
    """A context as Ray Serve's: values are set on it and travel back with the result."""

    def __init__(self):
        self.told = {}

    def invocation_metadata(self):
        return [("user-agent", "grpc")]

    def peer(self):
        return "ipv4:127.0.0.1:1"

    def set_code(self, code):
        self.told["code"] = code

    def set_details(self, details):
        self.told["details"] = details

    def set_trailing_metadata(self, pairs):
        self.told["metadata"] = [("request_id", "x"), *pairs]


async def test_a_context_without_abort_gets_code_and_message_set_before_the_error_is_raised(model_path):
    """Fails when errors under Ray Serve lose their code: it reads the context once the method has raised."""
    async with tiny_gateway(*WORKERS, model_path=model_path) as gateway:
        rpc, context = InferenceRpc(gateway.service, refuse=refuse_by_raising), PlainContext()
        with pytest.raises(CallRefused):
            await drain(rpc.Generate(inference_pb2.GenerateRequest(), context))
        assert context.told["code"] is grpc.StatusCode.INVALID_ARGUMENT
        assert "a prompt is needed" in context.told["details"]
        assert ("headrace-param", "prompt") in context.told["metadata"]
