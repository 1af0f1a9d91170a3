"""Models of which some layers have a window and others see everything: of the former a sequence holds what the window
needs, and gets the answers it would have got with everything kept."""

import asyncio
import random
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.config import EngineSettings, ModelSettings
from headrace.core.block import HashAlgorithm, HashedPrompt
from headrace.engine.block_pool import Selection
from headrace.engine.drafter import Draft, DraftWish
from headrace.engine.engine import Engine, FilledBlock
from headrace.engine.layered_kv import LayeredKV
from headrace.engine.layered_pool import LayeredPool
from headrace.engine.load_model import LoadedModel, load_model
from headrace.engine.model_runner import ModelRunner, SequenceStep

from .conftest import BLOCK_TOKENS, VOCAB, HeldRunner, admit, generate, make_byte_tokenizer, make_prompt, meet
from .test_engine import assert_equal, make_params, make_tokens
from .test_windows import ask_four_times_at_once, converse, plain_greedy

MakeEngine = Callable[..., Engine]

WINDOW = 24  # tokens: 3 blocks of a prefix, and so 8 near parts that a sequence may hold at once
HELD_NEAR = 8
PROMPT = 6 * WINDOW + 5
NUM_BLOCKS = 96

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "sliding_window": WINDOW,
    "max_position_embeddings": 512,
    "query_pre_attn_scalar": 16,
    "initializer_range": 0.4,
    "eos_token_id": 0,
    "bos_token_id": None,
    "pad_token_id": None,
}
FAMILIES = {
    "gemma2": {"num_hidden_layers": 2, "attn_logit_softcapping": 2.0},
    "gemma3_text": {"num_hidden_layers": 6},  # five with a window to one without, as it is published
}


