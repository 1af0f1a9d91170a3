"""A model of integers in place of a network: what a token's KV is depends on all KV before it, as it lies in the pool.

So a wrong, stale, misplaced or half-written block changes every token after it, and `expected_answer` says what the
tokens should have been, at a thousandth of the cost of a network. It reads everything, or a window of the last tokens.
`CopyingBackup` keeps copies of its blocks.
"""

import asyncio
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from headrace.core.block import HashedPrompt, KvLayout, payload_digest
from headrace.core.key_window import model_window
from headrace.engine.engine import Engine, FilledBlock
from headrace.engine.model_runner import SequenceStep

from .conftest import BLOCK_TOKENS, VOCAB, StepGate, make_prompt

LAYOUT = KvLayout(dtype="float32", num_layers=1, num_kv_heads=1, head_dim=1, block_tokens=BLOCK_TOKENS)  # 8 B a token
_WORD = 2**64


def _mix(value: int) -> int:
    value = (value ^ (value >> 31)) * 0x9E3779B97F4A7C15 % _WORD
    return (value ^ (value >> 29)) * 0xBF58476D1CE4E5B9 % _WORD


def _kv(token_id: int, position: int, before: int) -> int:
    """The KV of one token; `before` is the weighted sum of all KV before it."""
    return _mix((token_id * 0x100000001B3 + position + before) % _WORD)


def _next(kv: int) -> int:
    return 1 + _mix(kv) % (VOCAB - 1)


def _first_read(position: int, window_tokens: int | None) -> int:
    """The first position whose KV is read for this one."""
    return 0 if window_tokens is None else max(0, position - window_tokens + 1)


@dataclass(frozen=True, slots=True)
class ExpectedSequence:
    """A prompt and its answer, and the KV of all their tokens but the last of the answer, which is never computed."""

    token_ids: tuple[int, ...]
    words: tuple[int, ...]


def expected_sequence(prompt: Sequence[int], num_tokens: int, *, window_tokens: int | None = None) -> ExpectedSequence:
    """What follows a prompt, computed without a pool, of which nothing is ever passed."""
    sequence, words = list(prompt), list[int]()
    weighted: list[int] = []
    while len(words) < len(prompt) + max(0, num_tokens - 1):
        position = len(words)
        before = sum(weighted[_first_read(position, window_tokens) :]) % _WORD
        words.append(_kv(sequence[position], position, before))
        weighted.append(words[-1] * (2 * position + 1))
        if len(words) == len(sequence):
            sequence.append(_next(words[-1]))
    return ExpectedSequence(tuple(sequence[: len(prompt) + num_tokens]), tuple(words))


def expected_answer(prompt: Sequence[int], num_tokens: int, *, window_tokens: int | None = None) -> tuple[int, ...]:
    return expected_sequence(prompt, num_tokens, window_tokens=window_tokens).token_ids[len(prompt) :]


class HashedKV:
    """The pool's bytes: one word for each token."""

    layout = LAYOUT

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.words = np.zeros((num_blocks, BLOCK_TOKENS), dtype=np.uint64)

    def is_finite(self, block_ids: Sequence[int]) -> bool:
        return True

    def write_block(self, block_id: int, payload: memoryview) -> int:
        self.words[block_id] = np.frombuffer(payload, dtype=np.uint64)
        return payload_digest(bytes(payload))

    def read_block(self, block_id: int, out: memoryview) -> int:
        out[:] = self.words[block_id].tobytes()
        return payload_digest(bytes(out))


