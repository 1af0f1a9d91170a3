"""The account of blocks of two parts: a `BlockPool` for the wide parts, and one with a window for the near ones.

A prefix is found when all its wide parts are there, and the near parts of its last window. A sequence holds all its
wide parts, and near parts as a sequence of a model with a window holds blocks. Everybody else sees one pool of blocks
by the numbers of `core/part_ids.py`; what is counted, listed and selected are wide parts, and near parts follow them.

Both accounts are under one lock, so that what is found in both is taken in both.
"""

import math
import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

from headrace.core.block import HashedPrompt
from headrace.core.clock import Clock
from headrace.core.key_window import KeyWindow
from headrace.core.limits import POOL_NAMES_PER_BLOCK_MAX
from headrace.engine.block_pool import BlockPool
from headrace.engine.pool_block import PoolBlock
from headrace.engine.pool_values import Evicted, Selection, Short, Taken


class LayeredPool(BlockPool):
    """Thread-safe account of `num_blocks` wide and `num_near` near parts."""

    def __init__(
        self,
        num_blocks: int,
        *,
        num_near: int,
        near_window: KeyWindow,
        clock: Clock,
        on_freed: Callable[[], None] = lambda: None,
    ) -> None:
        """near_window: what the layers of near parts read of a sequence."""
        assert near_window.bounded
        lock = threading.RLock()
        super().__init__(num_blocks, clock=clock, on_freed=on_freed, lock=lock)
        self.near = BlockPool(
            num_near,
            clock=clock,
            on_freed=on_freed,
            window=near_window,
            lock=lock,
            # Sequences are as long as there are wide parts, however few near ones they hold.
            names_max=POOL_NAMES_PER_BLOCK_MAX * num_blocks,
        )

    @property
    def available_near(self) -> int:
        """As BlockPool.available_near."""
        return self.near.available_blocks

    def take(
        self, num_blocks: int, *, prompt: HashedPrompt | None = None, shared_max: int = 0, ttl_s: float = math.inf
    ) -> Taken | Short:
        """As BlockPool.take, and as many near parts as a sequence of so many blocks may hold at once: those behind the
        shared ones are on the blocks that come next. Without a prompt: wide parts only."""
        if prompt is None:
            return super().take(num_blocks)
        with self._lock:
            num_shared = self._found_in_both(prompt, min(shared_max, num_blocks))
            wide = self._find(num_blocks, prompt, num_shared)
            near = self.near._find(num_blocks, prompt, num_shared)
            for found in (wide, near):
                if isinstance(found, Short):
                    return found
            assert not isinstance(wide, Short)
            assert not isinstance(near, Short)
            assert wide.num_shared == near.num_shared == num_shared
            taken, window = self._take_found(wide, ttl_s), self.near._take_found(near, ttl_s)
        first, block_ids = window.first_block, taken.block_ids
        return replace(
            taken,
            block_ids=tuple(self.parts.place(block_ids, window.block_ids, first=first)),
            first_near=first,
            end_near=first + len(window.block_ids),
        )

    def take_near(self, num_parts: int) -> tuple[int, ...] | Short:
        """Take near parts alone, to be joined to blocks that the caller holds."""
        taken = self.near.take(num_parts)
        return taken if isinstance(taken, Short) else taken.block_ids

    def take_next(self, prompt: HashedPrompt, wanted: range, *, ttl_s: float) -> tuple[int, ...]:
        """As BlockPool.take_next, blocks with both parts."""
        with self._lock:
            wide = super().take_next(prompt, wanted, ttl_s=ttl_s)
            near = self.near.take_next(prompt, range(wanted.start, wanted.start + len(wide)), ttl_s=ttl_s)
        if len(near) < len(wide):
            super().unref_all(wide[len(near) :])
        return tuple(map(self.parts.join, wide, near))

    def ref(self, block_id: int) -> None:
        """As BlockPool.ref, each of its parts."""
        super().ref(self.parts.wide_of(block_id))
        if (near := self.parts.near_of(block_id)) is not None:
            self.near.ref(near)

    def sole_blocks(self, block_ids: Sequence[int]) -> int:
        """As BlockPool.sole_blocks, by wide parts."""
        return super().sole_blocks(self.parts.split(block_ids)[0])

    def sole_near(self, block_ids: Sequence[int]) -> int:
        """As BlockPool.sole_near."""
        return self.near.sole_blocks(self.parts.split(block_ids)[1])

    def unref_all(self, block_ids: Sequence[int]) -> None:
        """As BlockPool.unref_all, of each block the parts that are named."""
        wide, near = self.parts.split(block_ids)
        self.near.unref_all(near)
        super().unref_all(wide)

    def hash_blocks(
        self, prompt: HashedPrompt, block_ids: Sequence[int], *, first_block: int = 0, ttl_s: float = math.inf
    ) -> bool:
        """As BlockPool.hash_blocks. Blocks that have near parts stand side by side."""
        wide, near = self.parts.split(block_ids)
        shared = super().hash_blocks(prompt, wide, first_block=first_block, ttl_s=ttl_s)
        if not near:
            return shared
        first_near = next(i for i, block_id in enumerate(block_ids) if self.parts.near_of(block_id) is not None)
        end_near = first_near + len(near)
        assert all(self.parts.near_of(block_id) is not None for block_id in block_ids[first_near:end_near])
        # What was forgotten as a whole must not come back by half.
        return shared and self.near.hash_blocks(prompt, near, first_block=first_block + first_near, ttl_s=ttl_s)

    def resident_blocks(self, prompt: HashedPrompt) -> int:
        """As BlockPool.resident_blocks, of both parts."""
        with self._lock:
            return self._found_in_both(prompt, len(prompt.chain))

    def evict(self, selection: Selection, *, dry_run: bool) -> Evicted:
        """As BlockPool.evict; near parts go with their blocks, and those whose blocks went before, too."""
        evicted = super().evict(selection, dry_run=dry_run)
        if selection.blocks_max is None:
            num_near = self.near.evict(selection, dry_run=dry_run).num_blocks
        else:
            num_near = self.near.drop(evicted.block_hashes, dry_run=dry_run)
        return replace(evicted, num_near=num_near)

    def describe(self, selection: Selection) -> list[PoolBlock]:
        """As BlockPool.describe."""
        whole = {each.block_hash for each in self.near.describe(selection)}
        return [replace(each, has_near=each.block_hash in whole) for each in super().describe(selection)]

    def evict_expired(self) -> float:
        """As BlockPool.evict_expired."""
        return min(super().evict_expired(), self.near.evict_expired())

    def forget(self, selection: Selection) -> int:
        """As BlockPool.forget."""
        self.near.forget(selection)
        return super().forget(selection)

    def check_integrity(self) -> None:
        """As BlockPool.check_integrity, of both accounts."""
        super().check_integrity()
        self.near.check_integrity()

    def _found_in_both(self, prompt: HashedPrompt, blocks_max: int) -> int:
        return self.near._usable_prefix(prompt, self._usable_prefix(prompt, blocks_max))
