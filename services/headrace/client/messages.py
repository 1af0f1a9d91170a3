"""Client values to protobuf messages and back. The only file of the client that touches message fields."""

from collections.abc import Sequence

from headrace.client.values import (
    Accepted,
    BlockEntry,
    BlockListing,
    CacheOptions,
    Done,
    Event,
    Eviction,
    Finding,
    HolderRun,
    Message,
    MissExplanation,
    MissReason,
    Prompt,
    Sampling,
    Selector,
    ServedModel,
    StoredBlock,
    StoreNodeStatus,
    SystemStatus,
    WorkerStatus,
)
from headrace.core.block import CacheSource
from headrace.core.errors import InvalidRequest
from headrace.core.generation import (
    ALL_SOURCES,
    CachedTokens,
    EvictReport,
    HolderStat,
    TokenDelta,
    TokenLogprob,
    Usage,
)
from headrace.wire.v1 import admin_pb2, inference_pb2

SOURCE_TO_WIRE = {
    CacheSource.DEVICE: inference_pb2.CACHE_SOURCE_DEVICE,
    CacheSource.SHARED_MEMORY: inference_pb2.CACHE_SOURCE_SHARED_MEMORY,
    CacheSource.GRPC: inference_pb2.CACHE_SOURCE_GRPC,
}


def generate_request_message(
    prompt: Prompt, *, model: str, sampling: Sampling, cache: CacheOptions, timeout_ms: int, cache_salt: str
) -> inference_pb2.GenerateRequest:
    """Encode a request. Raises InvalidRequest where a value cannot be sent at all (the server checks the rest)."""
    request = inference_pb2.GenerateRequest(model=model, timeout_ms=timeout_ms, cache_salt=cache_salt)
    try:
        _set_prompt(request, prompt)
        _set_sampling(request.sampling, sampling)
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"the request cannot be encoded: {error}") from error
    request.cache.CopyFrom(
        inference_pb2.CacheOptions(
            bypass=not cache.sources,
            sources=[] if cache.sources == ALL_SOURCES else [SOURCE_TO_WIRE[s] for s in sorted(cache.sources)],
            no_publish=not cache.publish,
            decode_worker=cache.decode_worker,
            prefill_worker=cache.prefill_worker,
        )
    )
    return request


def _set_prompt(request: inference_pb2.GenerateRequest, prompt: Prompt) -> None:
    if isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, Sequence) and prompt and all(isinstance(part, Message) for part in prompt):
        request.chat.messages.extend(
            inference_pb2.ChatMessage(role=part.role, content=part.content)
            for part in prompt
            if isinstance(part, Message)
        )
    elif isinstance(prompt, Sequence) and prompt and all(type(part) is int for part in prompt):
        request.token_ids.ids.extend(part for part in prompt if isinstance(part, int))
    else:
        raise InvalidRequest("the prompt must be text, Message values or token ids, and not empty", param="prompt")


def _set_sampling(message: inference_pb2.Sampling, sampling: Sampling) -> None:
    for name in ("max_tokens", "temperature", "top_k", "top_p", "seed", "logprobs"):
        value = getattr(sampling, name)
        if value is not None:
            setattr(message, name, value)
    message.stop.extend(sampling.stop)
    message.ignore_eos = sampling.ignore_eos


def event_from_message(message: inference_pb2.GenerateEvent) -> Event | None:
    """Decode one event; None for a kind that this client does not know (a newer server's)."""
    match message.WhichOneof("event"):
        case "accepted":
            return Accepted(request_id=message.accepted.request_id, model=message.accepted.model)
        case "token":
            return _token_from_message(message.token)
        case "done":
            return _done_from_message(message.done)
    return None


def _token_from_message(token: inference_pb2.Token) -> TokenDelta:
    return TokenDelta(
        token_id=token.token_id,
        text=token.text,
        logprob=token.logprob if token.HasField("logprob") else None,
        top_logprobs=tuple(
            TokenLogprob(token_id=top.token_id, text=top.text, logprob=top.logprob) for top in token.top_logprobs
        ),
    )


def _done_from_message(done: inference_pb2.Done) -> Done:
    cached = done.usage.cached_tokens
    usage = Usage(
        prompt_tokens=done.usage.prompt_tokens,
        completion_tokens=done.usage.completion_tokens,
        cached=CachedTokens(device=cached.device, shared_memory=cached.shared_memory, grpc=cached.grpc),
    )
    return Done(
        finish_reason=done.finish_reason,
        text=done.text,
        usage=usage,
        decode_worker=done.decode_worker,
        prefill_worker=done.prefill_worker,
    )


def models_from_message(message: inference_pb2.ListModelsReply) -> tuple[ServedModel, ...]:
    """Decode the list of models."""
    return tuple(
        ServedModel(
            id=model.id,
            context_tokens_max=model.context_tokens_max,
            block_tokens=model.block_tokens,
            namespace=model.namespace,
        )
        for model in message.models
    )


def selector_message(selector: Selector) -> admin_pb2.Selector:
    """Encode a selector."""
    return admin_pb2.Selector(
        model=selector.model,
        namespace=selector.namespace,
        block_hashes=selector.block_hashes,
        prefix_text=selector.prefix_text,
        prefix_token_ids=selector.prefix_token_ids,
        idle_for_s=selector.idle_for_s,
        older_than_s=selector.older_than_s,
        holders=selector.holders,
        tier=selector.tier,
        tenant=selector.tenant,
        free_bytes=selector.free_bytes,
    )


def listing_from_message(message: admin_pb2.ListBlocksReply) -> BlockListing:
    """Decode a listing."""
    return BlockListing(
        blocks=tuple(_block_from_message(block) for block in message.blocks),
        total_blocks=message.total_blocks,
        errors=tuple((error.holder, error.error) for error in message.errors),
    )


