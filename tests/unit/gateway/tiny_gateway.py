"""A gateway over in-process workers: real service, real index and membership in memory, and a tiny decoder.

The decoder's answer depends on the prompt, the seed (unless greedy) and nothing else, so that a retry, another worker
or a cached prefix must give the same text. Workers can be told to fail, to hang and to be slow.
"""

import asyncio
import json
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import xxhash
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from headrace.config import GatewaySettings
from headrace.core.block import CacheSource, HashAlgorithm, HolderId, KvLayout, Namespace, Tier
from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import HeadraceError
from headrace.core.generation import (
    CachedTokens,
    ControlReport,
    DecodeCall,
    DeviceListing,
    EvictReport,
    EvictSelector,
    Finished,
    FinishReason,
    GenerateRequest,
    PrefillCall,
    PrefillResult,
    ReusedRun,
    TokenDelta,
    TokenLogprob,
    Usage,
    WorkerId,
)
from headrace.core.limits import MEMBER_TTL_MS
from headrace.core.members import StoreNodeRecord, WorkerRecord, WorkerRole
from headrace.core.tenants import KeyRing
from headrace.engine.block_pool import BlockPool
from headrace.engine.list_device import list_device
from headrace.gateway.goodput import RequestObserver
from headrace.gateway.known_keys import FixedKeys, KnownKeys
from headrace.gateway.observers import Observers
from headrace.gateway.service import Backend, GatewayService
from headrace.gateway.tokenize_prompt import Tokenizers
from headrace.index.memory_index import MemoryIndex, MemoryMembership
from headrace.transfer.device_expiry import DeviceExpiry

BLOCK_TOKENS = 4
MODEL = "tiny"
NODE = StoreNodeRecord(
    node_id="n0", incarnation=1, host="h", address="127.0.0.1:1", arena_path="", pid=1, metrics_port=0
)
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('system comes first') }}{% endif %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
)


def make_namespace(**changes) -> Namespace:
    layout = KvLayout(dtype="float32", num_layers=1, num_kv_heads=1, head_dim=4, block_tokens=BLOCK_TOKENS)
    namespace = Namespace(
        model_id=MODEL,
        weights_digest="w",
        tokenizer_digest="t",
        adapter_digest="",
        layout=layout,
        position_digest="p",
        numerics_probe="n",
        hash_algorithm=HashAlgorithm.XXH3_128,
        trust_group="default",
    )
    return replace(namespace, **changes)


def make_worker_record(worker_id: str, role: WorkerRole = WorkerRole.DECODE, **changes) -> WorkerRecord:
    record = WorkerRecord(
        worker_id=WorkerId(worker_id),
        incarnation=1,
        role=role,
        host="h",
        store_node=NODE.node_id,
        model=MODEL,
        namespace=make_namespace(),
        context_tokens_max=256,
        pool_blocks=1_000,
        pid=1,
    )
    return replace(record, **changes)


