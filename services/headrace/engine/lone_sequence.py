"""A sequence that is computed step by step without an engine: drafts of a small model, and measurements.

Owns what it holds of a pool, which is what a worker's sequence would hold: whole blocks, and where layers have windows
what these still read. Nobody finds its blocks by hash. Which steps are run, and when, is the caller's.
"""

from collections.abc import Iterator, Sequence

from headrace.core.clock import SystemClock
from headrace.engine.block_pool import BlockPool
from headrace.engine.block_table import BlockTable, TableWindows
from headrace.engine.load_model import LoadedModel
from headrace.engine.make_pool import make_pool
from headrace.engine.model_runner import SequenceStep
from headrace.engine.pool_values import Short


class LonePool:
    """A model's pool in the hands of one caller; no engine may use the model meanwhile. One thread."""

    def __init__(self, model: LoadedModel) -> None:
        self.model = model
        self.account: BlockPool = make_pool(model.kv, model.window, clock=SystemClock())
        self.windows = TableWindows(model.window, model.near_window, self.account.parts)
        self.block_tokens = model.kv.layout.block_tokens

    def step_rows(self, rows: int) -> int:
        """How many of so many rows one step of a worker computes of one sequence."""
        return self.windows.near_window.step_rows(self.windows.window.step_rows(rows))


class LoneSequence:
    """Positions [0, `end`) have KV in the pool, as far as it is read from `sure` on."""

    def __init__(self, pool: LonePool, *, begin: int = 0) -> None:
        """begin: positions before it count as computed, whatever the pool's blocks hold."""
        self.end = begin
        self.sure = begin  # the first position that it may go back to
        self._pool = pool
        self._table = BlockTable(
            first_block=pool.windows.window.first_block(begin), first_near=pool.windows.near_window.first_block(begin)
        )
        self._table.end_near = self._table.first_near

    def grow(self, end: int, *, whole_end: int = 0) -> bool:
        """Have blocks for positions [sure, end); False, and nothing is taken, when the pool has too few.

        whole_end: where the sequence is to come to. What no window passes is had for all of that, or not at all: else
        several sequences may stand half-way, each with blocks that the others need.
        """
        table, pool = self._table, self._pool
        account, num_blocks = pool.account, -(-end // pool.block_tokens)
        num_whole = num_blocks if pool.windows.window.bounded else max(num_blocks, -(-whole_end // pool.block_tokens))
        account.unref_all(table.pass_windows(self.sure, pool.windows))
        num_new = max(0, num_whole - table.first_block - len(table.block_ids))
        num_near = max(0, num_blocks - table.end_near) if pool.windows.near_window.bounded else 0
        if num_near > account.available_near:
            return False
        taken = account.take(num_new)
        if isinstance(taken, Short):
            return False
        table.block_ids += taken.block_ids
        near = account.take_near(num_near) if num_near else ()
        assert not isinstance(near, Short), "nobody else takes of this pool"
        table.add_near(near, account.parts)
        return True

    def step(self, token_ids: Sequence[int], *, num_logits: int = 0) -> SequenceStep:
        """The next tokens, to be computed in the runner's next step. The pool has room for them (`grow`)."""
        has_room = self.grow(self.end + len(token_ids))
        assert has_room, "the pool is too small for what is computed in it"
        start, self.end = self.end, self.end + len(token_ids)
        table = self._table
        return SequenceStep(tuple(token_ids), start, tuple(table.block_ids), num_logits, table.first_block)

    def steps(self, token_ids: Sequence[int], *, rows: int) -> Iterator[SequenceStep]:
        """The next tokens in as many steps as a worker takes that computes so many rows in one; logits of the last.

        Each step is to be computed before the next one is asked for. It never goes back before what was computed.
        """
        rows = self._pool.step_rows(rows)
        for first in range(0, len(token_ids), rows):
            self.sure = self.end
            yield self.step(token_ids[first : first + rows], num_logits=int(first + rows >= len(token_ids)))

    def go_back(self, end: int) -> None:
        """What is from `end` on is computed anew."""
        assert self.sure <= end <= self.end
        self.end = end

    def leave(self) -> None:
        """Give all blocks back. Idempotent."""
        self._pool.account.unref_all(self._table.clear())
        self.end = self.sure = 0
