"""One message of a streamed gRPC answer on its way to a client that may not read."""

import asyncio
from typing import Any

from headrace.core.errors import DeadlineExceeded
from headrace.core.front_door_limits import UNREAD_TIMEOUT_MS


async def write_message(context: Any, message: Any, *, timeout_ms: int = UNREAD_TIMEOUT_MS) -> None:
    """Send a message; waits while the client's window is full. Raises DeadlineExceeded when it stays full for so long:
    a client without a deadline of its own would hold its place on a worker for ever.

    Close what makes the messages before the call is ended with that error: its status, too, waits for the client, or
    for its connection to end.
    """
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            await context.write(message)
    except TimeoutError:
        raise DeadlineExceeded("the client takes nothing of its answer") from None
