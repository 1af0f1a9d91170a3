"""The HTTP protocol of Serve's proxies with bounds on what a stranger's connection may cost, before any key is seen.

Owns connections, head, and the times of head, body and reading; the body's size is the gateway's to refuse, since
it answers that with a 413 (`gateway/openai_http.py:read_body`). Uvicorn has none of these bounds: it keeps headers
without end, and waits for ever for a body, or for a client that does not read. What is beyond a bound is answered where
HTTP has an answer for it, its connection is closed, and `ended` is told why.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any, cast

from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from headrace.core.errors import HeadraceError, InvalidRequest, Overloaded
from headrace.core.front_door_limits import (
    HTTP_BODY_TIMEOUT_MS,
    HTTP_CONNECTIONS_MAX,
    HTTP_HEAD_BYTES_MAX,
    HTTP_HEAD_TIMEOUT_MS,
    HTTP_LINGER_MS,
    UNREAD_TIMEOUT_MS,
)
from headrace.core.limits import RETRY_AFTER_MS
from headrace.wire.openai_reply import render_error

# Why a connection was ended.
REASONS = ("connections", "head_bytes", "head_time", "body_time", "unread")


class BoundedHttp(HttpToolsProtocol):
    """One connection. Bounds are class attributes, so that a test may set smaller ones in a class of its own."""

    connections_max = HTTP_CONNECTIONS_MAX
    head_bytes_max = HTTP_HEAD_BYTES_MAX
    head_timeout_ms = HTTP_HEAD_TIMEOUT_MS
    body_timeout_ms = HTTP_BODY_TIMEOUT_MS
    unread_timeout_ms = UNREAD_TIMEOUT_MS
    ended: Callable[[str], None] = staticmethod(lambda reason: None)

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._head_bytes = 0
        self._in_head = True
        self._is_refused = False
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
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parse what has come, unless the head grows too long."""
        if self._is_refused:
            return
        if self._in_head:
            if self._head_bytes == 0 and self._reading is None:  # the next request of a connection that was kept
                self._wait_for("head_time", self.head_timeout_ms)
            self._head_bytes += len(data)
        super().data_received(data)
        # After the parser: a body may have come with its head, and only an unfinished head counts.
        if self._in_head and self._head_bytes > self.head_bytes_max:
            self._refuse_head()

    def on_message_begin(self) -> None:
        """A request begins: its head is to come."""
        super().on_message_begin()
        self._in_head = True

    def on_headers_complete(self) -> None:
        """The head is whole: its body is to come."""
        head_bytes = sum(len(name) + len(value) for name, value in self.headers) + len(self.url)
        self._in_head, self._head_bytes = False, 0
        if head_bytes > self.head_bytes_max:  # all of it came at once
            self._refuse_head()
            return
        self._wait_for("body_time", self.body_timeout_ms)
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """As uvicorn's, unless the head was refused."""
        if not self._is_refused:
            super().on_body(body)

    def on_message_complete(self) -> None:
        """The request is whole."""
        self._in_head = True
        self._stop_waiting()
        if not self._is_refused:
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
        elif cycle is not None and busy and cycle.response_started:
            # The answer to it has begun (a body that was refused unread): what is missing is not waited for.
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
        if not self._is_refused:
            self._refuse("head_bytes", 431, InvalidRequest(f"the head is longer than {self.head_bytes_max} bytes"))

    def _refuse(self, reason: str, status: int, error: HeadraceError) -> None:
        """Answer in OpenAI's shape and close. A request under way on this connection ends as if its client had left."""
        self._is_refused = True
        self._stop_waiting()
        self.ended(reason)
        if self.cycle is not None and not self.cycle.response_complete:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        body = json.dumps(render_error(error)).encode()
        head = f"HTTP/1.1 {status} \r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
        retry = f"retry-after: {RETRY_AFTER_MS // 1000}\r\n" if status == 503 else ""
        transport = cast(asyncio.Transport, self.transport)
        transport.write((head + retry + "connection: close\r\n\r\n").encode() + body)
        if reason == "connections" or not transport.can_write_eof():
            transport.close()
            return
        # What still comes is thrown away for a moment: closing at once would reset the connection of a client that is
        # sending, and take the answer from it.
        self.flow.resume_reading()
        transport.write_eof()
        self._lingering = self.loop.call_later(HTTP_LINGER_MS / 1000, transport.abort)
