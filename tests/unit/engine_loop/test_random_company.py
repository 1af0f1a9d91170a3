"""Random companies of runs on one engine: arrivals, shared beginnings, cancels, preemption, reloads that fail or drip.

Whatever the company, everybody ends, every answer is the right one (`hashed_model.py`: one wrong byte of KV changes
it), every block that is told holds what its hash says, the pool's books balance, and what usage says was computed is
what was computed. A failure names its seed.
"""

import asyncio
import math
import random
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass

import pytest

from headrace.core.generation import SamplingParams, TokenDelta
from headrace.engine.engine import Engine, FilledBlock, RunFinished

from .conftest import BLOCK_TOKENS, VOCAB, admit
from .hashed_model import CopyingBackup, assert_expected_block, expected_sequence, make_hashed_engine, runner_of

MakeEngine = Callable[..., Engine]


@dataclass(frozen=True, slots=True)
class Ask:
    """One request of a company."""

    prompt: list[int]
    max_tokens: int  # 0: only the prompt's full blocks are wanted
    use_device: bool
    leaves_blocks: bool
    backup: CopyingBackup | None
    comes_after_s: float
    gone_after_s: float | None
    ttl_s: float = math.inf  # that its blocks are kept for after their last use
    pause_s: float = 0.0  # that its consumer takes over each full block


def make_ask(rng: random.Random, engine: Engine, heads: list[list[int]], *, kind: str) -> Ask:
    head = rng.choice(heads)
    prompt = head[: rng.randrange(1, len(head) + 1)] if rng.random() < 0.7 else list(head)
    if rng.random() < 0.5:
        prompt += rng.choices(range(1, VOCAB), k=rng.randrange(1, 12))
    plain = kind == "counted"
    backup = None
    if kind == "tight" and rng.random() < 0.6:
        backup = CopyingBackup(engine, copies_filled=rng.random() < 0.7)
        backup.reloads_max = rng.choice((0, 1, 2, 1_000))
        backup.delay_s = rng.choice((0.0, 0.002))
    return Ask(
        prompt=prompt,
        max_tokens=rng.choice((0, 1, 3, 12, 25)) if not plain else rng.choice((1, 4)),
        use_device=rng.random() < 0.8,
        leaves_blocks=plain or rng.random() < 0.85,
        backup=backup,
        comes_after_s=rng.choice((0.0, 0.0, rng.uniform(0, 0.02))),
        gone_after_s=rng.uniform(0, 0.05) if kind == "tight" and rng.random() < 0.2 else None,
    )


async def serve(engine: Engine, ask: Ask) -> int:
    """Ask, check the blocks and the answer; returns how many of the prompt's tokens usage counts as computed."""
    await asyncio.sleep(ask.comes_after_s)
    admission = await admit(engine, ask.prompt, use_device=ask.use_device, ttl_s=ask.ttl_s)
    expected = expected_sequence(ask.prompt, ask.max_tokens, window_tokens=runner_of(engine).window_tokens)
    tokens: list[int] = []
    positions: list[int] = []
    samples = ask.max_tokens > 0
    try:
        num_device = admission.num_device_blocks
        run = engine.run(
            admission,
            cached_tokens=num_device * BLOCK_TOKENS,
            sampling=SamplingParams(max_tokens=ask.max_tokens, ignore_eos=True) if samples else None,
            leaves_blocks=ask.leaves_blocks,
            backup=ask.backup if ask.leaves_blocks else None,
        )
        async with aclosing(run) as events:
            async for event in events:
                if isinstance(event, TokenDelta):
                    tokens.append(event.token_id)
                elif isinstance(event, FilledBlock):
                    positions.append(event.position)
                    if ask.backup is not None:
                        ask.backup.filled(event)
                    try:
                        await asyncio.sleep(ask.pause_s)
                        assert_expected_block(engine, event, expected)
                    finally:
                        engine.pool.unref(event.block_id)
                elif isinstance(event, RunFinished):
                    finished = event
    finally:
        engine.release(admission)
    assert (*ask.prompt, *tokens) == expected.token_ids
    num_tokens = len(ask.prompt) + max(0, ask.max_tokens - 1) if samples else len(ask.prompt)
    if engine.window.bounded:  # what lies before a window that is found is not told
        assert positions == sorted(set(positions)), "a block is told twice, or before one that stands before it"
    elif ask.leaves_blocks:
        assert positions == list(range(num_device, num_tokens // BLOCK_TOKENS)), "a block is missing, or told twice"
    assert finished.num_reused_blocks * BLOCK_TOKENS <= len(ask.prompt) - samples
    to_compute = len(ask.prompt) if samples else len(ask.prompt) // BLOCK_TOKENS * BLOCK_TOKENS
    return to_compute - finished.num_reused_blocks * BLOCK_TOKENS


async def serve_all(engine: Engine, asks: list[Ask]) -> list[int]:
    """All of them, but for those who go; what `serve` returns of those who stay."""
    tasks = [asyncio.ensure_future(serve(engine, ask)) for ask in asks]
    for task, ask in zip(tasks, asks, strict=True):
        if ask.gone_after_s is not None:
            asyncio.get_running_loop().call_later(ask.gone_after_s, task.cancel)
    async with asyncio.timeout(120):
        outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for outcome in outcomes:
        if isinstance(outcome, Exception):  # a cancellation is none
            raise outcome
    return [outcome for outcome in outcomes if isinstance(outcome, int)]


@pytest.mark.parametrize("seed", range(12))
async def test_any_company_in_a_tight_pool_gets_right_answers_and_gives_everything_back(
    make_engine: MakeEngine, seed: int
) -> None:
    rng = random.Random(seed)
    num_blocks = rng.randrange(12, 24)
    engine = make_hashed_engine(
        make_engine, num_blocks=num_blocks, chunk=rng.choice((3, 8, 20, 64)), batch=rng.randrange(1, 7)
    )
    heads = [rng.choices(range(1, VOCAB), k=rng.randrange(BLOCK_TOKENS, 7 * BLOCK_TOKENS)) for _ in range(3)]
    await serve_all(engine, [make_ask(rng, engine, heads, kind="tight") for _ in range(25)])
    engine.pool.check_integrity()
    assert engine.steps.num_without_blocks == 0


@pytest.mark.parametrize("seed", range(8))
async def test_what_usage_says_was_computed_is_what_was_computed(make_engine: MakeEngine, seed: int) -> None:
    """With room for all, so that nothing is computed twice. Fails if a block is taken without being counted, or counted
    as cached by somebody for whom it was computed."""
    rng = random.Random(1_000 + seed)
    engine = make_hashed_engine(make_engine, num_blocks=64, chunk=rng.choice((5, 8, 30)), batch=rng.randrange(2, 7))
    heads = [rng.choices(range(1, VOCAB), k=rng.randrange(BLOCK_TOKENS, 6 * BLOCK_TOKENS)) for _ in range(2)]
    asks = [make_ask(rng, engine, heads, kind="counted") for _ in range(7)]
    computed = await serve_all(engine, asks)
    assert engine.steps.num_preemptions == 0
    assert runner_of(engine).num_rows == sum(computed) + sum(ask.max_tokens - 1 for ask in asks)
