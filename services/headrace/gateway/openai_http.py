"""The OpenAI-compatible HTTP API as an ASGI app: models, completions, chat completions, health and metrics.

Owns the endpoints and how requests are read; how replies are sent is `openai_replies.py`'s. All bodies are parsed and
rendered in `wire/`; all work is the GatewayService's. Nothing is global: two apps in one process do not meet.
"""

import asyncio
import functools
import inspect
import ipaddress
import logging
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from typing import Any

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from headrace.core.errors import HeadraceError, InvalidRequest, PermissionDenied, RequestTooLarge, UnknownModel
from headrace.core.front_door_limits import PARSED_ON_LOOP_BYTES_MAX
from headrace.core.limits import CLIENT_REQUEST_ID_CHARS_MAX, REQUEST_BODY_BYTES_MAX, REQUEST_DRAIN_BYTES_MAX
from headrace.core.tenants import Tenant
from headrace.gateway.admit_request import Body
from headrace.gateway.authenticate import AUTHORIZATION
from headrace.gateway.merge_streams import merge_streams
from headrace.gateway.openai_replies import EventStream, NumberedEvent, collect_reply, read_opening
from headrace.gateway.service import GatewayEvent, GatewayService
from headrace.gateway.until_disconnect import ClientDisconnected, until_disconnect
from headrace.gateway.worker_table import ServedModel
from headrace.telemetry.request_context import TRACEPARENT, within_callers_trace
from headrace.wire.openai_body import OpenAiRequest, parse_chat_body, parse_completion_body, parse_json_body
from headrace.wire.openai_fields import JsonObject
from headrace.wire.openai_reply import Json, render_error, render_model
from headrace.wire.status import http_headers, status_of

log = logging.getLogger(__name__)

CLIENT_CLOSED_REQUEST = 499  # nginx's word for it; nobody is there to read it

# When a model was made is nowhere written down, and OpenAI's clients expect a time: the same one of every gateway, as a
# client that asks again by another one would take a later time for another model.
MODEL_CREATED_UNIX_S = 0


def build_http_app(
    service: GatewayService,
    *,
    metrics_text: Callable[[], bytes] | None = None,
    keyless_at_home: bool = False,
    allowed_origins: Sequence[str] = (),
) -> ASGIApp:
    """The app over a started service. `metrics_text` gives the Prometheus exposition for `/metrics`, if any.

    keyless_at_home: where no keys are asked for, whoever calls this machine by another name than its own is refused.
    allowed_origins: of web pages whose browsers may let them read what they are answered; "*" is every page.
    """
    api = _Api(service, metrics_text, keyless_at_home)
    app = Starlette(
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
    return _with_cors(app, allowed_origins) if allowed_origins else app


def _with_cors(app: ASGIApp, allowed_origins: Sequence[str]) -> ASGIApp:
    """Around the whole app: Starlette answers unexpected errors outside of its middleware, and a page reads those too.

    Cookies are never meant: a page sends its key as everybody does. Browsers ask separately whether a public page may
    call into a private network: pages that are named may, "*" is not meant so.
    """
    private: dict[str, Any] = {"allow_private_network": "*" not in allowed_origins} if _KNOWS_PRIVATE_NETWORKS else {}
    return CORSMiddleware(
        app,
        allow_origins=allowed_origins,
        allow_methods=("GET", "POST"),
        allow_headers=("*",),
        expose_headers=("x-request-id", "retry-after", "retry-after-ms"),
        **private,
    )


# Newer releases of Starlette refuse such a preflight unless they are told so; older ones pass over what is asked.
_KNOWS_PRIVATE_NETWORKS = "allow_private_network" in inspect.signature(CORSMiddleware).parameters


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
        return JSONResponse({"object": "list", "data": [self._entry(model) for model in self._service.models()]})

    async def get_model(self, request: Request) -> Response:
        self._caller(request)
        name, models = request.path_params["model"], self._service.models()
        found = next((m for m in models if m.name == name), None)
        if found is None:
            raise UnknownModel(name, [m.name for m in models])
        return JSONResponse(self._entry(found))

    def _entry(self, model: ServedModel) -> Json:
        return render_model(model.name, created_unix_s=MODEL_CREATED_UNIX_S, context_tokens_max=model.tokens_max)

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
        body = await read_body(request)
        parsing = functools.partial(_parse, body, parse)
        loop, is_large = asyncio.get_running_loop(), len(body) > PARSED_ON_LOOP_BYTES_MAX
        wanted = await loop.run_in_executor(self._service.body_thread, parsing) if is_large else parsing()
        events = within_callers_trace(request.headers.get(TRACEPARENT), self._generate(wanted, tenant))
        created_unix_s = self._service.clock.unix_ms() // 1000
        headers = _request_id_headers(request)
        try:
            if not wanted.stream:
                thread = self._service.body_thread
                whole = collect_reply(events, wanted, chat=chat, created_unix_s=created_unix_s, thread=thread)
                reply = await until_disconnect(request.receive, whole)
                return Response(reply, media_type="application/json", headers=headers)
            opening = await until_disconnect(request.receive, read_opening(events))
        except BaseException:
            await events.aclose()
            raise
        return EventStream(opening, events, wanted, chat=chat, created_unix_s=created_unix_s, headers=headers)

    def _generate(self, wanted: OpenAiRequest, tenant: Tenant) -> AsyncGenerator[NumberedEvent, None]:
        body = Body(len(wanted.requests))
        return merge_streams(
            [_number(i, self._service.generate(r, tenant, body=body)) for i, r in enumerate(wanted.requests)]
        )


def _parse(body: bytes, parse: Callable[[JsonObject], OpenAiRequest]) -> OpenAiRequest:
    return parse(parse_json_body(body))


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


def _peer_of(request: Request) -> str:
    return request.client.host if request.client else ""


def _request_id_headers(request: Request) -> dict[str, str]:
    """The caller's own `x-request-id`, cut; a label for its logs, never an identity here."""
    given = request.headers.get("x-request-id", "")[:CLIENT_REQUEST_ID_CHARS_MAX]
    return {"x-request-id": given} if given else {}


async def _nobody_reads(request: Request, error: Exception) -> Response:
    """The client left before there was an answer: there is nothing to tell anybody."""
    return Response(status_code=CLIENT_CLOSED_REQUEST)
