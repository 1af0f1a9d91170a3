"""The OpenAI-compatible HTTP API as an ASGI app: models, completions, chat completions, health and metrics.

Owns how requests are read and how replies are sent, whole or as server-sent events. All bodies are parsed and rendered
in `wire/`; all work is the GatewayService's. Nothing is global: two apps in one process do not meet.
"""

import asyncio
import ipaddress
import json
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from headrace.core.errors import HeadraceError, InvalidRequest, PermissionDenied, RequestTooLarge, UnknownModel
from headrace.core.generation import Usage, WorkerId
from headrace.core.limits import CLIENT_REQUEST_ID_CHARS_MAX, REQUEST_BODY_BYTES_MAX, REQUEST_DRAIN_BYTES_MAX
from headrace.core.tenants import Tenant
from headrace.gateway.accepted import Accepted
from headrace.gateway.admit_request import Body
from headrace.gateway.authenticate import AUTHORIZATION
from headrace.gateway.merge_streams import merge_streams
from headrace.gateway.route_request import ChoiceFinished, ChoiceToken
from headrace.gateway.service import GatewayEvent, GatewayService
from headrace.telemetry.request_context import TRACEPARENT, within_callers_trace
from headrace.wire.openai_body import JsonObject, OpenAiRequest, parse_chat_body, parse_completion_body, parse_json_body
from headrace.wire.openai_reply import (
    ChoiceText,
    Json,
    ReplyHead,
    add_usage,
    join_usage,
    render_chunk,
    render_error,
    render_model,
    render_reply,
    render_usage_chunk,
    render_workers,
)
from headrace.wire.status import http_headers, status_of

log = logging.getLogger(__name__)

Result = TypeVar("Result")
NumberedEvent = tuple[int, GatewayEvent]  # (index of the prompt in the request, event)
CLIENT_CLOSED_REQUEST = 499  # nginx's word for it; nobody is there to read it


def build_http_app(
    service: GatewayService, *, metrics_text: Callable[[], bytes] | None = None, keyless_at_home: bool = False
) -> Starlette:
    """The app over a started service. `metrics_text` gives the Prometheus exposition for `/metrics`, if any.

    keyless_at_home: where no keys are asked for, whoever calls this machine by another name than its own is refused.
    """
    api = _Api(service, metrics_text, keyless_at_home)
    return Starlette(
        routes=[
            Route("/v1/models", api.list_models),
            Route("/v1/models/{model:path}", api.get_model),
            Route("/v1/chat/completions", api.chat, methods=["POST"]),
            Route("/v1/completions", api.complete, methods=["POST"]),
            Route("/health", api.health),
            Route("/ready", api.ready),
            Route("/metrics", api.metrics),
        ],
        exception_handlers={
            HTTPException: api.http_error,
            HeadraceError: api.error,
            ClientDisconnected: _nobody_reads,
            Exception: api.error,
        },
    )


