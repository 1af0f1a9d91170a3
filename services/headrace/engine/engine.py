"""The engine of one worker: runs sequences through the model, step by step, in a thread of its own.

This file owns the step thread, the batch and the life of a run:

    admit ──► Admission (blocks held) ──► caller loads a prefix ──► run ──► events ──► RunFinished (blocks given back)

The event loop and the step thread share three things only, each with its own lock: the block pool, the mailbox of new
and cancelled runs, and each run's event stream. The batch itself belongs to the step thread. A run's blocks are given
back by the step thread, between steps, so that no block changes hands while a step writes to it.

It knows nothing of stores, of the index or of where loaded bytes came from.
"""

import asyncio
import math
import threading
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

from tokenizers import Tokenizer

from headrace.config import EngineSettings
from headrace.core.block import HashedPrompt
from headrace.core.clock import Clock, Deadline
from headrace.core.errors import InvalidRequest, WorkerUnavailable
from headrace.core.generation import EvictReport, EvictSelector, SamplingParams
from headrace.core.limits import ENGINE_STALL_MS, ENGINE_STOP_TIMEOUT_MS, FAILED_STEPS_MAX
from headrace.engine.admission_queue import Admission, AdmissionQueue, AdmissionState
from headrace.engine.block_pool import BlockPool, Short
from headrace.engine.event_stream import EngineEvent, EventStream, FilledBlock, RunFinished
from headrace.engine.evict_device import evict_device
from headrace.engine.load_model import LoadedModel
from headrace.engine.run import Run, RunLimits
from headrace.engine.sample_token import Logits
from headrace.engine.schedule_step import Preempt, Resume, StepLimits, StepPlan, schedule_step
from headrace.engine.settle_turns import count_served, settle_turns
from headrace.engine.step_times import EngineLoad, StepTimes
from headrace.engine.turns import Turns

__all__ = ["Admission", "Engine", "EngineEvent", "EngineLoad", "FilledBlock", "RunFinished"]


