"""Requests on an engine of their own, without stores: what each was answered, and what the engine did for all of them.

The engine is made over a loaded model's pool, so nothing else may use the model meanwhile.
"""

import asyncio
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

from headrace.config import EngineSettings
from headrace.core.block import HashedPrompt, hash_prompt
from headrace.core.clock import Clock, Deadline, SystemClock
from headrace.core.generation import SamplingParams, TokenDelta
from headrace.engine.drafter import Drafter
from headrace.engine.engine import Engine, FilledBlock, RunFinished
from headrace.engine.layered_pool import LayeredPool
from headrace.engine.load_model import LoadedModel

RUN_TIMEOUT_S = 600.0
MEETING_POLL_S = 0.001
SYSTEM_CLOCK = SystemClock()


@dataclass(frozen=True, slots=True)
class Answer:
    """One request's tokens, with the log-probabilities that it asked for, and how much of its prompt was reused."""

    deltas: tuple[TokenDelta, ...]
    cached_tokens: int

    @property
    def token_ids(self) -> tuple[int, ...]:
        """What was generated."""
        return tuple(delta.token_id for delta in self.deltas)


@dataclass(frozen=True, slots=True)
class Ran:
    """What a set of requests came to."""

    answers: tuple[Answer, ...]  # in the order of the prompts
    seconds: float
    num_preemptions: int
    num_shared_blocks: int  # taken from another run of the same moment instead of being computed
    held_bytes_max: int  # of the pool, at any event of a run
    num_drafted_tokens: int
    num_accepted_tokens: int

    @property
    def cached_tokens(self) -> int:
        """Of all prompts."""
        return sum(answer.cached_tokens for answer in self.answers)


async def run_requests(
    model: LoadedModel,
    settings: EngineSettings,
    prompts: Sequence[Sequence[int]],
    *,
    sampling: SamplingParams,
    reuse: bool,
    one_by_one: bool = False,
    drafter: Drafter | None = None,
    clock: Clock = SYSTEM_CLOCK,
    when_met: Callable[[], None] = lambda: None,
) -> Ran:
    """Run prompts on a fresh engine, together or each after the one before. reuse: of blocks in the engine's pool.

    clock: by which the engine measures its steps. when_met: called when all that run together are in the engine, or
    will not come, for a runner whose steps wait until then.
    """
    engine = Engine(model, settings, clock=clock, drafter=drafter)
    engine.start()
    deadline = Deadline.after(RUN_TIMEOUT_S, SYSTEM_CLOCK)
    held_bytes_max, started_s = 0, time.perf_counter()

    def on_event() -> None:
        nonlocal held_bytes_max
        held_bytes_max = max(held_bytes_max, held_bytes(engine))

    try:
        runs = [
            answer_prompt(
                engine, _hash(model, prompt), sampling=sampling, reuse=reuse, deadline=deadline, on_event=on_event
            )
            for prompt in prompts
        ]
        answers = [await run for run in runs] if one_by_one else await _meet(engine, runs, when_met)
        seconds = time.perf_counter() - started_s
    finally:
        await engine.stop()
    engine.pool.check_integrity()
    drafts = engine.speculation()
    return Ran(
        answers=tuple(answers),
        seconds=seconds,
        num_preemptions=engine.steps.num_preemptions,
        num_shared_blocks=engine.steps.num_shared_blocks,
        held_bytes_max=held_bytes_max,
        num_drafted_tokens=drafts.drafted_tokens,
        num_accepted_tokens=drafts.accepted_tokens,
    )


async def _meet(
    engine: Engine, runs: Sequence[Coroutine[Any, Any, Answer]], when_met: Callable[[], None]
) -> list[Answer]:
    """Run all together. Who gives up meanwhile leaves nobody behind: neither steps that wait nor answers under way."""
    answers = asyncio.gather(*runs)
    try:
        try:
            while not answers.done() and (load := engine.load()).running + load.waiting < len(runs):  # noqa: ASYNC110
                await asyncio.sleep(MEETING_POLL_S)
        finally:
            when_met()
        return await answers
    finally:
        if answers.cancel():
            await asyncio.wait([answers])


def held_bytes(engine: Engine) -> int:
    """What sequences hold of an engine's pool now."""
    pool, layout = engine.pool, engine.kv.layout
    held = (pool.num_blocks - pool.available_blocks) * layout.wide.block_bytes
    if isinstance(pool, LayeredPool):
        held += (pool.near.num_blocks - pool.available_near) * layout.near.block_bytes
    return held


async def answer_prompt(
    engine: Engine,
    prompt: HashedPrompt,
    *,
    sampling: SamplingParams,
    reuse: bool,
    deadline: Deadline,
    on_event: Callable[[], None] = lambda: None,
) -> Answer:
    """Run one prompt on an engine that runs. reuse: of blocks in its pool, from before and for later."""
    block_tokens = prompt.block_tokens
    admission = await engine.admit(
        prompt, num_blocks=len(prompt.token_ids) // block_tokens + 1, use_device=reuse, deadline=deadline
    )
    cached_tokens = admission.num_device_blocks * block_tokens
    deltas = []
    async with aclosing(
        engine.run(admission, cached_tokens=cached_tokens, sampling=sampling, leaves_blocks=reuse)
    ) as events:
        async for event in events:
            on_event()
            match event:
                case TokenDelta():
                    deltas.append(event)
                case FilledBlock(block_id=block_id):
                    engine.pool.unref(block_id)
                case RunFinished(num_reused_blocks=num_blocks):
                    cached_tokens = num_blocks * block_tokens
    return Answer(tuple(deltas), cached_tokens)


def _hash(model: LoadedModel, token_ids: Sequence[int]) -> HashedPrompt:
    namespace = model.namespace
    return hash_prompt(
        namespace.id, token_ids, block_tokens=model.kv.layout.block_tokens, algorithm=namespace.hash_algorithm
    )
