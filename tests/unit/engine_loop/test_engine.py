"""The engine on a real tiny model: equality of answers whatever the company, and the life of runs and blocks."""

import asyncio
import random
import threading
from collections.abc import Callable, Sequence
from contextlib import aclosing
from pathlib import Path

import pytest
import torch

from headrace.core.clock import Deadline
from headrace.core.errors import DeadlineExceeded, InvalidRequest, Overloaded, WorkerUnavailable
from headrace.core.generation import EvictSelector, FinishReason, SamplingParams, TokenDelta
from headrace.core.limits import ENGINE_STALL_MS, STREAM_EVENTS_MAX, WORKER_WAITING_MAX
from headrace.engine.block_pool import Selection, Taken
from headrace.engine.engine import Admission, Engine, EngineEvent, EngineLoad, FilledBlock, RunFinished
from headrace.engine.event_stream import EventStream
from headrace.engine.load_model import LoadedModel
from headrace.engine.model_runner import ModelRunner, SequenceStep
from headrace.engine.sample_token import uniform

from .conftest import (
    BLOCK_TOKENS,
    CLOCK,
    VOCAB,
    HeldRunner,
    Reply,
    StandingClock,
    admit,
    begin_together,
    gate_of,
    generate,
    make_prompt,
    meet,
    until,
)

MakeEngine = Callable[..., Engine]


def make_tokens(length: int, *, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1, VOCAB), k=length)


def make_params(max_tokens: int, **changes: object) -> SamplingParams:
    settings = {"max_tokens": max_tokens, "logprobs": VOCAB, "ignore_eos": True} | changes
    return SamplingParams(**settings)  # type: ignore[arg-type]


TWELVE_TOKENS = make_params(12)


def assert_equal(got: Reply, want: Reply) -> None:
    assert got.token_ids == want.token_ids
    assert got.logprobs == want.logprobs
    assert got.text == want.text
    assert got.finished == want.finished


# Equality


async def test_a_request_gets_the_same_bits_alone_and_among_strangers(make_engine: MakeEngine) -> None:
    """Fails if a row's logits depend on the batch, on the chunks of a prompt, or on somebody else's blocks."""
    prompts = [make_tokens(length, seed=length) for length in (1, 7, 8, 9, 40, 64, 100)]
    alone = make_engine(chunk=512)
    expected = [await generate(alone, prompt) for prompt in prompts]
    crowded = make_engine(chunk=13, batch=3)
    strangers = [make_tokens(20 + 3 * seed, seed=100 + seed) for seed in range(4)]
    replies = await asyncio.gather(*(generate(crowded, prompt) for prompt in (*strangers, *prompts)))
    for got, want in zip(replies[len(strangers) :], expected, strict=True):
        assert_equal(got, want)


@pytest.mark.parametrize("chunk", [1, 5, 8, 64])
async def test_chunks_of_a_prompt_do_not_change_the_answer(make_engine: MakeEngine, chunk: int) -> None:
    prompt = make_tokens(61, seed=3)
    assert_equal(await generate(make_engine(chunk=chunk), prompt), await generate(make_engine(chunk=512), prompt))


async def test_preempted_sequences_give_the_answer_they_would_have_given(make_engine: MakeEngine) -> None:
    """Five sequences that each grow to 7 blocks in a pool of 16: some must be recomputed. Fails if a recompute starts
    at the wrong token, counts its draws anew or reports a block twice."""
    prompts = [make_tokens(16 + seed, seed=seed) for seed in range(5)]
    params = make_params(36, temperature=0.8, seed=9)
    roomy, tight = make_engine(), make_engine(usable_blocks=16, wrap=HeldRunner)
    expected = [await generate(roomy, prompt, sampling=params) for prompt in prompts]
    replies = await meet(tight, [generate(tight, prompt, sampling=params) for prompt in prompts])
    for got, want in zip(replies, expected, strict=True):
        assert_equal(got, want)
        assert [block.block_hash for block in got.filled] == [block.block_hash for block in want.filled]
    assert tight.steps.num_preemptions > 0


