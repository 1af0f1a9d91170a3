"""Who gives its blocks up when they run short, and how it comes back: computed again or read back, whichever is sooner.

This file owns the prediction of both, what is stored before it is given up, and the reloads under way. Taking and
giving back blocks is `step_loop.py`'s. Everything here but `stop` belongs to the step thread.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from headrace.core.block import HashedPrompt
from headrace.core.clock import Clock
from headrace.core.limits import SAVE_PATIENCE_MS
from headrace.engine.block_pool import BlockPool
from headrace.engine.block_table import TableWindows
from headrace.engine.choose_victim import BlockHolder, choose_victim
from headrace.engine.reloads import Reloads
from headrace.engine.run import Run
from headrace.engine.schedule_step import Preempt
from headrace.engine.step_times import StepTimes


@dataclass(frozen=True, slots=True)
class Comeback:
    """The sooner way to have a run's blocks again; `reload` is what of the chain is read back for it, maybe nothing."""

    seconds: float
    reload: range


class Preemption:
    """Of one engine's runs. The counts are for other threads to read."""

    def __init__(
        self,
        pool: BlockPool,
        times: StepTimes,
        clock: Clock,
        *,
        call_on_loop: Callable[[Callable[[], None]], None],
        look_again: Callable[[], None],
        windows: TableWindows,
    ) -> None:
        """look_again: tells the step thread that a reload has ended. Both are called in any thread."""
        self._windows = windows
        self.num_preemptions = 0
        self.num_reloads = 0  # preempted runs of which at least one block was read back
        self.num_reloaded_blocks = 0  # that need not be computed for it
        self._pool = pool
        self._times = times
        self._clock = clock
        self._call_on_loop = call_on_loop
        self._reloads = Reloads(pool, call_on_loop=call_on_loop, look_again=look_again)
        self._save_until_s = 0.0

    @property
    def saving_s(self) -> float:
        """For how long blocks of a preempted run may still be on their way to a store, and come free soon; at most."""
        return max(0.0, self._save_until_s - self._clock.now_s())

    def choose(self, runs: Iterable[Run], missing: Preempt) -> Run:
        """The run that gives way, by `choose_victim`. What a store is to have of it and has not is on its way there
        then: those blocks come free when they are stored."""
        by_key = {run.key: run for run in runs if run.block_ids and not run.reloading}
        holders = [self._holder(run, near=missing.near) for run in by_key.values()]
        victim = by_key[choose_victim(holders, num_missing=missing.num_missing)]
        self.num_preemptions += 1
        backup, unkept = victim.backup, victim.unkept_blocks()
        if backup is not None and unkept:
            for block in unkept:
                self._pool.ref(block.block_id)
            self._save_until_s = self._clock.now_s() + SAVE_PATIENCE_MS / 1000
            self._call_on_loop(lambda: backup.save(unkept))
        return victim

    def come_back(self, run: Run, *, first_block: int) -> None:
        """The run has blocks again, and those before `first_block` hold its KV: begin to read back what is stored of
        the others, if that is sooner there than computed."""
        stored = range(first_block, max(first_block, run.num_stored))
        way = self._predict(run, blocks=stored, end=run.num_computed + run.num_missing)
        if run.backup is not None and way.reload:
            table = run.begin_reload(way.reload, self._windows)
            self._pool.unref_all(table.passed)
            self._reloads.begin(run.key, run.backup, run.reusable[0], table)

    def take_reloaded(self, runs: Mapping[int, Run]) -> list[tuple[Run, HashedPrompt | None]]:
        """Runs whose reloads have ended, each with its chain if its blocks are to be shared; what did not come is
        computed."""
        ended = []
        for key, reloaded in self._reloads.take_done().items():
            run = runs[key]
            num_blocks, passed = run.end_reload(reloaded, self._windows)
            self._pool.unref_all(passed)
            ended.append((run, run.shared_chain if num_blocks else None))
            self.num_reloads += num_blocks > 0
            self.num_reloaded_blocks += num_blocks
        return ended

    def give_back(self, run: Run) -> None:
        """The run has ended: give its blocks back, at once or as soon as nobody writes to them any more."""
        block_ids = run.give_up_blocks()
        if not self._reloads.abandon(run.key):
            self._pool.unref_all(block_ids)

    async def stop(self) -> None:
        """End what is being read back. On the event loop, when every run has ended."""
        await self._reloads.stop()

    def _holder(self, run: Run, *, near: bool) -> BlockHolder:
        comeback = self._predict(run, blocks=range(run.num_kept), end=run.num_computed)
        num_freed = self._pool.sole_near(run.block_ids) if near else self._pool.sole_blocks(run.block_ids)
        return BlockHolder(run.key, num_freed, comeback.seconds)

    def _predict(self, run: Run, *, blocks: range, end: int) -> Comeback:
        """To have positions [blocks.start * block_tokens, end) again, where `blocks` can be read back."""
        block_tokens = run.admission.prompt.block_tokens
        computed_s = self._times.compute_s(blocks.start * block_tokens, end)
        if run.backup is not None and blocks:
            rest_s = self._times.compute_s(min(end, blocks.stop * block_tokens), end)
            if (reloaded_s := run.backup.reload_s(len(blocks)) + rest_s) < computed_s:
                return Comeback(reloaded_s, blocks)
        return Comeback(computed_s, range(blocks.start, blocks.start))
