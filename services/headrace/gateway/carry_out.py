"""An operator's change is carried out to its end, and written down, also when whoever asked for it leaves meanwhile:
one that was begun is done on some holders, and must neither be left there nor missing in the audit log."""

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


async def carry_out(change: Coroutine[Any, Any, Result]) -> Result:
    """Await it. Cancelling this waits for its end, which must be bounded, and then raises CancelledError."""
    changing = asyncio.create_task(change)
    left: asyncio.CancelledError | None = None
    while not changing.done():
        try:
            await asyncio.wait([changing])
        except asyncio.CancelledError as cancelled:
            left = cancelled
    if left is not None:
        raise left
    return changing.result()
