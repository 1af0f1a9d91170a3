"""Results become protobuf messages. Values in, messages out; nothing is decided here."""

from headrace.core.block import CacheSource, NamespaceId
from headrace.core.budgets import Budget
from headrace.core.generation import (
    BlockInfo,
    ControlReport,
    EvictReport,
    EvictSelector,
    Finished,
    HolderStat,
    RequestId,
    TokenDelta,
    Usage,
    WorkerId,
)
from headrace.core.limits import EVICT_HASHES_MAX
from headrace.core.members import GatewayRecord, StoreNodeRecord, WorkerRecord
from headrace.wire.v1 import admin_pb2, inference_pb2


def render_accepted(request_id: RequestId, model: str) -> inference_pb2.GenerateEvent:
    """First event of every stream."""
    return inference_pb2.GenerateEvent(accepted=inference_pb2.Accepted(request_id=request_id, model=model))


def render_token(delta: TokenDelta) -> inference_pb2.GenerateEvent:
    """One generated token."""
    token = inference_pb2.Token(token_id=delta.token_id, text=delta.text, logprob=delta.logprob)
    for top in delta.top_logprobs:
        token.top_logprobs.add(token_id=top.token_id, text=top.text, logprob=top.logprob)
    return inference_pb2.GenerateEvent(token=token)


def render_done(finished: Finished, prefill_worker: WorkerId | None) -> inference_pb2.GenerateEvent:
    """Last event of a stream that ends well."""
    return inference_pb2.GenerateEvent(
        done=inference_pb2.Done(
            finish_reason=finished.reason.value,
            text=finished.text,
            usage=render_usage(finished.usage),
            decode_worker=finished.worker_id,
            prefill_worker=prefill_worker or "",
        )
    )


def render_usage(usage: Usage) -> inference_pb2.Usage:
    """Token counts with cached tokens by source."""
    cached = {source.value: tokens for source, tokens in usage.cached.by_source().items()}
    assert set(cached) == set(CacheSource)
    return inference_pb2.Usage(
        prompt_tokens=usage.prompt_tokens,
        completion_tokens=usage.completion_tokens,
        cached_tokens=inference_pb2.CachedTokens(**cached),
        drafted_tokens=usage.drafted_tokens,
        accepted_draft_tokens=usage.accepted_draft_tokens,
    )


def render_model(
    name: str, *, context_tokens_max: int, block_tokens: int, namespace: NamespaceId
) -> inference_pb2.Model:
    """One entry of the model list."""
    return inference_pb2.Model(
        id=name, context_tokens_max=context_tokens_max, block_tokens=block_tokens, namespace=namespace
    )


def render_selector(selector: EvictSelector) -> admin_pb2.Selector:
    """A selector for a store node; the inverse of `parse_selector`."""
    return admin_pb2.Selector(
        model=selector.model or "",
        namespace=selector.namespace or "",
        block_hashes=selector.block_hashes,
        prefix_token_ids=selector.prefix_token_ids,
        idle_for_s=selector.idle_for_s,
        created_before_unix_ms=selector.created_before_unix_ms,
        tier=selector.tier or "",
        free_bytes=selector.free_bytes,
    )


def render_block(block: BlockInfo, *, model: str = "", text: str = "") -> admin_pb2.BlockEntry:
    """One block as people see it."""
    return admin_pb2.BlockEntry(
        namespace=block.namespace,
        base_namespace=block.base_namespace,
        model=model,
        block_hash=block.block_hash,
        parent_hash=block.parent_hash,
        position=block.position,
        token_ids=block.token_ids,
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
        pinned_until_unix_ms=block.pinned_until_unix_ms,
        protected_by_pin=block.protected_by_pin,
        expires_unix_ms=block.expires_unix_ms,
        narrowed_from=block.narrowed_from,
        text=text,
    )


def render_evict_report(report: EvictReport) -> admin_pb2.EvictReport:
    """What one holder did."""
    return admin_pb2.EvictReport(
        holder=report.holder,
        blocks=report.blocks,
        tokens=report.tokens,
        bytes=report.bytes,
        skipped_leased_blocks=report.skipped_leased_blocks,
        dry_run=report.dry_run,
        error=report.error,
        block_hashes=report.block_hashes[:EVICT_HASHES_MAX],
        skipped_pinned_blocks=report.skipped_pinned_blocks,
    )


def render_control_report(report: ControlReport) -> admin_pb2.ControlReport:
    """What one holder did about a pin or a time to live."""
    return admin_pb2.ControlReport(
        holder=report.holder,
        outcome=report.outcome or "",
        blocks=report.blocks,
        tokens=report.tokens,
        bytes=report.bytes,
        pinned_bytes=report.pinned_bytes,
        pin_bytes_max=report.pin_bytes_max,
        until_unix_ms=report.until_unix_ms,
        why=report.why,
        error=report.error,
    )


def render_budget(budget: Budget) -> admin_pb2.Budget:
    """One row of a node's table of budgets; the inverse of `parse_budget`."""
    return admin_pb2.Budget(
        account=budget.account,
        namespaces=budget.namespaces,
        bytes_max=budget.bytes_max,
        bytes_min=budget.bytes_min,
        set_unix_ms=budget.set_unix_ms,
        set_by=budget.set_by,
    )


def render_holder_stat(stat: HolderStat) -> admin_pb2.HolderStat:
    """One holder's books."""
    return admin_pb2.HolderStat(
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
        pinned_bytes=stat.pinned_bytes,
        pin_bytes_max=stat.pin_bytes_max,
        lookups=stat.lookups,
        read_bytes=stat.read_bytes,
        written_bytes=stat.written_bytes,
    )


def render_store_node(record: StoreNodeRecord) -> admin_pb2.StoreNodeStatus:
    """One live store node."""
    return admin_pb2.StoreNodeStatus(
        node_id=record.node_id,
        incarnation=record.incarnation,
        host=record.host,
        address=record.address,
        pid=record.pid,
        metrics_port=record.metrics_port,
        draining=record.draining,
    )


def render_gateway(record: GatewayRecord) -> admin_pb2.GatewayStatus:
    """One live gateway."""
    return admin_pb2.GatewayStatus(
        gateway_id=record.gateway_id,
        host=record.host,
        address=record.address,
        pid=record.pid,
        metrics_port=record.metrics_port,
        version=record.version,
    )


def render_worker(record: WorkerRecord) -> admin_pb2.WorkerStatus:
    """One live worker."""
    return admin_pb2.WorkerStatus(
        worker_id=record.worker_id,
        role=record.role.value,
        host=record.host,
        store_node=record.store_node,
        model=record.model,
        namespace=record.namespace.id,
        pid=record.pid,
        running=record.running,
        waiting=record.waiting,
        free_blocks=record.free_blocks,
        pool_blocks=record.pool_blocks,
        context_tokens_max=record.context_tokens_max,
        metrics_port=record.metrics_port,
    )
