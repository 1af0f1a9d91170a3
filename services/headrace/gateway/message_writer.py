"""The messages of a streamed gRPC answer on their way to a client that may not read."""

import asyncio
from typing import Any

from headrace.core.errors import DeadlineExceeded
from headrace.core.front_door_limits import UNREAD_TIMEOUT_MS


class MessageWriter:
    """Writes the messages of one call of grpc.aio."""

    def __init__(self, context: Any, *, timeout_ms: int = UNREAD_TIMEOUT_MS) -> None:
        self._context = context
        self._timeout_s = timeout_ms / 1_000
        self._has_begun = False

    async def write(self, message: Any) -> None:
        """Send a message; waits while the client's window is full. Raises DeadlineExceeded when it stays full for so
        long: a client without a deadline of its own would hold its place on a worker for ever.

        Close what makes the messages before the call is ended with that error: its status, too, waits for the client,
        or for its connection to end.
        """
        try:
            async with asyncio.timeout(self._timeout_s):
                if not self._has_begun:
                    # By itself gRPC sends the answer's head with the first message, and takes no status while it waits.
                    await self._context.send_initial_metadata(())
                    self._has_begun = True
                await self._context.write(message)
        except TimeoutError:
            raise DeadlineExceeded("the client takes nothing of its answer") from None
