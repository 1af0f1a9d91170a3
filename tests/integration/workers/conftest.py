"""Real workers: a tiny llama in real engines, a real store node over real gRPC and shared memory, one event loop."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.blocks.host_arena import host_id
from headrace.config import EngineSettings, ModelSettings, StoreSettings
from headrace.core.block import HashAlgorithm, hash_prompt
from headrace.core.clock import SystemClock
from headrace.core.errors import CacheFault
from headrace.core.generation import (
    AttemptId,
    CacheControl,
    CachedTokens,
    DecodeCall,
    GenerateRequest,
    PrefillCall,
    PrefillResult,
    RequestId,
    SamplingParams,
    TokenDelta,
    WorkerId,
)
from headrace.core.members import MemberRecord, StoreNodeRecord, WorkerRole
from headrace.core.ports import Membership
from headrace.decode.decode_tokens import decode_tokens
from headrace.engine.drafter import Drafter
from headrace.engine.engine import Engine
from headrace.engine.load_model import LoadedModel, load_model
from headrace.index.memory_index import MemoryIndex, MemoryMembership
from headrace.prefill.prefill_prompt import prefill_prompt
from headrace.store.service import StoreNodeService
from headrace.transfer.store_nodes import StoreNodeTable
from headrace.transfer.worker import Worker
from headrace.transfer.worker_member import WorkerPlace

from .priced_steps import PricedSteps

BLOCK_TOKENS = 8
VOCAB = 256
CLOCK = SystemClock()
EVERYTHING = CacheControl()
# So small a model computes a prompt in less time than a busy machine makes a load wait for its turn; what is loaded in
# these tests must not depend on that. `test_slow_source.py` tells what overtakes what.
LOAD_PATIENCE_MS = 10_000
_attempt_numbers = iter(range(1_000_000))


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> list[LoadedModel]:
    """The same weights loaded three times, each with a pool of its own: three workers' worth."""
    path = tmp_path_factory.mktemp("tiny-llama")
    torch.manual_seed(5)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        initializer_range=0.4,  # peaked enough that greedy text is not one token for ever
        eos_token_id=0,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<eos>": 0} | {character: index for index, character in enumerate(alphabet[: VOCAB - 1], start=1)}
    Tokenizer(models.BPE(vocab=vocab, merges=[])).save(str(path / "tokenizer.json"))
    return [
        load_model(
            ModelSettings(
                model=str(path), device="cpu", torch_threads=1, model_cache_dir=str(path / "cache"), dtype="float32"
            ),
            EngineSettings(block_tokens=BLOCK_TOKENS, pool_tokens=96 * BLOCK_TOKENS),
            trust_group="tests",
            hash_algorithm=HashAlgorithm.XXH3_128,
            report=lambda line: None,
        )
        for _ in range(3)
    ]


class LastingMembership:
    """A Membership whose records outlive any pause that a busy machine makes: what is tested here is not liveness."""

    def __init__(self, membership: Membership) -> None:
        self._membership = membership

    async def announce(self, record: MemberRecord, *, ttl_ms: int) -> bool:
        return await self._membership.announce(record, ttl_ms=100 * ttl_ms)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._membership, name)


@dataclass(frozen=True, slots=True)
class Reply:
    """Tokens, every log-probability behind each (they stand for the bits of the logits), and what was cached."""

    token_ids: tuple[int, ...]
    logprobs: tuple[tuple[tuple[int, float], ...], ...]
    cached: CachedTokens

    def same_answer_as(self, other: "Reply") -> bool:
        return (self.token_ids, self.logprobs) == (other.token_ids, other.logprobs)


class TestWorker:
    """One worker, of role BOTH unless it says otherwise."""

    __test__ = False

    def __init__(self, worker: Worker) -> None:
        self.worker = worker
        self.faults: list[CacheFault] = []

    def request(
        self, token_ids: Sequence[int], cache: CacheControl, max_tokens: int = 6, salt: str = "", group: str = ""
    ) -> GenerateRequest:
        prompt = hash_prompt(
            self.worker.engine.model.namespace.narrowed(salt, trust_group=group).id,
            token_ids,
            block_tokens=self.worker.engine.kv.layout.block_tokens,
            algorithm=HashAlgorithm.XXH3_128,
        )
        sampling = SamplingParams(max_tokens=max_tokens, logprobs=VOCAB, ignore_eos=True)
        return GenerateRequest(RequestId("r"), "tiny", prompt, sampling, cache, trust_group=group, cache_salt=salt)

    async def prefill(self, token_ids: Sequence[int], *, hint_nodes: tuple[str, ...] = ()) -> PrefillResult:
        return await prefill_prompt(
            PrefillCall(
                attempt_id=new_attempt(),
                request=self.request(token_ids, EVERYTHING),
                worker_id=self.worker.worker_id,
                timeout_ms=60_000,
                hint_nodes=hint_nodes,
            ),
            self.worker,
        )

    async def decode(
        self,
        token_ids: Sequence[int],
        *,
        cache: CacheControl = EVERYTHING,
        hint_nodes: tuple[str, ...] = (),
        computed_from: int | None = None,
        max_tokens: int = 6,
        salt: str = "",
        group: str = "",
    ) -> Reply:
        request = self.request(token_ids, cache, max_tokens, salt, group)
        call = DecodeCall(
            attempt_id=new_attempt(),
            request=request,
            worker_id=self.worker.worker_id,
            timeout_ms=60_000,
            computed_from=len(request.prompt.chain) if computed_from is None else computed_from,
            hint_nodes=hint_nodes,
        )
        tokens: list[TokenDelta] = []
        async with aclosing(decode_tokens(call, self.worker)) as events:
            async for event in events:
                if isinstance(event, TokenDelta):
                    tokens.append(event)
                else:
                    finished = event
        assert finished.usage.completion_tokens == len(tokens)
        return Reply(
            token_ids=tuple(token.token_id for token in tokens),
            logprobs=tuple(tuple((top.token_id, top.logprob) for top in token.top_logprobs) for token in tokens),
            cached=finished.usage.cached,
        )

    async def cold(self, token_ids: Sequence[int], max_tokens: int = 6) -> Reply:
        """The same with no reuse at all, and leaving nothing behind."""
        cache = CacheControl(sources=frozenset(), publish=False)
        reply = await self.decode(token_ids, cache=cache, max_tokens=max_tokens)
        assert reply.cached.total == 0
        return reply

    async def published(self) -> None:
        """Wait until background publication has nothing left to do."""
        async with asyncio.timeout(60):
            while self.worker.publisher.num_pending:  # noqa: ASYNC110 (a publisher has no event for this)
                await asyncio.sleep(0.005)


