"""A model whose layers all have a window: its sequences hold what the window needs, and get the answers they would have
got with everything kept."""

import asyncio
from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, MistralConfig, MistralForCausalLM

from headrace.config import EngineSettings, ModelSettings
from headrace.core.block import HashAlgorithm
from headrace.core.errors import InvalidRequest
from headrace.core.key_window import KeyWindow
from headrace.engine.engine import Engine, FilledBlock
from headrace.engine.load_model import LoadedModel, load_model
from headrace.engine.model_runner import ModelRunner, SequenceStep

from .conftest import BLOCK_TOKENS, VOCAB, HeldRunner, Reply, admit, generate, make_byte_tokenizer, meet
from .test_engine import assert_equal, make_params, make_tokens

MakeEngine = Callable[..., Engine]

WINDOW = 24  # tokens: 3 blocks of a prefix, and so 8 blocks that a sequence may hold at once
HELD_BLOCKS = 8
PROMPT = 6 * WINDOW + 5


@pytest.fixture(scope="module")
def window_model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-mistral")
    torch.manual_seed(5)
    config = MistralConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        sliding_window=WINDOW,
        max_position_embeddings=512,
        initializer_range=0.4,
        eos_token_id=0,
        bos_token_id=None,
    )
    MistralForCausalLM(config).save_pretrained(path)
    make_byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def window_model(window_model_dir: Path) -> LoadedModel:
    lines: list[str] = []
    model = load_model(
        ModelSettings(model=str(window_model_dir), device="cpu", torch_threads=1),
        EngineSettings(block_tokens=BLOCK_TOKENS, pool_tokens=64 * BLOCK_TOKENS),
        trust_group="tests",
        hash_algorithm=HashAlgorithm.XXH3_128,
        report=lines.append,
    )
    said = [line for line in lines if "every layer sees the last 24 tokens only" in line]
    assert len(said) == 1, lines
    assert f"at most {HELD_BLOCKS} blocks of the pool" in said[0]
    return model


@pytest.fixture
def make_window_engine(make_engine: MakeEngine, window_model: LoadedModel) -> MakeEngine:
    """As `make_engine`, of a model with a window; `usable_blocks` bound what may be held at once, as a small pool."""
    parts = ("kv", "namespace", "window", "path", "eos_token_ids", "context_tokens_max", "exact", "name")
    changes = {part: getattr(window_model, part) for part in parts}

    def make(**settings: object) -> Engine:
        wrap = settings.pop("wrap", lambda runner: runner)
        return make_engine(wrap=lambda runner: wrap(window_model.runner), **(changes | settings))  # type: ignore[operator]

    return make


@torch.inference_mode()
def plain_greedy(model_dir: Path, prompt: list[int], count: int) -> tuple[int, ...]:
    model = AutoModelForCausalLM.from_pretrained(model_dir, attn_implementation="eager").eval()
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])


