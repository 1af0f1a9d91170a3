"""Sequences that give their blocks up and come back: computed again or read back, whatever happens meanwhile.

The model is one of integers (`hashed_model.py`): one block with wrong bytes changes every token after it.
"""

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import aclosing

import pytest

from headrace.core.errors import WorkerUnavailable
from headrace.core.generation import SamplingParams, TokenDelta
from headrace.core.limits import SAVE_PATIENCE_MS
from headrace.engine.block_table import TableWindows
from headrace.engine.engine import Engine, FilledBlock, RunFinished
from headrace.engine.event_stream import EventStream
from headrace.engine.run import Run
from headrace.engine.schedule_step import StepPlan

from .conftest import BLOCK_TOKENS, VOCAB, StandingClock, admit, begin_together, gate_of, in_step, until
from .hashed_model import CopyingBackup, HashedRunner, expected_answer, make_hashed_engine
from .test_block_pool import ManualClock

MakeEngine = Callable[..., Engine]


def make_tokens(length: int, *, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1, VOCAB), k=length)


async def answer(
    engine: Engine,
    prompt: Sequence[int],
    *,
    max_tokens: int,
    backup: CopyingBackup | None = None,
    use_device: bool = True,
    leaves_blocks: bool = True,
) -> tuple[tuple[int, ...], RunFinished]:
    admission = await admit(engine, prompt, use_device=use_device)
    tokens: list[int] = []
    run = engine.run(
        admission,
        cached_tokens=admission.num_device_blocks * BLOCK_TOKENS,
        sampling=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        leaves_blocks=leaves_blocks,
        backup=backup if leaves_blocks else None,
    )
    async with aclosing(run) as events:
        async for event in events:
            if isinstance(event, TokenDelta):
                tokens.append(event.token_id)
            elif isinstance(event, FilledBlock):
                if backup is not None:
                    backup.filled(event)
                engine.pool.unref(event.block_id)
            elif isinstance(event, RunFinished):
                finished = event
    return tuple(tokens), finished


async def ask_all(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    backups: Sequence[CopyingBackup | None],
    *,
    use_device: bool = True,
) -> "list[asyncio.Task[tuple[tuple[int, ...], RunFinished]]]":
    """All at once, each with 40 tokens. No step has gone yet, nor goes."""
    gate_of(engine).let_go(0)
    asks = [
        answer(engine, p, max_tokens=40, backup=b, use_device=use_device) for p, b in zip(prompts, backups, strict=True)
    ]
    return await begin_together(engine, asks)


async def answer_all(
    engine: Engine,
    prompts: Sequence[Sequence[int]],
    backups: Sequence[CopyingBackup | None],
    *,
    use_device: bool = True,
) -> None:
    """All at once, each with 40 tokens; every answer must be the right one. Consumers keep up with the steps."""
    replies = await in_step(engine, await ask_all(engine, prompts, backups, use_device=use_device))
    for prompt, (tokens, finished) in zip(prompts, replies, strict=True):
        assert tokens == expected_answer(prompt, 40, window_tokens=engine.window.tokens)
        assert finished.num_reused_blocks == 0
    engine.pool.check_integrity()


PROMPTS = [make_tokens(20 + seed, seed=seed) for seed in range(5)]


async def test_preempted_sequences_are_read_back_when_that_is_sooner(make_engine: MakeEngine) -> None:
    """Five sequences that grow to 8 blocks each in a pool of 16. Fails if what is read back is taken for more or for
    other positions than it is, or is computed all the same."""
    computing = make_hashed_engine(make_engine, num_blocks=16)
    await answer_all(computing, PROMPTS, [None] * 5)
    engine = make_hashed_engine(make_engine, num_blocks=16)
    backups = [CopyingBackup(engine) for _ in PROMPTS]
    await answer_all(engine, PROMPTS, backups)
    assert engine.steps.num_preemptions > 0
    assert engine.steps.preemption.num_reloads > 0
    assert engine.steps.preemption.num_reloaded_blocks == sum(backup.num_reloaded for backup in backups)
    assert rows(engine) < rows(computing)


