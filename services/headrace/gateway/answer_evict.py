"""Evict what a selector means on every holder, or count it, and say what that costs: what is lost, and whose it was."""

from collections.abc import Sequence

from headrace.core.generation import ControlOutcome, EvictReport, EvictSelector
from headrace.core.limits import LIST_BLOCKS_MAX
from headrace.gateway.admin_scope import AdminScope
from headrace.gateway.audit_log import asked_of, audited_change, ended_at
from headrace.gateway.evict_everywhere import evict_everywhere
from headrace.gateway.fleet import Fleet
from headrace.gateway.list_everywhere import list_everywhere
from headrace.gateway.price_eviction import count_hits, price_eviction
from headrace.wire.render import render_evict_report
from headrace.wire.v1 import admin_pb2


async def answer_evict(fleet: Fleet, scope: AdminScope, request: admin_pb2.EvictRequest) -> admin_pb2.EvictReply:
    """Holder by holder what was done, and its price. Raises InvalidRequest for a selector that means nothing."""
    if request.dry_run:
        selectors, reports = await _evict(fleet, scope, request)
    else:
        with audited_change(scope.tenant.name, "evict", asked_of(request.selector)) as change:
            selectors, reports = await _evict(fleet, scope, request)
            change.effect = _effect(reports)
            outcomes = [_outcome(report) for report in reports if not report.error]
            change.ended = ended_at(outcomes, errors=len(reports) - len(outcomes))
    return await _priced_reply(fleet, request, selectors, reports)


async def _evict(
    fleet: Fleet, scope: AdminScope, request: admin_pb2.EvictRequest
) -> tuple[tuple[EvictSelector, ...], list[EvictReport]]:
    selectors = await fleet.resolve(request.selector, scope)
    holders = request.selector.holders
    reports = await evict_everywhere(fleet, selectors, dry_run=request.dry_run, holders=holders, who=scope.tenant.name)
    return selectors, reports


def _outcome(report: EvictReport) -> ControlOutcome:
    if report.blocks:
        return ControlOutcome.DONE
    skipped = report.skipped_leased_blocks or report.skipped_pinned_blocks
    return ControlOutcome.REFUSED if skipped else ControlOutcome.NOT_HELD


def _effect(reports: Sequence[EvictReport]) -> dict[str, object]:
    return {
        "blocks": sum(report.blocks for report in reports),
        "bytes": sum(report.bytes for report in reports),
        "holders": {report.holder: report.error or report.blocks for report in reports},
    }


async def _priced_reply(
    fleet: Fleet,
    request: admin_pb2.EvictRequest,
    selectors: Sequence[EvictSelector],
    reports: Sequence[EvictReport],
) -> admin_pb2.EvictReply:
    spaces = dict.fromkeys(EvictSelector(namespace=selector.namespace) for selector in selectors)
    listing = await list_everywhere(fleet, tuple(spaces), limit=LIST_BLOCKS_MAX)
    price = price_eviction(
        reports,
        copies=(block.block_hash for block in listing.blocks),
        copies_are_all=listing.total_blocks == len(listing.blocks) and not listing.errors,
        dry_run=request.dry_run,
    )
    owners = fleet.namespace_to_account()
    hits = count_hits(reports if request.dry_run else (), listed=listing.blocks, namespace_to_account=owners)
    measured = fleet.service.prefill_rate.tokens_per_s
    source = "configured" if request.tokens_per_s > 0 else "measured" if measured else ""
    return admin_pb2.EvictReply(
        reports=[render_evict_report(report) for report in reports],
        lost_tokens=price.lost_tokens,
        lost_tokens_at_most=price.at_most,
        tokens_per_s=request.tokens_per_s if source == "configured" else measured,
        tokens_per_s_from=source,
        tenants=[
            admin_pb2.TenantHit(tenant=hit.account, blocks=hit.blocks, prefixes=hit.prefixes) for hit in hits.accounts
        ],
        prefixes=hits.prefixes,
        hits_at_least=hits.at_least,
    )