class _Api:
    """The endpoints, over one service."""

    def __init__(
        self, service: GatewayService, metrics_text: Callable[[], bytes] | None, keyless_at_home: bool
    ) -> None:
        self._service = service
        self._metrics_text = metrics_text
        self._keyless_at_home = keyless_at_home

    def _caller(self, request: Request) -> Tenant:
        """Who asks. Raises Unauthenticated, InvalidRequest, before anything of the request's body is read."""
        if self._keyless_at_home and self._service.key_ring is None:
            check_named_locally(request.url.hostname or "")
        return self._service.authenticate(request.headers.get(AUTHORIZATION))

    async def list_models(self, request: Request) -> Response:
        self._caller(request)
        created_unix_s = self._service.clock.unix_ms() // 1000
        models = [
            render_model(m.name, created_unix_s=created_unix_s, context_tokens_max=m.tokens_max)
            for m in self._service.models()
        ]
        return JSONResponse({"object": "list", "data": models})

    async def get_model(self, request: Request) -> Response:
        self._caller(request)
        name, models = request.path_params["model"], self._service.models()
        found = next((m for m in models if m.name == name), None)
        if found is None:
            raise UnknownModel(name, [m.name for m in models])
        created_unix_s = self._service.clock.unix_ms() // 1000
        return JSONResponse(
            render_model(found.name, created_unix_s=created_unix_s, context_tokens_max=found.tokens_max)
        )

    async def chat(self, request: Request) -> Response:
        return await self._answer(request, parse_chat_body, chat=True)

    async def complete(self, request: Request) -> Response:
        return await self._answer(request, parse_completion_body, chat=False)

    async def health(self, request: Request) -> Response:
        """Live: the process serves HTTP. Says nothing of workers or Redis."""
        return JSONResponse({"status": "ok"})

    async def ready(self, request: Request) -> Response:
        """Ready: a generation request could be served now."""
        ready = self._service.ready()
        body = {"status": "ready" if ready else "no decode worker", "index_available": self._service.index_available}
        return JSONResponse(body, status_code=200 if ready else 503)

    async def metrics(self, request: Request) -> Response:
        """Counts of all tenants together, and so an admin's to see."""
        if not self._caller(request).is_admin:
            raise PermissionDenied("read the metrics of all tenants")
        if self._metrics_text is None:
            raise HTTPException(404, "this process exports no metrics here")
        return PlainTextResponse(self._metrics_text(), media_type="text/plain; version=0.0.4")

    async def error(self, request: Request, error: Exception) -> Response:
        """Any error as OpenAI spells it. What is not ours is logged with its trace and told without details."""
        if not isinstance(error, HeadraceError):
            log.error("unexpected error for %s", request.scope["path"], exc_info=error)
        self._service.call_refused(error, _peer_of(request))
        return JSONResponse(
            render_error(error),
            status_code=status_of(error).http_status,
            headers=_request_id_headers(request) | http_headers(error),
        )

    async def http_error(self, request: Request, error: Exception) -> Response:
        """Unknown paths and methods, in OpenAI's shape."""
        assert isinstance(error, HTTPException)
        invalid = InvalidRequest(f"{request.method} {request.scope['path'][:200]}: {error.detail}")
        self._service.call_refused(invalid, _peer_of(request))
        return JSONResponse(render_error(invalid), status_code=error.status_code, headers=error.headers)

    async def _answer(self, request: Request, parse: Callable[[JsonObject], OpenAiRequest], *, chat: bool) -> Response:
        """Read, parse and generate. Errors until the first token have an HTTP status of their own."""
        tenant = self._caller(request)
        wanted = parse(parse_json_body(await read_body(request)))
        events = within_callers_trace(request.headers.get(TRACEPARENT), self._generate(wanted, tenant))
        created_unix_s = self._service.clock.unix_ms() // 1000
        headers = _request_id_headers(request)
        try:
            if not wanted.stream:
                reply = _collect(events, wanted, chat=chat, created_unix_s=created_unix_s)
                return JSONResponse(await until_disconnect(request.receive, reply), headers=headers)
            opening = await until_disconnect(request.receive, _read_opening(events))
        except ClientDisconnected:
            await events.aclose()
            return Response(status_code=CLIENT_CLOSED_REQUEST)
        except BaseException:
            await events.aclose()
            raise
        return EventStream(opening, events, wanted, chat=chat, created_unix_s=created_unix_s, headers=headers)

    def _generate(self, wanted: OpenAiRequest, tenant: Tenant) -> AsyncGenerator[NumberedEvent, None]:
        body = Body(len(wanted.requests))
        return merge_streams(
            [_number(i, self._service.generate(r, tenant, body=body)) for i, r in enumerate(wanted.requests)]
        )


async def _number(prompt: int, events: AsyncGenerator[GatewayEvent, None]) -> AsyncGenerator[NumberedEvent, None]:
    async with aclosing(events):
        async for event in events:
            yield prompt, event


