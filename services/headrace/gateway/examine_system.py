"""Examine the whole system for an operator: is everybody there, do clocks, versions and namespaces agree, is the index
what the nodes hold? Looks at bounded samples; repairs only by having nodes register again and dead entries swept."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

import grpc

from headrace import __version__
from headrace.core.block import BlockHash, NamespaceId
from headrace.core.clock import Deadline
from headrace.core.errors import HeadraceError, IndexUnavailable
from headrace.core.generation import EvictSelector
from headrace.core.limits import ADMIN_CALL_TIMEOUT_MS, CLOCK_SKEW_MS_MAX, DOCTOR_SAMPLE_BLOCKS, INDEX_SWEEP_ENTRIES
from headrace.core.members import StoreNodeRecord, WorkerRecord
from headrace.gateway.service import GatewayService
from headrace.wire.render import render_selector
from headrace.wire.status import error_of_call, message_of
from headrace.wire.v1 import admin_pb2

TIMEOUT_S = ADMIN_CALL_TIMEOUT_MS / 1000


@dataclass(slots=True)
class Finding:
    """One thing that was looked at; `holder` is "" for what concerns everybody."""

    check: str
    holder: str
    ok: bool
    detail: str
    fixed: str = ""


@dataclass(frozen=True, slots=True)
class Stubs:
    """Ways to a node's two services."""

    cache: Callable[[StoreNodeRecord], Any]
    node: Callable[[StoreNodeRecord], Any]


async def examine_system(service: GatewayService, *, stubs: Stubs, fix: bool) -> list[Finding]:
    """Every finding, good ones too. fix: nodes that the index misrepresents register again; dead entries are swept."""
    await service.refresh()
    workers = service.table.records()
    try:
        nodes: Sequence[StoreNodeRecord] = await service.membership.store_nodes()
        findings = [Finding("index", "", service.index_available, _index_detail(service.index_available))]
    except IndexUnavailable as away:
        nodes, findings = (), [Finding("index", "", False, str(away))]
    if not nodes:
        findings.append(Finding("store nodes", "", False, "none is announced; nothing is kept but in workers' pools"))
    for node in nodes:
        findings += await _examine_node(service, node, stubs, fix=fix)
    findings += [await _examine_worker(service, worker) for worker in workers]
    if not workers:
        findings.append(Finding("workers", "", False, "none is announced; no request can be served"))
    findings += _examine_namespaces(workers)
    if fix:
        findings.append(await _sweep(service, nodes, workers))
    return findings


def _index_detail(available: bool) -> str:
    return "answers" if available else "does not answer; requests go on without reuse"


async def _examine_node(service: GatewayService, node: StoreNodeRecord, stubs: Stubs, *, fix: bool) -> list[Finding]:
    try:
        asked_ms = service.clock.unix_ms()
        status = await stubs.cache(node).Status(admin_pb2.StatusRequest(), timeout=TIMEOUT_S)
        answered_ms = service.clock.unix_ms()
        listing = await stubs.cache(node).ListBlocks(
            admin_pb2.ListBlocksRequest(selector=render_selector(EvictSelector()), limit=DOCTOR_SAMPLE_BLOCKS),
            timeout=TIMEOUT_S,
        )
        held = Finding("store node", node.holder_id, True, f"answers; holds {listing.total_blocks:,} blocks")
        found = [held, _clock(node, status.unix_ms, asked_ms, answered_ms), _version(node, status.version)]
        indexed = await _compare_with_index(service, node, listing.blocks)
        if fix and not indexed.ok:
            reply = await stubs.node(node).Reregister(admin_pb2.ReregisterRequest(), timeout=TIMEOUT_S)
            indexed.fixed = f"registers its {reply.blocks:,} blocks again"
        return [*found, indexed]
    except grpc.aio.AioRpcError as failed:
        return [Finding("store node", node.holder_id, False, message_of(error_of_call(failed)))]


def _clock(node: StoreNodeRecord, theirs_ms: int, asked_ms: int, answered_ms: int) -> Finding:
    """Its clock lies between our two readings, or is off by at least the distance."""
    off_ms = max(asked_ms - theirs_ms, theirs_ms - answered_ms, 0)
    return Finding("clock", node.holder_id, off_ms <= CLOCK_SKEW_MS_MAX, f"{off_ms:,} ms from this gateway's, or less")


def _version(node: StoreNodeRecord, version: str) -> Finding:
    return Finding("version", node.holder_id, version == __version__, f"{version or 'unknown'}, here {__version__}")


async def _compare_with_index(service: GatewayService, node: StoreNodeRecord, blocks: Sequence[Any]) -> Finding:
    """Whether the index names the sampled blocks. Listed heads first, so that chains can be put together."""
    chains: dict[tuple[str, bytes], tuple[BlockHash, ...]] = {}
    for block in blocks:
        before = chains.get((block.namespace, block.parent_hash), ())
        if block.position == len(before):
            chains[(block.namespace, block.block_hash)] = (*before, BlockHash(block.block_hash))
    missing = 0
    try:
        for (namespace, _), chain in chains.items():
            match = await service.index.longest_prefix(NamespaceId(namespace), chain)
            missing += match.of(node.holder_id) < len(chain)
    except IndexUnavailable as away:
        return Finding("index entries", node.holder_id, False, f"not compared: {away}")
    detail = f"{missing} of {len(chains)} sampled blocks are not in the index" if missing else f"{len(chains)} sampled"
    return Finding("index entries", node.holder_id, not missing, detail)


async def _examine_worker(service: GatewayService, worker: WorkerRecord) -> Finding:
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


async def _sweep(service: GatewayService, nodes: Sequence[StoreNodeRecord], workers: Sequence[WorkerRecord]) -> Finding:
    live = {record.holder_id: record.incarnation for record in (*nodes, *workers)}
    try:
        swept = await service.index.sweep(live, limit=INDEX_SWEEP_ENTRIES)
    except IndexUnavailable as away:
        return Finding("dead entries", "", False, f"not swept: {away}")
    return Finding("dead entries", "", True, f"{swept:,} swept", fixed=f"{swept:,} swept" if swept else "")
