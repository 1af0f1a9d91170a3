"""The virtual-time loop itself: time jumps, deadlocks fail, threads end when they say."""

import asyncio
import time

import pytest
from virtual_loop import Deadlocked, run_virtual

from headrace.core.clock import Deadline
from headrace.core.errors import DeadlineExceeded
from headrace.transfer.run_in_thread import run_in_thread


def test_an_hour_of_sleep_takes_no_time():
    """Fails when the loop really waits."""
    started_s = time.monotonic()

    async def main(clock):
        before_s = clock.now_s()
        await asyncio.sleep(3600)
        return clock.now_s() - before_s

    assert run_virtual(main, seed=1) == pytest.approx(3600)
    assert time.monotonic() - started_s < 5


def test_a_wait_that_nothing_ends_is_a_deadlock():
    """Fails (by hanging) when the loop waits for ever as a real one would."""

    async def main(clock):
        await asyncio.Event().wait()

    with pytest.raises(Deadlocked):
        run_virtual(main, seed=1)


def test_deadlines_run_on_virtual_time():
    """Fails when Deadline and the loop disagree about now."""

    async def main(clock):
        deadline = Deadline.after(10, clock)
        with pytest.raises(DeadlineExceeded):
            async with deadline.scope("nothing"):
                await asyncio.sleep(11)
        assert deadline.left_s() == 0

    run_virtual(main, seed=1)


def test_cancelled_thread_work_is_waited_for():
    """Fails when `run_in_thread` hands control back while the thread still writes."""

    async def main(clock):
        done = []
        task = asyncio.create_task(run_in_thread(done.append, "written"))
        await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert done == ["written"]

    run_virtual(main, seed=3)


def test_real_threads_are_waited_for_too():
    """The same on the real loop: twice cancelled, and still the thread is done first."""

    async def main():
        done = []

        def work():
            time.sleep(0.05)
            done.append("written")

        task = asyncio.create_task(run_in_thread(work))
        await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert done == ["written"]

    asyncio.run(main())
