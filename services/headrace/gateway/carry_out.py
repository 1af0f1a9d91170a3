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
    """Await it. Cancelling this waits for its end, which must be bounded, and then raises CancelledError. How it ended
    is in its audit line; a bug is logged with its stack, since nobody is left who would see it."""
    changing = asyncio.create_task(change)
    try:
        return await until_done(changing)
    except asyncio.CancelledError:
        failed = None if changing.cancelled() else changing.exception()
        if failed is not None and not isinstance(failed, HeadraceError):
            log.error("a change failed after its caller had left", exc_info=failed)
        raise
