"""What is done for a caller ends with it, and for nobody else's end."""

import asyncio
import signal
import sys
from collections.abc import AsyncIterator, Callable

import pytest

from headrace_cluster.caller_presence import CallerGone, CallersPresent, Presence

CALLER = """
import asyncio
from headrace_cluster.caller_presence import Presence
async def main():
    print(await Presence("127.0.0.1").address(), flush=True)
    await asyncio.Event().wait()
asyncio.run(main())
"""


async def count(seconds: float = 0.01) -> AsyncIterator[int]:
    number = 0
    while True:
        await asyncio.sleep(seconds)
        number += 1
        yield number


async def until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not holds():  # noqa: ASYNC110 (the far side of a socket tells nobody here)
            await asyncio.sleep(0.01)


async def take(callers: CallersPresent, address: str, items: AsyncIterator[int], num: int) -> list[int]:
    """Up to `num` items; fewer when the caller goes."""
    taken: list[int] = []
    try:
        async for item in callers.while_present(address, items):
            taken.append(item)
            if len(taken) == num:
                break
    except CallerGone:
        taken.append(-1)
    return taken


async def test_killing_a_caller_ends_its_calls_and_no_other_callers():
    """Fails when a stream runs on for a process that is dead, or one caller's end is everybody's."""
    callers, other = CallersPresent(), Presence("127.0.0.1")
    caller = await asyncio.create_subprocess_exec(sys.executable, "-c", CALLER, stdout=asyncio.subprocess.PIPE)
    try:
        address = (await caller.stdout.readline()).decode().strip()
        calls = [asyncio.create_task(take(callers, address, items, 10**6)) for items in (count(), count(), count(60))]
        others = [asyncio.create_task(take(callers, at, count(), 100)) for at in (await other.address(), "")]
        await until(lambda: address in callers._callers and callers._callers[address].calls == 3)
        await asyncio.sleep(0.2)
        assert not any(call.done() for call in calls)
        caller.send_signal(signal.SIGKILL)
        async with asyncio.timeout(60):
            ended = await asyncio.gather(*calls)
            assert [taken[-1] for taken in ended] == [-1, -1, -1]
            assert await asyncio.gather(*others) == [list(range(1, 101))] * 2
    finally:
        if caller.returncode is None:
            caller.kill()
        await caller.wait()
        await other.close()
        callers.close()


async def test_a_caller_that_goes_while_the_consumer_has_control_is_noticed_at_the_next_item():
    """Fails when the end fires into whoever consumes the items."""
    callers, caller = CallersPresent(), Presence("127.0.0.1")
    address = await caller.address()
    items = callers.while_present(address, count())
    assert await anext(items) == 1
    await until(lambda: bool(caller._writers))  # it is followed
    await caller.close()
    await until(lambda: callers._callers[address].gone)
    with pytest.raises(CallerGone):
        await anext(items)


async def test_a_timeout_of_the_call_itself_stays_what_it_is_and_no_connection_is_left_behind():
    """Fails when a call's own timeout is taken for its caller's end, or a caller is followed after its last call."""

    async def fails() -> AsyncIterator[int]:
        raise TimeoutError("the call's own")
        yield 0

    callers, caller = CallersPresent(), Presence("127.0.0.1")
    address = await caller.address()
    with pytest.raises(TimeoutError, match="the call's own"):
        await anext(callers.while_present(address, fails()))
    assert await take(callers, address, count(), 3) == [1, 2, 3]
    await until(lambda: not callers._callers)
    await caller.close()


async def test_a_caller_that_cannot_be_reached_is_served(caplog: pytest.LogCaptureFixture):
    """Fails when a network that lets nobody connect back makes every call fail."""
    callers = CallersPresent()
    assert await take(callers, "127.0.0.1:1", count(), 20) == list(range(1, 21))
    assert "cannot be followed" in caplog.text
