"""The CacheAdmin service over all holders: every live store node and every worker's own pool.

Reports holder by holder what was in fact done. A holder that does not answer has its error in the reply; none is left
out silently. Prefixes given as text or token ids are tokenised and hashed here, for every live namespace of the model.
"""

import asyncio
import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

import grpc

from headrace.core.block import Namespace, Tier
from headrace.core.clock import Deadline
from headrace.core.errors import HeadraceError, IndexUnavailable, InvalidRequest
from headrace.core.generation import DeviceListing, EvictReport, EvictSelector, HolderStat
from headrace.core.limits import ADMIN_CALL_TIMEOUT_MS, LIST_BLOCKS_MAX
from headrace.core.members import StoreNodeRecord, WorkerRecord
from headrace.gateway.admin_scope import AdminScope, admin_scope
from headrace.gateway.answer_why_miss import answer_why_miss
from headrace.gateway.audit_log import audit
from headrace.gateway.authenticate import authorization_of
from headrace.gateway.examine_system import Stubs, examine_system
from headrace.gateway.move_block import move_block, read_block
from headrace.gateway.price_eviction import price_eviction
from headrace.gateway.refuse_call import RefuseCall
from headrace.gateway.resolve_selector import resolve_selector
from headrace.gateway.service import GatewayService
from headrace.wire.render import (
    render_block,
    render_evict_report,
    render_holder_stat,
    render_selector,
    render_store_node,
    render_worker,
)
from headrace.wire.status import error_of_call, message_of
from headrace.wire.v1 import admin_pb2, admin_pb2_grpc

Reply = TypeVar("Reply")

TIMEOUT_S = ADMIN_CALL_TIMEOUT_MS / 1000


