"""Deadlines: made once, passed down, and typed when they pass."""

import asyncio

import pytest
from hand_clock import HandClock

from headrace.core.clock import Deadline, SystemClock
from headrace.core.errors import DeadlineExceeded


async def test_a_wait_past_its_deadline_says_what_it_waited_for():
    with pytest.raises(DeadlineExceeded, match="a slow peer"):
        async with Deadline.after(0.01, SystemClock()).scope("a slow peer"):
            await asyncio.sleep(30)


async def test_a_wait_within_its_deadline_is_left_alone():
    async with Deadline.after(3_600, SystemClock()).scope("nothing"):
        await asyncio.sleep(0)


async def test_cancellation_from_outside_passes_through_untouched():
    """Fails if a cancelled request were reported as a missed deadline."""

    async def wait():
        async with Deadline.after(30, SystemClock()).scope("a peer"):
            await asyncio.sleep(30)

    task = asyncio.create_task(wait())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def test_capping_never_moves_a_deadline_later():
    clock = HandClock()
    near = Deadline.after(1, clock)
    assert near.capped(100).at_s == near.at_s
    assert near.capped(0.1).at_s < near.at_s
    clock.seconds += 2
    assert near.left_s() == 0