def new_attempt() -> AttemptId:
    return AttemptId(f"attempt-{next(_attempt_numbers)}")


async def meet(tested: TestWorker, steps: PricedSteps, asked: Sequence[Coroutine[Any, Any, Reply]]) -> list[Reply]:
    """Let no step of the worker's engine go before all of these are in it; then their replies."""
    steps.may_go.clear()
    replies = [asyncio.create_task(each) for each in asked]
    engine = tested.worker.engine
    async with asyncio.timeout(60):
        while engine.load().running + engine.load().waiting < len(asked):  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    steps.may_go.set()
    return await asyncio.gather(*replies)


MakeWorker = Callable[..., Awaitable[TestWorker]]


@pytest.fixture
def membership() -> MemoryMembership:
    return MemoryMembership(CLOCK)


@pytest.fixture
async def make_worker(
    tiny_models: list[LoadedModel], membership: Membership, tmp_path: Path
) -> AsyncIterator[MakeWorker]:
    """Start workers; `near=False` puts one on another host, where only gRPC is left; `model` is one that no
    running worker has; `steps` are the engine's steps and its clock. Nothing may be held at the end.

    A test names `store_node` before this, so that the node outlives what the workers still publish.
    """
    made: list[TestWorker] = []
    free_models = list(tiny_models)

    async def make(
        worker_id: str,
        *,
        near: bool = True,
        members: Membership | None = None,
        model: LoadedModel | None = None,
        role: WorkerRole = WorkerRole.BOTH,
        drafter: Drafter | None = None,
        load_patience_ms: int = LOAD_PATIENCE_MS,
        steps: PricedSteps | None = None,
    ) -> TestWorker:
        model = model or free_models.pop()
        if steps is not None:
            model = steps.of(model)
        block_tokens = model.namespace.layout.block_tokens
        engine = Engine(
            model,
            EngineSettings(block_tokens=block_tokens, prefill_chunk_tokens=32, batch_sequences_max=8),
            clock=steps or CLOCK,
            drafter=drafter,
        )
        faults: list[CacheFault] = []
        host = host_id(tmp_path) if near else "elsewhere"
        table = StoreNodeTable(host=host, membership=members or membership, clock=CLOCK, report_fault=faults.append)
        worker = Worker(
            WorkerPlace(WorkerId(worker_id), role, host),
            engine,
            nodes=table,
            node_table=table,
            membership=LastingMembership(members or membership),
            clock=CLOCK,
            report_fault=faults.append,
            load_patience_ms=load_patience_ms,
        )
        await worker.start()
        tested = TestWorker(worker)
        tested.faults = faults
        made.append(tested)
        return tested

    yield make
    for tested in made:
        if isinstance(steps := tested.worker.engine.steps._clock, PricedSteps):
            steps.hold_after = lambda rows: False
            steps.may_go.set()  # a test that failed may have left them waiting
        try:
            await tested.published()
        finally:
            await tested.worker.stop()
    for tested in made:
        pool = tested.worker.engine.pool
        pool.check_integrity()
        assert pool.available_blocks == pool.num_blocks, "blocks are still held"
        assert tested.worker.attempts_running == 0


@pytest.fixture
async def store_node(membership: MemoryMembership, tmp_path: Path) -> AsyncIterator[StoreNodeService]:
    """A store node with a real server on this loop, announced before it is handed out."""
    service = StoreNodeService(
        StoreSettings(node_id="node-1", arena_mb=8, arena_dir=str(tmp_path)),
        index=MemoryIndex(membership),
        membership=LastingMembership(membership),
        clock=CLOCK,
    )
    record: StoreNodeRecord = await service.start()
    await membership.announce(record, ttl_ms=60_000)
    yield service
    # A server that is collected without having been stopped blocks the interpreter's exit: stop first, check then.
    stat = service.node.stat()
    service.node.check_integrity()
    await service.stop(remove_arena=True)
    assert (stat.reserved_blocks, stat.leased_blocks) == (0, 0)


@pytest.fixture
def prompts() -> Callable[..., list[int]]:
    """prompts(length, salt): token ids that look random and are the same in every run; never the end-of-sequence id."""

    def make(length: int, salt: int = 0) -> list[int]:
        return [1 + (position * 31 + position * position * 7 + salt * 97) % (VOCAB - 1) for position in range(length)]

    return make
