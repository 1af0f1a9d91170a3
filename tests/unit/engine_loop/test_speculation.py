"""Drafts change nothing but how many steps an answer takes: on a real tiny model, whatever the drafter says."""

import random
from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch

from headrace.core.generation import FinishReason, SamplingParams
from headrace.engine.draft_model import ModelDrafter
from headrace.engine.draft_ngram import NgramDrafter
from headrace.engine.drafter import Draft, DraftWish
from headrace.engine.engine import Engine
from headrace.engine.load_model import LoadedModel
from headrace.engine.model_runner import ModelRunner, SequenceStep
from headrace.engine.paged_kv import PagedKV

from .conftest import BLOCK_TOKENS, VOCAB, HeldRunner, Reply, generate, meet

MakeEngine = Callable[..., Engine]


def make_tokens(length: int, *, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1, VOCAB), k=length)


def make_params(max_tokens: int, **changes: object) -> SamplingParams:
    settings = {"max_tokens": max_tokens, "logprobs": 4, "ignore_eos": True} | changes
    return SamplingParams(**settings)  # type: ignore[arg-type]


class StillClock:
    """Nothing takes time: costs stay what is assumed before anything was measured, and drafts pay if they are right."""

    def now_s(self) -> float:
        return 1.0

    def unix_ms(self) -> int:
        return 1_000


STILL = StillClock()


class Prophet:
    """Knows some answers, and drafts them with every n-th token wrong: what is right and what is not is known."""

    costs_steps = False

    def __init__(self, *, wrong_every: int) -> None:
        self.answers: list[list[int]] = []
        self.wrong_every = wrong_every
        self.gone: list[int] = []

    def draft(self, wishes: Sequence[DraftWish]) -> list[Draft]:
        return [Draft(tuple(self._follow(list(wish.token_ids), wish.most))) for wish in wishes]

    def token_s(self) -> float:
        return 0.0

    def leave(self, key: int) -> None:
        self.gone.append(key)

    def _follow(self, token_ids: list[int], most: int) -> list[int]:
        num = len(token_ids)
        (answer,) = [answer for answer in self.answers if answer[:num] == token_ids][:1] or [[]]
        end = num + most
        return [
            (token + 1) % VOCAB if position % self.wrong_every == 0 else token
            for position, token in enumerate(answer[num:end], start=num)
        ]


DRAFTERS = ("right", "two of three right", "wrong")


class Liar(Prophet):
    """Always wrong."""

    def __init__(self) -> None:
        super().__init__(wrong_every=1)


def assert_equal(got: Reply, want: Reply) -> None:
    assert got.token_ids == want.token_ids
    assert got.logprobs == want.logprobs
    assert got.text == want.text
    assert got.finished == want.finished
    assert [block.block_hash for block in got.filled] == [block.block_hash for block in want.filled]


async def both(
    make_engine: MakeEngine, drafter: Prophet, prompts: Sequence[list[int]], params: SamplingParams, **how: object
) -> tuple[list[Reply], list[Reply], Engine]:
    """The prompts' answers one by one without drafts, then all together with the drafter."""
    plain = make_engine(**{"chunk": 512, **how} | {"usable_blocks": 64})
    want = [await generate(plain, prompt, sampling=params) for prompt in prompts]
    drafter.answers = [[*prompt, *reply.token_ids] for prompt, reply in zip(prompts, want, strict=True)]
    engine = make_engine(drafter=drafter, clock=STILL, wrap=HeldRunner, **how)
    return await meet(engine, [generate(engine, prompt, sampling=params) for prompt in prompts]), want, engine


class KindProphet(Prophet):
    """Its drafts are of a kind of their own."""

    def draft(self, wishes: Sequence[DraftWish]) -> list[Draft]:
        return [replace(draft, kind=3) for draft in super().draft(wishes)]


