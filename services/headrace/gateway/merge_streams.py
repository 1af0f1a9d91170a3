"""Several streams become one, in the order in which their events come."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import TypeVar

from headrace.core.limits import CHOICE_EVENTS_MAX

Event = TypeVar("Event")


async def merge_streams(streams: Sequence[AsyncGenerator[Event, None]]) -> AsyncGenerator[Event, None]:
    """Yield every event of every stream; each stream's own order is kept.

    The first error of any stream ends all of them and is raised. Closing the merged stream closes the others before it
    returns. A reader that is slow holds the streams back after `CHOICE_EVENTS_MAX` events.
    """
    if len(streams) == 1:  # no task, no queue: the common case costs nothing
        async with aclosing(streams[0]) as only:
            async for event in only:
                yield event
        return
    queue: asyncio.Queue[Event | _Ended] = asyncio.Queue(CHOICE_EVENTS_MAX)
    tasks = [asyncio.create_task(_pump(stream, queue)) for stream in streams]
    open_streams = len(streams)
    try:
        while open_streams:
            item = await queue.get()
            if not isinstance(item, _Ended):
                yield item
                continue
            if item.error is not None:
                raise item.error
            open_streams -= 1
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@dataclass(frozen=True, slots=True)
class _Ended:
    """A stream has ended, well or not."""

    error: Exception | None


async def _pump(stream: AsyncGenerator[Event, None], queue: "asyncio.Queue[Event | _Ended]") -> None:
    try:
        async with aclosing(stream):
            async for event in stream:
                await queue.put(event)
    except Exception as error:  # not handled here: raised again by the one who reads
        await queue.put(_Ended(error))
    else:
        await queue.put(_Ended(None))