class CacheAdminRpc:
    """headrace.v1.CacheAdmin over one service. `channel_to` gives the gRPC channel to an address."""

    def __init__(
        self, service: GatewayService, *, channel_to: Callable[[str], grpc.aio.Channel], refuse: RefuseCall
    ) -> None:
        self._service = service
        self._channel_to = channel_to
        self._refuse = refuse

    async def ListBlocks(self, request: admin_pb2.ListBlocksRequest, grpc_context: Any) -> admin_pb2.ListBlocksReply:
        """Blocks in every tier of all nodes and workers, up to the limit."""
        return await self._answer(grpc_context, lambda scope: self._list_blocks(request, scope))

    async def Stat(self, request: admin_pb2.StatRequest, grpc_context: Any) -> admin_pb2.StatReply:
        """Books of every holder as they are now; of a caller that may not see all, its own share."""
        return await self._answer(grpc_context, self._stat)

    async def Evict(self, request: admin_pb2.EvictRequest, grpc_context: Any) -> admin_pb2.EvictReply:
        """Evict (dry: count) on every holder."""
        return await self._answer(grpc_context, lambda scope: self._evict(request, scope))

    async def Status(self, request: admin_pb2.StatusRequest, grpc_context: Any) -> admin_pb2.StatusReply:
        """Who is there. When the membership service is away: who was there last, and that it is away."""
        return await self._answer(grpc_context, self._status)

    async def WhyMiss(self, request: admin_pb2.WhyMissRequest, grpc_context: Any) -> admin_pb2.WhyMissReply:
        """Why a prompt, or a request that was served lately, is not all in the cache now."""
        return await self._answer(
            grpc_context,
            lambda scope: answer_why_miss(
                request,
                service=self._service,
                scope=scope,
                stub_of=self._node_stub,
                list_everywhere=lambda selectors: self._list_everywhere(selectors, limit=LIST_BLOCKS_MAX),
            ),
        )

    async def Doctor(self, request: admin_pb2.DoctorRequest, grpc_context: Any) -> admin_pb2.DoctorReply:
        """What is well and what is not, and (asked to) what was done about it."""
        return await self._answer(grpc_context, lambda scope: self._doctor(request, scope))

    async def _doctor(self, request: admin_pb2.DoctorRequest, scope: AdminScope) -> admin_pb2.DoctorReply:
        scope.require_all("examine the system")
        stubs = Stubs(cache=self._stub, node=self._node_stub)
        findings = await examine_system(self._service, stubs=stubs, fix=request.fix)
        if request.fix:
            fixed = {f"{finding.check} {finding.holder}": finding.fixed for finding in findings if finding.fixed}
            audit(scope.tenant.name, "doctor --fix", {}, fixed)
        return admin_pb2.DoctorReply(findings=[admin_pb2.Finding(**dataclasses.asdict(each)) for each in findings])

    async def ReadBlock(self, request: admin_pb2.ReadBlockRequest, grpc_context: Any) -> admin_pb2.StoredBlock:
        """One block's header and payload, of a named node."""
        return await self._answer(grpc_context, lambda scope: self._read_block(request, scope))

    async def WriteBlock(self, request: admin_pb2.StoredBlock, grpc_context: Any) -> admin_pb2.WriteBlockReply:
        """Store one block on a named node; it checks everything again."""
        return await self._answer(grpc_context, lambda scope: self._write_block(request, scope))

    async def _read_block(self, request: admin_pb2.ReadBlockRequest, scope: AdminScope) -> admin_pb2.StoredBlock:
        scope.require_all("export blocks")
        node = await self._node_named(request.holder)
        return await read_block(request, node, live=self._live_namespaces(), stub_of=self._node_stub)

    async def _write_block(self, request: admin_pb2.StoredBlock, scope: AdminScope) -> admin_pb2.WriteBlockReply:
        scope.require_all("import blocks")
        node = await self._node_named(request.holder)
        reply = await move_block(request, node, live=self._live_namespaces(), stub_of=self._node_stub)
        asked = {"holder": node.holder_id, "bytes": len(request.payload)}
        audit(scope.tenant.name, "import block", asked, {"outcome": reply.outcome})
        return reply

    async def _node_named(self, holder: str) -> StoreNodeRecord:
        await self._service.refresh()
        nodes, _ = await self._holders([holder])
        if not nodes:
            raise InvalidRequest(f"{holder[:80]!r} is no store node; only those are read and written", param="holder")
        return nodes[0]

    def _live_namespaces(self) -> list[Namespace]:
        return [worker.namespace for worker in self._service.table.records()]

    async def _answer(self, grpc_context: Any, work: Callable[[AdminScope], Awaitable[Reply]]) -> Reply:
        """Find out who asks, then do the work within what that caller may see."""
        try:
            tenant = self._service.authenticate(authorization_of(grpc_context))
            return await work(admin_scope(tenant, self._service.key_ring))
        except Exception as error:
            await self._refuse(grpc_context, error)

    async def _list_blocks(self, request: admin_pb2.ListBlocksRequest, scope: AdminScope) -> admin_pb2.ListBlocksReply:
        selectors = await self._resolve(request.selector, scope)
        limit = min(request.limit or LIST_BLOCKS_MAX, LIST_BLOCKS_MAX)
        whole = await self._list_everywhere(selectors, limit=limit, holders=request.selector.holders)
        await self._name_models(whole, with_text=request.with_text)
        return whole

    async def _list_everywhere(
        self, selectors: Sequence[EvictSelector], *, limit: int, holders: Sequence[str] = ()
    ) -> admin_pb2.ListBlocksReply:
        nodes, workers = await self._holders(holders)

        async def ask(node: StoreNodeRecord) -> admin_pb2.ListBlocksReply:
            merged = admin_pb2.ListBlocksReply()
            try:
                for selector in selectors:
                    asked = admin_pb2.ListBlocksRequest(selector=render_selector(selector), limit=limit)
                    reply = await self._stub(node).ListBlocks(asked, timeout=TIMEOUT_S)
                    merged.blocks.extend(reply.blocks)
                    merged.total_blocks += reply.total_blocks
            except grpc.aio.AioRpcError as failed:
                merged.errors.add(holder=node.holder_id, error=message_of(error_of_call(failed)))
            return merged

        work = [ask(node) for node in nodes]
        for worker in workers:
            work.append(self._list_on_worker(worker, self._for_worker(worker, selectors), limit))
        whole = admin_pb2.ListBlocksReply()
        for reply in await _all(work):
            whole.blocks.extend(reply.blocks[: limit - len(whole.blocks)])
            whole.errors.extend(reply.errors)
            whole.total_blocks += reply.total_blocks
        return whole

    async def _holders(self, named: Sequence[str]) -> tuple[list[StoreNodeRecord], list[WorkerRecord]]:
        """The live holders of these names; all of them when none is named. Raises InvalidRequest for an unknown one."""
        nodes, workers = await self._service.membership.store_nodes(), self._service.table.records()
        live = [record.holder_id for record in (*nodes, *workers)]
        unknown = [name for name in named if name not in live]
        if unknown:
            raise InvalidRequest(
                f"no live holder {unknown[0][:80]!r}; live: {', '.join(live) or 'none'}", param="holders"
            )
        return (
            [node for node in nodes if not named or node.holder_id in named],
            [worker for worker in workers if not named or worker.holder_id in named],
        )

    async def _name_models(self, reply: admin_pb2.ListBlocksReply, *, with_text: bool) -> None:
        """Fill in each block's model and, if asked for, its text. Blocks of a model that no live worker serves keep
        neither: only workers tell which model a namespace is of."""
        by_namespace = {w.namespace.id: w for w in self._service.table.records()}
        deadline = Deadline.after(TIMEOUT_S, self._service.clock)
        for block in reply.blocks:
            worker = by_namespace.get(block.base_namespace)
            if worker is None:
                continue
            block.model = worker.model
            if with_text and worker.model_path:
                tokenizer = await self._service.tokenizers.get(worker.model_path, deadline=deadline)
                block.text = tokenizer.decode(tuple(block.token_ids))

    async def _stat(self, scope: AdminScope) -> admin_pb2.StatReply:
        if not scope.sees_all:
            return await self._stat_of_own(scope)

        async def ask(node: StoreNodeRecord) -> list[admin_pb2.HolderStat]:
            try:
                return list((await self._stub(node).Stat(admin_pb2.StatRequest(), timeout=TIMEOUT_S)).holders)
            except grpc.aio.AioRpcError as failed:
                error = message_of(error_of_call(failed))
                return [admin_pb2.HolderStat(holder=node.holder_id, tier=Tier.HOST.value, error=error)]

        async def ask_worker(worker: WorkerRecord) -> list[admin_pb2.HolderStat]:
            try:
                return [render_holder_stat((await self._device(worker, EvictSelector(), limit=0)).stat)]
            except HeadraceError as error:
                tier = Tier.DEVICE.value
                return [admin_pb2.HolderStat(holder=worker.holder_id, tier=tier, error=message_of(error))]

        await self._service.refresh()
        work = [ask(node) for node in await self._service.membership.store_nodes()]
        work += [ask_worker(worker) for worker in self._service.table.records()]
        return admin_pb2.StatReply(holders=[holder for reply in await _all(work) for holder in reply])

    async def _list_on_worker(
        self, worker: WorkerRecord, selectors: Sequence[EvictSelector], limit: int
    ) -> admin_pb2.ListBlocksReply:
        reply = admin_pb2.ListBlocksReply()
        try:
            for selector in selectors:
                listing = await self._device(worker, selector, limit=limit - len(reply.blocks))
                reply.blocks.extend(render_block(block) for block in listing.blocks)
                reply.total_blocks += listing.total_blocks
        except HeadraceError as error:
            reply.errors.add(holder=worker.holder_id, error=message_of(error))
        return reply

    async def _device(self, worker: WorkerRecord, selector: EvictSelector, *, limit: int) -> DeviceListing:
        async with Deadline.after(TIMEOUT_S, self._service.clock).scope(f"listing what {worker.worker_id} holds"):
            return await self._service.calls.list_device(worker, selector, limit=limit)

    def _for_worker(self, worker: WorkerRecord, selectors: Sequence[EvictSelector]) -> list[EvictSelector]:
        """The selectors that can mean blocks of this worker's pool: all but those of another worker's namespace. A
        narrowed namespace is no worker's own, so everybody is asked for its blocks."""
        others = {w.namespace.id for w in self._service.table.records()} - {worker.namespace.id}
        return [selector for selector in selectors if selector.namespace not in others]

    async def _stat_of_own(self, scope: AdminScope) -> admin_pb2.StatReply:
        """Each holder as if it held the caller's blocks and nothing else: what others hold must not show, not even as
        room that is left. Counted as a dry eviction of everything in scope."""
        reports = await self._evict_everywhere(await self._resolve(admin_pb2.Selector(), scope), dry_run=True)
        return admin_pb2.StatReply(holders=[render_holder_stat(_stat_of_report(report)) for report in reports])

    async def _evict(self, request: admin_pb2.EvictRequest, scope: AdminScope) -> admin_pb2.EvictReply:
        selectors = await self._resolve(request.selector, scope)
        holders = request.selector.holders
        reports = await self._evict_everywhere(
            selectors, dry_run=request.dry_run, holders=holders, who=scope.tenant.name
        )
        spaces = dict.fromkeys(EvictSelector(namespace=selector.namespace) for selector in selectors)
        listing = await self._list_everywhere(tuple(spaces), limit=LIST_BLOCKS_MAX)
        price = price_eviction(
            reports,
            copies=(block.block_hash for block in listing.blocks),
            copies_are_all=listing.total_blocks == len(listing.blocks) and not listing.errors,
            dry_run=request.dry_run,
        )
        if not request.dry_run:
            self._audit("evict", request.selector, scope, reports)
        measured = self._service.prefill_rate.tokens_per_s
        source = "configured" if request.tokens_per_s > 0 else "measured" if measured else ""
        return admin_pb2.EvictReply(
            reports=[render_evict_report(report) for report in reports],
            lost_tokens=price.lost_tokens,
            lost_tokens_at_most=price.at_most,
            tokens_per_s=request.tokens_per_s if source == "configured" else measured,
            tokens_per_s_from=source,
        )

    def _audit(
        self, what: str, selector: admin_pb2.Selector, scope: AdminScope, reports: Sequence[EvictReport]
    ) -> None:
        asked = {field.name: value for field, value in selector.ListFields() if not field.name.startswith("prefix")}
        prefix = len(selector.prefix_text) or len(selector.prefix_token_ids)
        effect = {
            "blocks": sum(report.blocks for report in reports),
            "bytes": sum(report.bytes for report in reports),
            "holders": {report.holder: report.error or report.blocks for report in reports},
        }
        audit(scope.tenant.name, what, {**asked, "prefix_length": prefix}, effect)

    async def _evict_everywhere(
        self, selectors: Sequence[EvictSelector], *, dry_run: bool, holders: Sequence[str] = (), who: str = ""
    ) -> list[EvictReport]:
        nodes, workers = await self._holders(holders)
        work = [self._evict_on_node(node, selectors, dry_run, who) for node in nodes]
        for worker in workers:
            own = self._for_worker(worker, selectors)
            if own:
                work.append(self._evict_on_worker(worker, own, dry_run))
        return await _all(work)

    async def _evict_on_node(
        self, node: StoreNodeRecord, selectors: Sequence[EvictSelector], dry_run: bool, who: str
    ) -> EvictReport:
        report = _nothing_evicted(node.holder_id, dry_run)
        try:
            for selector in selectors:
                rest = render_selector(_rest(selector, report))
                asked = admin_pb2.EvictRequest(selector=rest, dry_run=dry_run, who=who)
                for part in (await self._stub(node).Evict(asked, timeout=TIMEOUT_S)).reports:
                    report = _add(report, part)
        except grpc.aio.AioRpcError as failed:
            return dataclasses.replace(report, error=message_of(error_of_call(failed)))
        return report

    async def _evict_on_worker(
        self, worker: WorkerRecord, selectors: Sequence[EvictSelector], dry_run: bool
    ) -> EvictReport:
        report = _nothing_evicted(worker.holder_id, dry_run)
        try:
            async with Deadline.after(TIMEOUT_S, self._service.clock).scope(f"evict on {worker.worker_id}"):
                for selector in selectors:
                    rest = _rest(selector, report)
                    report = _add(report, await self._service.calls.evict_device(worker, rest, dry_run=dry_run))
        except HeadraceError as error:
            return dataclasses.replace(report, error=message_of(error))
        return report

    async def _status(self, scope: AdminScope) -> admin_pb2.StatusReply:
        scope.require_all("see every worker's load")
        await self._service.refresh()
        try:
            nodes = await self._service.membership.store_nodes()
        except IndexUnavailable:
            nodes = ()
        return admin_pb2.StatusReply(
            store_nodes=[render_store_node(node) for node in nodes],
            workers=[render_worker(worker) for worker in self._service.table.records()],
            index_available=self._service.index_available,
        )

    async def _resolve(self, selector: admin_pb2.Selector, scope: AdminScope) -> tuple[EvictSelector, ...]:
        await self._service.refresh()
        return await resolve_selector(
            selector,
            workers=self._service.table.records(),
            tokenizers=self._service.tokenizers,
            deadline=Deadline.after(TIMEOUT_S, self._service.clock),
            scope=scope,
            unix_ms=self._service.clock.unix_ms(),
        )

    def _node_stub(self, node: StoreNodeRecord) -> Any:
        stub_of: Any = admin_pb2_grpc.NodeAdminStub
        return stub_of(self._channel_to(node.address))

    def _stub(self, node: StoreNodeRecord) -> Any:
        stub_of: Any = admin_pb2_grpc.CacheAdminStub  # generated code is untyped
        return stub_of(self._channel_to(node.address))


