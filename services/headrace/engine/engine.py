"""The engine of one worker, as the event loop sees it: prompts are admitted, run, and heard of.

This file owns the way of a prompt from the wish to its events; the steps themselves are `step_loop.py`'s:

    admit ──► Admission (blocks held) ──► caller loads a prefix ──► run ──► events ──► RunFinished (blocks given back)

It knows nothing of stores, of the index or of where loaded bytes came from.
"""

import math
from collections.abc import AsyncGenerator, Sequence

from tokenizers import Tokenizer

from headrace.config import EngineSettings
from headrace.core.block import HashedPrompt
from headrace.core.clock import Clock, Deadline
from headrace.core.errors import InvalidRequest
from headrace.core.generation import EvictReport, EvictSelector, SamplingParams
from headrace.core.speculation_stats import SpeculationStats
from headrace.engine.admission_queue import Admission, AdmissionQueue, AdmissionState
from headrace.engine.drafter import Drafter
from headrace.engine.event_stream import EngineEvent, EventStream, FilledBlock, RunFinished
from headrace.engine.evict_device import evict_device
from headrace.engine.load_model import LoadedModel
from headrace.engine.make_pool import make_pool
from headrace.engine.prefix_backup import PrefixBackup
from headrace.engine.run import Run, RunRules
from headrace.engine.schedule_step import StepLimits
from headrace.engine.speculation import Speculation
from headrace.engine.step_loop import Scheduling, StepLoop, stopped
from headrace.engine.step_times import EngineLoad, StepTimes
from headrace.engine.turns import Turns

__all__ = ["Admission", "Engine", "EngineEvent", "EngineLoad", "FilledBlock", "RunFinished"]


