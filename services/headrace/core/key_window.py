"""What a model needs of a sequence's earlier keys and values: everything, or a window of the last tokens.

        0                    first needed        position
        |---- never read again ----|===== read =====|

Only a model all of whose layers have a window needs less than everything: one layer without it reads every block. The
file owns the arithmetic between windows and blocks; whoever keeps, loads or counts blocks asks it. Pure.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.core.limits import PUBLISH_BATCH_BLOCKS, PUBLISH_QUEUE_BLOCKS


@dataclass(frozen=True, slots=True)
class KeyWindow:
    """`tokens`: how many positions the layer that sees furthest reads, the computed one among them; None for all."""

    tokens: int | None
    block_tokens: int

    def __post_init__(self) -> None:
        assert self.tokens is None or self.tokens > 0
        assert self.block_tokens > 0

    @property
    def bounded(self) -> bool:
        """Whether there are blocks that nobody needs any more."""
        return self.tokens is not None

    @property
    def prefix_blocks(self) -> int:
        """Of a bounded window: how many last blocks of a prefix are read by what comes behind it."""
        assert self.tokens is not None
        return -(-(self.tokens - 1) // self.block_tokens)

    def first_block(self, position: int) -> int:
        """Blocks before this one are read neither for `position` nor for any later one."""
        return 0 if self.tokens is None else max(0, position - self.tokens + 1) // self.block_tokens

    def first_of_prefix(self, num_blocks: int) -> int:
        """Blocks [this one, num_blocks) are what is read of a prefix of so many blocks."""
        return self.first_block(num_blocks * self.block_tokens)

    def held_blocks(self, num_blocks: int) -> int:
        """The most blocks that a sequence of so many holds at once: two windows, and the two blocks at their edges.

        A prefix's window, and the window that is loaded or the rows of a step (`step_rows`) behind it.
        """
        return min(num_blocks, 2 * self.prefix_blocks + 2) if self.bounded else num_blocks

    def step_rows(self, rows: int) -> int:
        """How many of so many rows one step may compute of one sequence, for `held_blocks` to be enough."""
        return rows if self.tokens is None else min(rows, max(self.tokens, self.block_tokens))


EVERYTHING = KeyWindow(None, 1)  # nothing is ever passed, whatever the size of a block


def model_window(windows: Iterable[int | None], *, block_tokens: int) -> KeyWindow:
    """What a model needs whose layers have these windows; never less than the newest full block, so that what stands
    on it can tell whether it was forgotten."""
    widest = 0
    for window in windows:
        if window is None:
            return KeyWindow(None, block_tokens)
        widest = max(widest, window)
    return KeyWindow(max(widest, block_tokens + 1) if widest else None, block_tokens)


def near_parts(num_blocks: int, sequences: int, window: KeyWindow) -> int:
    """Near parts that a pool of `num_blocks` wide ones has: as many as so many sequences can hold at once, however long
    they are, and those of blocks that wait to be published, which a window may have passed. Never more than wide ones.
    """
    num_held = sequences * window.held_blocks(num_blocks)
    return min(num_blocks, num_held + PUBLISH_QUEUE_BLOCKS + PUBLISH_BATCH_BLOCKS)
