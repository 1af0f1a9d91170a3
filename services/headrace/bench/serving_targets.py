"""Systems under load: our gRPC API by our own client, and any OpenAI-compatible server over HTTP.

Both give one answer as a stream of the same two things, so that what measures does not know which it measures. Every
failure is a HeadraceError: the server's own, or RequestFailed with a kind that failures are counted by.
"""

import json
from collections.abc import AsyncGenerator, Mapping
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any, Protocol

from headrace.bench.http_stream import HttpReply, HttpServer, ProtocolBroken, http_request
from headrace.bench.planned_requests import PlannedRequest
from headrace.client import (
    AsyncHeadraceClient,
    CacheOptions,
    CacheSource,
    Done,
    GatewayUnreachable,
    Sampling,
    ServedModel,
    TokenDelta,
)
from headrace.core.errors import HeadraceError, InvalidRequest, UnknownModel

# Counted by this name where a server says how many tokens were cached, but not where they came from.
ANY_SOURCE = "any"


class RequestFailed(HeadraceError):
    """One request failed; `kind` is what failures of this sort are counted by."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind = kind


def error_kind(error: HeadraceError) -> str:
    """The name that a failure is counted by."""
    return error.kind if isinstance(error, RequestFailed) else type(error).__name__


@dataclass(frozen=True, slots=True)
class TokenArrived:
    """One more piece of the answer: over gRPC each token, over HTTP each chunk with text or reasoning."""


@dataclass(frozen=True, slots=True)
class AnswerUsage:
    """The end of an answer, and what the server counted."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: Mapping[str, int] | None  # by source; None where the server does not say


@dataclass(frozen=True, slots=True)
class CacheUse:
    """What requests may do with the cache."""

    reads: bool = True
    publishes: bool = True
    salted_by_conversation: bool = False  # no conversation reuses what another one left


ANY_USE = CacheUse()
AnswerStream = AsyncGenerator[TokenArrived | AnswerUsage, None]


class LoadTarget(Protocol):
    """What is measured. A stream that is closed or cancelled ends its request."""

    def stream(self, request: PlannedRequest, *, timeout_s: float) -> AnswerStream:
        """The pieces as they come, then AnswerUsage. Raises HeadraceError."""
        ...


class GrpcTarget:
    """A Headrace gateway's gRPC API."""

    def __init__(self, client: AsyncHeadraceClient, model: str, *, cache: CacheUse = ANY_USE) -> None:
        self._client = client
        self._model = model
        self._cache = cache
        sources = frozenset(CacheSource) if cache.reads else frozenset[CacheSource]()
        self._options = CacheOptions(sources=sources, publish=cache.publishes)

    @staticmethod
    async def find_model(client: AsyncHeadraceClient, name: str) -> ServedModel:
        """The named model, or the only one. Raises UnknownModel, GatewayUnreachable."""
        return _pick_model(await client.list_models(), name)

    async def stream(self, request: PlannedRequest, *, timeout_s: float) -> AnswerStream:
        """As LoadTarget."""
        call = self._client.stream(
            request.prompt,
            model=self._model,
            sampling=Sampling(max_tokens=request.max_tokens, ignore_eos=True),
            cache=self._options,
            timeout_s=timeout_s,
            cache_salt=f"conversation-{request.conversation}" if self._cache.salted_by_conversation else "",
        )
        async with call:
            async for event in call:
                if isinstance(event, TokenDelta):
                    yield TokenArrived()
                elif isinstance(event, Done):
                    by_source = {str(k): count for k, count in event.usage.cached.by_source().items()}
                    yield AnswerUsage(event.usage.prompt_tokens, event.usage.completion_tokens, by_source)
                    return
        raise RequestFailed("stream_cut", "the stream ended without its last event")


