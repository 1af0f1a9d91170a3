"""A request's events as OpenAI's HTTP API answers them: whole, or as server-sent events while they come.

Shapes are `wire/openai_reply.py`'s; here is when what is sent, and what is kept of the events until then.
"""

import asyncio
import json
import logging
from collections.abc import AsyncGenerator
from concurrent.futures import Executor
from contextlib import aclosing
from typing import Any

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from headrace.core.errors import HeadraceError
from headrace.core.generation import Usage, WorkerId
from headrace.core.limits import CHOICES_MAX
from headrace.gateway.accepted import Accepted
from headrace.gateway.route_request import ChoiceFinished, ChoiceToken
from headrace.gateway.service import GatewayEvent
from headrace.gateway.until_disconnect import ClientDisconnected, until_disconnect
from headrace.wire.openai_body import OpenAiRequest
from headrace.wire.openai_reply import (
    ChoiceText,
    Json,
    ReplyHead,
    add_usage,
    join_usage,
    render_chunk,
    render_error,
    render_reply,
    render_running_usage,
    render_usage_chunk,
    render_workers,
    token_text,
)

log = logging.getLogger(__name__)

NumberedEvent = tuple[int, GatewayEvent]  # (index of the prompt in the request, event)


async def read_opening(events: AsyncGenerator[NumberedEvent, None]) -> list[NumberedEvent]:
    """Events up to the first token or result: until then a failure can still be an HTTP status."""
    opening = []
    async for numbered in events:
        opening.append(numbered)
        if not isinstance(numbered[1], Accepted):
            break
    return opening


async def collect_reply(
    events: AsyncGenerator[NumberedEvent, None],
    wanted: OpenAiRequest,
    *,
    chat: bool,
    created_unix_s: int,
    thread: Executor,
) -> bytes:
    """Read a whole answer and write it as JSON: one with log-probabilities, which may be large, in `thread`."""
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

    def write() -> bytes:
        ordered = [choices[i] for i in sorted(choices)]
        return _encode_in_pieces(render_reply(reply.head, ordered, reply.usage(), reply.workers())).encode()

    return await asyncio.get_running_loop().run_in_executor(thread, write) if wanted.logprobs else write()


class _Reply:
    """What a reply's head and tail need: names, usages and workers, taken from the events as they pass."""

    def __init__(self, wanted: OpenAiRequest, *, chat: bool, created_unix_s: int) -> None:
        self._wanted = wanted
        self._choices = wanted.requests[0].choices
        self._chat = chat
        self._created_unix_s = created_unix_s
        self._head: ReplyHead | None = None
        self._finished: dict[int, ChoiceFinished] = {}
        self._prompt_tokens = 0
        self._completion_tokens = 0

    def take(self, prompt: int, event: GatewayEvent) -> None:
        match event:
            case Accepted(request_id=request_id, model=model, prompt_tokens=prompt_tokens):
                self._head = self._head or ReplyHead(request_id, model, self._created_unix_s, self._chat)
                self._prompt_tokens += prompt_tokens
            case ChoiceFinished():
                self._finished[self.index_of(prompt, event)] = event
            case ChoiceToken():
                self._completion_tokens += 1

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

    def usage_of_piece(self) -> Json:
        """What each piece of a stream says of usage, where the client asked for any: null until the end, as OpenAI has
        it, or the counts so far."""
        if self._wanted.running_usage:
            return {"usage": render_running_usage(self._prompt_tokens, self._completion_tokens)}
        return {"usage": None} if self._wanted.include_usage else {}

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
        self._text_offsets: dict[int, int] = {}  # of each choice that has begun
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
                await _send_data(send, _encode(tail))
        except Exception as error:
            if not isinstance(error, HeadraceError):
                log.exception("request %s failed after its first token", self._reply.head.request_id)
            await _send_data(send, _encode(render_error(error)))
        await _send_data(send, b"[DONE]")
        await send({"type": "http.response.body", "body": b"", "more_body": False})

    async def _send_event(self, send: Send, prompt: int, event: GatewayEvent) -> None:
        self._reply.take(prompt, event)
        if isinstance(event, Accepted):
            return
        index = self._reply.index_of(prompt, event)
        first = index not in self._text_offsets
        text_offset = self._text_offsets.setdefault(index, 0)
        if isinstance(event, ChoiceFinished):
            done = event.finished
            chunk = render_chunk(self._reply.head, index=index, text=done.text, finish_reason=done.reason, first=first)
        elif event.delta.text or first or self._wanted.logprobs:
            delta = event.delta if self._wanted.logprobs else None
            text = event.delta.text
            chunk = render_chunk(
                self._reply.head, index=index, text=text, delta=delta, text_offset=text_offset, first=first
            )
            self._text_offsets[index] += len(token_text(event.delta))
        else:
            return  # half a character or a possible stop string: nothing to show yet
        await _send_data(send, _encode(chunk | self._reply.usage_of_piece()))


def _encode(value: Json) -> bytes:
    return _dumps(value).encode()


def _encode_in_pieces(value: Any) -> str:
    """As `_dumps`, an element of a long list at a time: in a thread, one call for all of it would keep the event loop
    waiting as long as it lasts, as no other Python code runs meanwhile."""
    if isinstance(value, dict):
        return "{" + ",".join(f"{_dumps(name)}:{_encode_in_pieces(each)}" for name, each in value.items()) + "}"
    if isinstance(value, list):
        encode = _encode_in_pieces if len(value) <= CHOICES_MAX else _dumps
        return "[" + ",".join(map(encode, value)) + "]"
    return _dumps(value)


_dumps = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode


async def _send_data(send: Send, data: bytes) -> None:
    await send({"type": "http.response.body", "body": b"data: " + data + b"\n\n", "more_body": True})