async def test_what_becomes_of_an_answers_last_draft_counts_for_its_kind(make_engine: MakeEngine) -> None:
    """Fails if a run that has ended with its draft, and so has none any more, had it counted under another kind."""
    _, _, engine = await both(make_engine, KindProphet(wrong_every=10_000), [make_tokens(9, seed=9)], make_params(20))
    assert engine.speculation().accepted_tokens > 0
    assert engine._speculation is not None
    assert set(engine._speculation._by_kind) == {3}


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("drafter", [Prophet(wrong_every=10_000), Prophet(wrong_every=3), Liar()], ids=DRAFTERS)
async def test_every_bit_is_as_without_drafts_whether_they_are_right_or_not(
    make_engine: MakeEngine, drafter: Prophet, temperature: float
) -> None:
    """Four at once. Fails when a draft's row sees a wrong token, a rejected one is seen later, or its block is
    shared."""
    drafter.gone.clear()
    prompts = [make_tokens(length, seed=length) for length in (1, 8, 9, 61)]
    params = make_params(20, temperature=temperature, seed=4)
    got, want, engine = await both(make_engine, drafter, prompts, params)
    for one, other in zip(got, want, strict=True):
        assert_equal(one, other)
    stats = engine.speculation()
    assert stats.drafted_tokens > 0
    if isinstance(drafter, Liar):
        assert stats.accepted_tokens == 0
    else:
        assert stats.accepted_tokens > 0.3 * stats.drafted_tokens
    assert sorted(drafter.gone) == [1, 2, 3, 4], "who has ended is drafted for no more"


async def test_right_drafts_spare_steps(make_engine: MakeEngine) -> None:
    """One sequence, 7 drafts a step: 48 tokens take some 6 steps of 8 tokens. Fails when accepted tokens are computed
    again."""
    drafter = Prophet(wrong_every=10_000)
    got, want, engine = await both(make_engine, drafter, [make_tokens(5, seed=1)], make_params(48))
    assert_equal(got[0], want[0])
    assert engine.steps.num_steps <= 12, "the prompt, and drafts that grow as they are found right"


async def test_each_answer_says_how_many_of_its_tokens_were_drafted(make_engine: MakeEngine) -> None:
    """Two at once. Fails when one is told the other's, or the engine's own count is another."""
    prompts = [make_tokens(5, seed=1), make_tokens(6, seed=2)]
    got, _, engine = await both(make_engine, Prophet(wrong_every=10_000), prompts, make_params(24))
    finished = [reply.finished for reply in got]
    assert all(0 < each.accepted_draft_tokens <= each.drafted_tokens for each in finished)
    assert all(each.accepted_draft_tokens < each.completion_tokens for each in finished), "the first is no draft"
    stats = engine.speculation()
    assert sum(each.drafted_tokens for each in finished) == stats.drafted_tokens
    assert sum(each.accepted_draft_tokens for each in finished) == stats.accepted_tokens == stats.drafted_tokens


async def test_wrong_drafts_are_given_up_and_tried_again_now_and_then(make_engine: MakeEngine) -> None:
    drafter = Liar()
    got, want, engine = await both(make_engine, drafter, [make_tokens(5, seed=1)], make_params(150))
    assert_equal(got[0], want[0])
    stats = engine.speculation()
    assert 3 < stats.drafted_tokens < 60, "of 150 steps, few may have drafts: they never were right"


async def test_an_answer_ends_in_the_middle_of_a_draft_as_it_would_have_ended_without(make_engine: MakeEngine) -> None:
    """By the end token, by a stop string, by max_tokens, by the context. Fails when tokens behind the end are given
    out, counted, or left in a shared block."""
    prompt = make_tokens(BLOCK_TOKENS - 2, seed=5)
    free = await generate(make_engine(), prompt, sampling=make_params(30))
    eos = free.token_ids[11]
    ends = [
        (make_params(30, ignore_eos=False), {"eos_token_ids": frozenset({eos})}),
        (make_params(30, stop=(free.text[9:12],)), {}),
        (make_params(13), {}),
        (make_params(200), {"context_tokens_max": len(prompt) + 21}),
    ]
    for params, how in ends:
        plain, drafter = make_engine(**how), Prophet(wrong_every=10_000)
        want = await generate(plain, prompt, sampling=params)
        drafter.answers = [[*prompt, *free.token_ids, *make_tokens(300, seed=6)]]
        engine = make_engine(drafter=drafter, clock=STILL, **how)
        got = await generate(engine, prompt, sampling=params)
        assert_equal(got, want)
        assert got.finished.completion_tokens < 30
        stats = engine.speculation()
        assert stats.accepted_tokens > 3
        assert engine.pool.kept_blocks == plain.pool.kept_blocks, "nothing behind the end was shared"
    assert got.finished.reason is FinishReason.LENGTH