async def test_every_prompt_length_gets_the_same_answer_from_blocks_that_are_already_there(
    make_engine: MakeEngine,
) -> None:
    """For each length from 1 to 3 B + 2: send, send again, send with one token more. Reuse is as long as it can be
    without the last token's block, never longer."""
    cold, warm = make_engine(), make_engine()
    params = make_params(4)
    for length in range(1, 3 * BLOCK_TOKENS + 3):
        prompt = make_tokens(length, seed=1000 + length)
        longer = [*prompt, 5]
        want, want_longer = await generate(cold, prompt, sampling=params), await generate(cold, longer, sampling=params)
        first = await generate(warm, prompt, use_device=True, sampling=params)
        again = await generate(warm, prompt, use_device=True, sampling=params)
        more = await generate(warm, longer, use_device=True, sampling=params)
        for got, expected in ((first, want), (again, want), (more, want_longer)):
            assert_equal(got, expected)
        assert first.num_device_blocks == 0
        assert again.num_device_blocks == (length - 1) // BLOCK_TOKENS
        assert more.num_device_blocks == length // BLOCK_TOKENS
        warm.pool.check_integrity()


async def test_a_conversation_goes_on_from_the_blocks_that_its_answer_filled(make_engine: MakeEngine) -> None:
    """Fails if blocks filled by decoding are not hashed, or hashed otherwise than a prompt's."""
    engine = make_engine()
    prompt = make_tokens(10, seed=1)
    reply = await generate(engine, prompt, sampling=make_params(25))
    turn = [*prompt, *reply.token_ids, 9, 9]
    expected_hashes = make_prompt(engine, turn).chain[:4]
    assert tuple(block.block_hash for block in reply.filled) == expected_hashes
    assert [block.position for block in reply.filled] == [0, 1, 2, 3]
    second = await generate(engine, turn, use_device=True)
    assert second.num_device_blocks == 4  # 10 + 25 tokens, of which the last was never an input: 34 // 8
    assert_equal(second, await generate(make_engine(), turn))


async def test_blocks_loaded_by_somebody_else_count_as_computed_and_are_shared(make_engine: MakeEngine) -> None:
    """A payload copied out of one engine's blocks and into another's gives the same bits."""
    prompt = make_tokens(3 * BLOCK_TOKENS + 2, seed=4)
    engine = make_engine()
    want = await generate(engine, prompt)
    payloads = [bytearray(engine.kv.layout.block_bytes) for _ in range(3)]
    for block, payload in zip(want.filled, payloads, strict=False):
        engine.kv.read_block(block.block_id, memoryview(payload))
    other = make_engine()
    admission = await admit(other, prompt)
    for block_id, payload in zip(admission.block_ids, payloads, strict=False):
        other.kv.write_block(block_id, memoryview(payload))
    other.mark_loaded(admission, 3)
    replies = await asyncio.gather(
        run_out(other, admission, cached_tokens=3 * BLOCK_TOKENS), generate(other, prompt, use_device=True)
    )
    assert [token.token_id for token in tokens_in(replies[0])] == list(want.token_ids)
    assert replies[1].num_device_blocks == 3
    assert_equal(replies[1], want)


async def test_a_block_that_is_shared_is_not_written_again(make_engine: MakeEngine) -> None:
    """Blocks found by hash but not counted as cached are exchanged. Fails if they are computed in place."""
    engine = make_engine()
    prompt = make_tokens(20, seed=6)
    want = await generate(engine, prompt)
    taken = engine.pool.take(2, prompt=make_prompt(engine, prompt), shared_max=2)
    assert isinstance(taken, Taken)
    shared = taken.block_ids
    admission = await admit(engine, prompt, use_device=True)
    assert tuple(admission.block_ids[:2]) == shared
    events = await run_out(engine, admission, cached_tokens=0)
    assert [token.token_id for token in tokens_in(events)] == list(want.token_ids)
    filled = [event.block_id for event in events if isinstance(event, FilledBlock)]
    assert not set(filled) & set(shared)
    engine.pool.unref_all(shared)


async def run_out(
    engine: Engine, admission: Admission, *, cached_tokens: int = 0, sampling: SamplingParams | None = TWELVE_TOKENS
) -> list[EngineEvent]:
    """All events of a run; references are given back."""
    events = []
    async with aclosing(engine.run(admission, cached_tokens=cached_tokens, sampling=sampling)) as run:
        async for event in run:
            events.append(event)
            if isinstance(event, FilledBlock):
                engine.pool.unref(event.block_id)
    return events


def tokens_in(events: Sequence[EngineEvent]) -> list[TokenDelta]:
    return [event for event in events if isinstance(event, TokenDelta)]