class HashedRunner:
    """The runner over it. `window_tokens`: how many last positions a token reads, itself among them; None for all.
    Counts the rows that it computed."""

    row_multiple = 4  # so that a few drafts cost no row more, as with the real runner

    def __init__(self, kv: HashedKV, *, window_tokens: int | None = None) -> None:
        self._kv = kv
        self.window_tokens = window_tokens
        self.num_rows = 0
        self.gate = StepGate(may_go=math.inf)

    def run_step(self, steps: Sequence[SequenceStep]) -> torch.Tensor:
        self.gate.pass_one()
        wanted: list[int] = []
        for step in steps:
            wanted += self._compute(step)
            self.num_rows += len(step.token_ids)
        logits = torch.zeros(len(wanted), VOCAB)
        logits[range(len(wanted)), wanted] = 20.0
        return logits

    def _compute(self, step: SequenceStep) -> list[int]:
        """Writes the step's KV; returns the tokens that its last `num_logits` rows point at."""
        begin = step.first_block * BLOCK_TOKENS  # earlier positions are not there to be read
        words = self._kv.words[list(step.block_ids)].reshape(-1)  # [positions of the step's table]
        weights = 2 * np.arange(begin, begin + len(words), dtype=np.uint64) + np.uint64(1)
        points_at = []
        for position, token_id in enumerate(step.token_ids, start=step.start):
            first_read = _first_read(position, self.window_tokens)
            assert begin <= first_read, "a block that is still read has been given away"
            read = slice(first_read - begin, position - begin)
            kv = _kv(token_id, position, int((words[read] * weights[read]).sum(dtype=np.uint64)))
            words[position - begin] = kv
            self._kv.words[step.block_ids[(position - begin) // BLOCK_TOKENS], position % BLOCK_TOKENS] = kv
            points_at.append(_next(kv))
        return points_at[len(points_at) - step.num_logits :]


def make_hashed_engine(
    make_engine: Callable[..., Engine], *, num_blocks: int, window_tokens: int | None = None, **settings: object
) -> Engine:
    kv = HashedKV(64)
    runner = HashedRunner(kv, window_tokens=window_tokens)
    window = model_window((window_tokens,), block_tokens=BLOCK_TOKENS)
    return make_engine(usable_blocks=num_blocks, wrap=lambda _: runner, kv=kv, window=window, **settings)


def runner_of(engine: Engine) -> HashedRunner:
    """The runner of an engine that `make_hashed_engine` made."""
    runner = engine.model.runner
    assert isinstance(runner, HashedRunner)
    return runner


def assert_expected_block(engine: Engine, block: FilledBlock, expected: ExpectedSequence) -> None:
    """A block that was told is the one of its sequence, by hash and by bytes. The caller holds it."""
    assert block.block_hash == make_prompt(engine, expected.token_ids).chain[block.position], "it holds other tokens"
    payload = bytearray(LAYOUT.block_bytes)
    engine.kv.read_block(block.block_id, memoryview(payload))
    first = block.position * BLOCK_TOKENS
    words = np.frombuffer(payload, dtype=np.uint64).tolist()
    assert tuple(words) == expected.words[first : first + BLOCK_TOKENS], "its bytes are not those of its tokens"


class CopyingBackup:
    """A `PrefixBackup` that copies blocks when they are saved or filled, and reads back as much as it is told to."""

    def __init__(self, engine: Engine, *, copies_filled: bool = True, second_s: float = 0.0) -> None:
        self._engine = engine
        self._copies_filled = copies_filled
        self._second_s = second_s
        self.copies: dict[int, tuple[bytes, bytes]] = {}  # position to (hash, payload)
        self.gate = asyncio.Event()  # reloads wait for it
        self.gate.set()
        self.reloads_max = 1_000  # blocks that one reload delivers at most
        self.num_reloaded = self.num_saved = 0
        self.reloading = asyncio.Event()
        self.delay_s = 0.0  # of each block that is read back

    def filled(self, block: FilledBlock) -> None:
        """A block was computed: copy it, as a publisher would."""
        if self._copies_filled:
            self._copy(block)

    def _copy(self, block: FilledBlock) -> None:
        payload = bytearray(LAYOUT.block_bytes)
        self._engine.kv.read_block(block.block_id, memoryview(payload))
        self.copies[block.position] = (block.block_hash, bytes(payload))

    def num_stored(self) -> int:
        return next(position for position in range(1_000) if position not in self.copies)

    def num_kept(self) -> int:
        return self.num_stored()

    def reload_s(self, num_blocks: int) -> float:
        return self._second_s

    def save(self, blocks: Sequence[FilledBlock]) -> None:
        for block in blocks:
            self._copy(block)
            self.num_saved += 1
            self._engine.pool.unref(block.block_id)

    async def reload(self, prompt: HashedPrompt, block_ids: Sequence[int], blocks: range, *, saved_from: int) -> int:
        self.reloading.set()
        await self.gate.wait()
        num_blocks = 0
        for position in blocks[: self.reloads_max]:
            block_hash, payload = self.copies[position]
            assert block_hash == prompt.chain[position]
            await asyncio.sleep(self.delay_s)
            self._engine.kv.write_block(block_ids[position], memoryview(payload))
            num_blocks += 1
        self.num_reloaded += num_blocks
        return num_blocks