def check_named_locally(host: str) -> None:
    """Refuse a caller that names this machine as only somebody else's DNS does: a web page whose own name was made to
    lead here may read what it is answered, since its browser takes that for the page's own. Raises InvalidRequest."""
    try:
        ipaddress.ip_address(host)
    except ValueError:
        if host not in ("", "localhost") and not host.endswith(".localhost"):
            raise InvalidRequest(
                f"called as {host[:200]!r}: without a tenants_file this gateway is called by an address or as "
                "localhost; set tenants_file, or insecure_network: true"
            ) from None


async def read_body(request: Request) -> bytes:
    """A request's body, at most REQUEST_BODY_BYTES_MAX of it; what is larger is read to its end but not kept, so that
    the client reads the answer instead of a reset connection. Raises RequestTooLarge, ClientDisconnected."""
    kept, total = bytearray(), 0
    async for chunk in _chunks(request):
        total += len(chunk)
        if total <= REQUEST_BODY_BYTES_MAX:
            kept += chunk
        else:
            kept.clear()
            if total > REQUEST_DRAIN_BYTES_MAX:
                break
    if total > REQUEST_BODY_BYTES_MAX:
        raise RequestTooLarge(REQUEST_BODY_BYTES_MAX)
    return bytes(kept)


async def _chunks(request: Request) -> AsyncGenerator[bytes, None]:
    try:
        async for chunk in request.stream():
            yield chunk
    except ClientDisconnect:
        raise ClientDisconnected from None


class ClientDisconnected(Exception):
    """The client has closed its connection; nobody waits for an answer."""


