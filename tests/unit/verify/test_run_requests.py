"""Requests that run together: steps wait until all have met, and for no longer than anybody is there."""

import asyncio
import threading
from types import SimpleNamespace

import pytest

from headrace.verify.run_requests import _meet


async def test_who_gives_up_before_all_have_met_leaves_no_step_waiting_and_no_answer_under_way():
    """Fails when Ctrl-C leaves a thread at a gate that nobody will open: the program would not end."""
    nobody_yet = SimpleNamespace(load=lambda: SimpleNamespace(running=0, waiting=0))
    may_go, begun, ended = threading.Event(), asyncio.Event(), asyncio.Event()

    async def answer():
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    meeting = asyncio.create_task(_meet(nobody_yet, [answer()], may_go.set))
    await begun.wait()
    assert not may_go.is_set()
    meeting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await meeting
    assert (may_go.is_set(), ended.is_set()) == (True, True)
