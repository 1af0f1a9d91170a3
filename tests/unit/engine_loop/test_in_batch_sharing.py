"""Equal beginnings that arrive together are computed once, on a real tiny model: counted in rows of steps."""

import asyncio
import random
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from typing import Any

import pytest
import torch

from headrace.core.generation import SamplingParams
from headrace.engine.engine import Engine, FilledBlock, RunFinished
from headrace.engine.model_runner import ModelRunner, SequenceStep

from .conftest import BLOCK_TOKENS, VOCAB, HeldRunner, Reply, StandingClock, admit, gate_of, generate, meet, until

MakeEngine = Callable[..., Engine]
PARAMS = SamplingParams(max_tokens=6, logprobs=VOCAB, ignore_eos=True)


def make_tokens(length: int, *, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1, VOCAB), k=length)


class CountingRunner(HeldRunner):
    """The real runner, which waits until it may go on, and counts how often each position of a prompt was computed."""

    def __init__(self, runner: ModelRunner) -> None:
        super().__init__(runner)
        self.prompt_rows = 0  # rows of steps that had more than one of their sequence

    def run_step(self, steps: Sequence[SequenceStep]) -> torch.Tensor:
        logits = super().run_step(steps)
        self.prompt_rows += sum(len(step.token_ids) for step in steps if len(step.token_ids) > 1)
        return logits


def counting(engine: Engine) -> CountingRunner:
    runner = engine.model.runner
    assert isinstance(runner, CountingRunner)
    return runner


async def together(engine: Engine, prompts: Sequence[Sequence[int]], *, use_device: bool = True) -> list[Reply]:
    """All prompts' replies; the first step is computed when all of them have been submitted."""
    return await meet(engine, [generate(engine, p, use_device=use_device, sampling=PARAMS) for p in prompts])


async def come_after(engine: Engine, num_steps: int, reply: Coroutine[Any, Any, Reply]) -> "asyncio.Task[Reply]":
    """Begin this when so many steps have gone, while no further step goes."""
    gate = gate_of(engine)
    await until(lambda: engine.load().running > 0)
    gate.let_go(num_steps)
    await until(lambda: gate.is_waiting and gate.num_steps == num_steps)
    before = engine.load().running + engine.load().waiting
    task = asyncio.create_task(reply)
    await until(lambda: engine.load().running + engine.load().waiting == before + 1)
    return task


def assert_equal(got: Reply, want: Reply) -> None:
    assert (got.token_ids, got.logprobs, got.text, got.finished) == (
        want.token_ids,
        want.logprobs,
        want.text,
        want.finished,
    )


@pytest.mark.parametrize("chunk", [5, 16, 512])
async def test_eight_equal_prompts_at_once_are_computed_once(make_engine: MakeEngine, chunk: int) -> None:
    """Fails if followers compute what another run is computing, if their rows differ from those of a run alone, or if
    what was counted as cached is not what nobody computed for them."""
    prompt = make_tokens(5 * BLOCK_TOKENS + 3, seed=1)
    want = await generate(make_engine(), prompt, sampling=PARAMS)
    engine = make_engine(chunk=chunk, wrap=CountingRunner, usable_blocks=64)
    replies = await together(engine, [prompt] * 8)
    for reply in replies:
        assert_equal(reply, want)
        assert [block.block_hash for block in reply.filled] == [block.block_hash for block in want.filled]
    reused = sorted(reply.finished.num_reused_blocks for reply in replies)
    assert reused == [0] + [5] * 7
    # Once the five full blocks, and for each its own last three tokens (single rows of these count as none).
    assert counting(engine).prompt_rows <= 5 * BLOCK_TOKENS + 8 * 3
    assert engine.steps.num_shared_blocks == 7 * 5
    assert engine.pool.counters.hits_blocks == 7 * 5


async def test_prompts_that_part_after_a_common_beginning_share_just_that(make_engine: MakeEngine) -> None:
    head = make_tokens(4 * BLOCK_TOKENS + 2, seed=2)
    prompts = [[*head, *make_tokens(20 + seed, seed=seed)] for seed in range(4)]
    wants = [await generate(make_engine(), prompt, sampling=PARAMS) for prompt in prompts]
    engine = make_engine(chunk=24, wrap=CountingRunner)
    replies = await together(engine, prompts)
    for reply, want in zip(replies, wants, strict=True):
        assert_equal(reply, want)
    assert sorted(reply.finished.num_reused_blocks for reply in replies) == [0, 4, 4, 4]
    rests = sum(len(prompt) - 4 * BLOCK_TOKENS for prompt in prompts)
    assert counting(engine).prompt_rows <= 4 * BLOCK_TOKENS + rests


async def test_who_comes_while_an_equal_prompt_is_computed_follows_it_from_there(make_engine: MakeEngine) -> None:
    """The late one is shorter, so its turn is first: the one that is under way is computed in its turn. Fails if both
    are computed, or if the one under way is charged for taking what it has begun itself."""
    head = make_tokens(20 * BLOCK_TOKENS, seed=3)
    long, short = [*head, *make_tokens(100, seed=4)], [*head, 7]
    engine = make_engine(chunk=BLOCK_TOKENS, clock=StandingClock(), wrap=CountingRunner)
    first = asyncio.ensure_future(generate(engine, long, use_device=True, sampling=PARAMS))
    overtaking = await come_after(engine, 5, generate(engine, short, use_device=True, sampling=PARAMS))
    # 15 steps for what is left of the head, and 6 for the answer; the long one has 13 more of its prompt.
    gate_of(engine).let_go(5 + 15 + 6 + 3)
    async with asyncio.timeout(60):
        second = await overtaking
    assert not first.done(), "the short one was to overtake it"
    assert (second.finished.num_reused_blocks, second.num_device_blocks) == (20, 5)
    gate_of(engine).let_go()
    assert (await first).finished.num_reused_blocks == 0
    assert counting(engine).prompt_rows <= len(long)


