"""The step thread of one engine: its mailbox, its batch, and one step after another.

This file owns the runs from the moment they are submitted until their blocks are given back. `engine.py` is the event
loop's side. They share the block pool, the mailbox (new and cancelled runs, under one lock) and each run's event
stream; the batch itself belongs to the step thread. A run's blocks are given back by the step thread, between steps, so
that no block changes hands while a step writes to it.

It knows nothing of admission's queue, of stores or of where loaded bytes came from.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass

from headrace.core.block import HashedPrompt
from headrace.core.clock import Clock
from headrace.core.errors import WorkerUnavailable
from headrace.core.limits import ENGINE_STALL_MS, ENGINE_STOP_TIMEOUT_MS, FAILED_STEPS_MAX
from headrace.engine.admission_queue import Admission, AdmissionState
from headrace.engine.block_pool import BlockPool
from headrace.engine.block_table import TableWindows
from headrace.engine.event_stream import EventStream, RunFinished
from headrace.engine.fault_log import FaultLog
from headrace.engine.follow_runs import follow_runs
from headrace.engine.load_model import LoadedModel
from headrace.engine.pool_values import Short
from headrace.engine.preemption import Preemption
from headrace.engine.run import Run
from headrace.engine.sample_token import Logits
from headrace.engine.schedule_step import PlannedRows, Preempt, Resume, StepLimits, StepPlan, schedule_step
from headrace.engine.settle_turns import count_served, settle_turns
from headrace.engine.speculation import Speculation
from headrace.engine.spoilt_blocks import check_computed, forget_spoilt
from headrace.engine.step_times import StepTimes
from headrace.engine.turns import Turns


@dataclass(frozen=True, slots=True)
class Scheduling:
    """By what an engine's steps are planned."""

    limits: StepLimits
    turns: Turns  # whose prompts are computed first
    times: StepTimes  # what steps take
    speculation: Speculation | None = None  # None: nothing is drafted


