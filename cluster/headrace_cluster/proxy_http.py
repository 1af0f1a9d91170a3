"""What Serve's HTTP proxies lack: bounds on what a stranger's connection may cost (`bounded_http.py`; for gRPC
`FRONT_DOOR_OPTIONS`), certificates that are renewed (`proxy_tls.py`), and a second gateway for a request
whose first one died before it answered.

Serve ends such a request with a bare 500, although nothing of an answer was passed on and another gateway, or the one
that takes the dead one's place, would serve it. Runs inside the proxies, by way of the environment variable
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`. Its twin for gRPC is in `proxy_services.py`.
"""

import json
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any

from starlette.middleware import Middleware

from headrace.core.errors import WorkerUnavailable
from headrace.core.front_door_limits import HTTP_KEPT_BYTES_MAX
from headrace.core.limits import REQUEST_BODY_BYTES_MAX
from headrace.wire.openai_reply import render_error
from headrace.wire.status import http_headers, status_of

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[dict[str, Any], Receive, Send], Awaitable[None]]

CALLBACK_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
CALLBACK = "headrace_cluster.proxy_http.middlewares"

# Serve's gRPC proxies take messages of 2 GiB from anybody unless this says what they take.
MESSAGE_BYTES_VARIABLE = "RAY_SERVE_GRPC_MAX_MESSAGE_SIZE"

# Twice: a request that kills the gateway which serves it must not kill them all.
CALL_ATTEMPTS = 2


def middlewares() -> list[Middleware]:
    """What Serve puts around its HTTP proxies. Called in a proxy before it makes its server: there is no other place to
    say which protocol that speaks."""
    # Here and not above: whoever starts a system needs this file's names, and neither Ray nor a server.
    import uvicorn.config
    from ray.serve._private.constants import DEFAULT_GRPC_SERVER_OPTIONS
    from ray.util.metrics import Counter, Gauge

    from headrace.telemetry.metrics import CERTIFICATE_ENDS
    from headrace.transfer.channels import FRONT_DOOR_OPTIONS
    from headrace_cluster.bounded_http import BoundedHttp
    from headrace_cluster.proxy_tls import set_up_tls

    ended = Counter(
        "headrace_http_connections_ended",
        description="Connections that a proxy ended because they were beyond a bound.",
        tag_keys=("reason",),
    )
    BoundedHttp.ended = staticmethod(lambda reason: ended.inc(tags={"reason": reason}))
    refused = Counter(
        "headrace_refused_connections",
        description="HTTPS connections whose TLS handshake failed, plain text among them.",
        tag_keys=("reason",),
    )
    ends = Gauge(
        CERTIFICATE_ENDS, description="When the certificate that callers are shown ends, in seconds since 1970."
    )
    set_up_tls(lambda reason: refused.inc(tags={"reason": reason}), shown=ends.set)
    DEFAULT_GRPC_SERVER_OPTIONS.extend(FRONT_DOOR_OPTIONS)
    uvicorn.config.HTTP_PROTOCOLS["auto"] = f"{BoundedHttp.__module__}:{BoundedHttp.__qualname__}"
    return [Middleware(TryAgainWhenDied)]


class TryAgainWhenDied:
    """An ASGI app that asks the one within again when that ends without a word, and says 503 when it does so twice.

    A request whose body is larger than a gateway accepts, or that comes while the bodies of others fill what may be
    kept, is passed on as it comes, once.
    """

    def __init__(self, app: App, *, kept_bytes_max: int = HTTP_KEPT_BYTES_MAX) -> None:
        self._app = app
        self._kept = _KeptBytes(kept_bytes_max)

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        with self._kept.part() as part:
            await self._ask(_KeptRequest(receive, part), scope, send)

    async def _ask(self, request: "_KeptRequest", scope: dict[str, Any], send: Send) -> None:
        await request.keep()
        for _ in range(CALL_ATTEMPTS if request.is_whole else 1):
            answered = False

            async def note_and_send(message: Message) -> None:
                nonlocal answered
                answered = True
                await send(message)

            # A copy: whoever is asked writes into it where the request went.
            await self._app({**scope}, request.again(), note_and_send)
            if answered or request.is_left:
                return
        await _send_refusal(send)


class _KeptBytes:
    """How many bytes of bodies are kept in this proxy, of all requests together."""

    def __init__(self, bytes_max: int) -> None:
        self._bytes_max = bytes_max
        self._bytes = 0

    @contextmanager
    def part(self) -> Iterator[Callable[[int], bool]]:
        """One request's part, given back at the end: takes so many bytes more, and says whether there was room."""
        mine = 0

        def take(num_bytes: int) -> bool:
            nonlocal mine
            mine += num_bytes
            self._bytes += num_bytes
            return self._bytes <= self._bytes_max

        try:
            yield take
        finally:
            self._bytes -= mine


class _KeptRequest:
    """A request's body, so that it can be given to more than one reader; after it, what the client does."""

    def __init__(self, receive: Receive, take: Callable[[int], bool]) -> None:
        self.is_whole = False
        self.is_left = False  # the client has closed its connection
        self._receive = receive
        self._take = take
        self._messages: list[Message] = []

    async def keep(self) -> None:
        """Read the body, up to what a gateway accepts and as far as there is room."""
        kept_bytes, has_room = 0, True
        while not self.is_whole and has_room and kept_bytes <= REQUEST_BODY_BYTES_MAX:
            message = await self._next()
            self._messages.append(message)
            if message["type"] != "http.request":
                return
            part_bytes = len(message.get("body", b""))
            kept_bytes += part_bytes
            has_room = self._take(part_bytes)
            self.is_whole = not message.get("more_body", False)

    def again(self) -> Receive:
        """A receive that begins with the kept part."""
        kept = iter(self._messages)

        async def receive() -> Message:
            return next(kept, None) or await self._next()

        return receive

    async def _next(self) -> Message:
        message = await self._receive()
        self.is_left = self.is_left or message["type"] == "http.disconnect"
        return message


async def _send_refusal(send: Send) -> None:
    error = WorkerUnavailable("", "the gateway died while it served this request; another one takes its place")
    body = json.dumps(render_error(error)).encode()
    headers = {"content-type": "application/json", "content-length": str(len(body))} | http_headers(error)
    raw = [(name.encode(), value.encode()) for name, value in headers.items()]
    await send({"type": "http.response.start", "status": status_of(error).http_status, "headers": raw})
    await send({"type": "http.response.body", "body": body})