async def converse(engine: Engine, model_dir: Path, conversation: list[int]) -> None:
    """Three turns, each of which goes on where the one before ended, and is answered as by plain transformers."""
    for turn in range(3):
        reply = await generate(engine, conversation, use_device=True)
        assert reply.num_device_blocks == (0 if turn == 0 else (len(conversation) - 9) // BLOCK_TOKENS)
        assert reply.token_ids == plain_greedy(model_dir, conversation, 12)
        conversation = [*conversation, *reply.token_ids[:11], *make_tokens(9, seed=turn)]


async def ask_four_times_at_once(engine: Engine, prompt: list[int], want: tuple[int, ...]) -> None:
    """Of an engine over a HeldRunner: the prompt is computed about once, and answered alike."""
    replies: list[Reply] = await meet(engine, [generate(engine, prompt, use_device=True) for _ in range(4)])
    assert [reply.token_ids for reply in replies] == [want] * 4
    assert engine.steps.num_shared_blocks >= 2 * (len(prompt) // BLOCK_TOKENS)


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [make_tokens(PROMPT + 3 * seed, seed=seed) for seed in range(4)]


@pytest.fixture(scope="module")
def expected(window_model_dir: Path, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    return [plain_greedy(window_model_dir, prompt, 12) for prompt in prompts]


async def test_a_prompt_of_six_windows_runs_in_a_pool_of_two(
    make_window_engine: MakeEngine, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    """Fails if blocks that the window has passed stay with the sequence, or one that it needs is given away."""
    begins: list[tuple[int, int]] = []

    class Watched:
        """The runner, with each step's tables written down: where they begin, and where they might."""

        def __init__(self, runner: ModelRunner) -> None:
            self.runner = runner

        def run_step(self, steps: Sequence[SequenceStep]) -> torch.Tensor:
            window = KeyWindow(WINDOW, BLOCK_TOKENS)
            begins.extend((step.first_block, window.first_block(step.start)) for step in steps)
            return self.runner.run_step(steps)

    engine = make_window_engine(usable_blocks=HELD_BLOCKS, chunk=512, wrap=Watched)
    for prompt, want in zip(prompts, expected, strict=True):
        reply = await generate(engine, prompt)
        assert reply.token_ids == want
        # Every full block was handed out to be stored, the passed ones too.
        assert [block.position for block in reply.filled] == list(range((len(prompt) + 11) // BLOCK_TOKENS))
    assert all(begins_at == needed_from for begins_at, needed_from in begins)


async def test_sequences_in_a_tight_pool_give_way_and_still_answer_as_plain_transformers(
    make_window_engine: MakeEngine, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    """Fails if a sequence is answered from another one's blocks, while eight long ones take turns in room for two."""
    engine = make_window_engine(usable_blocks=3 * HELD_BLOCKS - 9, chunk=40)
    replies = await asyncio.gather(*(generate(engine, prompt, use_device=True) for prompt in prompts * 2))
    assert [reply.token_ids for reply in replies] == expected * 2


async def test_preempted_sequences_begin_again_behind_a_whole_window(make_window_engine: MakeEngine) -> None:
    """Five sequences of three blocks in a pool of fifteen; past their window each needs four. Fails if one that comes
    back begins behind a window of which a part is missing."""
    prompts = [make_tokens(2 * BLOCK_TOKENS + seed, seed=seed) for seed in range(5)]
    params = make_params(2 * WINDOW)
    roomy, tight = make_window_engine(), make_window_engine(usable_blocks=15, wrap=HeldRunner)
    expected = [await generate(roomy, prompt, sampling=params) for prompt in prompts]
    replies = await meet(tight, [generate(tight, prompt, use_device=True, sampling=params) for prompt in prompts])
    for got, want in zip(replies, expected, strict=True):
        assert_equal(got, want)
    assert tight.steps.num_preemptions > 0


async def test_a_hit_in_the_pool_takes_only_the_blocks_that_the_window_needs(
    make_window_engine: MakeEngine, prompts: list[list[int]]
) -> None:
    engine = make_window_engine()
    prompt = prompts[0]
    cold = await generate(engine, prompt)
    admission = await admit(engine, prompt, use_device=True)
    num_full = (len(prompt) - 1) // BLOCK_TOKENS
    assert (admission.num_device_blocks, admission.first_block) == (num_full, num_full - 3)
    assert len(admission.block_ids) == 4  # the window's three, and the one of the last tokens
    engine.release(admission)
    warm = await generate(engine, prompt, use_device=True)
    assert warm.num_device_blocks == num_full
    assert_equal(warm, cold)


async def test_what_may_not_be_counted_as_reused_is_computed_from_the_start(
    make_window_engine: MakeEngine, prompts: list[list[int]]
) -> None:
    """Half a window of a found prefix is no beginning: the blocks before are not there."""
    engine = make_window_engine()
    cold = await generate(engine, prompts[0])
    admission = await admit(engine, prompts[0], use_device=True)
    tokens: list[int] = []
    run = engine.run(admission, cached_tokens=10 * BLOCK_TOKENS, sampling=make_params(12))
    async with aclosing(run) as events:
        async for event in events:
            if isinstance(event, FilledBlock):
                engine.pool.unref(event.block_id)
            elif hasattr(event, "token_id"):
                tokens.append(event.token_id)
    assert tuple(tokens) == cold.token_ids


async def test_a_prompt_longer_than_the_pool_is_admitted_and_one_whose_window_is_not_is_refused(
    make_window_engine: MakeEngine, window_model: LoadedModel
) -> None:
    engine = make_window_engine()
    assert engine.context_tokens_max == window_model.context_tokens_max == 64 * BLOCK_TOKENS
    wide = make_window_engine(window=KeyWindow(40 * BLOCK_TOKENS, BLOCK_TOKENS))
    assert wide.context_tokens_max == 64 * BLOCK_TOKENS
    with pytest.raises(InvalidRequest, match="whole pool has 64"):
        await admit(wide, make_tokens(66 * BLOCK_TOKENS, seed=1))
    admission = await admit(engine, make_tokens(66 * BLOCK_TOKENS, seed=1))
    assert len(admission.block_ids) == HELD_BLOCKS
    engine.release(admission)


async def test_a_conversation_in_a_pool_that_holds_no_whole_prefix_goes_on_where_it_was(
    make_window_engine: MakeEngine, prompts: list[list[int]], window_model_dir: Path
) -> None:
    """Fails if a block can only be found while all before it are kept: a windowed sequence has given them back."""
    await converse(make_window_engine(usable_blocks=2 * HELD_BLOCKS), window_model_dir, prompts[2])


async def test_many_equal_prompts_at_once_are_computed_once_and_answered_alike(
    make_window_engine: MakeEngine, prompts: list[list[int]], expected: list[tuple[int, ...]]
) -> None:
    """Those who follow take the leader's blocks as they come, beyond the table that they were admitted with."""
    await ask_four_times_at_once(make_window_engine(chunk=16, wrap=HeldRunner), prompts[1], expected[1])


def test_a_model_with_one_layer_that_sees_everything_is_not_bounded(window_model: LoadedModel) -> None:
    assert window_model.window == KeyWindow(WINDOW, BLOCK_TOKENS)
    assert not replace(window_model.window, tokens=None).bounded
