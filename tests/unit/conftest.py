"""A small real gateway for tests of the client and the CLI: a grpc.aio server with an echoing model and a real cache.

It answers as the protos say: it hashes prompts, keeps their blocks, counts reuse, evicts, refuses. It knows no engine.
"""

import asyncio
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field

import grpc
import grpc.aio
import pytest

from headrace.core.block import BlockHash, HashAlgorithm, HashedPrompt, NamespaceId, hash_prompt
from headrace.core.errors import HeadraceError, InvalidRequest
from headrace.wire.status import message_of, status_of, trailing_metadata
from headrace.wire.v1 import admin_pb2, admin_pb2_grpc, inference_pb2, inference_pb2_grpc

NAMESPACE = NamespaceId("5a" * 16)
MODEL = "echo-1"
BLOCK_TOKENS = 4
BLOCK_BYTES = 1024
HOLDERS = ("node:here", "worker:d0")


def hash_text(token_ids: list[int]) -> HashedPrompt:
    return hash_prompt(NAMESPACE, token_ids, block_tokens=BLOCK_TOKENS, algorithm=HashAlgorithm.XXH3_128)


@dataclass
class StoredBlock:
    """One cached block; `idle_s` may be set by a test."""

    parent_hash: bytes
    position: int
    token_ids: tuple[int, ...]
    hits: int = 0
    idle_s: float = 0.0