class Engine:
    """One model, one pool, one step thread. All methods belong to the event loop that called `start`."""

    def __init__(self, model: LoadedModel, settings: EngineSettings, *, clock: Clock) -> None:
        self.model = model
        self.kv = model.kv
        self.pool = BlockPool(model.kv.num_blocks, clock=clock, on_freed=self._on_freed)
        self.heartbeat_s = clock.now_s()  # when a step last ended, or work was last waited for
        self.num_steps = 0
        self.num_preemptions = 0
        self._failed_steps = 0  # in a row
        self._block_tokens = model.kv.layout.block_tokens
        # A sequence can be as long as the model and the whole pool allow.
        self.context_tokens_max = min(model.context_tokens_max, self.pool.num_blocks * self._block_tokens)
        self._run_limits = RunLimits(self.context_tokens_max, model.eos_token_ids)
        self._step_limits = StepLimits(
            prefill_chunk_tokens=settings.prefill_chunk_tokens,
            batch_sequences_max=settings.batch_sequences_max,
            block_tokens=self._block_tokens,
        )
        self._clock = clock
        self._tokenizer: Tokenizer = Tokenizer.from_file(str(model.path / "tokenizer.json"))
        self._times = StepTimes(chunk_tokens=settings.prefill_chunk_tokens)
        self._turns = Turns(clock, prefill_cost=self._times.prefill_cost)
        self._queue = AdmissionQueue(
            self.pool,
            may_grant=lambda: not (self.num_without_blocks or self._ended),
            turns=self._turns,
            queue_s=lambda: self._times.read().queue_s,
        )
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
        self._to_wake: list[EventStream] = []  # streams with news since their consumers were last woken
        self._can_step = False
        self._idle = True
        self._num_in_batch = 0
        self._num_outside = 0
        self.num_without_blocks = 0  # preempted sequences that wait to go on

    def start(self) -> None:
        """Start the step thread; call from the event loop that will consume events."""
        self._loop = asyncio.get_running_loop()
        self._thread.start()

    async def stop(self) -> None:
        """End every run and every wait with WorkerUnavailable, and join the thread after its step. Idempotent."""
        with self._mail:
            self._stopping = True
            self._mail.notify()
        self._queue.fail(_stopped())
        if self._thread.is_alive():
            await asyncio.to_thread(self._thread.join, ENGINE_STOP_TIMEOUT_MS / 1000)
            if self._thread.is_alive():
                raise WorkerUnavailable("", f"its engine's step has not ended within {ENGINE_STOP_TIMEOUT_MS} ms")

    async def admit(
        self,
        prompt: HashedPrompt,
        *,
        num_blocks: int,
        use_device: bool,
        deadline: Deadline,
        ttl_s: float = math.inf,
        account: str = "",
        priority: int = 0,
    ) -> Admission:
        """Wait for its turn and for `num_blocks` blocks; more are taken when the sequence outgrows them.

        use_device: leading blocks come from the pool by hash, as far as it holds them; all but the block of the last
        token when `num_blocks` is more than the prompt's full blocks.
        ttl_s: how long blocks that the sequence uses or leaves in the pool are kept after their last use, at least.
        account, priority: whose share it is served from, and how soon.
        Raises InvalidRequest when it can never fit, Overloaded when the queue is full, DeadlineExceeded,
        WorkerUnavailable. The admission is held until `release`, or until a run on it has ended.
        """
        assert prompt.block_tokens == self._block_tokens
        assert prompt.token_ids
        if self._stopping or self._ended:
            raise _stopped()
        with self._times.waiting(prompt):
            return await self._queue.admit(
                prompt,
                num_blocks=num_blocks,
                use_device=use_device,
                deadline=deadline,
                ttl_s=ttl_s,
                account=account,
                priority=priority,
            )

    def release(self, admission: Admission) -> None:
        """Give the blocks back, and cancel the run if there is one; it gives them back after the step under way.
        Idempotent."""
        self._times.drop(admission)
        with self._mail:
            held = admission.state is AdmissionState.HELD
            if held:
                admission.state = AdmissionState.RELEASED
            elif admission.state is AdmissionState.RUNNING:
                self._cancelled.append(admission.key)
                self._changed = True
                self._mail.notify()
        if held:
            self.pool.unref_all(admission.block_ids)

    def mark_loaded(self, admission: Admission, num_blocks: int) -> None:
        """Blocks [0, num_blocks) hold verified bytes now: share them by hash. They are not to be written any more."""
        assert admission.state is AdmissionState.HELD
        assert num_blocks <= len(admission.prompt.chain)
        self.pool.hash_blocks(admission.prompt, admission.block_ids[:num_blocks], ttl_s=admission.ttl_s)
        admission.num_valid_blocks = max(admission.num_valid_blocks, num_blocks)
        self._times.loaded(admission)

    async def run(
        self,
        admission: Admission,
        *,
        cached_tokens: int,
        sampling: SamplingParams | None,
        leaves_blocks: bool = True,
    ) -> AsyncGenerator[EngineEvent, None]:
        """Compute the sequence from `cached_tokens` on; positions before hold valid KV in the admission's blocks.

        sampling None: compute the prompt's full blocks only. leaves_blocks False: what is computed is neither shared
        by hash nor reported as FilledBlock. Ends with RunFinished, after the blocks were given back. Closing the
        iterator cancels the run at its next step. Raises InvalidRequest (no room for a single output token),
        WorkerUnavailable, Overloaded (the consumer is too far behind).
        """
        run = self._submit(admission, cached_tokens, sampling, leaves_blocks)
        try:
            while True:
                event = await run.stream.next()
                yield event
                if isinstance(event, RunFinished):
                    return
        finally:
            self.release(admission)
            run.stream.close()

    def load(self) -> EngineLoad:
        """Counts of this moment, and costs as they were measured until now."""
        return EngineLoad(
            running=self._num_in_batch,
            waiting=self._queue.num_waiting + self._num_outside + len(self._submitted),
            free_blocks=self.pool.available_blocks,
            kept_blocks=self.pool.kept_blocks,
            ahead=self._times.read(list(self._submitted)),
        )

    def healthy(self) -> bool:
        """Whether the thread lives, its last steps did not all fail and, if there is work, one ended within
        ENGINE_STALL_MS. Busy is healthy."""
        if not self._thread.is_alive() or self._failed_steps >= FAILED_STEPS_MAX:
            return False
        return self._idle or self._clock.now_s() - self.heartbeat_s < ENGINE_STALL_MS / 1000

    def evict_device(self, selector: EvictSelector, *, dry_run: bool) -> EvictReport:
        """Evict from the pool what nobody uses now. The holder's name is the caller's to fill in."""
        return evict_device(self.pool, self.model, selector, dry_run=dry_run)

    def _submit(
        self, admission: Admission, cached_tokens: int, sampling: SamplingParams | None, leaves_blocks: bool
    ) -> Run:
        """Hand a run to the step thread, which owns the admission's blocks from here on."""
        assert self._loop is not None
        assert sampling is None or sampling.max_tokens >= 1
        num_prompt = len(admission.prompt.token_ids)
        if sampling is not None and num_prompt >= self.context_tokens_max:
            raise InvalidRequest(
                f"a prompt of {num_prompt} tokens leaves no room for output: prompt and output may have "
                f"{self.context_tokens_max} tokens together here; shorten the prompt",
                param="prompt",
            )
        if sampling is not None:  # the last token is always computed
            cached_tokens = min(cached_tokens, num_prompt - 1)
        num_computed = self._drop_uncounted_blocks(admission, cached_tokens)
        run = Run(
            admission,
            EventStream(self.pool, self._to_wake.append),
            num_computed=num_computed,
            sampling=sampling,
            leaves_blocks=leaves_blocks,
            limits=self._run_limits,
            tokenizer=self._tokenizer,
            hash_algorithm=self.model.namespace.hash_algorithm,
        )
        with self._mail:
            if self._stopping or self._ended:
                raise _stopped()
            assert admission.state is AdmissionState.HELD, "an admission is run once, and before it is released"
            admission.state = AdmissionState.RUNNING
            self._times.drop(admission)
            self._turns.enter(admission.claim)
            self._submitted.append(run)
            self._changed = True
            self._mail.notify()
        return run

    def _drop_uncounted_blocks(self, admission: Admission, cached_tokens: int) -> int:
        """Give back shared blocks beyond `cached_tokens`: they would be written again. Returns where to start."""
        assert 0 <= cached_tokens <= len(admission.prompt.token_ids)
        num_kept = cached_tokens // self._block_tokens
        if admission.num_valid_blocks <= num_kept:
            return cached_tokens
        admission.use_device = False  # nor may they come back by hash: the caller counts them as computed
        dropped = admission.block_ids[num_kept:]
        del admission.block_ids[num_kept:]
        self.pool.unref_all(dropped)
        return num_kept * self._block_tokens

    # What follows runs in the step thread, except where it says otherwise.

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
            self._mail.wait_for(lambda: self._stopping or self._changed or self._can_step)
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
        for run in [run for run in self._runs.values() if run.prompt_is_computed]:
            self._end(run, RunFinished(None, "", 0))
        plan = self._plan()
        self._can_step = bool(plan.rows)
        if not plan.rows:
            return
        started_s = self._clock.now_s()
        runs = [self._runs[rows.key] for rows in plan.rows]
        steps = [run.step_of(rows) for run, rows in zip(runs, plan.rows, strict=True)]
        self.num_steps += 1
        try:
            logits = self.model.runner.run_step(steps)  # [steps that want logits, vocab] float32
        except Exception as error:  # whatever the model's code raises: its sequences are lost, the worker is not
            self._failed_steps += 1
            for run in runs:
                self._fail(run, f"a step of its engine failed: {type(error).__name__}: {error}")
            return
        self._failed_steps = 0
        self._times.add(plan.rows, self._clock.now_s() - started_s)
        count_served(runs, plan.rows, self._turns)
        wanted = iter(logits.numpy())
        for run, rows in zip(runs, plan.rows, strict=True):
            try:
                self._share_blocks(run, rows.stop)
                self._add_token(run, next(wanted) if rows.wants_logits else None)
            except Exception as error:  # as above, but only this sequence is lost
                self._fail(run, f"its engine could not take a step's result: {type(error).__name__}: {error}")

    def _plan(self) -> StepPlan:
        """Ask for a plan, make the changes of blocks that it asks for first, and take the blocks that it needs."""
        while True:
            settle_turns(self._runs.values(), self._turns)
            planned = schedule_step(
                [run.state for run in self._runs.values()],
                self._step_limits,
                available_blocks=self.pool.available_blocks,
            )
            match planned:
                case Preempt(key=key):
                    self.num_preemptions += 1
                    block_ids = self._runs[key].give_up_blocks()
                    self._publish_counts()
                    self.pool.unref_all(block_ids)
                case Resume(key=key, num_blocks=num_blocks):
                    self._resume(self._runs[key], num_blocks)
                case StepPlan() as plan if self._take_blocks(plan):
                    for key in plan.joins:
                        self._runs[key].in_batch = True
                    self._publish_counts()
                    return plan

    def _resume(self, run: Run, num_blocks: int) -> None:
        prompt, shared_max = run.reusable
        taken = self.pool.take(num_blocks, prompt=prompt, shared_max=shared_max, ttl_s=run.admission.ttl_s)
        if not isinstance(taken, Short):  # another thread may have taken blocks since: then it is planned again
            run.resume(list(taken.block_ids), num_shared=taken.num_shared)
        self._publish_counts()

    def _take_blocks(self, plan: StepPlan) -> bool:
        """Take what the rows need. False: another thread was faster; what was taken stays, for the next plan."""
        for rows in plan.rows:
            taken = self.pool.take(rows.new_blocks)
            if isinstance(taken, Short):
                return False
            self._runs[rows.key].block_ids.extend(taken.block_ids)
        return True

    def _share_blocks(self, run: Run, stop: int) -> None:
        """Positions [0, stop) are computed: share the blocks that are full by hash, and report the new ones."""
        hashed = run.computed(stop)
        if hashed is None:
            return
        num_full = stop // self._block_tokens
        self.pool.hash_blocks(hashed, run.block_ids[:num_full], ttl_s=run.admission.ttl_s)
        for filled in run.unreported_blocks():
            self.pool.ref(filled.block_id)
            run.stream.send(filled)

    def _add_token(self, run: Run, logits: Logits | None) -> None:
        """Choose and send the next token, if one is due, and end the run if it was the last thing wanted."""
        finished = RunFinished(None, "", 0) if run.prompt_is_computed else None
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
        self._publish_counts()
        with self._mail:
            run.admission.state = AdmissionState.RELEASED
        self.pool.unref_all(run.give_up_blocks())
        match outcome:
            case RunFinished():
                run.stream.send(outcome)
            case WorkerUnavailable():
                run.stream.fail(outcome)

    def _end_everything(self) -> None:
        """The thread is ending, by `stop` or by a fault of ours: nobody may wait for it any more."""
        with self._mail:
            self._ended = True
            for run in self._submitted:
                self._runs[run.key] = run
            self._submitted = []
        for run in list(self._runs.values()):
            self._fail(run, _stopped().why)
        self._wake_consumers()
        self._call_on_loop(lambda: self._queue.fail(_stopped()))

    def _wake_consumers(self) -> None:
        streams = list(self._to_wake)
        self._to_wake.clear()  # in place: streams hold its `append`

        def wake_all() -> None:
            for stream in streams:
                stream.wake()

        if streams:
            self._call_on_loop(wake_all)

    def _publish_counts(self) -> None:
        """Say how many sequences are where; when no preempted one waits any more, new prompts may be admitted."""
        runs = self._runs.values()
        self._times.running(runs)
        self._num_in_batch = sum(run.in_batch for run in runs)
        self._num_outside = len(runs) - self._num_in_batch
        had_preempted = self.num_without_blocks > 0
        self.num_without_blocks = sum(not run.block_ids for run in runs)
        if had_preempted and self.num_without_blocks == 0:
            self._call_on_loop(self._queue.grant)

    def _on_freed(self) -> None:
        """Blocks were given back, in any thread: whoever waits for some looks again."""
        with self._mail:
            self._changed = True
            self._mail.notify()
        if self._queue.num_waiting:
            self._call_on_loop(self._queue.grant)

    def _call_on_loop(self, act: Callable[[], None]) -> None:
        """From any thread. A closed loop has nobody left who waits."""
        assert self._loop is not None
        with suppress(RuntimeError):
            self._loop.call_soon_threadsafe(act)


def _stopped() -> WorkerUnavailable:
    return WorkerUnavailable("", "its engine has stopped")
