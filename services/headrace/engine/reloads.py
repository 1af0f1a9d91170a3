"""Blocks of preempted runs on their way back from a store, while the step thread goes on with the others.

The step thread begins a reload, hears of its end (`take_done`), or abandons it with its run. As long as a reload is
under way somebody may write to its blocks, so an abandoned one gives them back itself, when nobody does any more. The
tasks belong to the event loop; the books are under one lock.
"""

import asyncio
import threading
from collections.abc import Callable
from dataclasses import dataclass

from headrace.core.block import HashedPrompt
from headrace.engine.block_pool import BlockPool
from headrace.engine.prefix_backup import PrefixBackup
from headrace.engine.run import ReloadTable


@dataclass(slots=True, eq=False)
class _Reload:
    key: int  # of the run
    backup: PrefixBackup
    prompt: HashedPrompt
    table: ReloadTable
    wanted: bool = True
    task: "asyncio.Task[int] | None" = None


class Reloads:
    """The reloads of one engine."""

    def __init__(
        self, pool: BlockPool, *, call_on_loop: Callable[[Callable[[], None]], None], look_again: Callable[[], None]
    ) -> None:
        """look_again: tells the step thread that a reload has ended. Both are called in any thread."""
        self._pool = pool
        self._call_on_loop = call_on_loop
        self._look_again = look_again
        self._lock = threading.Lock()
        self._underway: dict[int, _Reload] = {}
        self._done: dict[int, range] = {}  # run to what is there of the range

    def begin(self, key: int, backup: PrefixBackup, prompt: HashedPrompt, table: ReloadTable) -> None:
        """Read blocks of a run's chain back. The end of it is in `take_done` unless it is abandoned."""
        reload = _Reload(key, backup, prompt, table)
        with self._lock:
            assert key not in self._underway
            assert key not in self._done
            self._underway[key] = reload
        self._call_on_loop(lambda: self._start(reload))

    def take_done(self) -> dict[int, range]:
        """Runs whose reloads have ended since this was last asked, with the leading part of the range that came."""
        with self._lock:
            done, self._done = self._done, {}
            return done

    def abandon(self, key: int) -> bool:
        """Nobody wants the run any more. True: its blocks are given back here, when nothing writes to them."""
        with self._lock:
            self._done.pop(key, None)
            reload = self._underway.get(key)
            if reload is None:
                return False
            reload.wanted = False
        self._call_on_loop(lambda: self._cancel(reload))
        return True

    async def stop(self) -> None:
        """Cancel what is under way and wait until it has ended. On the event loop."""
        while True:
            with self._lock:
                underway = list(self._underway.values())
            if not underway:
                return
            tasks = [reload.task for reload in underway if reload.task is not None]
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)
            else:
                await asyncio.sleep(0)  # they are about to be started

    def _start(self, reload: _Reload) -> None:
        reload.task = asyncio.create_task(self._run(reload), name="read preempted blocks back")
        # Not in the task itself: one that is cancelled before its first step never runs.
        reload.task.add_done_callback(lambda task: self._settle(reload, task))

    def _cancel(self, reload: _Reload) -> None:
        if reload.task is not None:
            reload.task.cancel()

    async def _run(self, reload: _Reload) -> int:
        if not reload.wanted:
            return 0
        table = reload.table
        return await reload.backup.reload(reload.prompt, table.block_ids, table.blocks, saved_from=table.saved_from)

    def _settle(self, reload: _Reload, task: "asyncio.Task[int]") -> None:
        num_blocks = 0
        if not task.cancelled() and (error := task.exception()) is not None:
            told = {"message": "reading preempted blocks back failed; they are computed", "exception": error}
            task.get_loop().call_exception_handler(told)
        elif not task.cancelled():
            num_blocks = task.result()
        with self._lock:
            del self._underway[reload.key]
            if reload.wanted:
                self._done[reload.key] = reload.table.blocks[:num_blocks]
        if reload.wanted:
            self._look_again()
        else:
            self._pool.unref_all(reload.table.held)
