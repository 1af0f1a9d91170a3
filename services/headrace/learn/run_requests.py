"""Requests on an engine, for experiments: what each took, and what the engine computed and held for all of them."""

import asyncio
import time
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from headrace.config import EngineSettings
from headrace.core.block import hash_prompt
from headrace.core.clock import Deadline, SystemClock
from headrace.core.generation import SamplingParams, TokenDelta
from headrace.engine.engine import Engine, FilledBlock
from headrace.engine.load_model import LoadedModel

RUN_TIMEOUT_S = 120.0
WATCH_S = 0.005


@dataclass(frozen=True, slots=True)
class Ran:
    """What a set of requests came to."""

    seconds: float
    output_tokens: tuple[tuple[int, ...], ...]
    cached_tokens: int  # of all prompts, found in the pool
    held_blocks_max: int  # of the pool, at any moment at which somebody looked


async def run_requests(
    model: LoadedModel,
    settings: EngineSettings,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    reuse: bool,
    one_by_one: bool = False,
) -> Ran:
    """Run prompts on a fresh engine over the model's pool, together or each after the one before; greedy."""
    clock = SystemClock()
    engine = Engine(model, settings, clock=clock)
    engine.start()
    deadline = Deadline.after(RUN_TIMEOUT_S, clock)
    held = _Held(engine)
    watching = asyncio.create_task(held.watch(), name="watch the pool")
    started_s = time.perf_counter()
    try:

        async def run(prompt: Sequence[int]) -> tuple[tuple[int, ...], int]:
            return await _run(engine, prompt, max_tokens=max_tokens, reuse=reuse, deadline=deadline)

        if one_by_one:
            results = [await run(prompt) for prompt in prompts]
        else:
            results = await asyncio.gather(*(run(prompt) for prompt in prompts))
        seconds = time.perf_counter() - started_s
    finally:
        watching.cancel()
        await asyncio.wait([watching])
        await engine.stop()
    outputs, cached = zip(*results, strict=True)
    return Ran(seconds, tuple(outputs), sum(cached), held.blocks_max)


async def _run(
    engine: Engine, token_ids: Sequence[int], *, max_tokens: int, reuse: bool, deadline: Deadline
) -> tuple[tuple[int, ...], int]:
    """One prompt's output tokens, and how many of its tokens were found in the pool."""
    namespace, block_tokens = engine.model.namespace, engine.model.kv.layout.block_tokens
    prompt = hash_prompt(namespace.id, token_ids, block_tokens=block_tokens, algorithm=namespace.hash_algorithm)
    admission = await engine.admit(
        prompt, num_blocks=-(-len(token_ids) // block_tokens), use_device=reuse, deadline=deadline
    )
    cached_tokens = admission.num_device_blocks * block_tokens
    sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
    output = []
    async with aclosing(
        engine.run(admission, cached_tokens=cached_tokens, sampling=sampling, leaves_blocks=reuse)
    ) as events:
        async for event in events:
            match event:
                case TokenDelta(token_id=token_id):
                    output.append(token_id)
                case FilledBlock(block_id=block_id):
                    engine.pool.unref(block_id)
    return tuple(output), cached_tokens


class _Held:
    """The most blocks that were somebody's."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.blocks_max = 0

    async def watch(self) -> None:
        while True:
            held = self._engine.pool.num_blocks - self._engine.pool.available_blocks
            self.blocks_max = max(self.blocks_max, held)
            await asyncio.sleep(WATCH_S)