async def one_reloads(engine: Engine, backups: Sequence[CopyingBackup]) -> int:
    """Let steps go until blocks of somebody are read back, which hangs; who that is."""
    gate = gate_of(engine)
    while True:
        await until(lambda: gate.is_waiting or any(backup.reloading.is_set() for backup in backups))
        for _ in range(10):  # consumers hear of the step
            await asyncio.sleep(0)
        if any(backup.reloading.is_set() for backup in backups):
            return next(number for number, backup in enumerate(backups) if backup.reloading.is_set())
        gate.let_go(gate.num_steps + 1)


def rows(engine: Engine) -> int:
    runner = engine.model.runner
    assert isinstance(runner, HashedRunner)
    return runner.num_rows


async def test_what_takes_longer_to_read_than_to_compute_is_computed(make_engine: MakeEngine) -> None:
    engine = make_hashed_engine(make_engine, num_blocks=16)
    backups = [CopyingBackup(engine, second_s=1e6) for _ in PROMPTS]
    await answer_all(engine, PROMPTS, backups)
    assert engine.steps.num_preemptions > 0
    assert engine.steps.preemption.num_reloads == 0


@pytest.mark.parametrize("reloads_max", [0, 1])
async def test_what_does_not_come_back_is_computed(make_engine: MakeEngine, reloads_max: int) -> None:
    """A store that has forgotten, or that delivers one block and stops."""
    engine = make_hashed_engine(make_engine, num_blocks=16)
    backups = [CopyingBackup(engine) for _ in PROMPTS]
    for backup in backups:
        backup.reloads_max = reloads_max
    await answer_all(engine, PROMPTS, backups)
    assert engine.steps.num_preemptions > 0
    assert (engine.steps.preemption.num_reloads > 0) == (reloads_max > 0)


WINDOW = 3 * BLOCK_TOKENS  # each sequence comes to hold 4 blocks, and asks for up to 8 when it comes back


ATTEMPTS = 40  # who gives way depends on what is back when a step is planned, which no test can say


async def answer_windowed(make_engine: MakeEngine, *, reloads_max: int) -> tuple[Engine, CopyingBackup, int]:
    """Five sequences in a pool of 16, whose blocks in it are not found again; the second has eight, and is back
    soonest, since only it can be read back. All are in the engine when their first step is planned: another sequence
    holds the one before. Returns the engine, the second's backup, and how many rows were computed again."""
    how = {"num_blocks": 16, "window_tokens": WINDOW, "clock": StandingClock()}
    engine = make_hashed_engine(make_engine, **how)
    long = CopyingBackup(engine)
    long.reloads_max = reloads_max
    prompts = [PROMPTS[0], make_tokens(62, seed=9), *PROMPTS[1:4]]
    backups = [None, long, None, None, None]
    gate = gate_of(engine)
    gate.let_go(0)
    other = asyncio.create_task(answer(engine, [1], max_tokens=1, use_device=False))
    await until(lambda: gate.is_waiting)
    asks = [
        asyncio.create_task(answer(engine, prompt, max_tokens=40, backup=backup, use_device=False))
        for prompt, backup in zip(prompts, backups, strict=True)
    ]
    await until(lambda: engine.load().running + engine.load().waiting == 1 + len(asks))
    replies = (await in_step(engine, [other, *asks]))[1:]
    for prompt, (tokens, _) in zip(prompts, replies, strict=True):
        assert tokens == expected_answer(prompt, 40, window_tokens=WINDOW)
    engine.pool.check_integrity()
    return engine, long, rows(engine) - 1 - sum(len(prompt) + 39 for prompt in prompts)


