"""What Serve's HTTP proxies lack: a request whose gateway died before it answered is sent once more, to another one.

Serve ends such a request with a bare 500, although nothing of an answer was passed on and another gateway, or the one
that takes the dead one's place, would serve it. Runs inside the proxies, by way of the environment variable
`RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH`. Its twin for gRPC is in `proxy_services.py`.
"""

import json
from collections.abc import Awaitable, Callable
from typing import Any

from starlette.middleware import Middleware

from headrace.core.errors import WorkerUnavailable
from headrace.core.limits import REQUEST_BODY_BYTES_MAX
from headrace.wire.openai_reply import render_error
from headrace.wire.status import http_headers, status_of

Message = dict[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[dict[str, Any], Receive, Send], Awaitable[None]]

CALLBACK_VARIABLE = "RAY_SERVE_HTTP_PROXY_CALLBACK_IMPORT_PATH"
CALLBACK = "headrace_cluster.proxy_http.middlewares"

# Twice: a request that kills the gateway which serves it must not kill them all.
CALL_ATTEMPTS = 2


def middlewares() -> list[Middleware]:
    """What Serve puts around its HTTP proxies."""
    return [Middleware(TryAgainWhenDied)]


class TryAgainWhenDied:
    """An ASGI app that asks the one within again when that ends without a word, and says 503 when it does so twice.

    A request whose body is larger than a gateway accepts is passed on as it comes, once.
    """

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = _KeptRequest(receive)
        await request.keep()
        for _ in range(CALL_ATTEMPTS if request.is_whole else 1):
            answered = False

            async def note_and_send(message: Message) -> None:
                nonlocal answered
                answered = True
                await send(message)

            await self._app(scope, request.again(), note_and_send)
            if answered or request.is_left:
                return
        await _send_refusal(send)


class _KeptRequest:
    """A request's body, so that it can be given to more than one reader; after it, what the client does."""

    def __init__(self, receive: Receive) -> None:
        self.is_whole = False
        self.is_left = False  # the client has closed its connection
        self._receive = receive
        self._messages: list[Message] = []

    async def keep(self) -> None:
        """Read the body, up to what a gateway accepts."""
        kept_bytes = 0
        while not self.is_whole and kept_bytes <= REQUEST_BODY_BYTES_MAX:
            message = await self._next()
            self._messages.append(message)
            if message["type"] != "http.request":
                return
            kept_bytes += len(message.get("body", b""))
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