class HttpTarget:
    """An OpenAI-compatible server; asks it for nothing but its list of models and completions.

    chat: /v1/chat/completions, which takes text only; else /v1/completions.
    stops_at_eos: answers end where the model ends them. Else they are as long as planned, which is asked for by
    `ignore_eos`: vLLM, SGLang and others know it beside us, and servers that take OpenAI's own fields alone refuse it.
    """

    def __init__(
        self,
        server: HttpServer,
        model: str,
        *,
        chat: bool,
        api_key: str = "",
        cache: CacheUse = ANY_USE,
        stops_at_eos: bool = False,
    ) -> None:
        self._server = server
        self._model = model
        self._chat = chat
        self._cache = cache
        self._stops_at_eos = stops_at_eos
        self._headers = {"content-type": "application/json", "accept": "text/event-stream"} | _bearer(api_key)

    @staticmethod
    async def find_model(server: HttpServer, name: str, *, api_key: str = "") -> ServedModel:
        """The named model, or the only one; a context of 0 tokens where the server does not say.

        Raises UnknownModel, GatewayUnreachable, RequestFailed.
        """
        try:
            async with http_request(server, "GET", "/v1/models", headers=_bearer(api_key)) as reply:
                if reply.status != 200:
                    raise await _failure(reply)
                listed = json.loads(await reply.whole())["data"]
                models = [ServedModel(str(m["id"]), int(m.get("max_model_len") or 0), 0, "") for m in listed]
        except OSError as error:
            raise GatewayUnreachable(str(server), error.strerror or str(error)) from error
        except (ProtocolBroken, ValueError, KeyError, TypeError) as error:
            raise GatewayUnreachable(str(server), f"its list of models cannot be read: {error}") from error
        return _pick_model(models, name)

    async def stream(self, request: PlannedRequest, *, timeout_s: float) -> AnswerStream:
        """As LoadTarget. The caller keeps the deadline; the server is told of it where it is ours."""
        path = "/v1/chat/completions" if self._chat else "/v1/completions"
        body = json.dumps(self._body(request)).encode()
        try:
            async with http_request(self._server, "POST", path, headers=self._headers, body=body) as reply:
                if reply.status != 200:
                    raise await _failure(reply)
                async with aclosing(self._read_answer(reply)) as answer:
                    async for event in answer:
                        yield event
        except OSError as error:
            raise RequestFailed("connection", f"{self._server}: {error.strerror or error}") from error
        except ProtocolBroken as error:
            raise RequestFailed("stream_cut", f"{self._server}: {error}") from error

    def _body(self, request: PlannedRequest) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": self._model,
            "max_tokens": request.max_tokens,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if not self._stops_at_eos:
            body["ignore_eos"] = True
        if self._chat:
            assert isinstance(request.prompt, str), "prompts for a chat are made of words"
            body["messages"] = [{"role": "user", "content": request.prompt}]
        else:
            body["prompt"] = request.prompt
        if not (self._cache.reads and self._cache.publishes):  # ours alone: other servers must not see it
            body["headrace"] = {"bypass": not self._cache.reads, "no_publish": not self._cache.publishes}
        if self._cache.salted_by_conversation:
            body["cache_salt"] = f"conversation-{request.conversation}"
        return body

    async def _read_answer(self, reply: HttpReply) -> AnswerStream:
        pieces, usage = 0, AnswerUsage(0, 0, None)
        async with aclosing(reply.lines()) as lines:  # type: ignore[type-var]
            async for line in lines:
                if not line.startswith(b"data:"):
                    continue
                if (data := line[5:].strip()) == b"[DONE]":
                    # A server that does not count its tokens: pieces are the best that is known.
                    yield usage if usage.completion_tokens else replace(usage, completion_tokens=pieces)
                    return
                chunk = _json_object(data)
                if "error" in chunk:
                    raise _told_error(chunk, "error")
                if chunk.get("usage"):
                    usage = _usage_of(chunk["usage"])
                if _has_text(chunk):
                    pieces += 1
                    yield TokenArrived()
        raise ProtocolBroken("the stream ended without [DONE]")


def _bearer(api_key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {api_key}"} if api_key else {}


def _pick_model(models: "list[ServedModel] | tuple[ServedModel, ...]", name: str) -> ServedModel:
    if not models:
        raise UnknownModel(name, [])
    if not name and len(models) > 1:
        raise InvalidRequest(f"several models are served; name one: {', '.join(m.id for m in models)}", param="model")
    for model in models:
        if name in ("", model.id):
            return model
    raise UnknownModel(name, [model.id for model in models])


def _json_object(data: bytes) -> dict[str, Any]:
    try:
        value = json.loads(data)
    except ValueError as error:
        raise ProtocolBroken("an event is not JSON") from error
    if not isinstance(value, dict):
        raise ProtocolBroken("an event is not a JSON object")
    return value


def _has_text(chunk: dict[str, Any]) -> bool:
    """The first chunk of a chat names the role and has no text: it is not the first token.

    What a model reasons comes as text of its own, by one of two names.
    """
    for choice in chunk.get("choices") or ():
        delta = choice.get("delta") or {}
        if choice.get("text") or any(delta.get(name) for name in ("content", "reasoning_content", "reasoning")):
            return True
    return False


def _usage_of(usage: dict[str, Any]) -> AnswerUsage:
    by_source = (usage.get("headrace") or {}).get("cached_tokens")
    if by_source is None:
        cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
        by_source = None if cached is None else {ANY_SOURCE: int(cached)}
    return AnswerUsage(int(usage.get("prompt_tokens") or 0), int(usage.get("completion_tokens") or 0), by_source)


async def _failure(reply: HttpReply) -> RequestFailed:
    try:
        told = json.loads(await reply.whole())
    except ValueError:
        told = {}
    return _told_error(told if isinstance(told, dict) else {}, f"http_{reply.status}")


def _told_error(body: dict[str, Any], kind: str) -> RequestFailed:
    """By the server's own code where it gives one: `overloaded` says more than 503."""
    error = body.get("error")
    error = error if isinstance(error, dict) else {}
    named = error.get("code") or error.get("type")
    return RequestFailed(f"{kind}_{named}" if named else kind, str(error.get("message") or kind)[:500])