async def test_a_prefill_run_computes_the_full_blocks_and_samples_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = make_tokens(3 * BLOCK_TOKENS + 5, seed=8)
    events = await run_out(engine, await admit_prefill(engine, prompt), sampling=None)
    assert [type(event) for event in events] == [FilledBlock, FilledBlock, FilledBlock, RunFinished]
    assert events[-1] == RunFinished(reason=None, text="", completion_tokens=0)
    assert [event.token_ids for event in events[:3]] == [tuple(prompt[i : i + 8]) for i in (0, 8, 16)]
    again = await admit_prefill(engine, prompt)
    assert again.num_device_blocks == 3
    assert await run_out(engine, again, cached_tokens=24, sampling=None) == [RunFinished(None, "", 0)]


@pytest.mark.parametrize("length", [3, 8, 16, 17])
async def test_a_prefill_run_of_any_length_ends(make_engine: MakeEngine, length: int) -> None:
    engine = make_engine()
    for _ in range(2):
        admission = await admit_prefill(engine, make_tokens(length, seed=length))
        cached_tokens = admission.num_device_blocks * BLOCK_TOKENS
        events = await run_out(engine, admission, cached_tokens=cached_tokens, sampling=None)
        assert isinstance(events[-1], RunFinished)


async def admit_prefill(engine: Engine, token_ids: Sequence[int]) -> Admission:
    prompt = make_prompt(engine, token_ids)
    deadline = Deadline.after(30, CLOCK)
    return await engine.admit(prompt, num_blocks=len(prompt.chain), use_device=True, deadline=deadline)


