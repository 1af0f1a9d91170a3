"""A small real gateway for tests of the client and the CLI: a grpc.aio server with an echoing model and a real cache.

It answers as the protos say: it hashes prompts, keeps their blocks, counts reuse, evicts, refuses. It knows no engine.
"""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import pytest

from headrace.core.block import BlockHash, HashAlgorithm, HashedPrompt, NamespaceId, hash_prompt
from headrace.core.errors import HeadraceError, InvalidRequest
from headrace.core.retention import NO_END_UNIX_MS
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
    pinned_until_unix_ms: int = 0
    expires_unix_ms: int = 0


@dataclass
class SmallGateway(inference_pb2_grpc.InferenceServicer, admin_pb2_grpc.CacheAdminServicer):
    """Echoes prompts one character a token (token id = code point); each holder keeps every full block it saw."""

    holder_blocks: dict[str, dict[BlockHash, StoredBlock]] = field(default_factory=lambda: {h: {} for h in HOLDERS})
    silent_holders: set[str] = field(default_factory=set)
    bookless_holders: set[str] = field(default_factory=set)  # tell their blocks and not their books
    failure: HeadraceError | None = None
    hang_after_tokens: int | None = None
    requests: list[inference_pb2.GenerateRequest] = field(default_factory=list)
    authorizations: list[str | None] = field(default_factory=list)  # of each call, in order
    applications: list[str | None] = field(default_factory=list)  # likewise
    questions: list[admin_pb2.WhyMissRequest] = field(default_factory=list)  # in order
    evictions: list[admin_pb2.EvictRequest] = field(default_factory=list)  # in order
    route: admin_pb2.ExplainRouteReply | None = None  # what is told of any request
    orders: list[Any] = field(default_factory=list)  # what was asked to be kept, to go, to be budgeted or drained
    pin_bytes_max: int = 100 * BLOCK_BYTES
    models: tuple[str, ...] = (MODEL,)
    quota: admin_pb2.TenantEntry = field(default_factory=lambda: admin_pb2.TenantEntry(name="acme", role="user"))
    drain_steps: list[dict[str, Any]] = field(default_factory=list)  # what a drain tells, one after the other
    draining: bool = False
    looked_up_tokens: int = 200  # and a quarter of them hit
    looked_up_between: int = 0  # tokens, from each look at the books to the next
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
            await asyncio.sleep(600)
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
        model = {"context_tokens_max": 512, "block_tokens": BLOCK_TOKENS, "namespace": NAMESPACE}
        return inference_pb2.ListModelsReply(models=[model | {"id": name} for name in self.models])

    async def Status(self, request, context):
        if self.failure is not None:
            await _refuse(context, self.failure)
        worker = admin_pb2.WorkerStatus(
            worker_id="d0", role="decode", host="h", store_node="here", model=MODEL, namespace=NAMESPACE, pid=12
        )
        node = admin_pb2.StoreNodeStatus(
            node_id="here", incarnation=7, host="h", address="127.0.0.1:1", pid=11, draining=self.draining
        )
        return admin_pb2.StatusReply(store_nodes=[node], workers=[worker], index_available=True)

    async def Stat(self, request, context):
        if self.failure is not None:
            await _refuse(context, self.failure)
        stats = [
            admin_pb2.HolderStat(
                holder=holder,
                tier="host" if holder.startswith("node:") else "device",
                total_blocks=100,
                committed_blocks=len(blocks),
                free_blocks=100 - len(blocks),
                block_bytes=BLOCK_BYTES,
                lookups=self.looked_up_tokens // 10,
                lookups_tokens=self.looked_up_tokens,
                hits_tokens=self.looked_up_tokens // 4,
                read_bytes=self.looked_up_tokens * 1024,
                pinned_bytes=self._pinned_bytes(holder),
                pin_bytes_max=self.pin_bytes_max if holder.startswith("node:") else 0,
                error="did not answer" if holder in self.silent_holders | self.bookless_holders else "",
            )
            for holder, blocks in self.holder_blocks.items()
        ]
        self.looked_up_tokens += self.looked_up_between
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
        if self.failure is not None:
            await _refuse(context, self.failure)
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
                pinned_until_unix_ms=block.pinned_until_unix_ms,
                protected_by_pin=block_hash in self._kept(holder),
                expires_unix_ms=block.expires_unix_ms,
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

    async def ExplainRoute(self, request, context):
        if self.route is None:
            await _refuse(context, InvalidRequest("not among the last"))
        return self.route

    async def Evict(self, request, context):
        if self.failure is not None:
            await _refuse(context, self.failure)
        self.evictions.append(request)
        return admin_pb2.EvictReply(
            reports=[self._evict(holder, request) for holder in self.holder_blocks],
            lost_tokens=100,
            tenants=[{"tenant": "acme", "blocks": 3, "prefixes": 2}] if request.dry_run else [],
            prefixes=2 if request.dry_run else 0,
            tokens_per_s=request.tokens_per_s,
            tokens_per_s_from="configured" if request.tokens_per_s else "",
        )

    def _evict(self, holder: str, request: admin_pb2.EvictRequest) -> admin_pb2.EvictReport:
        if holder in self.silent_holders:
            return admin_pb2.EvictReport(holder=holder, dry_run=request.dry_run, error="did not answer")
        kept = self._kept(holder)
        selected = self._meant(holder, request.selector)
        meant = [block_hash for block_hash in selected if block_hash not in kept]
        if not request.dry_run:
            for block_hash in meant:
                del self.holder_blocks[holder][block_hash]
        return admin_pb2.EvictReport(
            holder=holder,
            blocks=len(meant),
            tokens=len(meant) * BLOCK_TOKENS,
            bytes=len(meant) * BLOCK_BYTES,
            dry_run=request.dry_run,
            skipped_pinned_blocks=len(selected) - len(meant),
        )

    def _kept(self, holder: str) -> set[bytes]:
        """Pinned blocks of a holder and all before them."""
        blocks, kept = self.holder_blocks[holder], set()
        for block_hash, block in blocks.items():
            while block.pinned_until_unix_ms and block_hash in blocks and block_hash not in kept:
                kept.add(block_hash)
                block_hash = blocks[block_hash].parent_hash
        return kept

    def _pinned_bytes(self, holder: str) -> int:
        return len(self._kept(holder)) * BLOCK_BYTES

    def _named(self, holder: str, selector: admin_pb2.Selector) -> list[StoredBlock]:
        tokens = list(selector.prefix_token_ids) or [ord(c) for c in selector.prefix_text]
        names = set(selector.block_hashes) | set(hash_text(tokens).chain[-1:])
        return [block for block_hash, block in self.holder_blocks[holder].items() if block_hash in names]

    async def Pin(self, request, context):
        return await self._order(request, context, lambda holder, named: self._pin(holder, named, request))

    def _pin(self, holder, named, request):
        before = [block.pinned_until_unix_ms for block in named]
        until = NO_END_UNIX_MS if not request.HasField("for_s") else round((time.time() + request.for_s) * 1e3)
        for block in named:
            block.pinned_until_unix_ms = until
        taken = self._pinned_bytes(holder)
        if taken > self.pin_bytes_max:
            for block, earlier in zip(named, before, strict=True):
                block.pinned_until_unix_ms = earlier
            return {"outcome": "refused", "why": f"{taken} bytes are more than {self.pin_bytes_max}"}
        return {"outcome": "done", "until_unix_ms": 0 if until == NO_END_UNIX_MS else until}

    async def Unpin(self, request, context):
        def unpin(holder, named):
            pinned = [block for block in named if block.pinned_until_unix_ms]
            for block in pinned:
                block.pinned_until_unix_ms = 0
            return {"outcome": "done" if pinned else "not held"}

        return await self._order(request, context, unpin)

    async def SetTtl(self, request, context):
        def set_ttl(holder, named):
            until = round((time.time() + request.ttl_s) * 1e3) if request.HasField("ttl_s") else 0
            for block in named:
                block.expires_unix_ms = until
            return {"outcome": "done", "until_unix_ms": until}

        return await self._order(request, context, set_ttl)

    async def _order(self, request, context, act):
        """Have each store node that has the named blocks act on them."""
        if self.failure is not None:
            await _refuse(context, self.failure)
        self.orders.append(request)
        reports = []
        for holder in self.holder_blocks:
            if not holder.startswith("node:"):
                continue
            if holder in self.silent_holders:
                reports.append({"holder": holder, "error": "did not answer"})
                continue
            named = self._named(holder, request.selector)
            did = act(holder, named) if named else {"outcome": "not held"}
            counts = {"blocks": len(named), "pin_bytes_max": self.pin_bytes_max}
            reports.append({"holder": holder, "pinned_bytes": self._pinned_bytes(holder), **counts, **did})
        return admin_pb2.ControlReply(reports=reports)

    async def ListTenants(self, request, context):
        if self.failure is not None:
            await _refuse(context, self.failure)
        usage = {"host_blocks": 3, "host_bytes": 3 * BLOCK_BYTES, "refused_blocks": 7}
        entry = admin_pb2.TenantEntry(
            trust_group="acme-all", requests_per_minute=600, nodes=[{"holder": "node:here", "usage": usage}]
        )
        entry.MergeFrom(self.quota)
        errors = [{"holder": holder, "error": "did not answer"} for holder in sorted(self.silent_holders)]
        return admin_pb2.ListTenantsReply(tenants=[entry], errors=errors)

    async def SetQuota(self, request, context):
        self.orders.append(request)
        if request.tenant != self.quota.name:
            await _refuse(context, InvalidRequest("there is no such tenant", param="tenant"))
        self.quota.ClearField("bytes_max")
        if request.HasField("bytes_max"):
            self.quota.bytes_max = request.bytes_max
        self.quota.bytes_min, self.quota.budget_from = request.bytes_min, "" if request.reset else "operator"
        errors = [{"holder": holder, "error": "did not answer"} for holder in sorted(self.silent_holders)]
        return admin_pb2.SetQuotaReply(tenant=self.quota, errors=errors)

    async def DrainNode(self, request, context):
        if self.failure is not None:
            await _refuse(context, self.failure)
        self.orders.append(request)
        for step in self.drain_steps:
            yield admin_pb2.DrainNodeProgress(**step)


async def _refuse(context: grpc.aio.ServicerContext, error: HeadraceError) -> None:
    """As a gateway answers: code, message, and the metadata that tells kinds apart."""
    await context.abort(status_of(error).grpc_code, message_of(error), trailing_metadata(error))


class RecordMetadata(grpc.aio.ServerInterceptor):
    """Remembers what each call says of who it is and of which application it means."""

    def __init__(self, gateway: SmallGateway) -> None:
        self._gateway = gateway

    async def intercept_service(self, continuation, details):
        told = dict(details.invocation_metadata)
        self._gateway.authorizations.append(told.get("authorization"))
        self._gateway.applications.append(told.get("application"))
        return await continuation(details)


async def _serve(gateway: SmallGateway, started: threading.Event, stop: asyncio.Event) -> None:
    server = grpc.aio.server(interceptors=[RecordMetadata(gateway)])
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
    assert started.wait(60)
    yield gateway
    loop.call_soon_threadsafe(stop.set)
    thread.join(10)
    loop.close()
