"""The HTTP protocol of Serve's proxies with bounds on what a stranger's connection may cost, before any key is seen.

Owns connections, head, trailers, requests that come before the last one is answered, and the times of head, body and
reading; the body's size is the gateway's to refuse, since it answers that with a 413
(`gateway/openai_http.py:read_body`). Uvicorn has none of these bounds: it keeps headers and requests without end, and
waits for ever for a body, or for a client that does not read. What is beyond a bound, or no HTTP, is answered where
HTTP has an answer for it, its connection is closed, and `ended` is told why.

Nobody is taken over to another protocol: a request that asks for it (`Upgrade`, as Java's own client does with every
one) is answered as if it did not. The parser would take its body for the next request, and so reads its head again
without that line: its body is what its head declares, as of any other.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.core.errors import HeadraceError, InvalidRequest, Overloaded
from headrace.core.front_door_limits import (
    HTTP_BODY_TIMEOUT_MS,
    HTTP_CONNECTIONS_MAX,
    HTTP_HEAD_BYTES_MAX,
    HTTP_HEAD_TIMEOUT_MS,
    HTTP_LINGER_MS,
    HTTP_REQUESTS_AHEAD_MAX,
    UNREAD_TIMEOUT_MS,
)
from headrace.core.limits import RETRY_AFTER_MS
from headrace.wire.openai_reply import render_error

# Why a connection was ended.
REASONS = ("connections", "malformed", "head_bytes", "requests_ahead", "head_time", "body_time", "unread")


class BoundedHttp(HttpToolsProtocol):
    """One connection. Bounds are class attributes, so that a test may set smaller ones in a class of its own."""

    connections_max = HTTP_CONNECTIONS_MAX
    head_bytes_max = HTTP_HEAD_BYTES_MAX
    requests_ahead_max = HTTP_REQUESTS_AHEAD_MAX
    head_timeout_ms = HTTP_HEAD_TIMEOUT_MS
    body_timeout_ms = HTTP_BODY_TIMEOUT_MS
    unread_timeout_ms = UNREAD_TIMEOUT_MS
    ended: Callable[[str], None] = staticmethod(lambda reason: None)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_bytes = 0  # of a head, or of what came behind a body: trailers
        self._in_head = True
        self._answered: Any = None  # the request that is being answered; `cycle` is the one that came last
        self._is_refused = False
        self._is_passed_over = False  # the head that was read asks for an Upgrade, and is to be read without it
        self._reading: asyncio.TimerHandle | None = None  # until head or body are whole
        self._writing: asyncio.TimerHandle | None = None  # while the client takes nothing
        self._lingering: asyncio.TimerHandle | None = None  # after a refusal

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Let it in, or answer at once that there are too many."""
        super().connection_made(transport)
        if len(self.connections) > self.connections_max:
            self._refuse("connections", 503, Overloaded("too many connections", retry_after_ms=RETRY_AFTER_MS))
            return
        self._wait_for("head_time", self.head_timeout_ms)

    def connection_lost(self, exc: Exception | None) -> None:
        """Nothing is waited for any more."""
        for timer in (self._reading, self._writing, self._lingering):
            if timer is not None:
                timer.cancel()
        self._tell_left()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what has come, unless the head or the trailers grow too long."""
        if self._is_refused:
            return
        if self._in_head and self._head_bytes == 0 and self._reading is None:  # the next on a connection that was kept
            self._wait_for("head_time", self.head_timeout_ms)
        self._head_bytes += len(data)
        self._unset_keepalive_if_required()
        try:
            self._parse(data)
        except httptools.HttpParserError:
            self._refuse("malformed", 400, InvalidRequest("the request is not HTTP/1.1 as it should be"))
        # After the parser: a body may have come with its head, and only what is unfinished counts.
        if self._head_bytes > self.head_bytes_max:
            self._refuse_head()

    def _parse(self, data: bytes) -> None:
        while True:
            try:
                self.parser.feed_data(data)
                return
            except httptools.HttpParserUpgrade as upgrade:
                if not self._is_passed_over or self._is_refused:
                    return  # no body: what follows would be of the other protocol
                self._is_passed_over = False
                data = self._head_without_upgrade() + data[upgrade.args[0] :]
                self.parser = httptools.HttpRequestParser(self)
                self.parser.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn's

    def _head_without_upgrade(self) -> bytes:
        line = b"%s %s HTTP/%s\r\n" % (self.parser.get_method(), self.url, self.parser.get_http_version().encode())
        kept = [b"%s: %s\r\n" % (name, value) for name, value in self.headers if name != b"upgrade"]
        return line + b"".join(kept) + b"\r\n"

    def on_message_begin(self) -> None:
        """A request begins: its head is to come."""
        super().on_message_begin()
        self._in_head = True

    def on_header(self, name: bytes, value: bytes) -> None:
        """As uvicorn's, but of heads only: a trailer is no header, and the request's headers are being read."""
        if self._in_head:
            super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """The head is whole: its body is to come."""
        head_bytes = sum(len(name) + len(value) for name, value in self.headers) + len(self.url)
        self._in_head, self._head_bytes = False, 0
        upgrades = self.parser.should_upgrade()
        names = {name for name, _ in self.headers}
        has_body = not names.isdisjoint((b"content-length", b"transfer-encoding"))
        if self._is_refused:  # what stands behind a request that was refused
            return
        if head_bytes > self.head_bytes_max:  # all of it came at once
            self._refuse_head()
        elif len(self.pipeline) >= self.requests_ahead_max:
            many = f"more than {self.requests_ahead_max} requests wait on this connection; use another one"
            self._refuse("requests_ahead", 400, InvalidRequest(many))
        elif upgrades and has_body and b"upgrade" in names:
            self._is_passed_over = True
        elif upgrades and has_body:  # CONNECT, whose body has no meaning (RFC 9110, 9.3.6)
            self._refuse("malformed", 400, InvalidRequest("CONNECT has no body"))
        else:
            self._wait_for("body_time", self.body_timeout_ms)
            super().on_headers_complete()
            self.cycle.keep_alive = self.cycle.keep_alive and not upgrades

    def _should_upgrade(self) -> bool:
        return False

    def _start_asgi_task(self, cycle: Any, app: Any) -> None:
        self._answered = cycle
        if self._reading is not None and not self._in_head:
            # It, or one behind it, waited for an answer, and its body was not read meanwhile.
            self._wait_for("body_time", self.body_timeout_ms)
        super()._start_asgi_task(cycle, app)

    def on_body(self, body: bytes) -> None:
        """As uvicorn's, unless the request was refused."""
        self._head_bytes = 0
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole, or only its head that is to be read again."""
        if self._is_passed_over:
            return
        self._in_head, self._head_bytes = True, 0
        self._stop_waiting()
        if self._is_refused:
            return
        if self.cycle.response_complete:  # and uvicorn waits for no other one: its clock ended when more of this came
            self._wait_for("head_time", self.head_timeout_ms)
        super().on_message_complete()

    def pause_writing(self) -> None:
        """The client does not take what it is sent."""
        super().pause_writing()
        if self._writing is None:
            self._writing = self.loop.call_later(self.unread_timeout_ms / 1000, self._is_unread)

    def resume_writing(self) -> None:
        """It does again."""
        if self._writing is not None:
            self._writing.cancel()
            self._writing = None
        super().resume_writing()

    def _wait_for(self, reason: str, timeout_ms: int) -> None:
        self._stop_waiting()
        self._reading = self.loop.call_later(timeout_ms / 1000, self._is_late, reason)

    def _stop_waiting(self) -> None:
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None

    def _is_late(self, reason: str) -> None:
        self._reading = None
        cycle = self.cycle
        busy = cycle is not None and not cycle.response_complete
        if (reason == "head_time" and busy) or self.pipeline:
            # What comes behind a request that is being answered waits for its answer, and may not end it.
            self._wait_for(reason, self.head_timeout_ms if reason == "head_time" else self.body_timeout_ms)
        elif reason == "body_time" and cycle.response_started:
            # It has its answer, or a part (a body that was refused unread): there is no second one to it.
            self._close(reason)
        elif reason == "head_time" and self._head_bytes == 0:
            self._close(reason)  # nothing was asked, so nothing is answered
        else:
            self._refuse(reason, 408, InvalidRequest("the request did not arrive in time"))

    def _is_unread(self) -> None:
        self._writing = None
        self.ended("unread")
        self.transport.abort()  # what waits to be taken is thrown away with the connection

    def _close(self, reason: str) -> None:
        self.ended(reason)
        self.transport.abort()

    def _refuse_head(self) -> None:
        self._refuse("head_bytes", 431, InvalidRequest(f"the head is longer than {self.head_bytes_max} bytes"))

    def _tell_left(self) -> None:
        """Requests under way on this connection end as if their client had left."""
        self.pipeline.clear()
        for cycle in (self._answered, self.cycle):
            if cycle is not None and not cycle.response_complete:
                cycle.disconnected = True
                cycle.message_event.set()

    def _refuse(self, reason: str, status: int, error: HeadraceError) -> None:
        """Answer in OpenAI's shape and close; requests under way end. Close only, in the middle of an answer."""
        if self._is_refused:
            return
        self._is_refused = True
        self._stop_waiting()
        waiting = None if self._answered is None or self._answered.response_complete else self._answered
        if waiting is not None and waiting.response_started:
            self._tell_left()
            self._close(reason)
            return
        self.ended(reason)
        self._tell_left()
        body = json.dumps(render_error(error)).encode()
        head = f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        retry = f"retry-after: {RETRY_AFTER_MS // 1000}\r\n" if status == 503 else ""
        transport = self.transport
        is_head = waiting is not None and waiting.scope["method"] == "HEAD"  # which is answered without a body
        transport.write((head + retry + "connection: close\r\n\r\n").encode() + (b"" if is_head else body))
        if reason == "connections" or not transport.can_write_eof():
            transport.close()
            return
        # What still comes is thrown away for a moment: closing at once would reset the connection of a client that is
        # sending, and take the answer from it.
        self.flow.resume_reading()
        transport.write_eof()
        self._lingering = self.loop.call_later(HTTP_LINGER_MS / 1000, transport.abort)
