"""Examine the whole system for an operator: is everybody there, do clocks, versions, namespaces and budgets agree, do
books balance, is the index what the nodes hold? Looks at bounded samples; repairs only by having nodes register again,
budgets carried and dead entries swept."""

from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import grpc

from headrace import __version__
from headrace.core.budgets import merge_budgets, rows_to_send
from headrace.core.clock import Deadline
from headrace.core.errors import HeadraceError, IndexUnavailable
from headrace.core.generation import EvictSelector
from headrace.core.index_limits import INDEX_SWEEP_ENTRIES
from headrace.core.limits import CLOCK_SKEW_MS_MAX, DOCTOR_CHAINS_MAX, LIST_BLOCKS_MAX, MEMBER_TTL_MS
from headrace.core.members import StoreNodeRecord, WorkerRecord
from headrace.gateway.audit_log import AuditedChange
from headrace.gateway.carry_budgets import carry_budgets, filed_budgets, read_budgets
from headrace.gateway.compare_with_index import IndexGaps, KnownChain, compare_with_index
from headrace.gateway.examine_node import examine_node
from headrace.gateway.finding import Finding
from headrace.gateway.fleet import TIMEOUT_S, Fleet, all_of
from headrace.gateway.service import GatewayService
from headrace.wire.status import error_of_call, message_of
from headrace.wire.v1 import admin_pb2


async def examine_system(fleet: Fleet, *, fixing: AuditedChange | None = None) -> list[Finding]:
    """Every finding, good ones too. fixing: nodes that the index misrepresents register again, budgets that differ are
    carried, dead entries are swept, and each is written into this change at once, as what comes later may fail."""
    service = fleet.service
    await service.refresh()
    workers = service.table.records()
    try:
        nodes: Sequence[StoreNodeRecord] = await service.membership.store_nodes()
        findings = [Finding("index", "", service.index_available, _index_detail(service.index_available))]
        findings += [_version_finding(each.holder_id, each.version) for each in await service.membership.gateways()]
    except IndexUnavailable as away:
        nodes, findings = (), [Finding("index", "", False, str(away))]
    if not nodes:
        findings.append(Finding("store nodes", "", False, "none is announced; nothing is kept but in workers' pools"))
    findings += await _examine_nodes(fleet, nodes, fixing)
    for worker in workers:
        findings += await _examine_worker(service, worker)
    if not workers:
        findings.append(Finding("workers", "", False, "none is announced; no request can be served"))
    findings += _examine_namespaces(workers)
    if fixing is not None:
        findings.append(_noted(fixing, await _sweep(service, nodes)))
    return findings


def _noted(fixing: AuditedChange, finding: Finding) -> Finding:
    if finding.fixed:
        fixing.effect[f"{finding.check} {finding.holder}"] = finding.fixed
    return finding


