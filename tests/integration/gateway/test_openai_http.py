"""The real `openai` package, and a bare HTTP client where it is too polite, against the app under uvicorn."""

import asyncio
import json
import threading
from contextlib import asynccontextmanager

import httpx
import openai
import pytest
import uvicorn
from hand_clock import HandClock
from tiny_gateway import BLOCK_TOKENS, answer_text, make_worker_record, tiny_gateway, until

from headrace.core.errors import Overloaded, WorkerUnavailable
from headrace.core.front_door_limits import PARSED_ON_LOOP_BYTES_MAX
from headrace.core.limits import REQUEST_BODY_BYTES_MAX
from headrace.core.members import WorkerRole
from headrace.core.tenants import KeyRing
from headrace.gateway.known_keys import FixedKeys
from headrace.gateway.openai_http import build_http_app

WORKERS = (make_worker_record("d0"), make_worker_record("d1"), make_worker_record("p0", WorkerRole.PREFILL))
MESSAGES = [{"role": "system", "content": "You are brief."}, {"role": "user", "content": "Say something."}]


@asynccontextmanager
async def served(model_path, *records, **options):
    """A tiny gateway behind uvicorn on a free port: (gateway, base URL)."""
    async with tiny_gateway(*(records or WORKERS), model_path=model_path, **options) as gateway:
        app = build_http_app(gateway.service, metrics_text=lambda: b"headrace_up 1\n")
        server = uvicorn.Server(uvicorn.Config(app, port=0, log_level="error", lifespan="off"))
        server.install_signal_handlers = lambda: None
        serving = asyncio.create_task(server.serve())
        try:
            async with asyncio.timeout(60):
                while not server.started:  # noqa: ASYNC110 - uvicorn has no event for it
                    await asyncio.sleep(0.01)
            port = server.servers[0].sockets[0].getsockname()[1]
            yield gateway, f"http://127.0.0.1:{port}"
        finally:
            server.should_exit = True
            await serving


def openai_client(base_url, **options):
    return openai.AsyncOpenAI(base_url=f"{base_url}/v1", api_key="unused", max_retries=0, **options)


def only_decode_call(gateway):
    (call,) = [c for w in gateway.calls.workers.values() if w.record.role.decodes for c in w.calls]
    return call


async def test_a_chat_is_answered_whole_and_its_repeat_shows_the_cached_tokens(model_path):
    """Fails when OpenAI's client cannot read the reply, or the cached figure is not exact."""
    async with served(model_path) as (gateway, url), openai_client(url) as client:
        first = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=6)
        call = only_decode_call(gateway)
        assert first.choices[0].message.content == answer_text(call.request)
        assert (first.choices[0].finish_reason, first.object, first.model) == ("length", "chat.completion", "tiny")
        assert first.usage.prompt_tokens == len(call.request.prompt.token_ids)
        assert first.usage.prompt_tokens_details.cached_tokens == 0
        again = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=6)
        usable = (first.usage.prompt_tokens - 1) // BLOCK_TOKENS * BLOCK_TOKENS
        assert again.usage.prompt_tokens_details.cached_tokens == usable
        assert again.usage.model_extra["headrace"]["cached_tokens"]["shared_memory"] == usable
        gateway.assert_at_rest()


async def test_a_streamed_chat_gives_the_same_text_and_its_usage_when_asked(model_path):
    """Fails when pieces are lost, the stream does not end, or usage comes unasked."""
    async with served(model_path) as (gateway, url), openai_client(url) as client:
        stream = await client.chat.completions.create(
            model="tiny",
            messages=MESSAGES,
            max_tokens=6,
            temperature=0,
            stream=True,
            stream_options={"include_usage": True},
        )
        chunks = [chunk async for chunk in stream]
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        assert text == answer_text(only_decode_call(gateway).request)
        assert chunks[0].choices[0].delta.role == "assistant"
        assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "length"
        assert chunks[-1].usage.completion_tokens == 6
        assert all("usage" in chunk.model_fields_set and chunk.usage is None for chunk in chunks[:-1])
        assert len({chunk.id for chunk in chunks}) == 1
        bare = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=2, stream=True)
        assert not any("usage" in chunk.model_fields_set for chunk in [c async for c in bare])
        gateway.assert_at_rest()