@pytest.fixture(scope="module", params=list(FAMILIES))
def mixed_dir(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp(request.param)
    torch.manual_seed(5)
    config = AutoConfig.for_model(request.param, **COMMON, **FAMILIES[request.param])
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    make_byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def mixed_model(mixed_dir: Path) -> LoadedModel:
    lines: list[str] = []
    model = load_model(
        ModelSettings(model=str(mixed_dir), device="cpu", torch_threads=1),
        EngineSettings(block_tokens=BLOCK_TOKENS, pool_tokens=NUM_BLOCKS * BLOCK_TOKENS, batch_sequences_max=8),
        trust_group="tests",
        hash_algorithm=HashAlgorithm.XXH3_128,
        report=lines.append,
    )
    said = [line for line in lines if "the others see all" in line]
    assert len(said) == 1, lines
    assert f"a sequence holds KV of at most {HELD_NEAR * BLOCK_TOKENS} tokens" in said[0]
    return model


def with_near(model: LoadedModel, num_near: int) -> LoadedModel:
    """The same weights over a pool with room for so many near parts."""
    assert isinstance(model.kv, LayeredKV)
    kv = LayeredKV(model.kv.layout, NUM_BLOCKS, windows=model.kv.windows, num_near=num_near)
    runner = model.runner
    return replace(model, kv=kv, runner=ModelRunner(runner.model, kv, row_multiple=runner.row_multiple, threads=1))


@pytest.fixture
def make_mixed_engine(make_engine: MakeEngine, mixed_model: LoadedModel) -> MakeEngine:
    """As `make_engine`; `num_near`: near parts that the pool has."""
    parts = ("kv", "namespace", "window", "path", "eos_token_ids", "context_tokens_max", "exact", "name")

    def make(*, num_near: int | None = None, **settings: object) -> Engine:
        wrap = settings.pop("wrap", lambda runner: runner)
        model = mixed_model if num_near is None else with_near(mixed_model, num_near)
        changes = {part: getattr(model, part) for part in parts}
        settings = {"usable_blocks": NUM_BLOCKS} | settings
        return make_engine(wrap=lambda _: wrap(model.runner), **(changes | settings))  # type: ignore[operator]

    return make


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [make_tokens(PROMPT + 3 * seed, seed=seed) for seed in range(4)]


@pytest.fixture(scope="module")
def expected(mixed_dir: Path, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    return [plain_greedy(mixed_dir, prompt, 12) for prompt in prompts]


def near_held(engine: Engine) -> int:
    assert isinstance(engine.pool, LayeredPool)
    return engine.pool.near.num_blocks - engine.pool.near.available_blocks


async def test_a_prompt_of_six_windows_holds_near_parts_of_two_and_answers_as_plain_transformers(
    make_mixed_engine: MakeEngine, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    """Fails if near parts that the window has passed stay with the sequence, or one that is read is given away."""
    held: list[int] = []

    class Watched:
        def __init__(self, runner: ModelRunner) -> None:
            self.runner = runner

        def run_step(self, steps: Sequence[SequenceStep]) -> torch.Tensor:
            parts = engine.pool.parts
            for step in steps:
                wide, near = parts.split(step.block_ids)
                assert len(wide) * BLOCK_TOKENS >= step.start + len(step.token_ids)
                held.append(len(near))
            return self.runner.run_step(steps)

    engine = make_mixed_engine(num_near=HELD_NEAR, chunk=512, wrap=Watched)
    for prompt, want in zip(prompts, expected, strict=True):
        reply = await generate(engine, prompt)
        assert reply.token_ids == want
        # Every full block was handed out to be stored, with the parts that the window has passed since.
        assert [block.position for block in reply.filled] == list(range((len(prompt) + 11) // BLOCK_TOKENS))
        assert all(engine.pool.parts.near_of(block.block_id) is not None for block in reply.filled)
    assert max(held) <= HELD_NEAR
    assert near_held(engine) == 0


async def test_sequences_with_too_few_near_parts_give_way_and_still_answer_as_plain_transformers(
    make_mixed_engine: MakeEngine, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    """Fails if a sequence is answered from another one's near parts: eight long ones take turns in room for two."""
    engine = make_mixed_engine(num_near=2 * HELD_NEAR - 1, chunk=40)
    replies = await asyncio.gather(*(generate(engine, prompt, use_device=True) for prompt in prompts * 2))
    assert [reply.token_ids for reply in replies] == expected * 2
    assert near_held(engine) == 0


async def test_sequences_that_lost_blocks_of_either_part_give_the_answer_they_would_have_given(
    make_mixed_engine: MakeEngine,
) -> None:
    """Five sequences that grow past their window, once with few near parts, once with few wide ones."""
    batch = [make_tokens(2 * BLOCK_TOKENS + seed, seed=seed) for seed in range(5)]
    params = make_params(2 * WINDOW)
    roomy = make_mixed_engine()
    want = [await generate(roomy, prompt, sampling=params) for prompt in batch]
    for tight in (
        make_mixed_engine(num_near=16, wrap=HeldRunner),
        make_mixed_engine(usable_blocks=16, wrap=HeldRunner),
    ):
        replies = await meet(tight, [generate(tight, prompt, use_device=True, sampling=params) for prompt in batch])
        for got, wanted in zip(replies, want, strict=True):
            assert_equal(got, wanted)
        assert tight.steps.num_preemptions > 0
        assert near_held(tight) == 0


async def test_a_hit_in_the_pool_holds_all_wide_parts_and_near_ones_of_its_window(
    make_mixed_engine: MakeEngine, prompts: list[list[int]]
) -> None:
    engine = make_mixed_engine()
    cold = await generate(engine, prompts[0])
    admission = await admit(engine, prompts[0], use_device=True)
    num_full = (len(prompts[0]) - 1) // BLOCK_TOKENS
    assert (admission.num_device_blocks, admission.first_near) == (num_full, num_full - 3)
    wide, near = engine.pool.parts.split(admission.block_ids)
    assert (len(wide), len(near)) == (num_full + 1, 4)  # the window's three, and the one of the last tokens
    engine.release(admission)
    warm = await generate(engine, prompts[0], use_device=True)
    assert warm.num_device_blocks == num_full
    assert_equal(warm, cold)


async def test_where_near_parts_of_a_window_are_gone_the_prefix_is_shorter_and_never_wrong(
    make_mixed_engine: MakeEngine, prompts: list[list[int]], mixed_dir: Path
) -> None:
    """Other prompts push near parts out, while all wide ones stay: prompts that part anywhere are answered right."""
    engine = make_mixed_engine(num_near=2 * HELD_NEAR)
    await generate(engine, prompts[0])
    rng = random.Random(3)
    found: list[int] = []
    for turn in range(8):
        cut = rng.randrange(BLOCK_TOKENS, PROMPT)
        prompt = [*prompts[0][:cut], *make_tokens(9, seed=turn)]
        reply = await generate(engine, prompt, use_device=True)
        found.append(reply.num_device_blocks)
        assert reply.token_ids == plain_greedy(mixed_dir, prompt, 12)
    assert any(found), "nothing was found, so nothing was tried"


async def test_a_conversation_goes_on_where_it_was(make_mixed_engine: MakeEngine, mixed_dir: Path) -> None:
    await converse(make_mixed_engine(num_near=HELD_NEAR + 2), mixed_dir, make_tokens(PROMPT, seed=2))


async def test_many_equal_prompts_at_once_are_computed_once_and_answered_alike(
    make_mixed_engine: MakeEngine, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    """Those who follow take the leader's blocks as they come, with near parts beyond those they were admitted with."""
    engine = make_mixed_engine(chunk=16, wrap=HeldRunner)
    await ask_four_times_at_once(engine, prompts[1], expected[1])
    assert near_held(engine) == 0


async def test_what_may_not_be_counted_as_reused_is_computed_from_the_start(
    make_mixed_engine: MakeEngine, prompts: list[list[int]]
) -> None:
    """Half a window of near parts is no beginning: those before are not there."""
    engine = make_mixed_engine()
    cold = await generate(engine, prompts[0])
    for cached_blocks in (0, 10, len(prompts[0]) // BLOCK_TOKENS - 1):
        admission = await admit(engine, prompts[0], use_device=True)
        tokens: list[int] = []
        run = engine.run(admission, cached_tokens=cached_blocks * BLOCK_TOKENS, sampling=make_params(12))
        async with aclosing(run) as events:
            async for event in events:
                if isinstance(event, FilledBlock):
                    engine.pool.unref(event.block_id)
                elif hasattr(event, "token_id"):
                    tokens.append(event.token_id)
        assert tuple(tokens) == cold.token_ids
    assert near_held(engine) == 0


class _KnowsHalf:
    """A drafter that knows the answers, and spoils the second half of each draft."""

    costs_steps = False

    def __init__(self, texts: dict[tuple[int, ...], tuple[int, ...]]) -> None:
        self._texts = texts

    def token_s(self) -> float:
        return 0.0

    def draft(self, wishes: Sequence[DraftWish]) -> list[Draft]:
        drafts = []
        for wish in wishes:
            prompt = tuple(wish.token_ids[: wish.num_prompt])
            known = len(wish.token_ids) - wish.num_prompt
            right = list(self._texts[prompt][known : known + wish.most])
            spoilt = [token % (VOCAB - 1) + 1 for token in right[len(right) // 2 :]]
            drafts.append(Draft((*right[: len(right) // 2], *spoilt)))
        return drafts

    def leave(self, key: int) -> None:
        pass


async def test_drafts_change_no_answer(
    make_mixed_engine: MakeEngine, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    texts = {tuple(prompt): answer for prompt, answer in zip(prompts, expected, strict=True)}
    for num_near in (None, 3 * HELD_NEAR):
        engine = make_mixed_engine(num_near=num_near, drafter=_KnowsHalf(texts))
        replies = await asyncio.gather(*(generate(engine, prompt, use_device=True) for prompt in prompts))
        assert [reply.token_ids for reply in replies] == expected
        assert sum(reply.finished.accepted_draft_tokens for reply in replies) > 0


async def test_an_evicted_prefix_is_gone_with_both_its_parts(
    make_mixed_engine: MakeEngine, prompts: list[list[int]]
) -> None:
    engine = make_mixed_engine()
    await generate(engine, prompts[0])
    pool = engine.pool
    assert isinstance(pool, LayeredPool)
    assert pool.kept_blocks > 0 < pool.near.kept_blocks
    pool.evict(Selection(), dry_run=False)
    assert (pool.kept_blocks, pool.near.kept_blocks) == (0, 0)
    assert pool.resident_blocks(make_prompt(engine, prompts[0])) == 0


async def test_the_pool_of_five_windowed_layers_to_one_needs_a_fraction_of_the_bytes(
    make_mixed_engine: MakeEngine, mixed_model: LoadedModel, prompts: list[list[int]]
) -> None:
    """What a sequence of six windows holds of the pool, and what it would hold with all layers in one part."""
    engine = make_mixed_engine()
    await generate(engine, prompts[0])
    admission = await admit(engine, [*prompts[0], 1], use_device=True)
    wide, near = engine.pool.parts.split(admission.block_ids)
    layout = mixed_model.kv.layout
    held = len(wide) * layout.wide.block_bytes + len(near) * layout.near.block_bytes
    share = held / (len(wide) * replace(layout, near_layers=0).block_bytes)
    engine.release(admission)
    windowed_share = layout.near_layers / layout.num_layers
    assert share == pytest.approx(1 - windowed_share + windowed_share * 4 / len(wide), rel=0.01)


class _Copies:
    """A `PrefixBackup` that copies blocks when they are filled, and reads back as many as it is told to."""

    def __init__(self, engine: Engine, *, reloads_max: int) -> None:
        self._engine = engine
        self._copies: list[bytes] = []
        self._reloads_max = reloads_max

    def filled(self, block: FilledBlock) -> None:
        if block.position == len(self._copies):
            payload = bytearray(self._engine.kv.layout.block_bytes)
            self._engine.kv.read_block(block.block_id, memoryview(payload))
            self._copies.append(bytes(payload))

    def num_stored(self) -> int:
        return len(self._copies)

    def num_kept(self) -> int:
        return len(self._copies)

    def reload_s(self, num_blocks: int) -> float:
        return 0.0

    def save(self, blocks: Sequence[FilledBlock]) -> None:
        for block in blocks:
            self.filled(block)
            self._engine.pool.unref(block.block_id)

    async def reload(self, prompt: HashedPrompt, block_ids: Sequence[int], blocks: range, *, saved_from: int) -> int:
        read = blocks[: self._reloads_max]
        for position in read:
            self._engine.kv.write_block(block_ids[position], memoryview(self._copies[position]))
            await asyncio.sleep(0)
        return len(read)


@pytest.mark.parametrize("reloads_max", [1, 3, 5, 100])
async def test_what_is_read_back_counts_as_far_as_its_window_is_whole(
    make_mixed_engine: MakeEngine, reloads_max: int
) -> None:
    """Sequences that give way again and again, and get back all of what they had or only a beginning of it. Fails if a
    block is used behind a window of which near parts did not come."""
    batch = [make_tokens(7 * BLOCK_TOKENS + seed, seed=seed) for seed in range(4)]
    params = make_params(2 * WINDOW)
    roomy = make_mixed_engine()
    want = [(await generate(roomy, prompt, sampling=params)).token_ids for prompt in batch]
    tight = make_mixed_engine(usable_blocks=25, wrap=HeldRunner)
    backups = [_Copies(tight, reloads_max=reloads_max) for _ in batch]

    async def answer(prompt: list[int], backup: _Copies) -> tuple[int, ...]:
        admission = await admit(tight, prompt)
        tokens: list[int] = []
        run = tight.run(admission, cached_tokens=0, sampling=params, backup=backup)
        async with aclosing(run) as events:
            async for event in events:
                if isinstance(event, FilledBlock):
                    backup.filled(event)
                    tight.pool.unref(event.block_id)
                elif hasattr(event, "token_id"):
                    tokens.append(event.token_id)
        return tuple(tokens)

    replies = await meet(tight, [answer(prompt, backup) for prompt, backup in zip(batch, backups, strict=True)])
    assert replies == want
    assert tight.steps.num_preemptions > 0
    assert near_held(tight) == 0
