"""What a run needs to know of the copies that its blocks have elsewhere: the port through which a preempted run comes
back without being computed again.

The engine knows no stores; whoever runs a sequence gives it one of these (`transfer/stored_run.py`), or none.
"""

from collections.abc import Sequence
from typing import Protocol

from headrace.core.block import HashedPrompt
from headrace.engine.event_stream import FilledBlock


class PrefixBackup(Protocol):
    """Copies of one run's full blocks outside the pool, as far as its owner knows: hints, never promises."""

    def num_stored(self) -> int:
        """Leading blocks that can be read back now. In any thread, without waiting."""

    def num_kept(self) -> int:
        """Leading blocks that are stored or on their way. At least `num_stored`. In any thread, without waiting."""

    def reload_s(self, num_blocks: int) -> float:
        """Predicted seconds to read back what is read of so many blocks; infinite where none can be. In any thread,
        without waiting."""

    def save(self, blocks: Sequence[FilledBlock]) -> None:
        """The run gives these up, which nobody keeps yet: store them if there is room, and give the pool reference of
        each back in any case. On the event loop, without waiting."""

    async def reload(self, prompt: HashedPrompt, block_ids: Sequence[int], blocks: range, *, saved_from: int) -> int:
        """Read blocks of the chain back, block i into `block_ids[i]`, verified; how many leading ones of the range are
        there. What the table has before the range is not looked at. saved_from: what is computed where they do not
        come begins at this block, before the range where only a window of it is read back.

        On the event loop. Bounded in time. No fault of the cache is raised: what is missing is computed. When it has
        returned, or raised because it was cancelled, nobody writes to the pool's blocks any more.
        """