@dataclass
class SmallGateway(inference_pb2_grpc.InferenceServicer, admin_pb2_grpc.CacheAdminServicer):
    """Echoes prompts one character a token (token id = code point); each holder keeps every full block it saw."""

    holder_blocks: dict[str, dict[BlockHash, StoredBlock]] = field(default_factory=lambda: {h: {} for h in HOLDERS})
    silent_holders: set[str] = field(default_factory=set)
    failure: HeadraceError | None = None
    hang_after_tokens: int | None = None
    requests: list[inference_pb2.GenerateRequest] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)  # of each call, in order
    questions: list[admin_pb2.WhyMissRequest] = field(default_factory=list)  # in order
    evictions: list[admin_pb2.EvictRequest] = field(default_factory=list)  # in order
    time_remaining_s: float = 0.0
    hanging: threading.Event = field(default_factory=threading.Event)
    cancelled: threading.Event = field(default_factory=threading.Event)
    address: str = ""

    async def Generate(self, request, context) -> AsyncIterator[inference_pb2.GenerateEvent]:
        self.requests.append(request)
        self.time_remaining_s = context.time_remaining()
        if self.failure is not None:
            await _refuse(context, self.failure)
        prompt, answer = self._read(request)
        cached = 0 if request.cache.bypass else self._take(prompt)
        if not request.cache.no_publish:
            self._keep(prompt)
        yield inference_pb2.GenerateEvent(accepted={"request_id": f"req-{len(self.requests)}", "model": MODEL})
        bound = request.sampling.max_tokens if request.sampling.HasField("max_tokens") else 64
        for count, character in enumerate(answer[:bound]):
            if count == self.hang_after_tokens:
                await self._hang()
            yield inference_pb2.GenerateEvent(token={"token_id": ord(character), "text": character})
        usage = {
            "prompt_tokens": len(prompt.token_ids),
            "completion_tokens": len(answer[:bound]),
            "cached_tokens": {"device": min(cached, 4), "shared_memory": max(0, cached - 4)},
        }
        done = {"finish_reason": "length" if len(answer) > bound else "stop", "usage": usage, "decode_worker": "d0"}
        yield inference_pb2.GenerateEvent(done=done)

    async def _hang(self) -> None:
        self.hanging.set()
        try:
            await asyncio.sleep(60)
        except asyncio.CancelledError:
            self.cancelled.set()
            raise

    def _read(self, request) -> tuple[HashedPrompt, str]:
        match request.WhichOneof("prompt"):
            case "text":
                return hash_text([ord(c) for c in request.text]), request.text
            case "chat":
                turns = [f"{m.role}: {m.content}\n" for m in request.chat.messages]
                return hash_text([ord(c) for c in "".join(turns)]), f"you said {request.chat.messages[-1].content}"
        ids = list(request.token_ids.ids)
        return hash_text(ids), "".join(map(chr, ids))

    def _take(self, prompt: HashedPrompt) -> int:
        held = 0
        for block_hash in prompt.chain[: (len(prompt.token_ids) - 1) // BLOCK_TOKENS]:
            holders = [blocks[block_hash] for blocks in self.holder_blocks.values() if block_hash in blocks]
            if not holders:
                break
            holders[0].hits += 1
            held += BLOCK_TOKENS
        return held

    def _keep(self, prompt: HashedPrompt) -> None:
        for blocks in self.holder_blocks.values():
            for position, block_hash in enumerate(prompt.chain):
                made = StoredBlock(prompt.parent_of(position), position, prompt.block_token_ids(position))
                blocks.setdefault(block_hash, made)

    async def ListModels(self, request, context):
        model = {"id": MODEL, "context_tokens_max": 512, "block_tokens": BLOCK_TOKENS, "namespace": NAMESPACE}
        return inference_pb2.ListModelsReply(models=[model])

    async def Status(self, request, context):
        if self.failure is not None:
            await _refuse(context, self.failure)
        worker = admin_pb2.WorkerStatus(
            worker_id="d0", role="decode", host="h", store_node="here", model=MODEL, namespace=NAMESPACE, pid=12
        )
        node = admin_pb2.StoreNodeStatus(node_id="here", incarnation=7, host="h", address="127.0.0.1:1", pid=11)
        return admin_pb2.StatusReply(store_nodes=[node], workers=[worker], index_available=True)

    async def Stat(self, request, context):
        stats = [
            admin_pb2.HolderStat(
                holder=holder,
                tier="host" if holder.startswith("node:") else "device",
                total_blocks=100,
                committed_blocks=len(blocks),
                free_blocks=100 - len(blocks),
                block_bytes=BLOCK_BYTES,
                lookups_tokens=200,
                hits_tokens=50,
                error="did not answer" if holder in self.silent_holders else "",
            )
            for holder, blocks in self.holder_blocks.items()
        ]
        return admin_pb2.StatReply(holders=stats)

    def _meant(self, holder: str, selector: admin_pb2.Selector) -> list[BlockHash]:
        """Block hashes of one holder that a selector means: given hashes with all their descendants."""
        blocks = self.holder_blocks[holder]
        if selector.model and selector.model != MODEL:
            return []
        tokens = list(selector.prefix_token_ids) or [ord(c) for c in selector.prefix_text]
        roots = set(selector.block_hashes) | set(hash_text(tokens).chain[-1:])
        meant = [h for h in blocks if not roots or self._descends(blocks, h, roots)]
        if selector.HasField("idle_for_s"):
            meant = [h for h in meant if blocks[h].idle_s >= selector.idle_for_s]
        return meant

    def _descends(self, blocks: dict[BlockHash, StoredBlock], block_hash: bytes, roots: set[bytes]) -> bool:
        while block_hash in blocks:
            if block_hash in roots:
                return True
            block_hash = blocks[block_hash].parent_hash
        return False

    async def ListBlocks(self, request, context):
        entries = [
            admin_pb2.BlockEntry(
                namespace=NAMESPACE,
                model=MODEL,
                block_hash=block_hash,
                parent_hash=block.parent_hash,
                position=block.position,
                token_ids=block.token_ids,
                bytes=BLOCK_BYTES,
                holder=holder,
                tier="host" if holder.startswith("node:") else "device",
                hits=block.hits,
                age_s=30.0,
                idle_s=block.idle_s,
                text="".join(map(chr, block.token_ids)) if request.with_text else "",
            )
            for holder in self.holder_blocks
            if holder not in self.silent_holders
            for block_hash in self._meant(holder, request.selector)
            for block in [self.holder_blocks[holder][block_hash]]
        ]
        errors = [{"holder": holder, "error": "did not answer"} for holder in sorted(self.silent_holders)]
        shown = entries[: request.limit] if request.limit else entries
        return admin_pb2.ListBlocksReply(blocks=shown, total_blocks=len(entries), errors=errors)

    async def WhyMiss(self, request, context):
        if request.request_id:
            await _refuse(context, InvalidRequest("not among the last"))
        self.questions.append(request)
        reason = {"kind": "evicted", "detail": "evicted by operator ann, 9 s ago", "holder": "node:here"}
        return admin_pb2.WhyMissReply(
            model=MODEL,
            namespace=NAMESPACE,
            prompt_tokens=14,
            block_tokens=BLOCK_TOKENS,
            num_blocks=3,
            runs=[{"holder": "node:here", "held_blocks": 1, "indexed_blocks": 1}],
            reasons=[reason | {"first_block": 1, "num_blocks": 2}],
            errors=[{"holder": holder, "error": "did not answer"} for holder in sorted(self.silent_holders)],
        )

    async def Evict(self, request, context):
        if self.failure is not None:
            await _refuse(context, self.failure)
        self.evictions.append(request)
        return admin_pb2.EvictReply(
            reports=[self._evict(holder, request) for holder in self.holder_blocks],
            lost_tokens=100,
            tokens_per_s=request.tokens_per_s,
            tokens_per_s_from="configured" if request.tokens_per_s else "",
        )

    def _evict(self, holder: str, request: admin_pb2.EvictRequest) -> admin_pb2.EvictReport:
        if holder in self.silent_holders:
            return admin_pb2.EvictReport(holder=holder, dry_run=request.dry_run, error="did not answer")
        meant = self._meant(holder, request.selector)
        if not request.dry_run:
            for block_hash in meant:
                del self.holder_blocks[holder][block_hash]
        return admin_pb2.EvictReport(
            holder=holder,
            blocks=len(meant),
            tokens=len(meant) * BLOCK_TOKENS,
            bytes=len(meant) * BLOCK_BYTES,
            dry_run=request.dry_run,
        )


async def _refuse(context: grpc.aio.ServicerContext, error: HeadraceError) -> None:
    """As a gateway answers: code, message, and the metadata that tells kinds apart."""
    await context.abort(status_of(error).grpc_code, message_of(error), trailing_metadata(error))


class RecordAuthorization(grpc.aio.ServerInterceptor):
    """Remembers what each call says of who it is."""

    def __init__(self, gateway: SmallGateway) -> None:
        self._gateway = gateway

    async def intercept_service(self, continuation, details):
        self._gateway.authorizations.append(dict(details.invocation_metadata).get("authorization"))
        return await continuation(details)


async def _serve(gateway: SmallGateway, started: threading.Event, stop: asyncio.Event) -> None:
    server = grpc.aio.server(interceptors=[RecordAuthorization(gateway)])
    inference_pb2_grpc.add_InferenceServicer_to_server(gateway, server)
    admin_pb2_grpc.add_CacheAdminServicer_to_server(gateway, server)
    gateway.address = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
    await server.start()
    started.set()
    await stop.wait()
    await server.stop(grace=0)


@pytest.fixture
def small_gateway() -> Iterator[SmallGateway]:
    """A running SmallGateway on a free port, in a thread of its own so that blocking clients can be tested too."""
    gateway, started = SmallGateway(), threading.Event()
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()
    thread = threading.Thread(target=lambda: loop.run_until_complete(_serve(gateway, started, stop)), daemon=True)
    thread.start()
    assert started.wait(10)
    yield gateway
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
    loop.close()
