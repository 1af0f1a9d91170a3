"""The CacheAdmin service over all holders: every live store node and every worker's own pool.

Reports holder by holder what was in fact done. A holder that does not answer has its error in the reply; none is left
out silently. Prefixes given as text or token ids are tokenised and hashed here, for every live namespace of the model.
"""

import dataclasses
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any, TypeVar

import grpc

from headrace.core.block import Namespace, Tier
from headrace.core.errors import HeadraceError, IndexUnavailable, InvalidRequest
from headrace.core.generation import EvictReport, EvictSelector, HolderStat
from headrace.core.limits import LIST_BLOCKS_MAX
from headrace.core.members import StoreNodeRecord, WorkerRecord
from headrace.gateway.admin_scope import AdminScope, admin_scope
from headrace.gateway.answer_evict import answer_evict
from headrace.gateway.answer_why_miss import answer_why_miss
from headrace.gateway.audit_log import ChangeEnd, asked_of, audit, audited_change
from headrace.gateway.authenticate import authorization_of
from headrace.gateway.carry_out import carry_out
from headrace.gateway.drain_node import drain_node
from headrace.gateway.evict_everywhere import evict_everywhere
from headrace.gateway.examine_system import examine_system
from headrace.gateway.explain_route import explain_route
from headrace.gateway.fleet import IS_ELSEWHERE, TIMEOUT_S, Fleet, all_of
from headrace.gateway.list_everywhere import list_everywhere, name_blocks
from headrace.gateway.list_tenants import list_tenants
from headrace.gateway.move_block import NO_ROOM, move_block, read_block
from headrace.gateway.order_prefix import order_prefix
from headrace.gateway.peer_gateways import PeerGateways
from headrace.gateway.refuse_call import RefuseCall, telling
from headrace.gateway.seen_members import GoneMember
from headrace.gateway.service import GatewayService
from headrace.gateway.set_quota import set_quota
from headrace.wire.render import (
    render_gateway,
    render_holder_stat,
    render_store_node,
    render_worker,
)
from headrace.wire.status import error_of_call, message_of
from headrace.wire.v1 import admin_pb2, admin_pb2_grpc

Reply = TypeVar("Reply")