async def test_when_the_leader_goes_another_goes_on_from_where_it_came(make_engine: MakeEngine) -> None:
    """Fails if followers wait for a run that was cancelled, or compute again what it had shared already."""
    prompt = make_tokens(20 * BLOCK_TOKENS + 1, seed=5)
    want = await generate(make_engine(), prompt, sampling=PARAMS)
    engine = make_engine(chunk=BLOCK_TOKENS, clock=StandingClock(), wrap=CountingRunner, usable_blocks=64)
    leader = asyncio.ensure_future(generate(engine, prompt, use_device=True, sampling=PARAMS))
    same = [generate(engine, prompt, use_device=True, sampling=PARAMS) for _ in range(2)]
    followers = [await come_after(engine, num_steps, each) for num_steps, each in zip((2, 3), same, strict=True)]
    gate_of(engine).let_go(5)
    await until(lambda: gate_of(engine).is_waiting and engine.load().running == 3)
    leader.cancel()
    with pytest.raises(asyncio.CancelledError):
        await leader
    gate_of(engine).let_go()
    replies = await asyncio.gather(*followers)
    for reply in replies:
        assert_equal(reply, want)
    reused = sorted(reply.finished.num_reused_blocks for reply in replies)
    assert reused[0] > 0, "what the leader had computed was lost"
    assert reused[1] == 20
    assert counting(engine).prompt_rows <= len(prompt)


async def test_requests_that_may_not_reuse_compute_their_prompts_and_others_may_follow_them(
    make_engine: MakeEngine,
) -> None:
    prompt = make_tokens(3 * BLOCK_TOKENS + 1, seed=6)
    engine = make_engine(chunk=512, wrap=CountingRunner)
    replies = await together(engine, [prompt] * 3, use_device=False)
    assert [reply.finished.num_reused_blocks for reply in replies] == [0, 0, 0]
    assert counting(engine).prompt_rows == 3 * len(prompt)


async def test_who_has_computed_a_part_itself_takes_nothing_behind_it(make_engine: MakeEngine) -> None:
    """A shorter prompt that may not reuse overtakes a longer one with the same beginning. Fails if the longer one takes
    blocks that it does not lack at its beginning: usage could not say so."""
    prompt = make_tokens(36 * BLOCK_TOKENS, seed=9)
    short = prompt[: 18 * BLOCK_TOKENS + 1]
    engine = make_engine(chunk=BLOCK_TOKENS, clock=StandingClock(), wrap=CountingRunner, usable_blocks=64)
    first = asyncio.ensure_future(generate(engine, prompt, use_device=True, sampling=PARAMS))
    overtaking = await come_after(engine, 4, generate(engine, short, sampling=PARAMS))
    gate_of(engine).let_go(4 + 19 + 6 + 3)  # the short one's prompt and its answer; of the long one 32 blocks are left
    async with asyncio.timeout(60):
        second = await overtaking
    assert not first.done(), "the short one was to overtake it"
    gate_of(engine).let_go()
    assert (await first).finished.num_reused_blocks == second.finished.num_reused_blocks == 0
    assert counting(engine).prompt_rows == len(prompt) + len(short) - 1  # the short one's last row is a single one


async def test_a_run_that_leaves_no_blocks_leads_nobody(make_engine: MakeEngine) -> None:
    """Its blocks are never found by hash: whoever waited for them would wait as long as it lives."""
    prompt = make_tokens(6 * BLOCK_TOKENS + 1, seed=7)
    engine = make_engine(chunk=BLOCK_TOKENS, clock=StandingClock(), wrap=CountingRunner)
    hidden = engine.run(
        await admit(engine, prompt, use_device=True), cached_tokens=0, sampling=PARAMS, leaves_blocks=False
    )
    async with aclosing(hidden) as events:
        waiting = asyncio.ensure_future(anext(events))
        other = asyncio.ensure_future(generate(engine, prompt, use_device=True, sampling=PARAMS))
        await until(lambda: engine.load().running + engine.load().waiting == 2)
        gate_of(engine).let_go()
        await waiting
        async for event in events:
            last = event
    assert (await other).finished.num_reused_blocks == 0
    # It may follow, since it may reuse: so the other one leads, though it came later.
    assert isinstance(last, RunFinished)
    assert last.num_reused_blocks == 6


async def test_equal_prompts_that_are_only_prefilled_are_computed_once_and_each_reports_its_blocks(
    make_engine: MakeEngine,
) -> None:
    """Each publishes on its own account (its retention, its node), so each must hear of every block."""
    prompt = make_tokens(4 * BLOCK_TOKENS + 3, seed=8)
    engine = make_engine(chunk=16, wrap=CountingRunner)

    async def prefill() -> tuple[list[int], int]:
        admission = await admit(engine, prompt, use_device=True)
        positions = []
        async with aclosing(engine.run(admission, cached_tokens=0, sampling=None)) as events:
            async for event in events:
                if isinstance(event, FilledBlock):
                    positions.append(event.position)
                    engine.pool.unref(event.block_id)
                elif isinstance(event, RunFinished):
                    return positions, event.num_reused_blocks
        raise AssertionError("no end")

    runs = [asyncio.ensure_future(prefill()) for _ in range(4)]
    await until(lambda: engine.load().running + engine.load().waiting == 4)
    gate_of(engine).let_go()
    results = await asyncio.gather(*runs)
    assert all(positions == [0, 1, 2, 3] for positions, _ in results)
    assert sorted(num_reused for _, num_reused in results) == [0, 4, 4, 4]
    assert counting(engine).prompt_rows == 4 * BLOCK_TOKENS
