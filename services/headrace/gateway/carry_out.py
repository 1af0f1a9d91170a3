"""An operator's change is carried out to its end, and written down, also when whoever asked for it leaves meanwhile:
one that was begun is done on some holders, and must neither be left there nor missing in the audit log."""

import asyncio
import logging
from collections.abc import Coroutine
from typing import Any, TypeVar

from headrace.core.errors import HeadraceError
from headrace.transfer.run_in_thread import until_done

log = logging.getLogger(__name__)

Result = TypeVar("Result")


async def carry_out(change: Coroutine[Any, Any, Result]) -> Result:
    """Await it. Cancelling this waits for its end, which must be bounded, and then raises CancelledError. If the change
    failed, the log says how: nobody else is left to be told."""
    changing = asyncio.create_task(change)
    try:
        return await until_done(changing)
    except asyncio.CancelledError:
        if not changing.cancelled() and (failed := changing.exception()) is not None:
            is_told = isinstance(failed, HeadraceError)  # others are bugs, of which the stack is wanted
            name = getattr(change, "__qualname__", "a change")
            log.warning("%s failed after its caller left: %s", name, failed, exc_info=None if is_told else failed)
        raise