class StepLoop:
    """One thread that computes. `submit`, `cancel` and what is read belong to the event loop; the rest is its own."""

    def __init__(
        self,
        model: LoadedModel,
        pool: BlockPool,
        scheduling: Scheduling,
        *,
        clock: Clock,
        on_blocks_free: Callable[[], None],
        on_ended: Callable[[], None],
    ) -> None:
        """on_blocks_free, on_ended: called on the event loop, when no preempted run waits for blocks any more, and
        when the thread has ended, whatever the reason."""
        self.heartbeat_s = clock.now_s()  # when a step last ended, or work was last waited for
        self.num_steps = 0
        self.num_shared_blocks = 0  # taken from another run instead of being computed
        self.to_wake: list[EventStream] = []  # streams with news since their consumers were last woken
        self._model = model
        self._pool = pool
        self._limits = limits = scheduling.limits
        self._windows = TableWindows(limits.window, limits.near_window, pool.parts)
        self._turns = scheduling.turns
        self._times = scheduling.times
        self._speculation = scheduling.speculation
        self._clock = clock
        self._on_blocks_free = on_blocks_free
        self._on_ended = on_ended
        self.preemption = Preemption(
            pool,
            self._times,
            clock,
            call_on_loop=self.call_on_loop,
            look_again=self.look_again,
            windows=self._windows,
        )
        self._failed_steps = 0  # in a row
        self._faults = FaultLog()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread = threading.Thread(target=self._step_until_stopped, name="engine steps", daemon=True)
        # The mailbox, under `_mail`. `_changed`: something happened since the step thread last looked.
        self._mail = threading.Condition()
        self._submitted: list[Run] = []
        self._cancelled: list[int] = []  # keys of runs
        self._changed = False
        self._stopping = False
        self._ended = False
        # The batch and those waiting for it: the step thread's alone. The counts are for other threads to read.
        self._runs: dict[int, Run] = {}
        self._can_step = False
        self._look_again_s: float | None = None  # until the plan may be another one by itself; None: only by news
        self._idle = True
        self.num_in_batch = 0
        self._num_outside = 0
        self.num_without_blocks = 0  # preempted sequences that wait to go on

    def start(self) -> None:
        """Start the thread; call from the event loop that will consume events."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    def ask_to_stop(self) -> None:
        """Take no more runs, and end after the step under way. Idempotent."""
        with self._mail:
            self._stopping = True
            self._mail.notify()

    async def join(self) -> None:
        """Wait for the thread's end, and until no block is being read back. Raises WorkerUnavailable when the thread's
        step does not end in time."""
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, ENGINE_STOP_TIMEOUT_MS / 1000)
            if self._thread.is_alive():
                raise WorkerUnavailable("", f"its engine's step has not ended within {ENGINE_STOP_TIMEOUT_MS} ms")
        await self.preemption.stop()

    @property
    def num_preemptions(self) -> int:
        """How often a run had to give its blocks up."""
        return self.preemption.num_preemptions

    @property
    def takes_runs(self) -> bool:
        """Whether a run submitted now would be computed."""
        return not (self._stopping or self._ended)

    @property
    def may_admit(self) -> bool:
        """Whether blocks may be given to new prompts: not while a preempted sequence waits for them."""
        return not (self.num_without_blocks or self._ended)

    @property
    def num_outside(self) -> int:
        """Runs that are not in the batch yet."""
        return self._num_outside + len(self._submitted)

    def submitted(self) -> list[Run]:
        """Runs that the thread has not looked at yet."""
        return list(self._submitted)

    def submit(self, run: Run) -> None:
        """Hand a run over, with its admission's blocks. Raises WorkerUnavailable."""
        with self._mail:
            if not self.takes_runs:
                raise stopped()
            assert run.admission.state is AdmissionState.HELD, "an admission is run once, and before it is released"
            run.admission.state = AdmissionState.RUNNING
            self._times.drop(run.admission)
            self._turns.enter(run.admission.claim)
            self._submitted.append(run)
            self._tell()

    def cancel(self, admission: Admission) -> bool:
        """The admission is wanted no more. True: no run has it, so the caller gives its blocks back; else they are
        given back after the step under way. Idempotent."""
        with self._mail:
            if admission.state is AdmissionState.HELD:
                admission.state = AdmissionState.RELEASED
                return True
            if admission.state is AdmissionState.RUNNING:
                self._cancelled.append(admission.key)
                self._tell()
            return False

    def look_again(self) -> None:
        """Something that a plan depends on has changed. In any thread."""
        with self._mail:
            self._tell()

    def healthy(self) -> bool:
        """Whether the thread lives, its last steps did not all fail and, if there is work, one ended within
        ENGINE_STALL_MS. Busy is healthy."""
        if not self._thread.is_alive() or self._failed_steps >= FAILED_STEPS_MAX:
            return False
        return self._idle or self._clock.now_s() - self.heartbeat_s < ENGINE_STALL_MS / 1000

    def call_on_loop(self, act: Callable[[], None]) -> None:
        """From any thread. A closed loop has nobody left who waits."""
        assert self._loop is not None
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(act)

    def _tell(self) -> None:
        self._changed = True
        self._mail.notify()

    # What follows runs in the step thread.

    def _step_until_stopped(self) -> None:
        try:
            while self._wait_for_work():
                self._step()
                self.heartbeat_s = self._clock.now_s()
        finally:
            self._end_everything()

    def _wait_for_work(self) -> bool:
        """Sleep until there is something to do; False when stopping. Takes in the mail."""
        self._wake_consumers()
        with self._mail:
            self._idle = True
            self._mail.wait_for(lambda: self._stopping or self._changed or self._can_step, timeout=self._look_again_s)
            self.heartbeat_s = self._clock.now_s()
            self._idle = False
            self._changed = False
            submitted, self._submitted = self._submitted, []
            cancelled, self._cancelled = self._cancelled, []
            for run in submitted:
                self._runs[run.key] = run
            stopping = self._stopping
        for key in cancelled:
            if key in self._runs:
                self._end(self._runs[key])
        return not stopping

    def _step(self) -> None:
        """One step: plan, compute, hand out. A run that fails is ended; the others go on."""
        for run, hashed in self.preemption.take_reloaded(self._runs):
            self._share_blocks(run, hashed)
            self._pass_window(run)
        for run in list(self._runs.values()):
            self._take_computed(run)
            if run.prompt_is_computed:
                self._end(run, run.finished())
        if self._speculation is not None:
            self._speculation.propose(self._runs.values())
        plan = self._plan()
        self._can_step = bool(plan.rows)
        if not plan.rows:
            return
        started_s = self._clock.now_s()
        runs = [self._runs[rows.key] for rows in plan.rows]
        steps = [run.step_of(rows) for run, rows in zip(runs, plan.rows, strict=True)]
        self.num_steps += 1
        try:
            logits = self._model.runner.run_step(steps)  # [sum of num_logits, vocab] float32
        except Exception as error:  # whatever the model's code raises: its sequences are lost, the worker is not
            self._failed_steps += 1
            self._faults.tell("a step of the engine failed", error)
            for run in runs:
                self._fail(run, f"a step of its engine failed: {type(error).__name__}: {error}")
            return
        self._failed_steps = 0
        self._times.add(plan.rows, self._clock.now_s() - started_s)
        count_served(runs, plan.rows, self._turns)
        if self._speculation is not None:
            self._speculation.count_rows(self._times.draft_rows(plan.rows))
        wanted: list[Logits] = list(logits.numpy())
        for run, rows in zip(runs, plan.rows, strict=True):
            own, wanted = wanted[: rows.num_logits], wanted[rows.num_logits :]
            try:
                self._take_result(run, rows, own)
            except Exception as error:  # as above, but only this sequence is lost
                self._faults.tell("the engine could not take a step's result", error)
                try:
                    forget_spoilt(run, self._model.kv, self._pool)
                except Exception as unseen:
                    self._faults.tell("nobody could look whether a failed sequence's blocks are sound", unseen)
                self._fail(run, f"its engine could not take a step's result: {type(error).__name__}: {error}")

    def _plan(self) -> StepPlan:
        """Ask for a plan, make the changes of blocks that it asks for first, and take the blocks that it needs."""
        while True:
            settle_turns(self._runs.values(), self._turns)
            follow_runs(self._runs.values())
            planned = schedule_step(
                [run.state for run in self._runs.values() if not run.reloading],
                self._limits,
                available_blocks=self._pool.available_blocks,
                available_near=self._pool.available_near,
                may_preempt=not (saving_s := self.preemption.saving_s),
            )
            match planned:
                case Preempt() as missing:
                    self._preempt(missing)
                case Resume(key=key, num_blocks=num_blocks):
                    self._resume(self._runs[key], num_blocks)
                case StepPlan() as plan if self._take_blocks(plan):
                    for key in plan.joins:
                        self._runs[key].in_batch = True
                    self._publish_counts()
                    self._look_again_s = saving_s or None
                    return plan

    def _preempt(self, missing: Preempt) -> None:
        """One run gives its blocks back, and comes back later."""
        block_ids = self.preemption.choose(self._runs.values(), missing).give_up_blocks()
        self._publish_counts()
        self._pool.unref_all(block_ids)

    def _resume(self, run: Run, num_blocks: int) -> None:
        prompt, shared_max = run.reusable
        taken = self._pool.take(num_blocks, prompt=prompt, shared_max=shared_max, ttl_s=run.admission.ttl_s)
        if not isinstance(taken, Short):  # another thread may have taken blocks since: then it is planned again
            run.resume(taken)
            # What it finds now and had not before is reported as any block is, even if none gets full after this.
            self._share_blocks(run, prompt if run.leaves_blocks and taken.num_shared else None)
            self.preemption.come_back(run, first_block=taken.num_shared)
        self._publish_counts()

    def _take_blocks(self, plan: StepPlan) -> bool:
        """Take what the rows need. False: another thread was faster; what was taken stays, for the next plan."""
        for rows in plan.rows:
            taken = self._pool.take(rows.new_blocks)
            if isinstance(taken, Short):
                return False
            self._runs[rows.key].block_ids.extend(taken.block_ids)
            near = self._pool.take_near(rows.new_near) if rows.new_near else ()
            if isinstance(near, Short):
                return False
            if near:
                self._runs[rows.key].admission.add_near(near, self._pool.parts)
        return True

    def _pass_window(self, run: Run) -> None:
        """Give back what the run does not need any more."""
        self._pool.unref_all(run.admission.pass_windows(run.num_computed, self._windows))

    def _take_computed(self, run: Run) -> None:
        """Instead of computing the run's next blocks, take those that another run has computed meanwhile."""
        prompt, wanted = run.wanted_blocks
        taken = self._pool.take_next(prompt, wanted, ttl_s=run.admission.ttl_s) if wanted else ()
        if taken:
            if run.first_computed is None:  # else it has lost blocks that were its own, and finds them so
                self.num_shared_blocks += len(taken)
                self._pool.count_late_hits(len(taken))
            self._pool.unref_all(run.take(taken))
            self._share_blocks(run, prompt if run.leaves_blocks else None)
            self._pass_window(run)

    def _share_blocks(self, run: Run, hashed: HashedPrompt | None) -> None:
        """Share the run's blocks that are full by hash, and report the new ones. None: there are none, or they are not
        to be shared."""
        if hashed is None:
            return
        first_block = run.admission.first_block
        num_full = run.num_computed // self._limits.block_tokens - first_block
        if not run.is_forgotten:
            shared = self._pool.hash_blocks(
                hashed, run.block_ids[:num_full], first_block=first_block, ttl_s=run.admission.ttl_s
            )
            # Where blocks stay with their sequence, the pool itself sees what is forgotten, each time.
            run.is_forgotten = (self._limits.window.bounded or self._limits.near_window.bounded) and not shared
        for filled in run.unreported_blocks():
            self._pool.ref(filled.block_id)
            run.stream.send(filled)

    def _take_result(self, run: Run, rows: PlannedRows, logits: Sequence[Logits]) -> None:
        """Hand out what the rows brought, in the order in which as many steps of one row each would have brought it.

        A draft's token is kept when it is what was chosen in its place, and then what follows it was computed behind
        the right tokens. Whatever lies behind the first wrong one was never part of the sequence: its KV is written
        over, since the run's computed positions end before it. logits: num_logits rows of [vocab].
        """
        known, check = rows.stop - rows.num_drafts, run.check_draft(rows.num_drafts)
        for place in range(rows.num_drafts + 1):
            self._share_blocks(run, self._computed(run, known + place))
            self._add_token(run, logits[place] if rows.num_logits else None)
            if check.accepted == place or run.key not in self._runs:
                break
            self._turns.generated(run.admission.claim)  # the next one comes beside that of the step
        self._pass_window(run)
        if check.token_ids and self._speculation is not None:
            self._speculation.settle(run, check)

    def _computed(self, run: Run, stop: int) -> HashedPrompt | None:
        """As Run.computed. Raises KvInvalid before anybody gets to know of blocks of such numbers."""
        since = run.num_computed
        hashed = run.computed(stop)
        if hashed is not None:
            check_computed(run, self._model.kv, since=since)
        return hashed

    def _add_token(self, run: Run, logits: Logits | None) -> None:
        """Choose and send the next token, if one is due, and end the run if it was the last thing wanted."""
        finished = run.finished() if run.prompt_is_computed else None
        if logits is not None:
            delta, finished = run.add_token(logits)
            run.stream.send(delta)
        if finished is not None or run.stream.ended:
            self._end(run, finished)

    def _fail(self, run: Run, why: str) -> None:
        self._end(run, WorkerUnavailable("", why))

    def _end(self, run: Run, outcome: RunFinished | WorkerUnavailable | None = None) -> None:
        """Take a run out and give its blocks back, then tell its consumer. Idempotent."""
        if self._runs.pop(run.key, None) is None:
            return
        self._turns.leave(run.admission.claim)
        if self._speculation is not None:
            self._speculation.leave(run)
        self._publish_counts()
        with self._mail:
            run.admission.state = AdmissionState.RELEASED
        self.preemption.give_back(run)
        match outcome:
            case RunFinished():
                run.stream.send(outcome)
            case WorkerUnavailable():
                run.stream.fail(outcome)

    def _end_everything(self) -> None:
        """The thread is ending, by `ask_to_stop` or by a fault of ours: nobody may wait for it any more."""
        with self._mail:
            self._ended = True
            for run in self._submitted:
                self._runs[run.key] = run
            self._submitted = []
        for run in list(self._runs.values()):
            self._fail(run, stopped().why)
        self._wake_consumers()
        self.call_on_loop(self._on_ended)

    def _wake_consumers(self) -> None:
        streams = list(self.to_wake)
        self.to_wake.clear()  # in place: streams hold its `append`

        def wake_all() -> None:
            for stream in streams:
                stream.wake()

        if streams:
            self.call_on_loop(wake_all)

    def _publish_counts(self) -> None:
        """Say how many sequences are where; when no preempted one waits any more, new prompts may be admitted."""
        runs = self._runs.values()
        self._times.running(runs)
        self.num_in_batch = sum(run.in_batch for run in runs)
        self._num_outside = len(runs) - self.num_in_batch
        had_preempted = self.num_without_blocks > 0
        self.num_without_blocks = sum(not run.block_ids for run in runs)
        if had_preempted and self.num_without_blocks == 0:
            self.call_on_loop(self._on_blocks_free)


def stopped() -> WorkerUnavailable:
    """What everybody is told who waits for an engine that has stopped."""
    return WorkerUnavailable("", "its engine has stopped")