def write_tokenizer(directory: Path) -> str:
    """A byte-level tokenizer (one token a byte; id 0 ends) with a chat template, as a model directory holds it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<eos>": 0} | {character: index for index, character in enumerate(alphabet, start=1)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>", chat_template=CHAT_TEMPLATE)
    fast.save_pretrained(directory)
    (directory / "config.json").write_text(json.dumps({"model_type": "llama", "vocab_size": len(vocab)}))
    return str(directory)


def answer_text(request: GenerateRequest) -> str:
    """What any worker must answer: one letter a token."""
    seed = request.sampling.seed if request.sampling.temperature else 0
    spelled = json.dumps([request.prompt.token_ids, seed]).encode()
    return "".join(chr(97 + xxhash.xxh3_64_intdigest(spelled, i) % 26) for i in range(request.sampling.max_tokens))


@dataclass
class TinyWorker:
    """One worker. Knobs are plain fields; what it saw and holds open can be read."""

    record: WorkerRecord
    fails: HeadraceError | None = None  # raised before the first token
    fails_after: int | None = None  # tokens before `fails` is raised
    hangs: bool = False  # never answers
    token_seconds: float = 0.0
    calls: list[DecodeCall | PrefillCall] = field(default_factory=list)
    open_calls: int = 0
    tokens_made: int = 0
    clock: Clock = field(default_factory=SystemClock)

    def __post_init__(self) -> None:
        self.pool = BlockPool(1_000, clock=self.clock)
        self.expiry = DeviceExpiry(self.pool, self.record, clock=self.clock)  # its step is the test's to call


@dataclass
class TinyCalls:
    """WorkerCalls over TinyWorkers, which share one store node."""

    workers: dict[str, TinyWorker]
    index: MemoryIndex
    evicted: list[tuple[str, EvictSelector, bool]] = field(default_factory=list)
    stored: set[bytes] = field(default_factory=set)
    publish_to: Callable[[GenerateRequest], object] = lambda request: None  # a real store node's, say

    async def prefill(self, call: PrefillCall) -> PrefillResult:
        worker = self.workers[call.worker_id]
        worker.calls.append(call)
        worker.open_calls += 1
        try:
            await self._misbehave(worker)
            reused = self._held(call.request) if call.request.cache.reads else 0
            await self._publish(call.request)
        finally:
            worker.open_calls -= 1
        return PrefillResult(call.attempt_id, call.worker_id, reused, len(call.request.prompt.chain), NODE.node_id)

    async def decode(self, call: DecodeCall) -> AsyncIterator[TokenDelta | Finished]:
        worker, request = self.workers[call.worker_id], call.request
        worker.calls.append(call)
        worker.open_calls += 1
        try:
            if worker.fails_after is None:
                await self._misbehave(worker)
            cached = self._cached_blocks(call)
            if request.cache.publish:
                await self._publish(request)
            for number, letter in enumerate(answer_text(request)):
                if number == worker.fails_after:
                    await self._misbehave(worker)
                await asyncio.sleep(worker.token_seconds)
                worker.tokens_made += 1
                yield _delta(letter, request.sampling.logprobs)
            yield Finished(
                reason=FinishReason.LENGTH,
                usage=Usage(
                    prompt_tokens=len(request.prompt.token_ids),
                    completion_tokens=request.sampling.max_tokens,
                    cached=CachedTokens(shared_memory=cached * BLOCK_TOKENS),
                ),
                worker_id=call.worker_id,
                reused=(ReusedRun(CacheSource.SHARED_MEMORY, self._usable_blocks(call)),),
            )
        finally:
            worker.open_calls -= 1

    async def evict_device(self, worker: WorkerRecord, selector: EvictSelector, *, dry_run: bool) -> EvictReport:
        if self.workers[worker.worker_id].fails is not None:
            raise self.workers[worker.worker_id].fails
        self.evicted.append((worker.worker_id, selector, dry_run))
        return EvictReport(worker.holder_id, 2, 2 * BLOCK_TOKENS, 128, 0, dry_run)

    async def list_device(self, worker: WorkerRecord, selector: EvictSelector, *, limit: int) -> DeviceListing:
        tiny = self.workers[worker.worker_id]
        if tiny.fails is not None:
            raise tiny.fails
        return list_device(tiny.pool, tiny.record, selector, limit=limit)

    async def set_device_ttl(
        self, worker: WorkerRecord, selector: EvictSelector, *, ttl_s: float | None
    ) -> ControlReport:
        tiny = self.workers[worker.worker_id]
        if tiny.fails is not None:
            raise tiny.fails
        return tiny.expiry.order(selector, ttl_s=ttl_s)

    async def _misbehave(self, worker: TinyWorker) -> None:
        if worker.hangs:
            await asyncio.sleep(3600)
        if worker.fails is not None:
            raise worker.fails

    def _held(self, request: GenerateRequest) -> int:
        held = 0
        for block_hash in request.prompt.chain:
            if block_hash not in self.stored:
                break
            held += 1
        return held

    def _cached_blocks(self, call: DecodeCall) -> int:
        """Blocks that count as cached: loadable, not all of the prompt, not computed for this request."""
        return min(self._usable_blocks(call), call.computed_from)

    def _usable_blocks(self, call: DecodeCall) -> int:
        """Blocks that the decode worker need not compute."""
        if CacheSource.SHARED_MEMORY not in call.request.cache.sources:
            return 0
        usable = (len(call.request.prompt.token_ids) - 1) // BLOCK_TOKENS
        return min(self._held(call.request), usable)

    async def _publish(self, request: GenerateRequest) -> None:
        self.stored.update(request.prompt.chain)
        self.publish_to(request)
        await self.index.register(
            holder=HolderId(NODE.holder_id),
            incarnation=NODE.incarnation,
            tier=Tier.HOST,
            namespace=request.prompt.namespace,
            blocks=request.prompt.chain,
        )


async def until(condition: Callable[[], object]) -> None:
    """Wait until something that another task or process does is seen: those tell nobody here."""
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def _delta(letter: str, logprobs: int | None) -> TokenDelta:
    if logprobs is None:
        return TokenDelta(token_id=ord(letter), text=letter)
    tops = (TokenLogprob(ord(letter), letter, -0.5), TokenLogprob(33, "!", -1.5))[:logprobs]
    return TokenDelta(token_id=ord(letter), text=letter, logprob=-0.5, top_logprobs=tops)


class CountingTokenizers(Tokenizers):
    """Remembers in which thread each piece of work was done."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[threading.Thread] = []

    async def run(self, work, *, deadline):
        def noted():
            self.threads.append(threading.current_thread())
            return work()

        return await super().run(noted, deadline=deadline)