async def test_what_a_sequence_with_drafts_leaves_in_the_pool_is_valid(make_engine: MakeEngine) -> None:
    """A next turn stands on the blocks of the answer before. Fails when a rejected draft's KV is in a shared block, or
    reuse is less than without drafts."""
    prompt = make_tokens(2 * BLOCK_TOKENS, seed=7)
    params = make_params(3 * BLOCK_TOKENS + 1)
    drafter = Prophet(wrong_every=3)
    got, _, engine = await both(make_engine, drafter, [prompt], params)
    turn = [*prompt, *got[0].token_ids, *make_tokens(5, seed=8)]
    plain = make_engine()
    await generate(plain, prompt, sampling=params)
    reused = await generate(plain, turn, use_device=True)
    drafted = await generate(engine, turn, use_device=True)
    assert_equal(drafted, reused)
    assert drafted.logprobs == (await generate(make_engine(), turn)).logprobs
    assert drafted.num_device_blocks == reused.num_device_blocks == 5


async def test_in_a_tight_pool_drafts_cost_nobody_a_block(make_engine: MakeEngine) -> None:
    """Five sequences that each grow to 7 blocks in a pool of 16: with drafts, too, every answer is the same."""
    prompts = [make_tokens(16 + seed, seed=seed) for seed in range(5)]
    drafter = Prophet(wrong_every=4)
    got, want, engine = await both(
        make_engine, drafter, prompts, make_params(36, temperature=0.8, seed=9), usable_blocks=16
    )
    for one, other in zip(got, want, strict=True):
        assert_equal(one, other)
    assert engine.steps.num_preemptions
    engine.pool.check_integrity()


async def test_a_long_prompt_beside_drafting_streams_changes_no_answer(make_engine: MakeEngine) -> None:
    prompts = [make_tokens(9, seed=1), make_tokens(12, seed=2), make_tokens(150, seed=3), make_tokens(90, seed=4)]
    got, want, _ = await both(make_engine, Prophet(wrong_every=5), prompts, make_params(40), chunk=13)
    for one, other in zip(got, want, strict=True):
        assert_equal(one, other)


async def test_a_looked_up_draft_finds_what_repeats_itself(make_engine: MakeEngine) -> None:
    """A greedy answer of a tiny model says some things twice. Fails when the lookup proposes something else."""
    prompt = make_tokens(20, seed=3)
    params = make_params(100)
    want = await generate(make_engine(), prompt, sampling=params)
    engine = make_engine(drafter=NgramDrafter(), clock=STILL)
    assert_equal(await generate(engine, prompt, sampling=params), want)
    stats = engine.speculation()
    assert 0 < stats.accepted_tokens <= stats.drafted_tokens


def small_runner(model: LoadedModel) -> LoadedModel:
    """The same weights with a pool of their own: a draft model that is always right."""
    kv = PagedKV(model.kv.layout, 40)
    runner = ModelRunner(model.runner.model, kv, row_multiple=model.runner.row_multiple, threads=1)
    return replace(model, kv=kv, runner=runner)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_draft_model_that_agrees_is_right_at_every_temperature(
    make_engine: MakeEngine, tiny_model: LoadedModel, temperature: float
) -> None:
    """The large model's own weights draft. Fails when the small model reads another text, or draws another number."""
    drafter = ModelDrafter(small_runner(tiny_model), vocab_tokens=VOCAB, step_tokens=16, clock=STILL)
    prompts = [make_tokens(length, seed=length) for length in (3, 50, 17)]
    params = make_params(24, temperature=temperature, seed=2)
    plain = make_engine()
    want = [await generate(plain, prompt, sampling=params) for prompt in prompts]
    engine = make_engine(drafter=drafter, clock=STILL, wrap=HeldRunner)
    got = await meet(engine, [generate(engine, prompt, sampling=params) for prompt in prompts])
    for one, other in zip(got, want, strict=True):
        assert_equal(one, other)
    stats = engine.speculation()
    assert stats.accepted_tokens > 0.9 * stats.drafted_tokens > 9
    assert drafter._pool.account.available_blocks == 40, "a sequence that has ended holds no blocks"


