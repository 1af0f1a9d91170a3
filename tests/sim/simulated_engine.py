"""A tiny world in which KV bytes mean something: the engine's interface over a hash function instead of a model.

A block's KV is a function of the bytes of the block before it (as they lie in the pool) and of its own tokens; a token
is a function of all KV bytes before it. So a wrong, misplaced or half-written block changes every block and every token
after it, as it would in a transformer, and `cold_answer` says what they should have been. The accounts are the real
ones: `BlockPool` and `AdmissionQueue`.
"""

import asyncio
import hashlib
import random
from collections.abc import AsyncGenerator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

from headrace.core.block import (
    BlockHash,
    HashAlgorithm,
    HashedPrompt,
    KvLayout,
    Namespace,
    hash_prompt,
    payload_digest,
)
from headrace.core.clock import Clock, Deadline
from headrace.core.generation import EvictReport, EvictSelector, FinishReason, SamplingParams, TokenDelta
from headrace.core.key_window import EVERYTHING
from headrace.core.learned_costs import PRIOR_PREFILL
from headrace.engine.admission_queue import Admission, AdmissionQueue, AdmissionState
from headrace.engine.block_pool import BlockPool, Selection, Short
from headrace.engine.engine import EngineLoad
from headrace.engine.event_stream import EngineEvent, FilledBlock, RunFinished
from headrace.engine.prefix_backup import PrefixBackup
from headrace.engine.step_times import NOTHING_AHEAD
from headrace.engine.turns import Turns

LAYOUT = KvLayout(dtype="float32", num_layers=1, num_kv_heads=1, head_dim=4, block_tokens=4)
NAMESPACE = Namespace(
    model_id="simulated",
    weights_digest="w",
    tokenizer_digest="t",
    adapter_digest="",
    layout=LAYOUT,
    position_digest="p",
    numerics_probe="",
    hash_algorithm=HashAlgorithm.XXH3_128,
    trust_group="all",
)
VOCABULARY = 50


def make_prompt(token_ids: Sequence[int]) -> HashedPrompt:
    return hash_prompt(NAMESPACE.id, token_ids, block_tokens=LAYOUT.block_tokens, algorithm=NAMESPACE.hash_algorithm)


def block_kv(kv_before: bytes, token_ids: Sequence[int]) -> bytes:
    """KV of one full block, from the KV of the block before it (b"" for the first) and its tokens."""
    return hashlib.shake_128(b"kv" + kv_before + bytes(token_ids)).digest(LAYOUT.block_bytes)


def next_token(kv: Sequence[bytes], tail_ids: Sequence[int]) -> int:
    """The greedy token after full blocks with these bytes and then `tail_ids`."""
    digest = hashlib.shake_128(b"token" + b"".join(kv) + bytes(tail_ids)).digest(4)
    return int.from_bytes(digest, "little") % VOCABULARY


def cold_kv(token_ids: Sequence[int]) -> list[bytes]:
    """What every full block of a sequence must hold, computed with no cache at all."""
    kv: list[bytes] = []
    for start in range(0, len(token_ids) - len(token_ids) % LAYOUT.block_tokens, LAYOUT.block_tokens):
        kv.append(block_kv(kv[-1] if kv else b"", token_ids[start : start + LAYOUT.block_tokens]))
    return kv


def cold_answer(token_ids: Sequence[int], max_tokens: int) -> list[int]:
    """The tokens that follow a prompt, computed with no cache at all."""
    sequence = list(token_ids)
    for _ in range(max_tokens):
        kv = cold_kv(sequence)
        sequence.append(next_token(kv, sequence[len(kv) * LAYOUT.block_tokens :]))
    return sequence[len(token_ids) :]


class SimulatedKV:
    """PrefixPool over byte strings."""

    layout = LAYOUT

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self.blocks = [bytes(LAYOUT.block_bytes)] * num_blocks
        self.on_write = lambda block_id: None

    def write_block(self, block_id: int, payload: memoryview) -> int:
        self.blocks[block_id] = bytes(payload)
        self.on_write(block_id)
        return payload_digest(self.blocks[block_id])

    def read_block(self, block_id: int, out: memoryview) -> int:
        out[:] = self.blocks[block_id]
        return payload_digest(self.blocks[block_id])


