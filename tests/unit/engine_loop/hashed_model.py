"""A model of integers in place of a network: what a token's KV is depends on all KV before it, as it lies in the pool.

So a wrong, stale, misplaced or half-written block changes every token after it, and `expected_answer` says what the
tokens should have been, at a thousandth of the cost of a network. `CopyingBackup` keeps copies of its blocks.
"""

import asyncio
from collections.abc import Callable, Sequence

import numpy as np
import torch

from headrace.core.block import HashedPrompt, KvLayout, payload_digest
from headrace.engine.engine import Engine, FilledBlock
from headrace.engine.model_runner import SequenceStep

from .conftest import BLOCK_TOKENS, VOCAB

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


def expected_answer(prompt: Sequence[int], num_tokens: int) -> tuple[int, ...]:
    """What follows a prompt, computed without a pool."""
    sequence, before = list(prompt), 0
    position = 0
    while len(sequence) < len(prompt) + num_tokens:
        kv = _kv(sequence[position], position, before)
        before = (before + kv * (2 * position + 1)) % _WORD
        position += 1
        if position == len(sequence):
            sequence.append(_next(kv))
    return tuple(sequence[len(prompt) :])


class HashedKV:
    """The pool's bytes: one word for each token."""

    layout = LAYOUT

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.words = np.zeros((num_blocks, BLOCK_TOKENS), dtype=np.uint64)

    def write_block(self, block_id: int, payload: memoryview) -> int:
        self.words[block_id] = np.frombuffer(payload, dtype=np.uint64)
        return payload_digest(bytes(payload))

    def read_block(self, block_id: int, out: memoryview) -> int:
        out[:] = self.words[block_id].tobytes()
        return payload_digest(bytes(out))


class HashedRunner:
    """The runner over it. Counts the rows that it computed."""

    def __init__(self, kv: HashedKV) -> None:
        self._kv = kv
        self.num_rows = 0

    def run_step(self, steps: Sequence[SequenceStep]) -> torch.Tensor:
        wanted: list[int] = []
        for step in steps:
            wanted += self._compute(step)
            self.num_rows += len(step.token_ids)
        logits = torch.zeros(len(wanted), VOCAB)
        logits[range(len(wanted)), wanted] = 20.0
        return logits

    def _compute(self, step: SequenceStep) -> list[int]:
        """Writes the step's KV; returns the tokens that its last `num_logits` rows point at."""
        words = self._kv.words[list(step.block_ids)].reshape(-1)[: step.start]
        weights = 2 * np.arange(step.start, dtype=np.uint64) + np.uint64(1)
        before, points_at = int((words * weights).sum(dtype=np.uint64)), []
        for position, token_id in enumerate(step.token_ids, start=step.start):
            kv = _kv(token_id, position, before)
            self._kv.words[step.block_ids[position // BLOCK_TOKENS], position % BLOCK_TOKENS] = kv
            before = (before + kv * (2 * position + 1)) % _WORD
            points_at.append(_next(kv))
        return points_at[len(points_at) - step.num_logits :]


def make_hashed_engine(make_engine: Callable[..., Engine], *, num_blocks: int, **settings: object) -> Engine:
    kv = HashedKV(64)
    runner = HashedRunner(kv)
    return make_engine(usable_blocks=num_blocks, wrap=lambda _: runner, kv=kv, **settings)


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

    async def reload(self, prompt: HashedPrompt, block_ids: Sequence[int], blocks: range) -> int:
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