async def test_of_a_model_with_windows_the_last_one_is_read_back(make_engine: MakeEngine) -> None:
    """Fails if more is moved than the window before the place where it was, if that is taken for less, or if all is
    computed again."""
    for _ in range(ATTEMPTS):
        engine, long, rows_again = await answer_windowed(make_engine, reloads_max=1_000)
        preemption = engine.steps.preemption
        assert long.num_reloaded <= preemption.num_reloads * engine.window.prefix_blocks
        assert preemption.num_reloaded_blocks >= preemption.num_reloads * 7
        if long.num_reloaded > 0 and rows_again < 7 * BLOCK_TOKENS:
            return
    pytest.fail("no window was read back, or nothing was spared by it")


async def test_two_blocks_of_a_windows_three_are_no_window(make_engine: MakeEngine) -> None:
    """Fails if a sequence goes on behind what came back of its window."""
    for _ in range(ATTEMPTS):
        engine, long, _ = await answer_windowed(make_engine, reloads_max=2)
        assert engine.steps.preemption.num_reloads == 0
        if long.num_reloaded > 0:
            return
    pytest.fail("nothing of a window was read back")


async def test_reading_a_window_back_saves_what_is_behind_the_pools_own_prefix(make_engine: MakeEngine) -> None:
    """Fails if whoever reads it back is not told where computing would begin, and waits for it as if at the start."""
    engine = make_hashed_engine(make_engine, num_blocks=16, window_tokens=WINDOW)
    prompt = make_tokens(15 * BLOCK_TOKENS + 1, seed=9)
    await answer(engine, prompt[: 8 * BLOCK_TOKENS + 1], max_tokens=1)
    admission = await admit(engine, prompt, use_device=True)
    run = Run(
        admission,
        EventStream(engine.pool, lambda stream: None),
        engine._run_rules,
        num_computed=8 * BLOCK_TOKENS,
        sampling=None,
        leaves_blocks=True,
    )
    table = run.begin_reload(range(8, 15), TableWindows(engine.window, engine.near_window, engine.pool.parts))
    assert (table.blocks, table.saved_from) == (range(12, 15), 8)
    engine.release(admission)


@pytest.mark.parametrize("use_device", [True, False])
@pytest.mark.parametrize("reloads_max", [0, 1, 1_000])
async def test_less_than_a_window_that_comes_back_is_of_no_use(
    make_engine: MakeEngine, reloads_max: int, use_device: bool
) -> None:
    """Fails if a sequence goes on behind half a window, or without the prefix that it had found in the pool."""
    engine = make_hashed_engine(make_engine, num_blocks=16, window_tokens=WINDOW)
    backups = [CopyingBackup(engine) for _ in PROMPTS]
    for backup in backups:
        backup.reloads_max = reloads_max
    await answer_all(engine, PROMPTS, backups, use_device=use_device)
    assert engine.steps.num_preemptions > 0


async def test_blocks_that_nobody_keeps_are_stored_before_they_are_given_up(make_engine: MakeEngine) -> None:
    """Fails if the reference that goes with them is lost, or if they are computed again although they were saved."""
    engine = make_hashed_engine(make_engine, num_blocks=16)
    backups = [CopyingBackup(engine, copies_filled=False) for _ in PROMPTS]
    await answer_all(engine, PROMPTS, backups)
    assert sum(backup.num_saved for backup in backups) > 0
    assert engine.steps.preemption.num_reloads > 0


async def test_blocks_under_reload_stay_their_runs_until_nobody_writes_to_them(make_engine: MakeEngine) -> None:
    """The consumer goes while its blocks are read back: they must not be anybody else's before that has ended."""
    engine = make_hashed_engine(make_engine, num_blocks=16)
    backups = [CopyingBackup(engine) for _ in PROMPTS]
    for backup in backups:
        backup.gate.clear()
    asks = await ask_all(engine, PROMPTS, backups)
    number = await one_reloads(engine, backups)
    asks[number].cancel()
    with pytest.raises(asyncio.CancelledError):
        await asks[number]
    for backup in backups:
        backup.gate.set()
    gate_of(engine).let_go()
    for other in range(5):
        if other != number:
            assert (await asks[other])[0] == expected_answer(PROMPTS[other], 40)
    await until(lambda: engine.pool.available_blocks == 16)