def _block_from_message(block: admin_pb2.BlockEntry) -> BlockEntry:
    return BlockEntry(
        namespace=block.namespace,
        base_namespace=block.base_namespace or block.namespace,
        model=block.model,
        block_hash=block.block_hash,
        parent_hash=block.parent_hash,
        position=block.position,
        token_ids=tuple(block.token_ids),
        bytes=block.bytes,
        holder=block.holder,
        tier=block.tier,
        hits=block.hits,
        age_s=block.age_s,
        idle_s=block.idle_s,
        leases=block.leases,
        producer=block.producer,
        created_unix_ms=block.created_unix_ms,
        payload_xxh3=block.payload_xxh3,
        text=block.text,
    )


def stats_from_message(message: admin_pb2.StatReply) -> tuple[HolderStat, ...]:
    """Decode the holders' books."""
    return tuple(
        HolderStat(
            holder=stat.holder,
            tier=stat.tier,
            incarnation=stat.incarnation,
            total_blocks=stat.total_blocks,
            free_blocks=stat.free_blocks,
            committed_blocks=stat.committed_blocks,
            reserved_blocks=stat.reserved_blocks,
            leased_blocks=stat.leased_blocks,
            block_bytes=stat.block_bytes,
            lookups_tokens=stat.lookups_tokens,
            hits_tokens=stat.hits_tokens,
            evicted_blocks=stat.evicted_blocks,
            error=stat.error,
        )
        for stat in message.holders
    )


def reports_from_message(message: admin_pb2.EvictReply) -> tuple[EvictReport, ...]:
    """Decode what was evicted, holder by holder."""
    return tuple(
        EvictReport(
            holder=report.holder,
            blocks=report.blocks,
            tokens=report.tokens,
            bytes=report.bytes,
            skipped_leased_blocks=report.skipped_leased_blocks,
            dry_run=report.dry_run,
            error=report.error,
            block_hashes=tuple(report.block_hashes),
        )
        for report in message.reports
    )


def eviction_from_message(message: admin_pb2.EvictReply) -> Eviction:
    """Decode what was evicted and what it loses."""
    return Eviction(
        reports=reports_from_message(message),
        lost_tokens=message.lost_tokens,
        lost_tokens_at_most=message.lost_tokens_at_most,
        tokens_per_s=message.tokens_per_s,
        tokens_per_s_from=message.tokens_per_s_from,
    )


def why_miss_message(
    prompt: Prompt | None, *, model: str, request_id: str, cache_salt: str
) -> admin_pb2.WhyMissRequest:
    """Encode a question about a prompt, or about a request by its id."""
    asked = admin_pb2.WhyMissRequest(model=model, request_id=request_id, cache_salt=cache_salt)
    if prompt is not None:
        carried = inference_pb2.GenerateRequest()
        _set_prompt(carried, prompt)
        asked.text = carried.text
        asked.token_ids.extend(carried.token_ids.ids)
        asked.chat.extend(admin_pb2.ChatTurn(role=turn.role, content=turn.content) for turn in carried.chat.messages)
    return asked


def explanation_from_message(message: admin_pb2.WhyMissReply) -> MissExplanation:
    """Decode why a prompt missed."""
    return MissExplanation(
        model=message.model,
        namespace=message.namespace,
        prompt_tokens=message.prompt_tokens,
        block_tokens=message.block_tokens,
        num_blocks=message.num_blocks,
        runs=tuple(HolderRun(run.holder, run.held_blocks, run.indexed_blocks) for run in message.runs),
        reasons=tuple(
            MissReason(reason.kind, reason.detail, reason.holder, reason.first_block, reason.num_blocks)
            for reason in message.reasons
        ),
        errors=tuple((error.holder, error.error) for error in message.errors),
    )


def stored_block_message(block: StoredBlock, *, holder: str) -> admin_pb2.StoredBlock:
    """Encode a block to be written to a node."""
    return admin_pb2.StoredBlock(
        header=block.header, payload=block.payload, holder=holder, namespace_fields=block.namespace_fields
    )


def stored_block_from_message(message: admin_pb2.StoredBlock) -> StoredBlock:
    """Decode a block that was read."""
    return StoredBlock(message.header, message.payload, dict(message.namespace_fields))


def findings_from_message(message: admin_pb2.DoctorReply) -> tuple[Finding, ...]:
    """Decode what was found."""
    return tuple(Finding(each.check, each.holder, each.ok, each.detail, each.fixed) for each in message.findings)


def status_from_message(message: admin_pb2.StatusReply) -> SystemStatus:
    """Decode who is alive."""
    nodes = tuple(
        StoreNodeStatus(
            node_id=node.node_id,
            incarnation=node.incarnation,
            host=node.host,
            address=node.address,
            pid=node.pid,
            metrics_port=node.metrics_port,
        )
        for node in message.store_nodes
    )
    return SystemStatus(
        store_nodes=nodes,
        workers=tuple(_worker_from_message(worker) for worker in message.workers),
        index_available=message.index_available,
    )


def _worker_from_message(worker: admin_pb2.WorkerStatus) -> WorkerStatus:
    return WorkerStatus(
        worker_id=worker.worker_id,
        role=worker.role,
        host=worker.host,
        store_node=worker.store_node,
        model=worker.model,
        namespace=worker.namespace,
        pid=worker.pid,
        running=worker.running,
        waiting=worker.waiting,
        free_blocks=worker.free_blocks,
        pool_blocks=worker.pool_blocks,
        context_tokens_max=worker.context_tokens_max,
        metrics_port=worker.metrics_port,
    )
