"""How processes log: one line a record, which part and which request it is about, in both formats."""

import asyncio
import io
import json
import logging
import subprocess
import sys
from collections.abc import AsyncGenerator, Iterator
from datetime import datetime

import pytest

from headrace.telemetry.logs import set_up_logs
from headrace.telemetry.request_context import (
    NO_REQUEST,
    RequestContext,
    current,
    incoming_context,
    outgoing_metadata,
    stream_within,
    within,
    within_callers_trace,
)

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
log = logging.getLogger("headrace.tests")


@pytest.fixture
def written() -> Iterator[io.StringIO]:
    """What this process logs, set up by the test; the root logger is as before afterwards."""
    root, ours = logging.getLogger(), logging.getLogger("headrace")
    before, level = list(root.handlers), ours.level
    yield io.StringIO()
    root.handlers[:] = before
    ours.setLevel(level)


def test_a_json_record_is_one_object_on_one_line_whatever_is_in_it(written):
    """Fails when a line break in a message or a traceback makes two lines, or a field is missing."""
    set_up_logs("json", part="worker", instance_id="w1", stream=written)
    with within(RequestContext(request_id="r7", traceparent=TRACEPARENT)):
        try:
            raise ValueError("two\nlines")
        except ValueError:
            log.exception("it failed:\n%s", "twice")
    (line,) = written.getvalue().splitlines()
    entry = json.loads(line)
    assert datetime.fromisoformat(entry.pop("time")).utcoffset() is not None
    assert "ValueError: two\nlines" in entry.pop("error")
    assert entry == {
        "level": "ERROR",
        "logger": "headrace.tests",
        "message": "it failed:\ntwice",
        "part": "worker",
        "id": "w1",
        "request_id": "r7",
        "trace_id": "0af7651916cd43dd8448eb211c80319c",
    }


def test_text_from_outside_cannot_look_like_another_record(written):
    """Fails when a message that quotes a caller can forge a line."""
    set_up_logs("text", part="gateway", instance_id="g1", stream=written)
    log.warning("unknown model %s", "x\n2026-01-01T00:00:00.000Z ERROR forged\x1b[2J")
    (line,) = written.getvalue().splitlines()
    assert " WARNING headrace.tests [gateway g1] unknown model x\\n2026" in line
    assert "\x1b" not in line


def test_a_text_line_names_its_request_and_no_other(written):
    """Fails when the id is left out, or stays behind for what has none."""
    set_up_logs("text", part="store node", instance_id="n1", stream=written)
    with within(RequestContext(request_id="r7")):
        log.info("within")
    log.info("after")
    first, second = written.getvalue().splitlines()
    assert first.endswith("[store node n1] [request r7] within")
    assert second.endswith("[store node n1] after")


def test_setting_up_again_replaces_and_libraries_are_heard_from_warnings_on(written):
    """Fails when each record is written twice, or a library's information drowns ours."""
    set_up_logs("text", part="worker", stream=io.StringIO())
    set_up_logs("json", part="worker", stream=written)
    log.info("ours")
    logging.getLogger("somelibrary").info("chatter")
    logging.getLogger("somelibrary").warning("worth a line")
    assert [json.loads(line)["message"] for line in written.getvalue().splitlines()] == ["ours", "worth a line"]


async def test_two_streams_read_in_turns_keep_their_requests_apart():
    """Fails when a generator sees the request of whoever reads it, or leaves its own behind there."""

    async def ids() -> AsyncGenerator[str, None]:
        try:
            for _ in range(2):
                yield current().request_id
                task = asyncio.create_task(inherited())
                yield await task
        finally:
            ended.append(current().request_id)

    async def inherited() -> str:
        return current().request_id

    ended: list[str] = []
    streams = {name: stream_within(RequestContext(request_id=name), ids()) for name in ("a", "b")}
    for _ in range(3):
        for name, stream in streams.items():
            assert await asyncio.create_task(anext(stream)) == name
            assert current() == NO_REQUEST
    for stream in streams.values():
        await stream.aclose()
    assert ended == ["a", "b"]


def test_calls_to_other_parts_carry_request_and_trace_only_where_there_is_a_trace():
    """Fails when the far side cannot tell what a call is for, or every call pays for it."""
    assert outgoing_metadata() is None
    with within(RequestContext(request_id="r7")):
        assert outgoing_metadata() is None
    context = RequestContext(request_id="r7", traceparent=TRACEPARENT)
    with within(context):
        assert incoming_context(outgoing_metadata()) == context


def test_a_store_nodes_process_logs_as_its_setting_says():
    """Fails when the process sets its logging up in another way, or before it has read the setting."""
    command = [sys.executable, "-m", "headrace.store.service", "--log-format", "json", "--node-id", "n7"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 2
    entry = json.loads(done.stderr.splitlines()[-1])
    assert (entry["level"], entry["part"], entry["id"]) == ("ERROR", "store node", "n7")
    assert "redis_url" in entry["message"]


async def test_what_a_client_says_of_its_trace_is_kept_only_when_it_is_a_trace():
    """Fails when free text of a caller's goes into log lines and on to other parts."""

    async def events():
        yield current().traceparent

    good = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    for said, kept in ((good, good), ("00-ANY TEXT-b-01", ""), (good + "-more", ""), ("", ""), (None, "")):
        assert [event async for event in within_callers_trace(said, events())] == [kept]