class SimulatedEngine:
    """The interface of `engine.Engine`. A step takes a seeded moment; `computed_tokens` counts prompt work done."""

    def __init__(self, *, num_blocks: int, clock: Clock, rng: random.Random) -> None:
        self.model = SimpleNamespace(name="simulated", path=Path("simulated"), namespace=NAMESPACE)
        self.context_tokens_max = min(10_000, num_blocks * LAYOUT.block_tokens)
        self.window = self.near_window = EVERYTHING
        self.kv = SimulatedKV(num_blocks)
        self.pool = BlockPool(num_blocks, clock=clock, on_freed=self._on_freed)
        self.computed_tokens = 0
        self.prefill = PRIOR_PREFILL  # as learned
        self.known_kv: dict[BlockHash, bytes] = {}  # what every hashed block must hold
        self._rng = rng
        self._queue = AdmissionQueue(
            self.pool, may_grant=lambda: True, turns=Turns(clock, prefill_cost=lambda: PRIOR_PREFILL)
        )
        self._num_running = 0

    def start(self) -> None:
        pass

    async def stop(self) -> None:
        pass

    def healthy(self) -> bool:
        return True

    def load(self) -> EngineLoad:
        ahead = replace(NOTHING_AHEAD, prefill=self.prefill)
        return EngineLoad(self._num_running, self._queue.num_waiting, self.pool.available_blocks, ahead=ahead)

    def evict_device(self, selector: EvictSelector, *, dry_run: bool) -> EvictReport:
        evicted = self.pool.evict(Selection(), dry_run=dry_run)
        return EvictReport("", evicted.num_blocks, 0, 0, evicted.num_kept, dry_run)

    async def admit(
        self,
        prompt: HashedPrompt,
        *,
        num_blocks: int,
        use_device: bool,
        deadline: Deadline,
        ttl_s: float,
        account: str = "",
        priority: int = 0,
    ) -> Admission:
        return await self._queue.admit(
            prompt,
            num_blocks=num_blocks,
            use_device=use_device,
            deadline=deadline,
            ttl_s=ttl_s,
            account=account,
            priority=priority,
        )

    def release(self, admission: Admission) -> None:
        if admission.state is AdmissionState.HELD:
            admission.state = AdmissionState.RELEASED
            self.pool.unref_all(admission.block_ids)

    def mark_loaded(self, admission: Admission, num_blocks: int) -> None:
        assert admission.state is AdmissionState.HELD
        self._check_bytes(admission, num_blocks)
        self.pool.hash_blocks(admission.prompt, admission.block_ids[:num_blocks], ttl_s=admission.ttl_s)

    async def run(
        self,
        admission: Admission,
        *,
        cached_tokens: int,
        sampling: SamplingParams | None,
        leaves_blocks: bool = True,
        backup: PrefixBackup | None = None,
    ) -> AsyncGenerator[EngineEvent, None]:
        assert admission.state is AdmissionState.HELD
        assert cached_tokens % LAYOUT.block_tokens == 0
        admission.state = AdmissionState.RUNNING
        self._num_running += 1
        try:
            self._check_bytes(admission, cached_tokens // LAYOUT.block_tokens)
            token_ids = list(admission.prompt.token_ids)
            num_valid = cached_tokens // LAYOUT.block_tokens
            num_prompt = len(token_ids)
            self.computed_tokens += num_prompt - cached_tokens
            while True:
                async for filled in self._compute_full_blocks(admission, token_ids, num_valid, leaves_blocks):
                    yield filled
                num_valid = len(token_ids) // LAYOUT.block_tokens
                if sampling is None or len(token_ids) - num_prompt == sampling.max_tokens:
                    break
                await self._step()
                kv = [self.kv.blocks[block_id] for block_id in admission.block_ids[:num_valid]]
                token_ids.append(next_token(kv, token_ids[num_valid * LAYOUT.block_tokens :]))
                yield TokenDelta(token_ids[-1], f"{token_ids[-1]} ")
                await self._grow(admission, len(token_ids))
        finally:
            self._num_running -= 1
            admission.state = AdmissionState.RELEASED
            self.pool.unref_all(admission.block_ids)
        reason, num_reused = None if sampling is None else FinishReason.LENGTH, cached_tokens // LAYOUT.block_tokens
        yield RunFinished(reason, "", len(token_ids) - num_prompt, num_reused_blocks=num_reused)

    async def _compute_full_blocks(
        self, admission: Admission, token_ids: list[int], num_valid: int, leaves_blocks: bool
    ) -> AsyncGenerator[FilledBlock, None]:
        hashed = make_prompt(token_ids)
        for position in range(num_valid, len(hashed.chain)):
            await self._step()
            block_id = admission.block_ids[position]
            before = self.kv.blocks[admission.block_ids[position - 1]] if position else b""
            self.kv.blocks[block_id] = block_kv(before, hashed.block_token_ids(position))
            if leaves_blocks:
                self.pool.hash_blocks(hashed, admission.block_ids[: position + 1], ttl_s=admission.ttl_s)
                self._know(hashed)
                self.pool.ref(block_id)
                yield FilledBlock(
                    position=position,
                    block_id=block_id,
                    block_hash=hashed.chain[position],
                    parent_hash=hashed.parent_of(position),
                    token_ids=hashed.block_token_ids(position),
                    namespace=hashed.namespace,
                )

    async def _grow(self, admission: Admission, num_tokens: int) -> None:
        while num_tokens > len(admission.block_ids) * LAYOUT.block_tokens:
            taken = self.pool.take(1)
            if isinstance(taken, Short):
                await self._step()
            else:
                admission.block_ids.extend(taken.block_ids)

    async def _step(self) -> None:
        await asyncio.sleep(self._rng.uniform(0.001, 0.02))

    def _check_bytes(self, admission: Admission, num_blocks: int) -> None:
        """The invariant: what is called valid is what a cold computation would have put there."""
        self._know(admission.prompt)
        for position in range(num_blocks):
            found = self.kv.blocks[admission.block_ids[position]]
            assert found == self.known_kv[admission.prompt.chain[position]], f"wrong KV at block {position}"

    def _know(self, hashed: HashedPrompt) -> None:
        if hashed.chain and hashed.chain[-1] not in self.known_kv:
            self.known_kv.update(zip(hashed.chain, cold_kv(hashed.token_ids), strict=True))

    def _on_freed(self) -> None:
        if self._queue.num_waiting:
            asyncio.get_running_loop().call_soon(self._queue.grant)
