"""Evict on every holder, and say holder by holder what was in fact done."""

import dataclasses
from collections.abc import Sequence
from typing import Any

import grpc

from headrace.core.clock import Deadline
from headrace.core.errors import HeadraceError
from headrace.core.generation import EvictReport, EvictSelector
from headrace.core.members import StoreNodeRecord, WorkerRecord
from headrace.gateway.fleet import IS_ELSEWHERE, TIMEOUT_S, Fleet, all_of
from headrace.wire.render import render_selector
from headrace.wire.status import error_of_call, message_of
from headrace.wire.v1 import admin_pb2


async def evict_everywhere(
    fleet: Fleet, selectors: Sequence[EvictSelector], *, dry_run: bool, holders: Sequence[str] = (), who: str = ""
) -> list[EvictReport]:
    """Evict (dry: count) what any of the selectors means; `who` is for the nodes' own account of removals.

    A holder that fails has its error in its report; none is left out.
    """
    nodes, workers = await fleet.holders(holders)
    work = [_evict_on_node(fleet, node, selectors, dry_run, who) for node in nodes]
    for worker in workers:
        own = fleet.for_worker(worker, selectors)
        if own:
            work.append(_evict_on_worker(fleet, worker, own, dry_run))
    elsewhere = fleet.elsewhere(holders, selectors)
    return await all_of(work) + [_nothing_evicted(holder, dry_run, error=IS_ELSEWHERE) for holder in elsewhere]


async def _evict_on_node(
    fleet: Fleet, node: StoreNodeRecord, selectors: Sequence[EvictSelector], dry_run: bool, who: str
) -> EvictReport:
    report = _nothing_evicted(node.holder_id, dry_run)
    try:
        for selector in selectors:
            rest = render_selector(_rest(selector, report))
            asked = admin_pb2.EvictRequest(selector=rest, dry_run=dry_run, who=who)
            for part in (await fleet.cache_stub(node).Evict(asked, timeout=TIMEOUT_S)).reports:
                report = _add(report, part)
    except grpc.aio.AioRpcError as failed:
        return dataclasses.replace(report, error=message_of(error_of_call(failed)))
    return report


async def _evict_on_worker(
    fleet: Fleet, worker: WorkerRecord, selectors: Sequence[EvictSelector], dry_run: bool
) -> EvictReport:
    report = _nothing_evicted(worker.holder_id, dry_run)
    try:
        async with Deadline.after(TIMEOUT_S, fleet.service.clock).scope(f"evict on {worker.worker_id}"):
            for selector in selectors:
                rest = _rest(selector, report)
                report = _add(report, await fleet.service.calls.evict_device(worker, rest, dry_run=dry_run))
    except HeadraceError as error:
        return dataclasses.replace(report, error=message_of(error))
    return report


def _nothing_evicted(holder: str, dry_run: bool, error: str = "") -> EvictReport:
    return EvictReport(
        holder=holder, blocks=0, tokens=0, bytes=0, skipped_leased_blocks=0, dry_run=dry_run, error=error
    )


def _rest(selector: EvictSelector, report: EvictReport) -> EvictSelector:
    """The selector with what the holder freed already taken off the size to free."""
    if selector.free_bytes is None:
        return selector
    return dataclasses.replace(selector, free_bytes=max(0, selector.free_bytes - report.bytes))


def _add(report: EvictReport, part: Any) -> EvictReport:
    """Add one answer (protobuf or value) of the same holder."""
    return dataclasses.replace(
        report,
        blocks=report.blocks + part.blocks,
        tokens=report.tokens + part.tokens,
        bytes=report.bytes + part.bytes,
        skipped_leased_blocks=report.skipped_leased_blocks + part.skipped_leased_blocks,
        error=report.error or part.error,
        skipped_pinned_blocks=report.skipped_pinned_blocks + part.skipped_pinned_blocks,
        block_hashes=(*report.block_hashes, *part.block_hashes),
    )