class CountingObserver:
    """A RouteObserver that remembers."""

    def __init__(self) -> None:
        self.decisions: list[str] = []
        self.recoveries: list[str] = []
        self.first_tokens: list[float] = []
        self.usages: list[Usage] = []

    def decided(self, reason: str) -> None:
        self.decisions.append(reason)

    def recovered(self, kind: str) -> None:
        self.recoveries.append(kind)

    def first_token(self, seconds: float) -> None:
        self.first_tokens.append(seconds)

    def finished(self, usage: Usage, *, reads_cache: bool) -> None:
        self.usages.append(usage)


@dataclass
class TinyGateway:
    """A started service and everything around it."""

    service: GatewayService
    calls: TinyCalls
    membership: MemoryMembership
    observer: CountingObserver
    clock: Clock

    def worker(self, worker_id: str) -> TinyWorker:
        return self.calls.workers[worker_id]

    def assert_at_rest(self) -> None:
        """Nothing is held: no request, no call, no stream."""
        assert self.service.inflight == 0
        assert not self.service.table.in_flight_counts()
        assert {w.record.worker_id: w.open_calls for w in self.calls.workers.values() if w.open_calls} == {}
        self.service.table.check_integrity()


@asynccontextmanager
async def tiny_gateway(
    *records: WorkerRecord,
    model_path: str = "",
    clock: Clock | None = None,
    settings: GatewaySettings | None = None,
    index=None,
    key_ring: KeyRing | None = None,
    keys: KnownKeys | None = None,
    requests: RequestObserver | None = None,
    ray_cluster: str = "",
    **service_options,
) -> AsyncIterator[TinyGateway]:
    """A started gateway over these workers and one store node; ties go to the smallest worker id.

    key_ring: keys that stay; `keys` has those that change. requests: who counts them, beside the CountingObserver.
    """
    clock = clock or SystemClock()
    membership = MemoryMembership(clock)
    await membership.announce(NODE, ttl_ms=3_600_000)
    for record in records:
        await membership.announce(replace(record, model_path=model_path), ttl_ms=100 * MEMBER_TTL_MS)
    real_index = MemoryIndex(membership)
    calls = TinyCalls({record.worker_id: TinyWorker(record, clock=clock) for record in records}, real_index)
    observer = CountingObserver()
    observers = Observers(routes=observer) if requests is None else Observers(routes=observer, requests=requests)
    service = GatewayService(
        Backend(index or real_index, membership, calls, ray_cluster),
        settings or GatewaySettings(local_prefill_tokens=8),
        clock=clock,
        keys=keys or FixedKeys(key_ring),
        observers=observers,
        tie_break=lambda worker_id: sum(worker_id.encode()),
        **service_options,
    )
    await service.start()
    try:
        yield TinyGateway(service, calls, membership, observer, clock)
    finally:
        await service.stop()