async def test_a_drafter_that_fails_costs_no_answer(make_engine: MakeEngine) -> None:
    class Broken(Liar):
        def draft(self, wishes: Sequence[DraftWish]) -> list[Draft]:
            raise RuntimeError("out of memory")

    got, want, engine = await both(make_engine, Broken(), [make_tokens(5, seed=1)], make_params(10))
    assert_equal(got[0], want[0])
    stats = engine.speculation()
    assert stats.failure == "RuntimeError: out of memory"


async def test_drawn_tokens_are_the_same_for_every_seed_so_their_distribution_is(make_engine: MakeEngine) -> None:
    """Twenty seeds at temperature 1, with drafts that are right half of the time. The draw of each token is a function
    of its logits, the seed and its index; equality for every seed is equality of the distribution."""
    prompt = make_tokens(12, seed=1)
    plain, drafter = make_engine(), Prophet(wrong_every=2)
    engine = make_engine(drafter=drafter, clock=STILL)
    seen = set()
    for seed in range(20):
        params = SamplingParams(max_tokens=5, temperature=1.0, seed=seed, ignore_eos=True)
        want = await generate(plain, prompt, sampling=params)
        drafter.answers = [[*prompt, *want.token_ids]]
        assert (await generate(engine, prompt, sampling=params)).token_ids == want.token_ids
        seen.add(want.token_ids)
    assert len(seen) == 20, "all alike would show nothing"
    stats = engine.speculation()
    assert stats.accepted_tokens > 10


class MeasuredTime(StillClock):
    """Goes on by what steps are said to take."""

    def __init__(self) -> None:
        self.time_s = 1.0

    def now_s(self) -> float:
        return self.time_s


class PricedRunner(HeldRunner):
    """A runner whose steps take 10 ms and so much for each row, padded as the real one pads, on its own clock."""

    def __init__(self, runner: ModelRunner, clock: MeasuredTime, row_s: float) -> None:
        super().__init__(runner)
        self._clock = clock
        self._row_s = row_s

    def run_step(self, steps: Sequence[SequenceStep]) -> torch.Tensor:
        logits = super().run_step(steps)
        rows = sum(len(step.token_ids) for step in steps)
        self._clock.time_s += 0.010 + self._row_s * (rows + -rows % self.row_multiple)
        return logits


@pytest.mark.parametrize(
    ("drafter", "row_s", "least_speed", "drafts_most"),
    [
        (Prophet(wrong_every=10_000), 0.0001, 4.0, 999),
        (Prophet(wrong_every=10_000), 0.02, 1.0, 999),
        (Prophet(wrong_every=3), 0.02, 1.0, 999),
        (Liar(), 0.0001, 0.97, 60),
        (Liar(), 0.02, 0.85, 40),
    ],
    ids=["cheap and right", "dear and right", "dear and two of three right", "cheap and wrong", "dear and wrong"],
)
async def test_drafts_pay_or_stay_out(
    make_engine: MakeEngine, drafter: Prophet, row_s: float, least_speed: float, drafts_most: int
) -> None:
    """Two sequences of 100 tokens, in time that only steps take. Fails when drafts are made that cost more than they
    spare, beyond the few that it takes to find out."""
    prompts = [make_tokens(9, seed=seed) for seed in (1, 2)]
    params = SamplingParams(max_tokens=100, ignore_eos=True)

    async def seconds(engine: Engine, clock: MeasuredTime) -> tuple[float, list[Reply]]:
        replies = await meet(engine, [generate(engine, prompt, sampling=params) for prompt in prompts])
        return clock.time_s - 1.0, replies

    clock = MeasuredTime()
    plain = make_engine(wrap=lambda runner: PricedRunner(runner, clock, row_s), clock=clock)
    plain_s, want = await seconds(plain, clock)
    drafter.answers = [[*prompt, *reply.token_ids] for prompt, reply in zip(prompts, want, strict=True)]
    clock = MeasuredTime()
    drafted = make_engine(wrap=lambda runner: PricedRunner(runner, clock, row_s), clock=clock, drafter=drafter)
    drafted_s, got = await seconds(drafted, clock)
    assert [reply.token_ids for reply in got] == [reply.token_ids for reply in want]
    stats = drafted.speculation()
    assert plain_s / drafted_s >= least_speed, stats
    assert stats.drafted_tokens <= drafts_most
    if stats.accepted_tokens > 50:
        assert drafted_s < plain_s
        assert stats.gain_s > stats.cost_s, "what is reported says so, too"
