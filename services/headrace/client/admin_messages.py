"""What operators ask and are told, to protobuf messages and back. With `messages.py` the only file of the client that
touches message fields."""

from collections.abc import Iterable
from dataclasses import fields

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
from headrace.client.messages import encode, from_message, if_set, refusing_unencodable, set_prompt
from headrace.client.placement_values import RouteExplanation, RouteOutcome, RoutePlan
from headrace.client.values import Prompt
from headrace.core.generation import ControlOutcome, ControlReport, EvictReport, HolderStat
from headrace.wire.v1 import admin_pb2, inference_pb2


def selector_message(selector: Selector) -> admin_pb2.Selector:
    """Encode a selector. Raises InvalidRequest."""
    values = {field.name: getattr(selector, field.name) for field in fields(selector)}
    assert values.keys() <= set(admin_pb2.Selector.DESCRIPTOR.fields_by_name)  # no type says it of a dictionary
    return encode(admin_pb2.Selector, **values)


def listing_from_message(message: admin_pb2.ListBlocksReply) -> BlockListing:
    """Decode a listing."""
    blocks = tuple(_block_from_message(block) for block in message.blocks)
    return BlockListing(blocks, message.total_blocks, _errors_from_message(message.errors))


def _block_from_message(block: admin_pb2.BlockEntry) -> BlockEntry:
    base_namespace = block.base_namespace or block.namespace
    return from_message(BlockEntry, block, base_namespace=base_namespace, token_ids=tuple(block.token_ids))


def stats_from_message(message: admin_pb2.StatReply) -> tuple[HolderStat, ...]:
    """Decode the holders' books."""
    return tuple(from_message(HolderStat, stat) for stat in message.holders)


def eviction_from_message(message: admin_pb2.EvictReply) -> Eviction:
    """Decode what was evicted and what it loses."""
    return from_message(
        Eviction,
        message,
        reports=tuple(
            from_message(EvictReport, report, block_hashes=tuple(report.block_hashes)) for report in message.reports
        ),
        tenants=tuple(from_message(TenantHit, hit) for hit in message.tenants),
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


def explanation_from_message(message: admin_pb2.WhyMissReply) -> MissExplanation:
    """Decode why a prompt missed."""
    return from_message(
        MissExplanation,
        message,
        runs=tuple(from_message(HolderRun, run) for run in message.runs),
        reasons=tuple(from_message(MissReason, reason) for reason in message.reasons),
        errors=_errors_from_message(message.errors),
    )


def route_explanation_from_message(message: admin_pb2.ExplainRouteReply) -> RouteExplanation:
    """Decode why a request went where it went."""
    seconds = {name: if_set(message.outcome, name) for name in ("ttft_s", "fetch_s", "compute_s")}
    return from_message(
        RouteExplanation,
        message,
        chosen=from_message(RoutePlan, message.chosen),
        others=tuple(from_message(RoutePlan, plan) for plan in message.others),
        outcome=from_message(RouteOutcome, message.outcome, **seconds),
    )


def stored_block_from_message(message: admin_pb2.StoredBlock) -> StoredBlock:
    """Decode a block that was read."""
    return from_message(StoredBlock, message, namespace_fields=dict(message.namespace_fields))


def findings_from_message(message: admin_pb2.DoctorReply) -> tuple[Finding, ...]:
    """Decode what was found."""
    return tuple(from_message(Finding, finding) for finding in message.findings)


def status_from_message(message: admin_pb2.StatusReply) -> SystemStatus:
    """Decode who is alive."""
    return from_message(
        SystemStatus,
        message,
        store_nodes=tuple(from_message(StoreNodeStatus, node) for node in message.store_nodes),
        workers=tuple(from_message(WorkerStatus, worker) for worker in message.workers),
        gateways=tuple(from_message(GatewayStatus, gateway) for gateway in message.gateways),
        gone=tuple(from_message(GoneMember, member) for member in message.gone),
    )


def control_reports_from_message(message: admin_pb2.ControlReply) -> tuple[ControlReport, ...]:
    """Decode what each holder did about a pin or a time to live."""
    return tuple(
        from_message(ControlReport, report, outcome=None if report.error else ControlOutcome(report.outcome))
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
    bounds = ("bytes_max", "requests_per_minute", "tokens_per_minute", "concurrent_max")
    return from_message(
        TenantEntry,
        tenant,
        **{name: if_set(tenant, name) for name in bounds},
        ttl_s=tenant.ttl_s or None,
        nodes=tuple(from_message(TenantUsage, node.usage, holder=node.holder) for node in tenant.nodes),
    )


def drain_progress_from_message(message: admin_pb2.DrainNodeProgress) -> DrainProgress:
    """Decode how far a drain is."""
    return from_message(DrainProgress, message, moved_to=dict(sorted(message.moved_to.items())))


def _errors_from_message(errors: Iterable[admin_pb2.HolderError]) -> tuple[tuple[str, str], ...]:
    return tuple((error.holder, error.error) for error in errors)