async def test_a_stream_counts_its_tokens_in_every_piece_where_that_is_asked_for(model_path):
    """Fails when tools that measure by the running counts see none, or wrong ones."""
    async with served(model_path) as (_, url), openai_client(url) as client:
        stream = await client.completions.create(
            model="tiny",
            prompt=["ab", "cde"],
            max_tokens=3,
            stream=True,
            stream_options={"include_usage": True, "continuous_usage_stats": True},
        )
        usages = [chunk.usage async for chunk in stream]
    counts = [usage.completion_tokens for usage in usages]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1], usages[-1].prompt_tokens) == (1, 6, 5)
    assert all(usage.total_tokens == usage.prompt_tokens + usage.completion_tokens for usage in usages)
    assert usages[-1].prompt_tokens_details.cached_tokens == 0


async def test_completions_take_every_form_of_prompt(model_path):
    """Fails when texts, token ids or several prompts are mixed up."""
    async with served(model_path) as (gateway, url), openai_client(url) as client:
        reply = await client.completions.create(model="tiny", prompt=["ab", "cd"], n=2, max_tokens=3, temperature=0)
        assert [choice.index for choice in reply.choices] == [0, 1, 2, 3]
        texts = [choice.text for choice in reply.choices]
        assert texts[0] == texts[1] != texts[2] == texts[3]
        assert (reply.usage.prompt_tokens, reply.usage.completion_tokens) == (4, 12)
        ids = await client.completions.create(model="tiny", prompt=[1, 2, 3], temperature=0)
        assert ids.usage.prompt_tokens == 3
        assert len(ids.choices[0].text) == 16
        stream = await client.completions.create(model="tiny", prompt="ab", max_tokens=3, temperature=0, stream=True)
        assert "".join([chunk.choices[0].text async for chunk in stream]) == texts[0]
        gateway.assert_at_rest()


@pytest.mark.parametrize("stream", [False, True])
async def test_two_choices_are_told_apart_and_the_prompt_counts_once(model_path, stream):
    """Fails when choices are mixed, share their draw, or multiply the prompt."""
    async with served(model_path) as (gateway, url), openai_client(url) as client:
        options = {"stream_options": {"include_usage": True}} if stream else {}
        reply = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, n=2, seed=5, max_tokens=5, stream=stream, **options
        )
        texts = {0: "", 1: ""}
        if stream:
            async for chunk in reply:
                usage = chunk.usage
                for choice in chunk.choices:
                    texts[choice.index] += choice.delta.content or ""
        else:
            usage = reply.usage
            texts = {choice.index: choice.message.content for choice in reply.choices}
        assert [len(text) for text in texts.values()] == [5, 5]
        assert texts[0] != texts[1]
        calls = [c for w in gateway.calls.workers.values() if w.record.role.decodes for c in w.calls]
        assert usage.prompt_tokens == len(calls[0].request.prompt.token_ids)
        assert usage.completion_tokens == 10
        assert len({call.attempt_id for call in calls}) == 2
        gateway.assert_at_rest()


async def test_log_probabilities_have_openais_shape(model_path):
    """Fails when the client library cannot read them, whole or streamed."""
    async with served(model_path) as (_, url), openai_client(url) as client:
        whole = await client.chat.completions.create(
            model="tiny", messages=MESSAGES, max_tokens=2, logprobs=True, top_logprobs=2
        )
        entries = whole.choices[0].logprobs.content
        assert [entry.token for entry in entries] == list(whole.choices[0].message.content)
        assert [len(entry.top_logprobs) for entry in entries] == [2, 2]
        stream = await client.completions.create(model="tiny", prompt="ab", max_tokens=2, logprobs=1, stream=True)
        told = [c.choices[0].logprobs async for c in stream if c.choices[0].logprobs]
        assert [len(each.tokens) for each in told] == [1, 1]
        assert [each.text_offset for each in told] == [[0], [1]]


async def test_models_are_listed_and_found_by_name(model_path):
    """Fails when clients that look for a model before they use it find none."""
    async with served(model_path) as (_, url), openai_client(url) as client:
        assert [model.id async for model in client.models.list()] == ["tiny"]
        assert (await client.models.retrieve("tiny")).owned_by == "headrace"
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("org/other")


