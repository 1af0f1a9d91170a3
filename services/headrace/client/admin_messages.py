"""What operators ask and are told, to protobuf messages and back. With `messages.py` the only file of the client that
touches message fields."""

from collections.abc import Iterable

from headrace.client.admin_values import (
    BlockEntry,
    BlockListing,
    DrainProgress,
    Eviction,
    Finding,
    GatewayStatus,
    GoneMember,
    HolderRun,
    MissExplanation,
    MissReason,
    QuotaChange,
    Selector,
    StoredBlock,
    StoreNodeStatus,
    SystemStatus,
    TenantEntry,
    TenantHit,
    TenantListing,
    TenantUsage,
    WorkerStatus,
)
from headrace.client.messages import refusing_unencodable, set_prompt
from headrace.client.values import Prompt
from headrace.core.generation import ControlOutcome, ControlReport, EvictReport, HolderStat
from headrace.wire.v1 import admin_pb2, inference_pb2


def selector_message(selector: Selector) -> admin_pb2.Selector:
    """Encode a selector. Raises InvalidRequest."""
    with refusing_unencodable():
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
        errors=_errors_from_message(message.errors),
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
        pinned_until_unix_ms=block.pinned_until_unix_ms,
        protected_by_pin=block.protected_by_pin,
        expires_unix_ms=block.expires_unix_ms,
        tenant=block.tenant,
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
            pinned_bytes=stat.pinned_bytes,
            pin_bytes_max=stat.pin_bytes_max,
            lookups=stat.lookups,
            read_bytes=stat.read_bytes,
            written_bytes=stat.written_bytes,
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
            skipped_pinned_blocks=report.skipped_pinned_blocks,
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
        tenants=tuple(TenantHit(hit.tenant, hit.blocks, hit.prefixes) for hit in message.tenants),
        prefixes=message.prefixes,
        hits_at_least=message.hits_at_least,
    )


def why_miss_message(
    prompt: Prompt | None, *, model: str, request_id: str, cache_salt: str
) -> admin_pb2.WhyMissRequest:
    """Encode a question about a prompt, or about a request by its id. Raises InvalidRequest."""
    with refusing_unencodable():
        asked = admin_pb2.WhyMissRequest(model=model, request_id=request_id, cache_salt=cache_salt)
        if prompt is None:
            return asked
        carried = inference_pb2.GenerateRequest()
        set_prompt(carried, prompt)
        asked.text = carried.text
        asked.token_ids.extend(carried.token_ids.ids)
        asked.chat.extend(admin_pb2.ChatTurn(role=turn.role, content=turn.content) for turn in carried.chat.messages)
        return asked


def quota_message(tenant: str, *, bytes_max: int | None, bytes_min: int, reset: bool) -> admin_pb2.SetQuotaRequest:
    """Encode a tenant's new budget. Raises InvalidRequest."""
    with refusing_unencodable():
        return admin_pb2.SetQuotaRequest(tenant=tenant, bytes_max=bytes_max, bytes_min=bytes_min, reset=reset)


def drain_message(holder: str, *, undo: bool, without_moving: bool) -> admin_pb2.DrainNodeRequest:
    """Encode the order to drain a node. Raises InvalidRequest."""
    with refusing_unencodable():
        return admin_pb2.DrainNodeRequest(holder=holder, undo=undo, without_moving=without_moving)


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
        errors=_errors_from_message(message.errors),
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
            draining=node.draining,
        )
        for node in message.store_nodes
    )
    return SystemStatus(
        store_nodes=nodes,
        workers=tuple(_worker_from_message(worker) for worker in message.workers),
        index_available=message.index_available,
        gateways=tuple(
            GatewayStatus(
                gateway_id=gateway.gateway_id,
                host=gateway.host,
                address=gateway.address,
                pid=gateway.pid,
                metrics_port=gateway.metrics_port,
                version=gateway.version,
            )
            for gateway in message.gateways
        ),
        gone=tuple(GoneMember(each.member, each.host, each.last_seen_unix_ms) for each in message.gone),
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


def control_reports_from_message(message: admin_pb2.ControlReply) -> tuple[ControlReport, ...]:
    """Decode what each holder did about a pin or a time to live."""
    return tuple(
        ControlReport(
            holder=report.holder,
            outcome=None if report.error else ControlOutcome(report.outcome),
            blocks=report.blocks,
            tokens=report.tokens,
            bytes=report.bytes,
            pinned_bytes=report.pinned_bytes,
            pin_bytes_max=report.pin_bytes_max,
            until_unix_ms=report.until_unix_ms,
            why=report.why,
            error=report.error,
        )
        for report in message.reports
    )


def tenants_from_message(message: admin_pb2.ListTenantsReply) -> TenantListing:
    """Decode the tenants."""
    return TenantListing(
        tenants=tuple(_tenant_from_message(tenant) for tenant in message.tenants),
        errors=_errors_from_message(message.errors),
    )


def quota_change_from_message(message: admin_pb2.SetQuotaReply) -> QuotaChange:
    """Decode a tenant with its new budget."""
    return QuotaChange(tenant=_tenant_from_message(message.tenant), errors=_errors_from_message(message.errors))


def _tenant_from_message(tenant: admin_pb2.TenantEntry) -> TenantEntry:
    return TenantEntry(
        name=tenant.name,
        trust_group=tenant.trust_group,
        role=tenant.role,
        bytes_max=tenant.bytes_max if tenant.HasField("bytes_max") else None,
        bytes_min=tenant.bytes_min,
        ttl_s=tenant.ttl_s or None,
        budget_from=tenant.budget_from,
        **{
            name: getattr(tenant, name) if tenant.HasField(name) else None
            for name in ("requests_per_minute", "tokens_per_minute", "concurrent_max")
        },
        nodes=tuple(
            TenantUsage(
                holder=node.holder,
                host_blocks=node.usage.host_blocks,
                host_bytes=node.usage.host_bytes,
                disk_blocks=node.usage.disk_blocks,
                disk_bytes=node.usage.disk_bytes,
                pinned_bytes=node.usage.pinned_bytes,
                refused_blocks=node.usage.refused_blocks,
                evicted_blocks=node.usage.evicted_blocks,
            )
            for node in tenant.nodes
        ),
    )


def drain_progress_from_message(message: admin_pb2.DrainNodeProgress) -> DrainProgress:
    """Decode how far a drain is."""
    return DrainProgress(
        total_blocks=message.total_blocks,
        moved_blocks=message.moved_blocks,
        present_blocks=message.present_blocks,
        refused_blocks=message.refused_blocks,
        moved_bytes=message.moved_bytes,
        done=message.done,
        state=message.state,
        error=message.error,
        moved_to=dict(sorted(message.moved_to.items())),
    )


def _errors_from_message(errors: Iterable[admin_pb2.HolderError]) -> tuple[tuple[str, str], ...]:
    return tuple((error.holder, error.error) for error in errors)