async def test_who_is_read_back_slowly_stops_nobody_and_keeps_its_blocks(make_engine: MakeEngine) -> None:
    """The others and new ones go on, give way to each other and end, while one reload hangs. Fails if its run is sent
    away again: its blocks would be written to when they are somebody else's."""
    engine = make_hashed_engine(make_engine, num_blocks=20)
    backups = [CopyingBackup(engine) for _ in PROMPTS]
    for backup in backups:
        backup.gate.clear()
    asks = await ask_all(engine, PROMPTS, backups)
    number = await one_reloads(engine, backups)
    slow = asks.pop(number)
    for backup in [*backups[:number], *backups[number + 1 :]]:
        backup.gate.set()
    num_preemptions = engine.steps.num_preemptions
    new = [make_tokens(20, seed=50 + number) for number in range(4)]
    asks += [asyncio.create_task(answer(engine, prompt, max_tokens=40)) for prompt in new]
    await until(lambda: engine.load().running + engine.load().waiting == sum(not ask.done() for ask in asks) + 1)
    others = await in_step(engine, asks)
    assert engine.steps.num_preemptions > num_preemptions, "nobody had to give way meanwhile"
    assert not slow.done()
    backups[number].gate.set()
    prompts = [*PROMPTS[:number], *PROMPTS[number + 1 :], *new, PROMPTS[number]]
    for prompt, (tokens, _) in zip(prompts, [*others, await slow], strict=True):
        assert tokens == expected_answer(prompt, 40)


async def test_an_engine_that_stops_ends_its_reloads_and_holds_nothing(make_engine: MakeEngine) -> None:
    """That nothing is held is asserted by the fixture."""
    engine = make_hashed_engine(make_engine, num_blocks=16)
    backups = [CopyingBackup(engine) for _ in PROMPTS]
    for backup in backups:
        backup.gate.clear()
    asks = await ask_all(engine, PROMPTS, backups)
    await one_reloads(engine, backups)
    stopping = asyncio.create_task(engine.stop())
    await asyncio.sleep(0)
    gate_of(engine).let_go()
    await stopping
    replies = await asyncio.gather(*asks, return_exceptions=True)
    assert any(isinstance(reply, WorkerUnavailable) for reply in replies)


async def test_a_plan_that_waits_for_saved_blocks_is_made_again_however_late_the_thread_comes_to_wait(
    make_engine: MakeEngine,
) -> None:
    """Fails if the patience that a plan had is asked for again behind it: over by then, it would be none for ever."""
    clock = ManualClock()
    engine = make_hashed_engine(make_engine, num_blocks=16, clock=clock)
    held: list[int] = []

    class SilentOnce(CopyingBackup):
        """Its first blocks are on their way to a store node that does not answer."""

        def save(self, blocks: Sequence[FilledBlock]) -> None:
            if held:
                super().save(blocks)
            else:
                held.extend(block.block_id for block in blocks)

    plan = engine.steps._plan

    def plan_and_lose_the_core() -> StepPlan:
        planned = plan()
        if not planned.rows:
            clock.time_s += 2 * SAVE_PATIENCE_MS / 1000
        return planned

    engine.steps._plan = plan_and_lose_the_core  # type: ignore[method-assign]
    backups = [SilentOnce(engine, copies_filled=False) for _ in PROMPTS[:3]]
    try:
        async with asyncio.timeout(60):
            await in_step(engine, await ask_all(engine, PROMPTS[:3], backups))
    finally:
        engine.pool.unref_all(held)
