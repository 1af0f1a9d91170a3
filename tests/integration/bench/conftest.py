"""HTTP servers on free ports, one of them small, OpenAI-compatible and without any knowledge of Headrace."""

import asyncio
import json
import re
import signal
import socket
import sys
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

import pytest
import uvicorn

BLOCK_TOKENS = 16
MODEL = "small"


@asynccontextmanager
async def http_served(app):
    """The app's base URL. A caller who is early waits in the socket's queue: nobody has to ask whether it has begun."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        server = uvicorn.Server(uvicorn.Config(app, log_level="error", lifespan="off"))
        serving = asyncio.create_task(server.serve(sockets=[listening]))
        try:
            yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        finally:
            server.should_exit = True
            await serving


@dataclass
class OpenAiServer:
    """An ASGI app: a list of models, and both kinds of completions as streams. Whatever else is asked for is not found.

    extras: fields beside OpenAI's that it takes; others are refused, as OpenAI's own servers do.
    """

    extras: frozenset[str] = frozenset({"ignore_eos"})
    tells_cached: bool = False  # as vLLM does: for answers that found something
    reasons: bool = False  # a chat's text comes as reasoning
    output_tokens_max: int = 10**9  # it ends its answers there
    asked: list[tuple[str, dict]] = field(default_factory=list)  # paths and bodies, in order
    keys: set[str] = field(default_factory=set)  # that requests came with
    _seen: set[tuple] = field(default_factory=set)

    FIELDS = frozenset({"model", "prompt", "messages", "max_tokens", "temperature", "stream", "stream_options"})

    async def __call__(self, scope, receive, send):
        path = scope["path"]
        body = await _body_of(receive)
        self.asked.append((path, body))
        self.keys.add(dict(scope["headers"]).get(b"authorization", b"").decode())
        if path == "/v1/models":
            await _reply(send, 200, {"object": "list", "data": [{"id": MODEL, "object": "model"}]})
        elif path not in ("/v1/completions", "/v1/chat/completions"):
            await _reply(send, 404, {"error": {"message": "no such page", "code": "not_found"}})
        elif unknown := sorted(set(body) - self.FIELDS - self.extras):
            message = f"Unrecognized request argument supplied: {unknown[0]}"
            await _reply(send, 400, {"error": {"message": message, "code": "unknown_field"}})
        else:
            await self._stream(send, body, is_chat="chat" in path)

    async def _stream(self, send, body, *, is_chat):
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"text/event-stream")]})
        if is_chat:
            await _event(send, {"choices": [{"delta": {"role": "assistant", "content": ""}}]})
        count = min(body["max_tokens"], self.output_tokens_max)
        for _ in range(count):
            text = {"delta": {"reasoning_content" if self.reasons else "content": "a "}} if is_chat else {"text": "a "}
            await _event(send, {"choices": [text]})
        await _event(send, {"choices": [{"delta": {}, "finish_reason": "length"} if is_chat else {"text": ""}]})
        await _event(send, {"choices": [], "usage": self._usage(body, count)})
        await send({"type": "http.response.body", "body": b"data: [DONE]\n\n"})

    def _usage(self, body, completion_tokens):
        """A word of a chat is a token here."""
        prompt = tuple(body["messages"][0]["content"].split() if "messages" in body else body["prompt"])
        ends = range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS)
        cached = max((end for end in ends if prompt[:end] in self._seen), default=0)
        self._seen.update(prompt[:end] for end in ends)
        details = {"cached_tokens": cached} if self.tells_cached and cached else None
        counts = {"prompt_tokens": len(prompt), "completion_tokens": completion_tokens}
        return {**counts, "prompt_tokens_details": details}


async def _body_of(receive):
    body, more = b"", True
    while more:
        message = await receive()
        body += message.get("body", b"")
        more = message.get("more_body", False)
    return json.loads(body) if body else {}


async def _event(send, chunk):
    data = b"data: " + json.dumps(chunk).encode() + b"\n\n"
    await send({"type": "http.response.body", "body": data, "more_body": True})


async def _reply(send, status, body):
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


async def run_program(*command, interrupt_after=None):
    """(exit code, what it printed, what it said beside). interrupt_after: Ctrl-C once it has said what matches."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, *map(str, command), stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    said = ""
    try:
        if interrupt_after is not None:
            while not re.search(interrupt_after, said):
                line = await process.stderr.readline()
                assert line, said
                said += line.decode()
            process.send_signal(signal.SIGINT)
        printed, rest = await process.communicate()
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return process.returncode, printed.decode(), said + rest.decode()


@pytest.fixture(scope="session")
def run_python():
    """`run_program`."""
    return run_program


@pytest.fixture(scope="session")
def bench_serve():
    """Runs `headrace bench serve --json` with these options: (exit code, JSON, what was said)."""

    async def run(*options, interrupt_after=None):
        command = ("-m", "headrace.admin.cli", "bench", "serve", "--json", *options)
        code, printed, said = await run_program(*command, interrupt_after=interrupt_after)
        return code, json.loads(printed), said

    return run


@pytest.fixture(scope="session")
def serve_http():
    """`http_served`."""
    return http_served


@pytest.fixture(scope="session")
def make_openai_server():
    """`OpenAiServer`."""
    return OpenAiServer