async def _examine_nodes(fleet: Fleet, nodes: Sequence[StoreNodeRecord], fixing: AuditedChange | None) -> list[Finding]:
    taking_nodes = sum(not node.draining for node in nodes)
    # One listing's worth of blocks over all nodes, so that a large fleet does not fill the gateway's memory.
    share = max(1, LIST_BLOCKS_MAX // max(1, len(nodes)))
    examined = await all_of(
        [examine_node(node, fleet, taking_nodes=taking_nodes, list_blocks_max=share) for node in nodes]
    )
    listings = {each.node: each.blocks for each in examined if each.blocks is not None}
    findings = [finding for each in examined for finding in each.findings]
    findings += await _examine_index(fleet, listings, fixing)
    return findings + await _examine_budgets(fleet, tuple(listings), fixing)


async def _examine_index(
    fleet: Fleet, listings: Mapping[StoreNodeRecord, Sequence[Any]], fixing: AuditedChange | None
) -> list[Finding]:
    recent = fleet.service.recent_prompts.latest(DOCTOR_CHAINS_MAX)
    asked_for = [KnownChain(each.prompt.namespace, each.prompt.chain) for each in recent if each.prompt.chain]
    try:
        gaps = await compare_with_index(fleet, listings, asked_for=asked_for)
    except IndexUnavailable as away:
        return [Finding("index entries", node.holder_id, False, f"not compared: {away}") for node in listings]
    except grpc.aio.AioRpcError as failed:
        return [Finding("index entries", "", False, f"not compared: {message_of(error_of_call(failed))}")]
    findings = []
    for node in listings:
        finding = _index_finding(node, gaps[node.holder_id])
        if fixing is not None and not finding.ok:
            finding.fixed = await _register_again(fleet, node)
            _noted(fixing, finding)
        findings.append(finding)
    return findings


def _index_finding(node: StoreNodeRecord, gaps: IndexGaps) -> Finding:
    wrong = []
    if gaps.missing_blocks:
        wrong.append(f"{gaps.missing_blocks:,} blocks that it holds are not in the index")
    if gaps.stale_blocks:
        wrong.append(f"the index names {gaps.stale_blocks:,} blocks that it does not hold")
    looked_at = f"{gaps.chains:,} {'chain' if gaps.chains == 1 else 'chains'} looked at"
    return Finding("index entries", node.holder_id, not wrong, "; ".join([*wrong, looked_at]))


async def _register_again(fleet: Fleet, node: StoreNodeRecord) -> str:
    """What was done, or "" when the node did not answer: the finding stands then."""
    try:
        reply = await fleet.node_stub(node).Reregister(admin_pb2.ReregisterRequest(), timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError:
        return ""
    return f"registers its {reply.blocks:,} blocks again"


async def _examine_budgets(
    fleet: Fleet, nodes: Sequence[StoreNodeRecord], fixing: AuditedChange | None
) -> list[Finding]:
    """Every node ought to keep the same table; one that lacks a row lets that tenant take what it will."""
    tables = await read_budgets(fleet, nodes)
    wanted = merge_budgets(tables.by_holder.values())
    findings = [Finding("budgets", holder, False, error) for holder, error in tables.errors.items()]
    apart = {holder: rows_to_send(wanted, table) for holder, table in tables.by_holder.items()}
    carrying = fixing is not None and any(apart.values())
    complaints = await carry_budgets(fleet, nodes, filed=filed_budgets(fleet)) if carrying else {}
    for holder, rows in apart.items():
        if not rows:
            findings.append(Finding("budgets", holder, True, f"{len(wanted):,}, as on every node"))
            continue
        named = ", ".join(repr(row.account) for row in rows[:3])
        finding = Finding("budgets", holder, False, f"{len(rows):,} differ from other nodes': {named}")
        if fixing is not None:
            finding.fixed = "" if holder in complaints else f"{len(rows):,} carried from other nodes"
            _noted(fixing, finding)
        findings.append(finding)
    return findings


def _index_detail(available: bool) -> str:
    return "answers" if available else "does not answer; requests go on without reuse"


def _version_finding(holder: str, version: str) -> Finding:
    return Finding("version", holder, version == __version__, f"{version}, here {__version__}")


async def _examine_worker(service: GatewayService, worker: WorkerRecord) -> list[Finding]:
    findings = [_version_finding(worker.holder_id, worker.version)]
    if worker.unix_ms:
        # Said when it was announced, which is at most MEMBER_TTL_MS ago.
        now_ms = service.clock.unix_ms()
        off_ms = max(worker.unix_ms - now_ms, now_ms - MEMBER_TTL_MS - worker.unix_ms, 0)
        detail = f"{off_ms:,} ms from this gateway's, or less; known to {MEMBER_TTL_MS / 1_000:g} s"
        findings.append(Finding("clock", worker.holder_id, off_ms <= CLOCK_SKEW_MS_MAX, detail))
    return [await _ask_worker(service, worker), *findings]


async def _ask_worker(service: GatewayService, worker: WorkerRecord) -> Finding:
    try:
        async with Deadline.after(TIMEOUT_S, service.clock).scope(f"asking {worker.worker_id}"):
            listing = await service.calls.list_device(worker, EvictSelector(), limit=0)
    except HeadraceError as error:
        return Finding("worker", worker.holder_id, False, message_of(error))
    detail = f"answers; {worker.role}, keeps {listing.total_blocks:,} blocks"
    if not worker.store_node:
        return Finding(
            "worker", worker.holder_id, False, f"{detail}; has no store node, so nothing it computes is kept"
        )
    return Finding("worker", worker.holder_id, True, detail)


def _examine_namespaces(workers: Sequence[WorkerRecord]) -> list[Finding]:
    """Workers of one model ought to share blocks; where they cannot, the fields that differ are named."""
    findings = []
    for model in dict.fromkeys(worker.model for worker in workers):
        apart = {worker.namespace: worker.holder_id for worker in workers if worker.model == model}
        for (one, holder), (other, other_holder) in combinations(apart.items(), 2):
            fields = ", ".join(one.differing_fields(other))
            findings.append(
                Finding("namespace", holder, False, f"{model}: not shared with {other_holder}: {fields} differ")
            )
        if len(apart) == 1:
            findings.append(Finding("namespace", "", True, f"{model}: all workers share {next(iter(apart)).id}"))
    return findings


async def _sweep(service: GatewayService, nodes: Sequence[StoreNodeRecord]) -> Finding:
    live = {node.holder_id: node.incarnation for node in nodes}
    try:
        # All of them, also those that gateways of another Ray cluster call.
        live |= {worker.holder_id: worker.incarnation for worker in await service.membership.workers()}
        swept = await service.index.sweep(live, limit=INDEX_SWEEP_ENTRIES)
    except IndexUnavailable as away:
        return Finding("dead entries", "", False, f"not swept: {away}")
    return Finding("dead entries", "", True, f"{swept:,} swept", fixed=f"{swept:,} swept" if swept else "")