class CacheAdminRpc(admin_pb2_grpc.CacheAdminServicer):
    """headrace.v1.CacheAdmin over one service. `channel_to` gives the gRPC channel to an address."""

    def __init__(
        self,
        service: GatewayService,
        *,
        channel_to: Callable[[str], grpc.aio.Channel],
        refuse: RefuseCall,
        peers: PeerGateways | None = None,
        counted: bool = True,
    ) -> None:
        """peers: the other gateways, which are asked for requests that this one does not remember; None asks nobody.
        counted: whether what is refused counts as a caller's; not of what other gateways ask."""
        self._service = service
        self._fleet = Fleet(service, channel_to=channel_to)
        self._refuse = telling(refuse, service.call_refused) if counted else refuse
        self._peers = peers

    async def ListBlocks(self, request: admin_pb2.ListBlocksRequest, grpc_context: Any) -> admin_pb2.ListBlocksReply:
        """Blocks in every tier of all nodes and workers, up to the limit."""
        return await self._answer(grpc_context, lambda scope: self._list_blocks(request, scope))

    async def Stat(self, request: admin_pb2.StatRequest, grpc_context: Any) -> admin_pb2.StatReply:
        """Books of every holder as they are now; of a caller that may not see all, its own share."""
        return await self._answer(grpc_context, self._stat)

    async def Evict(self, request: admin_pb2.EvictRequest, grpc_context: Any) -> admin_pb2.EvictReply:
        """Evict (dry: count) on every holder."""
        return await self._change(grpc_context, lambda scope: answer_evict(self._fleet, scope, request))

    async def Status(self, request: admin_pb2.StatusRequest, grpc_context: Any) -> admin_pb2.StatusReply:
        """Who is there. When the membership service is away: who was there last, and that it is away."""
        return await self._answer(grpc_context, self._status)

    async def WhyMiss(self, request: admin_pb2.WhyMissRequest, grpc_context: Any) -> admin_pb2.WhyMissReply:
        """Why a prompt, or a request that was served lately, is not all in the cache now."""
        return await self._answer_or_ask(
            "WhyMiss",
            request,
            grpc_context,
            lambda scope: answer_why_miss(
                request,
                service=self._service,
                scope=scope,
                stub_of=self._fleet.node_stub,
                list_everywhere=lambda selectors: list_everywhere(self._fleet, selectors, limit=LIST_BLOCKS_MAX),
            ),
        )

    async def ExplainRoute(
        self, request: admin_pb2.ExplainRouteRequest, grpc_context: Any
    ) -> admin_pb2.ExplainRouteReply:
        """Why one of the last requests went where it went, and what became of it."""
        return await self._answer_or_ask(
            "ExplainRoute", request, grpc_context, lambda scope: self._explain_route(request, scope)
        )

    async def Doctor(self, request: admin_pb2.DoctorRequest, grpc_context: Any) -> admin_pb2.DoctorReply:
        """What is well and what is not, and (asked to) what was done about it."""
        return await self._change(grpc_context, lambda scope: self._doctor(request, scope))

    async def Pin(self, request: admin_pb2.PinRequest, grpc_context: Any) -> admin_pb2.ControlReply:
        """Keep a prefix on every node that holds it."""
        return await self._change(grpc_context, lambda scope: order_prefix(self._fleet, "Pin", request, scope))

    async def Unpin(self, request: admin_pb2.PinRequest, grpc_context: Any) -> admin_pb2.ControlReply:
        """Take a pin back on every node."""
        return await self._change(grpc_context, lambda scope: order_prefix(self._fleet, "Unpin", request, scope))

    async def SetTtl(self, request: admin_pb2.SetTtlRequest, grpc_context: Any) -> admin_pb2.ControlReply:
        """Have a prefix go at a moment, or take such an order back."""
        return await self._change(grpc_context, lambda scope: order_prefix(self._fleet, "SetTtl", request, scope))

    async def ListTenants(self, request: admin_pb2.ListTenantsRequest, grpc_context: Any) -> admin_pb2.ListTenantsReply:
        """Tenants, their budgets and what they have on each node."""
        return await self._answer(grpc_context, lambda scope: list_tenants(self._fleet, scope))

    async def SetQuota(self, request: admin_pb2.SetQuotaRequest, grpc_context: Any) -> admin_pb2.SetQuotaReply:
        """A tenant's quota and protected minimum on each node."""
        return await self._change(grpc_context, lambda scope: set_quota(self._fleet, scope, request))

    async def DrainNode(
        self, request: admin_pb2.DrainNodeRequest, grpc_context: Any
    ) -> AsyncIterator[admin_pb2.DrainNodeProgress]:
        """Have a node take no new blocks and hand what it holds to others."""
        try:
            scope = admin_scope(self._service.authenticate(authorization_of(grpc_context)), self._service.key_ring)
            scope.require_all("drain nodes")
            async with aclosing(drain_node(request, self._fleet, who=scope.tenant.name)) as steps:
                async for progress in steps:
                    yield progress
        except Exception as error:
            await self._refuse(grpc_context, error)

    async def ReadBlock(self, request: admin_pb2.ReadBlockRequest, grpc_context: Any) -> admin_pb2.StoredBlock:
        """One block's header and payload, of a named node."""
        return await self._answer(grpc_context, lambda scope: self._read_block(request, scope))

    async def WriteBlock(self, request: admin_pb2.StoredBlock, grpc_context: Any) -> admin_pb2.WriteBlockReply:
        """Store one block on a named node; it checks everything again."""
        return await self._change(grpc_context, lambda scope: self._write_block(request, scope))

    async def _explain_route(
        self, request: admin_pb2.ExplainRouteRequest, scope: AdminScope
    ) -> admin_pb2.ExplainRouteReply:
        return explain_route(request, self._service.planner.decisions, scope)

    async def _doctor(self, request: admin_pb2.DoctorRequest, scope: AdminScope) -> admin_pb2.DoctorReply:
        scope.require_all("examine the system")
        if request.fix:
            with audited_change(scope.tenant.name, "doctor --fix", {}) as change:
                findings = await examine_system(self._fleet, fixing=change)
        else:
            findings = await examine_system(self._fleet)
        return admin_pb2.DoctorReply(findings=[admin_pb2.Finding(**dataclasses.asdict(each)) for each in findings])

    async def _read_block(self, request: admin_pb2.ReadBlockRequest, scope: AdminScope) -> admin_pb2.StoredBlock:
        scope.require_all("export blocks")
        node = await self._fleet.node_named(request.holder)
        block = await read_block(request, node, live=self._live_namespaces(), stub_of=self._fleet.node_stub)
        asked = {"holder": node.holder_id, "namespace": request.namespace, "block": list(request.chain[-1:])}
        audit(scope.tenant.name, "export block", asked, {"bytes": len(block.payload)})
        return block

    async def _write_block(self, request: admin_pb2.StoredBlock, scope: AdminScope) -> admin_pb2.WriteBlockReply:
        scope.require_all("import blocks")
        asked = {"holder": request.holder, "bytes": len(request.payload)}
        with audited_change(scope.tenant.name, "import block", asked) as change:
            node = await self._fleet.node_named(request.holder)
            reply = await move_block(request, node, live=self._live_namespaces(), stub_of=self._fleet.node_stub)
            change.effect = {"outcome": reply.outcome}
            change.ended = ChangeEnd.REFUSED if reply.outcome == NO_ROOM else ChangeEnd.DONE
        return reply

    def _live_namespaces(self) -> list[Namespace]:
        return [worker.namespace for worker in self._service.table.records()]

    async def _answer(self, grpc_context: Any, work: Callable[[AdminScope], Awaitable[Reply]]) -> Reply:
        """Find out who asks, then do the work within what that caller may see."""
        try:
            tenant = self._service.authenticate(authorization_of(grpc_context))
            return await work(admin_scope(tenant, self._service.key_ring))
        except Exception as error:
            await self._refuse(grpc_context, error)

    async def _change(self, grpc_context: Any, work: Callable[[AdminScope], Coroutine[Any, Any, Reply]]) -> Reply:
        """As `_answer`, for work that changes something: it is done to its end."""
        return await self._answer(grpc_context, lambda scope: carry_out(work(scope)))

    async def _answer_or_ask(
        self, rpc: str, request: Any, grpc_context: Any, work: Callable[[AdminScope], Awaitable[Reply]]
    ) -> Reply:
        """As `_answer`; a request id that is not known here is asked for at the other gateways."""

        async def answer(scope: AdminScope) -> Reply:
            try:
                return await work(scope)
            except InvalidRequest as unknown:
                if self._peers is None or unknown.param != "request_id":
                    raise
                authorization = authorization_of(grpc_context)
                reply: Reply = await self._peers.ask(rpc, request, authorization=authorization, unknown=unknown)
                return reply

        return await self._answer(grpc_context, answer)

    async def _list_blocks(self, request: admin_pb2.ListBlocksRequest, scope: AdminScope) -> admin_pb2.ListBlocksReply:
        selectors = await self._fleet.resolve(request.selector, scope)
        limit = min(request.limit or LIST_BLOCKS_MAX, LIST_BLOCKS_MAX)
        whole = await list_everywhere(self._fleet, selectors, limit=limit, holders=request.selector.holders)
        await name_blocks(self._fleet, whole, with_text=request.with_text)
        if request.with_text and scope.sees_all:
            audit(scope.tenant.name, "read text", asked_of(request.selector), {"blocks": len(whole.blocks)})
        return whole

    async def _stat(self, scope: AdminScope) -> admin_pb2.StatReply:
        if not scope.sees_all:
            return await self._stat_of_own(scope)

        async def ask(node: StoreNodeRecord) -> list[admin_pb2.HolderStat]:
            try:
                return list(
                    (await self._fleet.cache_stub(node).Stat(admin_pb2.StatRequest(), timeout=TIMEOUT_S)).holders
                )
            except grpc.aio.AioRpcError as failed:
                error = message_of(error_of_call(failed))
                return [admin_pb2.HolderStat(holder=node.holder_id, tier=Tier.HOST.value, error=error)]

        async def ask_worker(worker: WorkerRecord) -> list[admin_pb2.HolderStat]:
            try:
                return [render_holder_stat((await self._fleet.list_device(worker, EvictSelector(), limit=0)).stat)]
            except HeadraceError as error:
                tier = Tier.DEVICE.value
                return [admin_pb2.HolderStat(holder=worker.holder_id, tier=tier, error=message_of(error))]

        await self._service.refresh()
        work = [ask(node) for node in await self._service.membership.store_nodes()]
        work += [ask_worker(worker) for worker in self._service.table.records()]
        stats = [holder for reply in await all_of(work) for holder in reply]
        for holder in self._fleet.elsewhere():
            stats.append(admin_pb2.HolderStat(holder=holder, tier=Tier.DEVICE.value, error=IS_ELSEWHERE))
        return admin_pb2.StatReply(holders=stats)

    async def _stat_of_own(self, scope: AdminScope) -> admin_pb2.StatReply:
        """Each holder as if it held the caller's blocks and nothing else: what others hold must not show, not even as
        room that is left. Counted as a dry eviction of everything in scope."""
        reports = await evict_everywhere(
            self._fleet, await self._fleet.resolve(admin_pb2.Selector(), scope), dry_run=True
        )
        return admin_pb2.StatReply(holders=[render_holder_stat(_stat_of_report(report)) for report in reports])

    async def _status(self, scope: AdminScope) -> admin_pb2.StatusReply:
        scope.require_all("see every worker's load")
        await self._service.refresh()
        members = self._service.membership
        with suppress(IndexUnavailable):  # then it is known who was there last
            await members.store_nodes()
            await members.gateways()
        return admin_pb2.StatusReply(
            store_nodes=[render_store_node(node) for node in members.last_store_nodes()],
            workers=[render_worker(worker) for worker in self._service.table.records()],
            gateways=[render_gateway(gateway) for gateway in members.last_gateways()],
            gone=[render_gone(each) for each in members.gone()],
            index_available=self._service.index_available,
        )


def render_gone(gone: GoneMember) -> admin_pb2.GoneMember:
    """One that was there lately."""
    return admin_pb2.GoneMember(member=gone.member, host=gone.host, last_seen_unix_ms=gone.last_seen_unix_ms)


def _stat_of_report(report: EvictReport) -> HolderStat:
    """The books of a holder that had nothing but the blocks of this dry eviction, pinned ones among them."""
    blocks = report.blocks + report.skipped_leased_blocks + report.skipped_pinned_blocks
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
