"""Readers that wait until one block of a chain can be read: how a prefill's blocks reach the worker that decodes.

Each waits for one block, with a bound in time, and holds nothing. Who is too many, or comes while no new blocks are
taken, does not wait at all: the caller looks at what is there now. Nobody polls: what makes a block readable calls
`wake`. One event loop.
"""

import asyncio
from contextlib import suppress

from headrace.core.block import BlockHash, NamespaceId
from headrace.core.limits import LEASE_WAITERS_MAX


class BlockWaiters:
    """Who waits for which block of one node."""

    def __init__(self, *, waiters_max: int = LEASE_WAITERS_MAX) -> None:
        self._waiters_max = waiters_max
        self._key_to_woken: dict[tuple[NamespaceId, BlockHash], tuple[asyncio.Event, int]] = {}  # and how many wait
        self._num_waiting = 0
        self._is_open = True

    @property
    def num_waiting(self) -> int:
        """Readers that wait now."""
        return self._num_waiting

    async def wait(self, namespace: NamespaceId, block_hash: BlockHash, *, timeout_s: float) -> None:
        """Until the block was made readable, the time is over, or no new blocks come any more; which of these it was is
        for the caller to see. To be called in the step that found the block missing, or its waking may be missed."""
        if not self._is_open or self._num_waiting >= self._waiters_max:
            return
        key = (namespace, block_hash)
        woken, others = self._key_to_woken.get(key, (asyncio.Event(), 0))
        self._key_to_woken[key] = (woken, others + 1)
        self._num_waiting += 1
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(timeout_s):
                    await woken.wait()
        finally:
            self._num_waiting -= 1
            self._leave(key, woken)

    def wake(self, namespace: NamespaceId, block_hash: BlockHash) -> None:
        """A block can be read now."""
        woken, _ = self._key_to_woken.pop((namespace, block_hash), (None, 0))
        if woken is not None:
            woken.set()

    def close(self) -> None:
        """No new blocks come: whoever waits goes on, and nobody waits from now on. Idempotent."""
        self._is_open = False
        for namespace, block_hash in list(self._key_to_woken):
            self.wake(namespace, block_hash)

    def open(self) -> None:
        """New blocks come again. Idempotent."""
        self._is_open = True

    def check_integrity(self) -> None:
        """Nobody is counted who does not wait: at rest, 0."""
        assert 0 <= sum(count for _, count in self._key_to_woken.values()) <= self._num_waiting
        assert all(count > 0 for _, count in self._key_to_woken.values())

    def _leave(self, key: tuple[NamespaceId, BlockHash], woken: asyncio.Event) -> None:
        standing, count = self._key_to_woken.get(key, (None, 0))
        if standing is not woken:
            return  # woken, and perhaps others wait for the same block's next coming
        if count > 1:
            self._key_to_woken[key] = (woken, count - 1)
        else:
            del self._key_to_woken[key]
