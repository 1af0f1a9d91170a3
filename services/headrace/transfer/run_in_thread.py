"""Work whose end is always waited for: blocking calls in threads, and giving things back while being cancelled.

`asyncio.to_thread` returns at once when cancelled and leaves the thread running; a copy that runs on into pool blocks
or arena slots that were given back meanwhile is a wrong answer for somebody else. Here the caller gets control back
only when the work is done, and the cancellation after that.
"""

import asyncio
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


async def run_in_thread(function: Callable[..., Result], *args: object) -> Result:
    """Run `function(*args)` in the loop's thread pool. A cancellation is raised after the thread has finished."""
    return await until_done(asyncio.get_running_loop().run_in_executor(None, function, *args))


async def finish(work: Coroutine[Any, Any, Result]) -> Result:
    """Run a coroutine that cancellation must not cut short; it must be bounded in time by itself."""
    return await until_done(asyncio.ensure_future(work))


async def until_done(work: asyncio.Future[Result]) -> Result:
    """Wait for work that goes on whatever happens to the caller; a cancellation is raised after it, and it keeps its
    result."""
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