class Engine:
    """One model, one pool, one step thread. All methods belong to the event loop that called `start`."""

    def __init__(
        self, model: LoadedModel, settings: EngineSettings, *, clock: Clock, drafter: Drafter | None = None
    ) -> None:
        """drafter: proposes tokens for speculative decoding (`load_drafter`); None: there is none."""
        self.model = model
        self.kv = model.kv
        self.window = model.window
        self.near_window = model.near_window
        self.pool = make_pool(model.kv, model.window, clock=clock, on_freed=self._on_freed)
        self._block_tokens = model.kv.layout.block_tokens
        # A sequence can be as long as the model and the whole pool allow.
        self.context_tokens_max = model.context_tokens_max
        if self.window.held_blocks(-(-model.context_tokens_max // self._block_tokens)) > self.pool.num_blocks:
            self.context_tokens_max = min(model.context_tokens_max, self.pool.num_blocks * self._block_tokens)
        self._run_rules = RunRules(
            context_tokens_max=self.context_tokens_max,
            eos_token_ids=model.eos_token_ids,
            tokenizer=Tokenizer.from_file(str(model.path / "tokenizer.json")),
            hash_algorithm=model.namespace.hash_algorithm,
        )
        self._times = StepTimes(
            chunk_tokens=settings.prefill_chunk_tokens,
            drafts=drafter is not None,
            row_multiple=1 if drafter is None else model.runner.row_multiple,
        )
        self._speculation: Speculation | None = None
        if drafter is not None:
            self._speculation = Speculation(drafter, draft_tokens=settings.draft_tokens, times=self._times, clock=clock)
        self._turns = Turns(clock, prefill_cost=self._times.prefill_cost)
        self._queue = AdmissionQueue(
            self.pool,
            may_grant=lambda: self.steps.may_admit,
            turns=self._turns,
            queue_s=lambda: self._times.read().queue_s,
            window=self.window,
        )
        limits = StepLimits(
            prefill_chunk_tokens=settings.prefill_chunk_tokens,
            batch_sequences_max=settings.batch_sequences_max,
            block_tokens=self._block_tokens,
            window=self.window,
            near_window=self.near_window,
        )
        self.steps = StepLoop(
            model,
            self.pool,
            Scheduling(limits, self._turns, self._times, self._speculation),
            clock=clock,
            on_blocks_free=self._queue.grant,
            on_ended=lambda: self._queue.fail(stopped()),
        )

    def start(self) -> None:
        """Start the step thread; call from the event loop that will consume events."""
        self.steps.start()

    async def stop(self) -> None:
        """End every run and every wait with WorkerUnavailable, and join the thread after its step. Idempotent."""
        self.steps.ask_to_stop()
        self._queue.fail(stopped())
        await self.steps.join()

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
        if not self.steps.takes_runs:
            raise stopped()
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
        if self.steps.cancel(admission):
            self.pool.unref_all(admission.block_ids)

    def move_table(self, admission: Admission, block_ids: Sequence[int], *, first_block: int) -> None:
        """Another prefix has been loaded into some of the admission's blocks: its table is these from now on. The
        others are given back."""
        assert admission.state is AdmissionState.HELD
        dropped = [block_id for block_id in admission.block_ids if block_id not in block_ids]
        assert len(dropped) + len(block_ids) == len(admission.block_ids)
        admission.block_ids[:] = block_ids
        admission.first_block = first_block
        self.pool.unref_all(dropped)

    def move_near(self, admission: Admission, block_ids: Sequence[int], *, first_near: int, end_near: int) -> None:
        """As `move_table`, of blocks of two parts: the same blocks, and near parts on others of them."""
        assert admission.state is AdmissionState.HELD
        parts = self.pool.parts
        kept = set(parts.split(block_ids)[1])
        dropped = [near for near in parts.split(admission.block_ids)[1] if near not in kept]
        admission.block_ids[:] = block_ids
        admission.first_near, admission.end_near = first_near, end_near
        self.pool.unref_all([parts.near_alone(near) for near in dropped])

    def mark_loaded(self, admission: Admission, num_blocks: int) -> None:
        """Blocks [0, num_blocks) hold verified bytes now, as far as they are needed: share them by hash. They are not
        to be written any more."""
        assert admission.state is AdmissionState.HELD
        assert num_blocks <= len(admission.prompt.chain)
        first_block = admission.first_block
        valid = admission.block_ids[: num_blocks - first_block]
        self.pool.hash_blocks(admission.prompt, valid, first_block=first_block, ttl_s=admission.ttl_s)
        admission.num_valid_blocks = max(admission.num_valid_blocks, num_blocks)
        self._times.loaded(admission)

    async def run(
        self,
        admission: Admission,
        *,
        cached_tokens: int,
        sampling: SamplingParams | None,
        leaves_blocks: bool = True,
        backup: PrefixBackup | None = None,
    ) -> AsyncGenerator[EngineEvent, None]:
        """Compute the sequence from `cached_tokens` on; positions before hold valid KV in the admission's blocks.

        sampling None: compute the prompt's full blocks only. leaves_blocks False: what is computed is neither shared
        by hash nor reported as FilledBlock. backup: where its blocks are read back from after it had to give them up,
        when that is sooner than computing them. Ends with RunFinished, after the blocks were given back. Closing the
        iterator cancels the run at its next step. Raises InvalidRequest (no room for a single output token),
        WorkerUnavailable, Overloaded (the consumer is too far behind).
        """
        run = self._submit(admission, cached_tokens, sampling, leaves_blocks=leaves_blocks, backup=backup)
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
            running=self.steps.num_in_batch,
            waiting=self._queue.num_waiting + self.steps.num_outside,
            free_blocks=self.pool.available_blocks,
            kept_blocks=self.pool.kept_blocks,
            ahead=self._times.read(self.steps.submitted()),
        )

    def healthy(self) -> bool:
        """As StepLoop.healthy: busy is healthy."""
        return self.steps.healthy()

    def speculation(self) -> SpeculationStats:
        """What drafts came to since the start; nothing without a drafter. In any thread."""
        return SpeculationStats() if self._speculation is None else self._speculation.stats

    def evict_device(self, selector: EvictSelector, *, dry_run: bool) -> EvictReport:
        """Evict from the pool what nobody uses now. The holder's name is the caller's to fill in."""
        return evict_device(self.pool, self.model, selector, dry_run=dry_run)

    def _submit(
        self,
        admission: Admission,
        cached_tokens: int,
        sampling: SamplingParams | None,
        *,
        leaves_blocks: bool,
        backup: PrefixBackup | None,
    ) -> Run:
        """Hand a run to the step thread, which owns the admission's blocks from here on."""
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
            EventStream(self.pool, self.steps.to_wake.append),
            self._run_rules,
            num_computed=num_computed,
            sampling=sampling,
            leaves_blocks=leaves_blocks,
            backup=backup,
        )
        self.steps.submit(run)
        return run

    def _drop_uncounted_blocks(self, admission: Admission, cached_tokens: int) -> int:
        """Give back shared blocks beyond `cached_tokens`: they would be written again. Returns where to start."""
        assert 0 <= cached_tokens <= len(admission.prompt.token_ids)
        num_kept = cached_tokens // self._block_tokens
        if admission.num_valid_blocks <= num_kept:
            return cached_tokens
        admission.use_device = False  # nor may they come back by hash: the caller counts them as computed
        if admission.first_block > self.window.first_of_prefix(num_kept) or (
            self.near_window.bounded and admission.first_near > self.near_window.first_of_prefix(num_kept)
        ):
            num_kept = admission.first_block = admission.first_near = (
                0  # what is left lacks the beginning of its window
            )
        admission.end_near = min(admission.end_near, num_kept)
        first_dropped = max(0, num_kept - admission.first_block)
        dropped = admission.block_ids[first_dropped:]
        del admission.block_ids[first_dropped:]
        self.pool.unref_all(dropped)
        return num_kept * self._block_tokens

    def _on_freed(self) -> None:
        """Blocks were given back, in any thread: whoever waits for some looks again."""
        self.steps.look_again()
        if self._queue.num_waiting:
            self.steps.call_on_loop(self._queue.grant)
