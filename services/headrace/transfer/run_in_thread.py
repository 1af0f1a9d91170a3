"""Blocking work off the event loop, whose end is always waited for.

`asyncio.to_thread` returns at once when cancelled and leaves the thread running; a copy that runs on into pool blocks
or arena slots that were given back meanwhile is a wrong answer for somebody else. Here the caller gets control back
only when the thread is done with its buffers.
"""

import asyncio
from collections.abc import Callable
from typing import TypeVar

Result = TypeVar("Result")


async def run_in_thread(function: Callable[..., Result], *args: object) -> Result:
    """Run `function(*args)` in the loop's thread pool. A cancellation is raised after the thread has finished."""
    work = asyncio.get_running_loop().run_in_executor(None, function, *args)
    cancelled: asyncio.CancelledError | None = None
    while not work.done():
        try:
            await asyncio.wait([work])
        except asyncio.CancelledError as error:
            cancelled = error
    if cancelled is not None:
        work.exception()  # looked at, so that it is not reported as never retrieved
        raise cancelled
    return work.result()
