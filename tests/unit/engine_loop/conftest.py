"""A tiny llama with random weights and a byte-level tokenizer, and engines over it."""

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.config import EngineSettings, ModelSettings
from headrace.core.block import HashAlgorithm, HashedPrompt, hash_prompt
from headrace.core.clock import Clock, Deadline, SystemClock
from headrace.core.generation import SamplingParams, TokenDelta
from headrace.engine.drafter import Drafter
from headrace.engine.engine import Admission, Engine, FilledBlock, RunFinished
from headrace.engine.load_model import LoadedModel, load_model
from headrace.engine.model_runner import SequenceStep

BLOCK_TOKENS = 8
VOCAB = 256
CLOCK = SystemClock()


def make_byte_tokenizer() -> Tokenizer:
    """One token per byte, in the byte-level alphabet; id 0 is the end-of-sequence token."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<eos>": 0} | {character: index for index, character in enumerate(alphabet[: VOCAB - 1], start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return tokenizer


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(11)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        initializer_range=0.4,  # peaked enough that greedy text is not one token for ever
        eos_token_id=0,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    make_byte_tokenizer().save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="session")
def tiny_model(model_dir: Path) -> LoadedModel:
    """Loaded once; each engine makes an account of its own over the same tensors, so stale bytes are always about."""
    return load_model(
        ModelSettings(model=str(model_dir), device="cpu", torch_threads=1),
        EngineSettings(block_tokens=BLOCK_TOKENS, pool_tokens=64 * BLOCK_TOKENS),
        trust_group="tests",
        hash_algorithm=HashAlgorithm.XXH3_128,
        report=lambda line: None,
    )


@pytest.fixture
async def make_engine(tiny_model: LoadedModel) -> AsyncIterator[Callable[..., Engine]]:
    """Start engines; at the end of the test nothing may be held in any of them, and their books must balance."""
    engines: list[tuple[Engine, int]] = []

    def make(
        *,
        chunk: int = 32,
        batch: int = 8,
        usable_blocks: int = 64,
        wrap: Callable[[Any], Any] = lambda runner: runner,
        clock: Clock = CLOCK,
        drafter: Drafter | None = None,
        **model_changes: Any,
    ) -> Engine:
        settings = EngineSettings(block_tokens=BLOCK_TOKENS, prefill_chunk_tokens=chunk, batch_sequences_max=batch)
        model = replace(tiny_model, runner=wrap(tiny_model.runner), **model_changes)
        engine = Engine(model, settings, clock=clock, drafter=drafter)
        unusable = engine.pool.num_blocks - usable_blocks
        engine.pool.take(unusable)
        engine.start()
        engines.append((engine, unusable))
        return engine

    yield make
    for engine, unusable in engines:
        await engine.stop()
        engine.pool.check_integrity()
        assert engine.pool.available_blocks == engine.pool.num_blocks - unusable, "blocks are still held"


@dataclass(frozen=True, slots=True)
class Reply:
    """What a run gave: its tokens, the exact log-probabilities behind each, its text and its end."""

    token_ids: tuple[int, ...]
    logprobs: tuple[tuple[tuple[int, float], ...], ...]
    text: str
    finished: RunFinished
    filled: tuple[FilledBlock, ...]
    num_device_blocks: int


def make_prompt(engine: Engine, token_ids: Sequence[int]) -> HashedPrompt:
    namespace = engine.model.namespace
    return hash_prompt(namespace.id, token_ids, block_tokens=BLOCK_TOKENS, algorithm=namespace.hash_algorithm)


async def admit(
    engine: Engine,
    token_ids: Sequence[int],
    *,
    use_device: bool = False,
    for_s: float = 60,
    ttl_s: float = math.inf,
) -> Admission:
    return await engine.admit(
        make_prompt(engine, token_ids),
        num_blocks=len(token_ids) // BLOCK_TOKENS + 1,
        use_device=use_device,
        deadline=Deadline.after(for_s, CLOCK),
        ttl_s=ttl_s,
    )


async def generate(
    engine: Engine,
    token_ids: Sequence[int],
    *,
    use_device: bool = False,
    sampling: SamplingParams | None = None,
    ttl_s: float = math.inf,
) -> Reply:
    """One request from admission to release. All log-probabilities of each row stand for the bits of its logits."""
    sampling = sampling or SamplingParams(max_tokens=12, logprobs=VOCAB, ignore_eos=True)
    admission = await admit(engine, token_ids, use_device=use_device, ttl_s=ttl_s)
    num_device_blocks = admission.num_device_blocks
    tokens: list[TokenDelta] = []
    filled: list[FilledBlock] = []
    try:
        run = engine.run(admission, cached_tokens=num_device_blocks * BLOCK_TOKENS, sampling=sampling)
        async with aclosing(run) as events:
            async for event in events:
                if isinstance(event, TokenDelta):
                    tokens.append(event)
                elif isinstance(event, FilledBlock):
                    filled.append(event)
                    engine.pool.unref(event.block_id)
                else:
                    finished = event
    finally:
        engine.release(admission)
    return Reply(
        token_ids=tuple(token.token_id for token in tokens),
        logprobs=tuple(tuple((top.token_id, top.logprob) for top in token.top_logprobs) for token in tokens),
        text="".join(token.text for token in tokens) + finished.text,
        finished=finished,
        filled=tuple(filled),
        num_device_blocks=num_device_blocks,
    )


class HeldRunner:
    """The runner of a model, whose steps wait until they may go on: what is asked for meanwhile is there at once, so
    that sequences meet however fast or slow the machine is."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.may_go = threading.Event()

    def run_step(self, steps: Sequence[SequenceStep]) -> torch.Tensor:
        assert self.may_go.wait(60), "the test never let the steps go"
        return self._runner.run_step(steps)


async def meet(engine: Engine, replies: Sequence[Coroutine[Any, Any, Reply]]) -> list[Reply]:
    """Let no step of the engine (over a HeldRunner) go before every one of these is in it; then their replies."""
    held = engine.model.runner
    assert isinstance(held, HeldRunner)
    tasks = [asyncio.create_task(reply) for reply in replies]
    await until(lambda: engine.load().running + engine.load().waiting == len(tasks), for_s=60)
    held.may_go.set()
    return await asyncio.gather(*tasks)


async def until(condition: Callable[[], bool], *, for_s: float = 60) -> None:
    """Wait until something that another thread does has been done."""
    deadline = Deadline.after(for_s, CLOCK)
    while not condition():
        assert deadline.left_s() > 0, "it did not happen in time"
        await asyncio.sleep(0.005)