async def test_a_run_that_leaves_no_blocks_is_neither_reported_nor_found(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = make_tokens(20, seed=2)
    run = engine.run(await admit(engine, prompt), cached_tokens=0, sampling=make_params(9), leaves_blocks=False)
    assert not [event async for event in run if isinstance(event, FilledBlock)]
    assert engine.pool.resident_blocks(make_prompt(engine, prompt)) == 0


async def test_seeds_decide_samples_and_the_company_does_not(make_engine: MakeEngine) -> None:
    prompt = make_tokens(12, seed=5)
    params = [make_params(16, temperature=1.5, top_k=50, top_p=0.95, seed=seed) for seed in (1, 2, 1)]
    engine = make_engine()
    first, second, repeated = await asyncio.gather(*(generate(engine, prompt, sampling=p) for p in params))
    assert_equal(repeated, first)
    assert first.token_ids != second.token_ids


async def test_output_token_i_is_drawn_with_the_seeds_number_i(make_engine: MakeEngine) -> None:
    """At an endless temperature all tokens are alike, so the draw alone decides. Fails if draws are counted wrongly."""
    params = make_params(20, temperature=1e300, seed=77, logprobs=None)
    reply = await generate(make_engine(), make_tokens(5, seed=1), sampling=params)
    assert list(reply.token_ids) == [int(uniform(77, index) * VOCAB) for index in range(20)]


# How a run ends


async def test_max_tokens_ends_a_run_with_length(make_engine: MakeEngine) -> None:
    engine = make_engine()
    for max_tokens in (1, 2, 17):
        reply = await generate(engine, make_tokens(5, seed=1), sampling=make_params(max_tokens))
        assert len(reply.token_ids) == reply.finished.completion_tokens == max_tokens
        assert reply.finished.reason is FinishReason.LENGTH


async def test_the_context_ends_a_run_with_length_and_a_prompt_that_fills_it_is_refused(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine(context_tokens_max=20)
    reply = await generate(engine, make_tokens(15, seed=1), sampling=make_params(100))
    assert reply.finished == RunFinished(FinishReason.LENGTH, reply.finished.text, completion_tokens=5)
    assert len((await generate(engine, make_tokens(19, seed=1), sampling=make_params(100))).token_ids) == 1
    with pytest.raises(InvalidRequest, match="20 tokens together"):
        await generate(engine, make_tokens(20, seed=1), sampling=make_params(1))


async def test_a_sequence_may_grow_into_the_whole_pool_and_ends_there_with_length(
    make_engine: MakeEngine, tiny_model: LoadedModel
) -> None:
    engine = make_engine(context_tokens_max=100_000)
    assert engine.context_tokens_max == 64 * BLOCK_TOKENS
    reply = await generate(engine, make_tokens(500, seed=1), sampling=make_params(100, logprobs=None))
    assert reply.finished.reason is FinishReason.LENGTH
    assert reply.finished.completion_tokens == 12


async def test_the_end_of_sequence_token_stops_a_run_unless_it_is_ignored(make_engine: MakeEngine) -> None:
    free = await generate(make_engine(), make_tokens(5, seed=1), sampling=make_params(12))
    eos = free.token_ids[4]
    first = free.token_ids.index(eos)
    engine = make_engine(eos_token_ids=frozenset({eos}))
    stopped = await generate(engine, make_tokens(5, seed=1), sampling=make_params(12, ignore_eos=False))
    assert stopped.token_ids == free.token_ids[: first + 1]
    assert stopped.finished.reason is FinishReason.STOP
    assert stopped.finished.completion_tokens == first + 1
    assert_equal(await generate(engine, make_tokens(5, seed=1), sampling=make_params(12)), free)


async def test_a_stop_string_ends_a_run_and_is_not_returned(make_engine: MakeEngine) -> None:
    engine = make_engine()
    params = make_params(30, temperature=1.0, seed=3)
    free = await generate(engine, make_tokens(9, seed=2), sampling=params)
    stop = free.text[3:5]
    stopped = await generate(
        engine, make_tokens(9, seed=2), sampling=make_params(30, temperature=1.0, seed=3, stop=(stop,))
    )
    assert stopped.text == free.text[: free.text.index(stop)]
    assert stopped.finished.reason is FinishReason.STOP
    assert stopped.token_ids == free.token_ids[: len(stopped.token_ids)]
    assert stopped.finished.completion_tokens == len(stopped.token_ids) < 30


# Admission


async def test_a_prompt_that_can_never_fit_is_refused_with_the_arithmetic(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequest, match=r"600 tokens asks for 76 KV blocks of 8 tokens \(608\).* 64 \(512\)"):
        await admit(engine, make_tokens(600, seed=1))


async def test_a_small_prompt_is_given_blocks_before_a_large_one_that_came_first(make_engine: MakeEngine) -> None:
    """Fails when prompts wait in the order in which they came."""
    engine = make_engine(usable_blocks=4, clock=StandingClock())
    first = await admit(engine, make_tokens(30, seed=1))
    order: list[str] = []

    async def wait(name: str, length: int) -> None:
        admission = await admit(engine, make_tokens(length, seed=2))
        order.append(name)
        engine.release(admission)

    async with asyncio.timeout(60), asyncio.TaskGroup() as group:
        group.create_task(wait("large", 31))
        await asyncio.sleep(0)
        group.create_task(wait("small", 3))
        await asyncio.sleep(0.05)
        assert (order, engine.load().waiting) == ([], 2)
        engine.release(first)
    assert order == ["small", "large"]


async def test_a_short_prompt_overtakes_a_long_one_that_is_being_computed(make_engine: MakeEngine) -> None:
    """Fails when chunks of prompts are computed in the order in which these came."""
    engine = make_engine(chunk=8, clock=StandingClock(), wrap=HeldRunner)
    gate_of(engine).let_go(3)
    long = asyncio.create_task(generate(engine, make_tokens(400, seed=1), sampling=make_params(1)))
    await until(lambda: gate_of(engine).is_waiting and gate_of(engine).num_steps == 3)
    short = asyncio.create_task(generate(engine, make_tokens(12, seed=2), sampling=make_params(1)))
    await until(lambda: engine.load().running + engine.load().waiting == 2)
    gate_of(engine).let_go(3 + 4)  # two chunks, and the one that was under way
    async with asyncio.timeout(60):
        await short
    assert not long.done()
    gate_of(engine).let_go()
    await long


async def test_a_preempted_sequence_gets_blocks_before_new_prompts_do(make_engine: MakeEngine) -> None:
    """Fails if newcomers take what a preempted sequence waits for: under load it would wait for ever."""
    engine = make_engine(usable_blocks=8, wrap=HeldRunner)
    params = make_params(48, logprobs=None)  # seven blocks each in the end: the newcomer's one is left beside them
    old, young = make_tokens(8, seed=1), make_tokens(8, seed=2)
    both = asyncio.create_task(meet(engine, [generate(engine, prompt, sampling=params) for prompt in (old, young)]))
    await until(lambda: engine.steps.num_preemptions > 0)
    admission = await admit(engine, [1])
    assert engine.steps.num_without_blocks == 0, "a preempted sequence still waits for blocks"
    engine.release(admission)
    await both


async def test_what_a_sequence_leaves_has_its_time_to_live_also_when_it_was_preempted(make_engine: MakeEngine) -> None:
    """Fails when blocks of the prompt, of the answer or of a sequence that came back are kept without a bound."""
    engine = make_engine(usable_blocks=16, wrap=HeldRunner)
    prompts = [make_tokens(16 + seed, seed=seed) for seed in range(5)]
    params = make_params(36, logprobs=None)
    await meet(engine, [generate(engine, prompt, use_device=True, sampling=params, ttl_s=600) for prompt in prompts])
    assert engine.steps.num_preemptions > 0
    blocks = engine.pool.describe(Selection())
    left_s = [block.expires_unix_ms / 1_000 - CLOCK.unix_ms() / 1_000 for block in blocks]
    assert len(blocks) > 5
    assert all(500 < left <= 601 for left in left_s)
    await generate(engine, prompts[-1], use_device=True)
    assert 0 in [block.expires_unix_ms for block in engine.pool.describe(Selection())], "a use without a bound is none"


async def test_what_was_loaded_has_the_time_to_live_of_who_loaded_it(make_engine: MakeEngine) -> None:
    """Fails when blocks from a store node are kept on the device without a bound."""
    engine = make_engine()
    admission = await admit(engine, make_tokens(20, seed=1), ttl_s=600)
    engine.mark_loaded(admission, 2)
    engine.release(admission)
    assert [bool(block.expires_unix_ms) for block in engine.pool.describe(Selection())] == [True] * 2


async def test_a_full_queue_is_overloaded_and_says_when_to_come_back(make_engine: MakeEngine) -> None:
    engine = make_engine(usable_blocks=1)
    held = await admit(engine, [1])
    waiting = [asyncio.create_task(admit(engine, [1])) for _ in range(WORKER_WAITING_MAX)]
    await asyncio.sleep(0)
    with pytest.raises(Overloaded) as refusal:
        await admit(engine, [1])
    assert refusal.value.retry_after_ms > 0
    for task in waiting:
        task.cancel()
    await asyncio.wait(waiting)
    assert engine.load().waiting == 0
    engine.release(held)


async def test_waiting_for_blocks_ends_at_the_deadline_and_lets_the_next_one_in(make_engine: MakeEngine) -> None:
    engine = make_engine(usable_blocks=4)
    held = await admit(engine, make_tokens(10, seed=1))
    large = asyncio.create_task(admit(engine, make_tokens(30, seed=1), for_s=0.05))
    await asyncio.sleep(0)
    small = asyncio.create_task(admit(engine, [1]))
    with pytest.raises(DeadlineExceeded, match="4 KV blocks"):
        await large
    engine.release(await small)
    engine.release(held)


async def test_an_admission_that_is_cancelled_as_it_is_granted_holds_nothing(make_engine: MakeEngine) -> None:
    engine = make_engine(usable_blocks=1)
    held = await admit(engine, [1])
    waiting = asyncio.create_task(admit(engine, [1]))
    await asyncio.sleep(0.01)
    engine.release(held)  # schedules the grant; the cancellation comes behind it, before the waiting task runs
    asyncio.get_running_loop().call_soon(waiting.cancel)
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert engine.pool.available_blocks == 1


async def test_release_is_idempotent(make_engine: MakeEngine) -> None:
    engine = make_engine()
    admission = await admit(engine, make_tokens(20, seed=1))
    engine.release(admission)
    engine.release(admission)
    admission = await admit(engine, make_tokens(20, seed=1))
    await run_out(engine, admission)
    engine.release(admission)
    engine.release(admission)
    assert engine.pool.available_blocks == 64


# Cancelling, failing, stopping


class GatedRunner:
    """The real runner, which waits before each step until it may go on, and may be told to fail."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.gate = threading.Event()
        self.gate.set()
        self.inside = threading.Event()
        self.failure: BaseException | None = None
        self.logits_value: float | None = None

    def run_step(self, steps: Sequence[SequenceStep]) -> torch.Tensor:
        self.inside.set()
        assert self.gate.wait(120)
        if self.failure is not None:
            raise self.failure
        logits = self._runner.run_step(steps)
        return logits if self.logits_value is None else torch.full_like(logits, self.logits_value)


async def test_closing_a_stream_frees_its_blocks_at_the_next_step_and_not_during_one(make_engine: MakeEngine) -> None:
    """Fails if the blocks are given to somebody else while a step may still write to them, or are kept."""
    engine = make_engine(wrap=HeldRunner)
    gate_of(engine).let_go(1)
    admission = await admit(engine, make_tokens(20, seed=1))
    run = engine.run(admission, cached_tokens=0, sampling=make_params(400))
    while not isinstance(event := await anext(run), TokenDelta):
        engine.pool.unref(event.block_id)
    await until(lambda: gate_of(engine).is_waiting)
    await run.aclose()
    engine.release(admission)
    assert engine.pool.available_blocks < 64
    gate_of(engine).let_go()
    await until(lambda: engine.pool.available_blocks == 64)
    steps = engine.steps.num_steps
    await asyncio.sleep(0.05)
    assert engine.steps.num_steps == steps, "it goes on computing for nobody"
    assert engine.load().running == 0


async def test_cancelling_the_consumers_task_frees_its_blocks_and_leaves_others_alone(make_engine: MakeEngine) -> None:
    want = await generate(make_engine(), make_tokens(30, seed=2))
    engine = make_engine(wrap=HeldRunner)
    doomed, other = await begin_together(
        engine,
        [
            generate(engine, make_tokens(40, seed=1), sampling=make_params(400)),
            generate(engine, make_tokens(30, seed=2)),
        ],
    )
    gate_of(engine).let_go(6)
    await until(lambda: gate_of(engine).is_waiting and engine.load().running == 2)
    doomed.cancel()
    gate_of(engine).let_go()
    assert_equal(await other, want)
    with pytest.raises(asyncio.CancelledError):
        await doomed
    await until(lambda: engine.pool.available_blocks == 64)


async def test_closing_a_run_that_waits_for_the_batch_frees_its_blocks(make_engine: MakeEngine) -> None:
    """It gets no steps, so nothing but the closing itself can end it."""
    engine = make_engine(batch=1, wrap=HeldRunner)
    first = asyncio.create_task(generate(engine, make_tokens(9, seed=1), sampling=make_params(480)))
    await until(lambda: gate_of(engine).is_waiting)
    admission = await admit(engine, make_tokens(30, seed=2))
    run = engine.run(admission, cached_tokens=0, sampling=make_params(5))
    waiting = asyncio.create_task(anext(run))
    await until(lambda: engine.load().waiting == 1)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    gate_of(engine).let_go(1)  # blocks change hands between steps
    await until(lambda: engine.load().waiting == 0)
    assert not first.done()
    assert admission.block_ids == []
    first.cancel()
    await asyncio.wait([first])


async def test_a_run_that_was_never_iterated_leaves_the_admission_to_its_holder(make_engine: MakeEngine) -> None:
    engine = make_engine()
    admission = await admit(engine, make_tokens(20, seed=1))
    await engine.run(admission, cached_tokens=0, sampling=make_params(5)).aclose()
    engine.release(admission)
    assert engine.pool.available_blocks == 64


async def test_a_consumer_that_does_not_read_is_ended_and_others_are_unharmed(make_engine: MakeEngine) -> None:
    engine = make_engine()
    stream = EventStream(engine.pool, lambda stream: stream.wake())
    for _ in range(STREAM_EVENTS_MAX):
        stream.send(TokenDelta(token_id=1, text=""))
    assert not stream.ended
    stream.send(TokenDelta(token_id=1, text=""))
    assert stream.ended
    with pytest.raises(Overloaded, match="behind"):
        await stream.next()


async def test_a_block_sent_to_a_stream_that_has_ended_is_given_back(make_engine: MakeEngine) -> None:
    engine = make_engine()
    prompt = make_prompt(engine, make_tokens(8, seed=1))
    block_hash = prompt.chain[0]
    closed, full = (EventStream(engine.pool, lambda stream: stream.wake()) for _ in range(2))
    closed.close()
    for _ in range(STREAM_EVENTS_MAX):
        full.send(TokenDelta(token_id=1, text=""))
    for stream in (closed, full, full):
        taken = engine.pool.take(1)
        assert isinstance(taken, Taken)
        stream.send(FilledBlock(0, taken.block_ids[0], block_hash, block_hash, (), prompt.namespace))
        assert engine.pool.available_blocks == 64


async def test_blocks_in_events_that_nobody_takes_are_given_back(make_engine: MakeEngine) -> None:
    engine = make_engine()
    admission = await admit(engine, make_tokens(40, seed=1))
    run = engine.run(admission, cached_tokens=0, sampling=make_params(3))
    event = await anext(run)
    assert isinstance(event, FilledBlock)
    engine.pool.unref(event.block_id)
    await until(lambda: engine.load().running == 0)
    assert engine.pool.available_blocks < 64, "events hold their blocks until somebody takes them"
    await run.aclose()
    assert engine.pool.available_blocks == 64


async def test_a_step_that_fails_ends_its_runs_and_the_engine_goes_on(make_engine: MakeEngine) -> None:
    engine = make_engine(wrap=GatedRunner)
    engine.model.runner.failure = RuntimeError("out of registers")
    with pytest.raises(WorkerUnavailable, match="out of registers"):
        await generate(engine, make_tokens(20, seed=1))
    assert engine.healthy()
    assert engine.pool.available_blocks == 64
    engine.model.runner.failure = None
    assert_equal(
        await generate(engine, make_tokens(20, seed=1)), await generate(make_engine(), make_tokens(20, seed=1))
    )


async def test_logits_that_are_no_numbers_end_the_run_and_not_the_engine(make_engine: MakeEngine) -> None:
    engine = make_engine(wrap=GatedRunner)
    engine.model.runner.logits_value = float("nan")
    with pytest.raises(WorkerUnavailable, match="nan"):
        await generate(engine, make_tokens(20, seed=1))
    assert engine.healthy()


async def test_stopping_ends_runs_and_waits_and_refuses_what_comes_after(make_engine: MakeEngine) -> None:
    engine = make_engine(usable_blocks=8, wrap=HeldRunner)
    running = asyncio.create_task(generate(engine, make_tokens(50, seed=1), sampling=make_params(400)))
    await until(lambda: engine.load().running == 1)
    waiting = asyncio.create_task(admit(engine, make_tokens(50, seed=2)))
    await until(lambda: engine.load().waiting == 1)
    stopping = asyncio.create_task(engine.stop())
    await asyncio.sleep(0)
    gate_of(engine).let_go()
    await stopping
    for task in (running, waiting):
        with pytest.raises(WorkerUnavailable):
            await task
    with pytest.raises(WorkerUnavailable):
        await admit(engine, [1])
    assert not engine.healthy()
    await engine.stop()


@pytest.mark.parametrize("seed", [1, 2])
async def test_a_crowd_that_shares_cancels_and_outgrows_the_pool_gets_the_right_answers(
    make_engine: MakeEngine, seed: int
) -> None:
    """Everything at once, on a pool for three of twenty. The fixture then checks that no block is missing."""
    rng = random.Random(seed)
    heads = [make_tokens(rng.randint(17, 40), seed=seed * 10 + number) for number in range(3)]
    prompts = [[*rng.choice(heads), *make_tokens(rng.randint(1, 20), seed=number)] for number in range(20)]
    params = [make_params(rng.randint(1, 25), logprobs=None, temperature=0.9, seed=number) for number in range(20)]
    roomy = make_engine()
    expected = [await generate(roomy, prompt, sampling=p) for prompt, p in zip(prompts, params, strict=True)]
    tight = make_engine(usable_blocks=16, batch=5, chunk=rng.randint(1, 40))
    tasks = [
        asyncio.create_task(generate(tight, prompt, use_device=rng.random() < 0.7, sampling=p))
        for prompt, p in zip(prompts, params, strict=True)
    ]
    for task in rng.sample(tasks, 6):
        await asyncio.sleep(rng.random() * 0.05)
        task.cancel()
    replies = await asyncio.gather(*tasks, return_exceptions=True)
    for got, want in zip(replies, expected, strict=True):
        if not isinstance(got, asyncio.CancelledError):
            assert isinstance(got, Reply)
            assert_equal(got, want)
    assert any(isinstance(got, Reply) and got.num_device_blocks for got in replies)
    await until(lambda: tight.pool.available_blocks == 16)


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
async def test_when_the_thread_dies_nobody_waits_for_it(make_engine: MakeEngine) -> None:
    engine = make_engine(usable_blocks=8, wrap=GatedRunner)
    runner = engine.model.runner
    runner.gate.clear()
    running = asyncio.create_task(generate(engine, make_tokens(50, seed=1)))
    await until(runner.inside.is_set)
    waiting = asyncio.create_task(admit(engine, make_tokens(50, seed=2)))
    await until(lambda: engine.load().waiting == 1)
    runner.failure = SystemExit()
    runner.gate.set()
    for task in (running, waiting):
        with pytest.raises(WorkerUnavailable):
            await task
    with pytest.raises(WorkerUnavailable):
        await admit(engine, [1])
    await until(lambda: not engine.healthy())


# Health and load


class ManualClock:
    """A clock that stands still until it is moved."""

    time_s = 1.0

    def now_s(self) -> float:
        return self.time_s

    def unix_ms(self) -> int:
        return int(self.time_s * 1000)


async def test_an_engine_that_hangs_in_a_step_is_seen_and_an_idle_or_busy_one_is_healthy(
    make_engine: MakeEngine,
) -> None:
    clock = ManualClock()
    engine = make_engine(wrap=GatedRunner, clock=clock)
    runner = engine.model.runner
    await until(engine.healthy)
    clock.time_s += 2 * ENGINE_STALL_MS / 1000
    assert engine.healthy(), "idle for long is not stalled"
    runner.gate.clear()
    task = asyncio.create_task(generate(engine, make_tokens(20, seed=1)))
    await until(runner.inside.is_set)
    clock.time_s += 0.9 * ENGINE_STALL_MS / 1000
    assert engine.healthy(), "a long step is not stalled yet"
    clock.time_s += 0.2 * ENGINE_STALL_MS / 1000
    assert not engine.healthy()
    runner.gate.set()
    await task
    await until(engine.healthy)


async def test_an_idle_engine_sleeps(make_engine: MakeEngine) -> None:
    """Fails if the thread polls: it would give up the processor once per poll."""
    engine = make_engine()
    await generate(engine, make_tokens(20, seed=1))
    (thread,) = [thread for thread in threading.enumerate() if thread.name == "engine steps"]

    def times_slept() -> int:
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text(encoding="ascii")
        return int(status.split("voluntary_ctxt_switches:")[1].split()[0])

    slept = []
    for _ in range(20):  # on a busy machine a thread may be woken for nothing of its own, but not each time
        before = times_slept()
        await asyncio.sleep(0.3)
        slept.append(times_slept() - before)
        if slept[-1] <= 2:
            return
    raise AssertionError(slept)


async def test_load_counts_who_runs_and_who_waits(make_engine: MakeEngine) -> None:
    engine = make_engine(batch=2, wrap=GatedRunner)
    engine.model.runner.gate.clear()
    tasks = [asyncio.create_task(generate(engine, make_tokens(9, seed=seed))) for seed in range(3)]
    await until(lambda: engine.load().running + engine.load().waiting == 3)
    ahead = engine.load().ahead
    assert ahead.queue_s == pytest.approx(3 * ahead.prefill.seconds(0, 9)), "three prompts are still to be computed"
    engine.model.runner.gate.set()
    await asyncio.gather(*tasks)
    await until(lambda: engine.load().running + engine.load().waiting == 0)
    load = engine.load()
    assert load == EngineLoad(0, 0, free_blocks=64, kept_blocks=engine.pool.kept_blocks, ahead=load.ahead)
    assert load.ahead.queue_s == 0
    assert load.ahead.prefill != ahead.prefill, "the steps were measured"


async def test_no_prompt_stays_in_the_queues_seconds_whatever_became_of_it(make_engine: MakeEngine) -> None:
    """Fails when a prompt that was refused, given up or loaded instead of computed counts for ever, or too much."""
    engine = make_engine(usable_blocks=4)
    prompt = make_prompt(engine, make_tokens(31, seed=1))
    held = await admit(engine, make_tokens(31, seed=1))
    assert engine.load().ahead.queue_s == 0, "all of it may be on its way"
    waiting = asyncio.create_task(admit(engine, make_tokens(31, seed=2)))
    await until(lambda: engine.load().waiting == 1)
    assert engine.load().ahead.queue_s == pytest.approx(engine.load().ahead.prefill.seconds(0, 31))
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    engine.mark_loaded(held, 2)
    assert len(prompt.chain) > 2
    assert engine.load().ahead.queue_s == pytest.approx(engine.load().ahead.prefill.seconds(16, 31))
    engine.release(held)
    assert engine.load().ahead.queue_s == 0


# Eviction


async def test_evicting_the_device_tier_frees_what_nobody_uses_and_reports_it_in_every_unit(
    make_engine: MakeEngine,
) -> None:
    engine = make_engine()
    prompt = make_tokens(20, seed=1)
    await generate(engine, prompt, sampling=make_params(1))
    dry = engine.evict_device(EvictSelector(), dry_run=True)
    assert (dry.blocks, dry.tokens, dry.bytes, dry.dry_run) == (2, 16, 2 * engine.kv.layout.block_bytes, True)
    assert engine.evict_device(EvictSelector(model="another"), dry_run=False).blocks == 0
    chain = make_prompt(engine, prompt).chain
    assert engine.evict_device(EvictSelector(block_hashes=chain[1:]), dry_run=False).blocks == 1
    held = await admit(engine, prompt, use_device=True)
    assert held.num_device_blocks == 1
    report = engine.evict_device(EvictSelector(namespace=engine.model.namespace.id), dry_run=False)
    assert (report.blocks, report.skipped_leased_blocks) == (0, 1)
    engine.release(held)
    assert engine.evict_device(EvictSelector(), dry_run=False).blocks == 1
    assert (await generate(engine, prompt, use_device=True)).num_device_blocks == 0