async def _all(work: Sequence[Awaitable[Reply]]) -> list[Reply]:
    """Results in the order of `work`, run at the same time; a bug in one ends all."""
    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(_awaited(item)) for item in work]
    return [task.result() for task in tasks]


async def _awaited(item: Awaitable[Reply]) -> Reply:
    return await item


def _nothing_evicted(holder: str, dry_run: bool) -> EvictReport:
    return EvictReport(holder=holder, blocks=0, tokens=0, bytes=0, skipped_leased_blocks=0, dry_run=dry_run)


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
        block_hashes=(*report.block_hashes, *part.block_hashes),
    )


def _stat_of_report(report: EvictReport) -> HolderStat:
    """The books of a holder that had nothing but the blocks of this dry eviction."""
    blocks = report.blocks + report.skipped_leased_blocks
    return HolderStat(
        holder=report.holder,
        tier=(Tier.DEVICE if report.holder.startswith("worker:") else Tier.HOST).value,
        incarnation=0,
        total_blocks=blocks,
        free_blocks=0,
        committed_blocks=blocks,
        reserved_blocks=0,
        leased_blocks=report.skipped_leased_blocks,
        block_bytes=report.bytes // report.blocks if report.blocks else 0,
        lookups_tokens=0,
        hits_tokens=0,
        evicted_blocks=0,
        error=report.error,
    )
