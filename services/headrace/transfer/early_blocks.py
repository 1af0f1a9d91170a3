"""Pool blocks that were taken for prompts of whose prefill elsewhere nothing has come yet.

Owns how much of a worker's pool may wait in this way: no more than HAND_OFF_POOL_SHARE of either part of its blocks, so
that prompts which this very worker is to prefill find room. It says who waits; what they wait for is
`follow_prefill.py`'s.
"""

from collections.abc import Iterator
from contextlib import contextmanager

from headrace.core.limits import HAND_OFF_POOL_SHARE
from headrace.engine.engine import Engine
from headrace.engine.layered_pool import LayeredPool


class EarlyBlocks:
    """The account of one worker's early blocks: wide parts, and near ones where blocks have two. The event loop's."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.num_wide = self.num_near = 0

    def may_take(self, num_blocks: int) -> bool:
        """Whether a prompt of so many blocks can have them at once, and may wait with them."""
        pool, load = self._engine.pool, self._engine.load()
        num_wide, num_near = self._held(num_blocks)
        at_once = load.waiting == 0 and num_wide <= load.free_blocks
        if not at_once or self.num_wide + num_wide > HAND_OFF_POOL_SHARE * pool.num_blocks:
            return False
        if not isinstance(pool, LayeredPool):
            return True
        near_max = HAND_OFF_POOL_SHARE * pool.near.num_blocks
        return num_near <= pool.available_near and self.num_near + num_near <= near_max

    @contextmanager
    def taken(self, num_blocks: int) -> Iterator[None]:
        """What a prompt of so many blocks holds waits as long as the scope lasts."""
        num_wide, num_near = self._held(num_blocks)
        self.num_wide += num_wide
        self.num_near += num_near
        try:
            yield
        finally:
            self.num_wide -= num_wide
            self.num_near -= num_near

    def _held(self, num_blocks: int) -> tuple[int, int]:
        """Wide and near parts that a prompt of so many blocks holds at most."""
        engine = self._engine
        num_near = engine.near_window.held_blocks(num_blocks) if engine.near_window.bounded else 0
        return engine.window.held_blocks(num_blocks), num_near