@pytest.mark.parametrize(
    ("changes", "error", "code", "param"),
    [
        ({"model": "other"}, openai.NotFoundError, "model_not_found", "model"),
        ({"max_tokens": -1}, openai.BadRequestError, None, "max_tokens"),
        ({"max_tokens": 1000}, openai.BadRequestError, "context_length_exceeded", "max_tokens"),
        ({"messages": []}, openai.BadRequestError, None, "messages"),
        (
            {"tools": [{"type": "function", "function": {"name": "f"}}]},
            openai.BadRequestError,
            "unsupported_parameter",
            "tools",
        ),
        ({"extra_body": {"max_token": 3}}, openai.BadRequestError, "unsupported_parameter", "max_token"),
        ({"temperature": 3}, openai.BadRequestError, None, "temperature"),
        ({"extra_body": {"headrace": {"decode_worker": "nobody"}}}, openai.BadRequestError, None, "decode_worker"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_wrong_requests_raise_the_clients_own_errors(model_path, changes, error, code, param, stream):
    """Fails when an error has another status or shape, and when it reaches a worker."""
    async with served(model_path) as (gateway, url), openai_client(url) as client:
        with pytest.raises(error) as raised:
            await client.chat.completions.create(
                **({"model": "tiny", "messages": MESSAGES, "stream": stream} | changes)
            )
        assert raised.value.body["code"] == code
        assert raised.value.body["param"] == param
        assert not any(worker.calls for worker in gateway.calls.workers.values())
        gateway.assert_at_rest()


async def test_faults_of_workers_have_their_statuses(model_path):
    """Fails when a full or dead cluster looks like a caller's mistake or like success."""
    async with served(model_path) as (gateway, url), openai_client(url) as client:
        ask = {"model": "tiny", "messages": MESSAGES, "max_tokens": 3}
        for worker in gateway.calls.workers.values():
            worker.fails = Overloaded("full", retry_after_ms=1500)
        with pytest.raises(openai.InternalServerError) as raised:
            await client.chat.completions.create(**ask)
        assert (raised.value.status_code, raised.value.response.headers["retry-after"]) == (503, "2")
        for worker in gateway.calls.workers.values():
            worker.fails = WorkerUnavailable(worker.record.worker_id, "died")
        with pytest.raises(openai.InternalServerError) as raised:
            await client.chat.completions.create(**ask, stream=True)
        assert raised.value.status_code == 503
        for worker in gateway.calls.workers.values():
            worker.fails, worker.hangs = None, True
        with pytest.raises(openai.InternalServerError) as raised:
            await client.chat.completions.create(**ask, extra_body={"headrace": {"timeout_ms": 100}})
        assert raised.value.status_code == 504
        gateway.assert_at_rest()


async def test_an_error_after_the_first_token_is_an_event_of_the_stream(model_path):
    """Fails when a broken stream looks like a finished one."""
    async with served(model_path, WORKERS[0]) as (gateway, url), openai_client(url) as client:
        gateway.worker("d0").fails, gateway.worker("d0").fails_after = WorkerUnavailable("d0", "died"), 2
        stream = await client.chat.completions.create(model="tiny", messages=MESSAGES, max_tokens=5, stream=True)
        pieces = []

        async def read():
            async for chunk in stream:
                pieces.append(chunk.choices[0].delta.content)

        with pytest.raises(openai.APIError, match="d0"):
            await read()
        assert len(pieces) == 2
        gateway.assert_at_rest()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("when", ["before the first token", "in mid-stream"])
async def test_a_client_that_leaves_stops_its_workers(model_path, stream, when):
    """Fails when a closed connection keeps a worker busy: it would be for a minute at least."""
    async with served(model_path) as (gateway, url):
        for worker in gateway.calls.workers.values():
            worker.hangs, worker.token_seconds = when == "before the first token", 0.5
        body = {"model": "tiny", "messages": MESSAGES, "max_tokens": 150, "stream": stream}
        async with httpx.AsyncClient() as client:
            asking = asyncio.create_task(client.post(f"{url}/v1/chat/completions", json=body, timeout=120))
            await until(
                lambda: any(w.open_calls and (w.hangs or w.tokens_made) for w in gateway.calls.workers.values())
            )
            asking.cancel()
            await asyncio.gather(asking, return_exceptions=True)
        await until(lambda: gateway.service.inflight == 0)
        gateway.assert_at_rest()


@pytest.mark.parametrize(
    ("content", "status"),
    [
        (b"\xff\xfe{}", 400),
        (b"{not json", 400),
        (b"[1]", 400),
        (b"", 400),
        (json.dumps({"model": "tiny", "prompt": "\ud800"}).encode(), 400),
        (json.dumps({"model": "tiny", "prompt": "x" * 5_000_000}).encode(), 413),
        (b"x" * (REQUEST_BODY_BYTES_MAX + 1), 413),
    ],
    ids=["broken UTF-8", "broken JSON", "no object", "empty", "half a surrogate", "5 MB prompt", "one byte too many"],
)
async def test_bodies_that_cannot_be_read_are_refused_in_openais_shape(model_path, content, status):
    """Fails when a broken or huge body gets no answer, another status, or a worker's attention."""
    async with served(model_path) as (gateway, url), httpx.AsyncClient(timeout=30) as client:
        reply = await client.post(
            f"{url}/v1/completions", content=content, headers={b"x-request-id": ("é" * 90).encode()}
        )
        assert reply.status_code == status
        assert set(reply.json()["error"]) == {"message", "type", "param", "code"}
        assert dict(reply.headers.raw)[b"x-request-id"] == ("é" * 90).encode()[:128]
        assert not any(worker.calls for worker in gateway.calls.workers.values())


async def test_a_large_body_is_read_as_a_small_one_is(model_path):
    """Fails when what is parsed off the loop is parsed otherwise, or its errors get lost."""
    async with served(model_path) as (gateway, url), httpx.AsyncClient(timeout=60) as client:
        padding = " " * PARSED_ON_LOOP_BYTES_MAX
        bodies = [json.dumps({"model": "tiny", "prompt": [1, 2], "max_tokens": 2, "n": n}) + padding for n in (1, 0)]
        whole, wrong = [await client.post(f"{url}/v1/completions", content=body) for body in bodies]
        assert (whole.status_code, whole.json()["usage"]["prompt_tokens"]) == (200, 2)
        assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "n")
        gateway.assert_at_rest()


LARGE = {
    "a large body": {"prompt": [1, 2]},
    "log-probabilities": {"prompt": [1, 2], "logprobs": 2},
}


@pytest.mark.parametrize("what", LARGE)
async def test_large_bodies_and_answers_take_turns_in_one_thread(model_path, what):
    """Fails when each has a thread of its own: all of them together keep the loop waiting longer than one."""
    body = json.dumps({"model": "tiny", "max_tokens": 2} | LARGE[what])
    body += " " * PARSED_ON_LOOP_BYTES_MAX if what == "a large body" else ""
    async with tiny_gateway(*WORKERS, model_path=model_path) as gateway:
        transport = httpx.ASGITransport(build_http_app(gateway.service))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            await client.post("/v1/completions", json={"model": "tiny", "prompt": "a", "max_tokens": 1})
            before = set(threading.enumerate())
            replies = await asyncio.gather(*(client.post("/v1/completions", content=body) for _ in range(8)))
            assert {reply.status_code for reply in replies} == {200}
            begun = [each.name for each in threading.enumerate() if each not in before]
    assert [name for name in begun if name.startswith(("bodies", "asyncio"))] == ["bodies_0"]


async def test_only_pages_that_are_named_may_read_what_they_are_answered(model_path):
    """Fails when a browser keeps a chat page from the API, or lets any page use it."""
    async with tiny_gateway(*WORKERS, model_path=model_path) as gateway:
        app = build_http_app(gateway.service, allowed_origins=("https://chat.example",))
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            for origin, allowed in (("https://chat.example", "https://chat.example"), ("https://evil.example", None)):
                asked = {
                    "origin": origin,
                    "access-control-request-method": "POST",
                    "access-control-request-headers": "authorization, content-type, x-stainless-lang",
                }
                before = await client.options("/v1/chat/completions", headers=asked)
                assert before.headers.get("access-control-allow-origin") == allowed
                assert before.is_success == bool(allowed)
                for reply in (
                    await client.get("/v1/models", headers={"origin": origin}),
                    await client.post("/v1/completions", json={}, headers={"origin": origin}),
                ):
                    assert reply.headers.get("access-control-allow-origin") == allowed
        transport = httpx.ASGITransport(build_http_app(gateway.service))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            assert (await client.options("/v1/models", headers=asked)).status_code == 405
            assert (await client.head("/v1/models")).status_code == 200


@pytest.mark.parametrize(("origins", "allowed"), [(("https://chat.example",), "true"), (("*",), None)])
async def test_pages_that_are_named_may_call_into_a_private_network(model_path, origins, allowed):
    """Fails when a browser keeps a named page of the internet from a gateway at home, or lets every page call it."""
    async with tiny_gateway(*WORKERS, model_path=model_path) as gateway:
        transport = httpx.ASGITransport(build_http_app(gateway.service, allowed_origins=origins))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            asked = {
                "origin": "https://chat.example",
                "access-control-request-method": "POST",
                "access-control-request-private-network": "true",
            }
            before = await client.options("/v1/chat/completions", headers=asked)
    assert before.headers.get("access-control-allow-private-network") == allowed
    assert before.is_success == bool(allowed)


async def test_a_page_may_read_that_a_bug_ended_its_request(model_path):
    """Fails when a page sees a failed network instead of the error."""
    async with tiny_gateway(*WORKERS, model_path=model_path) as gateway:
        app = build_http_app(gateway.service, metrics_text=a_bug, allowed_origins=("https://chat.example",))
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
            reply = await client.get("/metrics", headers={"origin": "https://chat.example"})
    assert (reply.status_code, "error" in reply.json()) == (500, True)
    assert reply.headers["access-control-allow-origin"] == "https://chat.example"


def a_bug():
    raise ValueError("a bug")


async def test_a_model_is_as_old_at_every_gateway(model_path):
    """Fails when a client that asks two gateways in turn sees a model change."""
    clock, created = HandClock(), []
    async with tiny_gateway(*WORKERS, model_path=model_path, clock=clock) as gateway:
        for _ in range(2):
            transport = httpx.ASGITransport(build_http_app(gateway.service))
            async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as client:
                created += [model["created"] for model in (await client.get("/v1/models")).json()["data"]]
            clock.seconds += 5
    assert len(created) == 2
    assert created[0] == created[1]


async def test_other_paths_and_methods_answer_in_openais_shape_too(model_path):
    """Fails when a mistyped URL gives clients something they cannot parse."""
    async with served(model_path) as (_, url), httpx.AsyncClient() as client:
        missing, wrong = await client.get(f"{url}/v1/nothing"), await client.get(f"{url}/v1/completions")
        assert (missing.status_code, wrong.status_code) == (404, 405)
        assert "error" in missing.json()
        assert "error" in wrong.json()


NAMES = {
    "evil.example": 400,
    "localhost.evil.example:8000": 400,
    "127.0.0.1.evil.example": 400,
    "localhost:8000": 200,
    "127.0.0.1": 200,
    "[::1]:8000": 200,
}


async def test_without_keys_who_calls_this_machine_by_a_name_of_its_own_is_refused(model_path):
    """Fails when a web page whose name was made to lead here uses the API by a browser of this machine."""
    async with tiny_gateway(*WORKERS, model_path=model_path) as gateway:
        transport = httpx.ASGITransport(build_http_app(gateway.service, keyless_at_home=True))
        async with httpx.AsyncClient(transport=transport, base_url="http://localhost") as client:
            for name, status in NAMES.items():
                assert (await client.get("/v1/models", headers={"host": name})).status_code == status, name
            gateway.service.keys = FixedKeys(KeyRing(()))
            assert (await client.get("/v1/models", headers={"host": "a.example"})).status_code == 401


async def test_ready_means_that_a_decode_worker_is_known_and_health_does_not(model_path):
    """Fails when readiness is a constant, or liveness depends on workers."""
    async with served(model_path, WORKERS[2]) as (gateway, url), httpx.AsyncClient() as client:
        assert (await client.get(f"{url}/health")).status_code == 200
        assert (await client.get(f"{url}/ready")).status_code == 503
        await gateway.membership.announce(WORKERS[0], ttl_ms=60_000)
        await until(gateway.service.ready)
        assert (await client.get(f"{url}/ready")).status_code == 200
        assert (await client.get(f"{url}/metrics")).text == "headrace_up 1\n"


async def test_a_full_gateway_answers_503_with_a_time_to_come_back(model_path):
    """Fails when admission has no bound, or its refusal no Retry-After."""
    async with served(model_path, inflight_max=0) as (_, url), httpx.AsyncClient() as client:
        reply = await client.post(f"{url}/v1/completions", json={"model": "tiny", "prompt": "x"})
        assert reply.status_code == 503
        assert int(reply.headers["retry-after"]) >= 1
        assert reply.json()["error"]["code"] == "overloaded"
