"""A tiny llama with random weights and a byte-level tokenizer, and engines over it."""

import asyncio
import math
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

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
T = TypeVar("T")


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
        gate = getattr(engine.model.runner, "gate", None)
        if isinstance(gate, StepGate):
            gate.let_go()  # a test that failed may have left it closed
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


class StandingClock:
    """No time passes: nobody's turn comes by waiting, and steps cost what is assumed before any was measured."""

    def now_s(self) -> float:
        return 1.0

    def unix_ms(self) -> int:
        return 1_000


class StepGate:
    """Lets so many steps go, and no more: what is asked for meanwhile is there at once, so that sequences meet however
    fast or slow the machine is."""

    def __init__(self, *, may_go: float = 0) -> None:
        """may_go: steps that go before somebody waits."""
        self.num_steps = 0  # that were let go
        self.is_waiting = False  # whether the step thread stands here
        self._may_go = may_go
        self._changed = threading.Condition()

    def let_go(self, num_steps: float = math.inf) -> None:
        """So many steps may go in all, those before counted."""
        with self._changed:
            self._may_go = num_steps
            self._changed.notify_all()

    def pass_one(self) -> None:
        """Wait until one more step may go; in the step thread."""
        with self._changed:
            self.is_waiting = self.num_steps >= self._may_go
            assert self._changed.wait_for(lambda: self.num_steps < self._may_go, 120), "the test never let it go"
            self.is_waiting = False
            self.num_steps += 1


class HeldRunner:
    """The runner of a model, whose steps wait at a gate that is closed at first."""

    def __init__(self, runner: Any) -> None:
        self._runner = runner
        self.gate = StepGate()

    @property
    def row_multiple(self) -> int:
        return int(self._runner.row_multiple)

    def run_step(self, steps: Sequence[SequenceStep]) -> torch.Tensor:
        self.gate.pass_one()
        return self._runner.run_step(steps)  # type: ignore[no-any-return]


def gate_of(engine: Engine) -> StepGate:
    """The gate at which an engine's steps wait."""
    gate = engine.model.runner.gate  # type: ignore[attr-defined]
    assert isinstance(gate, StepGate)
    return gate


async def begin_together(engine: Engine, replies: Sequence[Coroutine[Any, Any, T]]) -> "list[asyncio.Task[T]]":
    """Begin these while no step goes; returns when every one is in the engine, which nobody else is using."""
    tasks = [asyncio.create_task(reply) for reply in replies]
    await until(lambda: engine.load().running + engine.load().waiting == len(tasks))
    return tasks


async def meet(engine: Engine, replies: Sequence[Coroutine[Any, Any, T]]) -> list[T]:
    """Let no step of the engine go before every one of these is in it; then their replies."""
    tasks = await begin_together(engine, replies)
    gate_of(engine).let_go()
    return await asyncio.gather(*tasks)


async def in_step(engine: Engine, tasks: "Sequence[asyncio.Task[T]]") -> list[T]:
    """Let each step go when everybody has heard of the one before; the tasks' replies."""
    gate = gate_of(engine)
    while True:
        await until(lambda: gate.is_waiting or all(task.done() for task in tasks))
        if all(task.done() for task in tasks):
            gate.let_go()
            return await asyncio.gather(*tasks)
        for _ in range(10):  # its consumers have been told by now: their turns, and those of whom they tell
            await asyncio.sleep(0)
        before = gate.num_steps
        gate.let_go(before + 1)
        await until(lambda: gate.num_steps > before)  # noqa: B023


async def until(condition: Callable[[], bool], *, for_s: float = 60) -> None:
    """Wait until something that another thread does has been done."""
    deadline = Deadline.after(for_s, CLOCK)
    while not condition():
        assert deadline.left_s() > 0, "it did not happen in time"
        await asyncio.sleep(0.001)