async def until_disconnect(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Await `work`, unless the client leaves first: then cancel it, wait for its end and raise ClientDisconnected."""
    working = asyncio.create_task(work)
    watching = asyncio.create_task(_wait_for_disconnect(receive))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnected
        return working.result()
    finally:
        working.cancel()
        watching.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _wait_for_disconnect(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _read_opening(events: AsyncGenerator[NumberedEvent, None]) -> list[NumberedEvent]:
    """Events up to the first token or result: until then a failure can still be an HTTP status."""
    opening = []
    async for numbered in events:
        opening.append(numbered)
        if not isinstance(numbered[1], Accepted):
            break
    return opening


async def _collect(
    events: AsyncGenerator[NumberedEvent, None], wanted: OpenAiRequest, *, chat: bool, created_unix_s: int
) -> Json:
    """Read a whole answer and render it."""
    reply = _Reply(wanted, chat=chat, created_unix_s=created_unix_s)
    choices: dict[int, ChoiceText] = {}
    async with aclosing(events):
        async for prompt, event in events:
            reply.take(prompt, event)
            if isinstance(event, Accepted):
                continue
            index = reply.index_of(prompt, event)
            choice = choices.setdefault(index, ChoiceText(index))
            if isinstance(event, ChoiceToken):
                choice.pieces.append(event.delta.text)
                if wanted.logprobs:
                    choice.deltas.append(event.delta)
            else:
                choice.pieces.append(event.finished.text)
                choice.finish_reason = event.finished.reason
    return render_reply(reply.head, [choices[i] for i in sorted(choices)], reply.usage(), reply.workers())


class _Reply:
    """What a reply's head and tail need: names, usages and workers, taken from the events as they pass."""

    def __init__(self, wanted: OpenAiRequest, *, chat: bool, created_unix_s: int) -> None:
        self._choices = wanted.requests[0].choices
        self._chat = chat
        self._created_unix_s = created_unix_s
        self._head: ReplyHead | None = None
        self._finished: dict[int, ChoiceFinished] = {}

    def take(self, prompt: int, event: GatewayEvent) -> None:
        match event:
            case Accepted(request_id=request_id, model=model):
                self._head = self._head or ReplyHead(request_id, model, self._created_unix_s, self._chat)
            case ChoiceFinished():
                self._finished[self.index_of(prompt, event)] = event
            case ChoiceToken():
                pass

    def index_of(self, prompt: int, event: ChoiceToken | ChoiceFinished) -> int:
        """A choice's index in the reply: choices of the first prompt first."""
        return prompt * self._choices + event.choice

    @property
    def head(self) -> ReplyHead:
        assert self._head is not None, "Accepted comes before everything else"
        return self._head

    def usage(self) -> Usage:
        usages = [self._finished[i].finished.usage for i in sorted(self._finished)]
        step = self._choices
        return add_usage([join_usage(usages[i : i + step]) for i in range(0, len(usages), step)])

    def workers(self) -> Json:
        done = [self._finished[i] for i in sorted(self._finished)]
        prefill: WorkerId | None = next((d.prefill_worker for d in done if d.prefill_worker), None)
        return render_workers([d.finished.worker_id for d in done], prefill)


class EventStream(Response):
    """A reply as server-sent events, ended by `data: [DONE]`. Ends the work within moments of the client leaving."""

    media_type = "text/event-stream"

    def __init__(
        self,
        opening: list[NumberedEvent],
        events: AsyncGenerator[NumberedEvent, None],
        wanted: OpenAiRequest,
        *,
        chat: bool,
        created_unix_s: int,
        headers: dict[str, str],
    ) -> None:
        self.status_code = 200
        self.background = None
        self._opening = opening
        self._events = events
        self._wanted = wanted
        self._reply = _Reply(wanted, chat=chat, created_unix_s=created_unix_s)
        self._begun: set[int] = set()
        self.body = b""
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"} | headers)
        del self.headers["content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await until_disconnect(receive, self._send_all(send))
        except ClientDisconnected:
            log.info("request %s: the client left", self._reply.head.request_id)
        finally:
            await self._events.aclose()

    async def _send_all(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        try:
            for numbered in self._opening:
                await self._send_event(send, *numbered)
            async for numbered in self._events:
                await self._send_event(send, *numbered)
            if self._wanted.include_usage:
                tail = render_usage_chunk(self._reply.head, self._reply.usage(), self._reply.workers())
                await _send_data(send, json.dumps(tail))
        except HeadraceError as error:
            await _send_data(send, json.dumps(render_error(error)))
        except Exception as error:
            log.exception("request %s failed after its first token", self._reply.head.request_id)
            await _send_data(send, json.dumps(render_error(error)))
        await _send_data(send, "[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_event(self, send: Send, prompt: int, event: GatewayEvent) -> None:
        self._reply.take(prompt, event)
        if isinstance(event, Accepted):
            return
        index = self._reply.index_of(prompt, event)
        first = index not in self._begun
        self._begun.add(index)
        if isinstance(event, ChoiceFinished):
            done = event.finished
            chunk = render_chunk(self._reply.head, index=index, text=done.text, finish_reason=done.reason, first=first)
        elif event.delta.text or first or self._wanted.logprobs:
            delta = event.delta if self._wanted.logprobs else None
            chunk = render_chunk(self._reply.head, index=index, text=event.delta.text, delta=delta, first=first)
        else:
            return  # half a character or a possible stop string: nothing to show yet
        await _send_data(send, json.dumps(chunk))


async def _send_data(send: Send, data: str) -> None:
    await send({"type": "http.response.body", "body": f"data: {data}\n\n".encode(), "more_body": True})


def _peer_of(request: Request) -> str:
    return request.client.host if request.client else ""


def _request_id_headers(request: Request) -> dict[str, str]:
    """The caller's own `x-request-id`, cut; a label for its logs, never an identity here."""
    given = request.headers.get("x-request-id", "")[:CLIENT_REQUEST_ID_CHARS_MAX]
    return {"x-request-id": given} if given else {}


async def _nobody_reads(request: Request, error: Exception) -> Response:
    """The client left while it was sending: nothing was begun, and there is nothing to tell anybody."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)
