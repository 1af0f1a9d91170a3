"""CacheAdmin of one store node: list, stat, evict, pin and give times to what this node holds, and nothing else.

A node knows namespaces, not model names: a selector that names a model is resolved through the records of live workers,
and refused when none of them serves it, so that an eviction never silently means something else.
"""

import math
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc.aio

from headrace import __version__
from headrace.core.block import Tier
from headrace.core.clock import Clock, SystemClock
from headrace.core.errors import HeadraceError, IndexUnavailable, InvalidRequest
from headrace.core.generation import BlockInfo, ControlReport, EvictReport, EvictSelector
from headrace.core.limits import LIST_BLOCKS_MAX, TTL_S_MAX
from headrace.core.members import StoreNodeRecord
from headrace.core.ports import Membership
from headrace.core.retention import checked_ttl
from headrace.store.removal_log import RemovalLog
from headrace.store.store_node import StoreNode
from headrace.wire import render
from headrace.wire.parse import parse_selector
from headrace.wire.status import message_of, status_of, trailing_metadata
from headrace.wire.v1 import admin_pb2 as pb
from headrace.wire.v1 import admin_pb2_grpc as pb_grpc


class CacheAdminOfNode(pb_grpc.CacheAdminServicer):
    """Register with `add_CacheAdminServicer_to_server`."""

    def __init__(
        self,
        node: StoreNode,
        membership: Membership,
        record: Callable[[], StoreNodeRecord],
        removals: RemovalLog | None = None,
        *,
        settle: Callable[[], Awaitable[None]] | None = None,
        clock: Clock | None = None,
    ) -> None:
        """removals: follows the node's changes; without it nothing is remembered.
        settle: awaited after an eviction, until what it removed stays removed after a crash.
        clock: the node's own.
        """
        self._node = node
        self._removals = removals
        self._membership = membership
        self._settle = settle
        self._record = record
        self._clock = SystemClock() if clock is None else clock

    async def ListBlocks(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Readable blocks that the selector means, heads first, at most `limit` of them."""
        return await answer(context, self._list_blocks(request))

    async def Stat(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """This node's books."""
        return pb.StatReply(holders=[render.render_holder_stat(stat) for stat in self._node.stats()])

    async def Evict(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Evict here; one report."""
        return await answer(context, self._evict(request))

    async def Pin(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Keep a prefix here; one report for each namespace that is meant."""
        return await answer(context, self._pin(request))

    async def Unpin(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Take a pin back here."""
        return await answer(context, self._order(request, self._node.unpin))

    async def SetTtl(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Have a prefix go from here at a moment, or take such an order back."""
        return await answer(context, self._set_ttl(request))

    async def Status(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """This node only; who else is there is for the gateway to say."""
        return pb.StatusReply(
            store_nodes=[render.render_store_node(self._record())],
            unix_ms=self._clock.unix_ms(),
            version=__version__,
        )

    async def _list_blocks(self, request: Any) -> Any:
        limit = min(request.limit or LIST_BLOCKS_MAX, LIST_BLOCKS_MAX)
        blocks: list[BlockInfo] = []
        total = 0
        namespace_to_model = await self._namespace_to_model()
        for selector in self._per_namespace(parse_selector(request.selector), namespace_to_model):
            found, matching = self._node.list_blocks(selector, limit=limit - len(blocks))
            blocks += found
            total += matching
        entries = [render.render_block(b, model=namespace_to_model.get(b.base_namespace, "")) for b in blocks]
        return pb.ListBlocksReply(blocks=entries, total_blocks=total)

    async def _evict(self, request: Any) -> Any:
        selector = parse_selector(request.selector)
        known = await self._namespace_to_model() if selector.model else {}
        removals = self._removals or RemovalLog(self._clock, removals_max=0)
        with removals.because(f"evicted by operator {request.who or 'of this node'}"):
            reports = [self._node.evict(each, dry_run=request.dry_run) for each in self._per_namespace(selector, known)]
        if not request.dry_run and self._settle is not None:
            await self._settle()
        total = EvictReport(
            holder=self._node.holder_id,
            blocks=sum(report.blocks for report in reports),
            tokens=sum(report.tokens for report in reports),
            bytes=sum(report.bytes for report in reports),
            skipped_leased_blocks=sum(report.skipped_leased_blocks for report in reports),
            skipped_pinned_blocks=sum(report.skipped_pinned_blocks for report in reports),
            dry_run=request.dry_run,
            block_hashes=tuple(block_hash for report in reports for block_hash in report.block_hashes),
        )
        return pb.EvictReply(reports=[render.render_evict_report(total)])

    async def _pin(self, request: Any) -> Any:
        until_unix_ms: int | None = None
        if request.HasField("for_s"):
            if not 0 < request.for_s <= TTL_S_MAX:  # false for NaN too
                raise InvalidRequest(
                    f"for_s must lie in 0..{TTL_S_MAX} seconds; leave it out for no end", param="for_s"
                )
            until_unix_ms = self._clock.unix_ms() + math.ceil(request.for_s * 1_000)
        return await self._order(
            request, lambda each: self._node.pin(each, until_unix_ms=until_unix_ms, carried=request.carried)
        )

    async def _set_ttl(self, request: Any) -> Any:
        expires_unix_ms: int | None = None
        if request.HasField("ttl_s"):
            ttl_s = checked_ttl(request.ttl_s, param="ttl_s")
            expires_unix_ms = self._clock.unix_ms() + math.ceil(ttl_s * 1_000)
        return await self._order(
            request, lambda each: self._node.set_ttl(each, expires_unix_ms=expires_unix_ms, carried=request.carried)
        )

    async def _order(self, request: Any, carry_out: Callable[[EvictSelector], ControlReport]) -> Any:
        """Carry an order out for each namespace that its selector means, with a report for each."""
        selector = parse_selector(request.selector)
        if not selector.block_hashes and not selector.prefix_token_ids:
            raise InvalidRequest("say which: a prefix, or block hashes", param="selector")
        others = (selector.idle_for_s, selector.created_before_unix_ms, selector.free_bytes)
        if selector.tier not in (None, Tier.HOST) or any(other is not None for other in others):
            raise InvalidRequest(
                "an order is about a prefix or blocks, not about idle ones, a tier or a size", param="selector"
            )
        known = await self._namespace_to_model() if selector.model else {}
        reports = [carry_out(each) for each in self._per_namespace(selector, known)]
        return pb.ControlReply(reports=[render.render_control_report(report) for report in reports])

    def _per_namespace(self, selector: EvictSelector, namespace_to_model: dict[str, str]) -> list[EvictSelector]:
        """The same selector once per namespace of its model, without the model."""
        if selector.model is None:
            return [selector]
        named = [namespace for namespace, model in namespace_to_model.items() if model == selector.model]
        if not named:
            why = "no live worker serves it, so its namespaces are not known here; give the namespace"
            raise InvalidRequest(f"model {selector.model[:200]!r}: {why}", param="model")
        meant = [namespace for namespace in named if selector.namespace in (None, namespace)]
        return [replace(selector, model=None, namespace=namespace) for namespace in meant]

    async def _namespace_to_model(self) -> dict[str, str]:
        """Which model each namespace is of, as live workers say; empty while the index is away."""
        try:
            return {worker.namespace.id: worker.model for worker in await self._membership.workers()}
        except IndexUnavailable:
            return {}


async def answer(context: grpc.aio.ServicerContext, reply: Awaitable[Any]) -> Any:
    """The reply, or the call's end with the error's code, message and fields."""
    try:
        return await reply
    except HeadraceError as error:
        await context.abort(status_of(error).grpc_code, message_of(error), trailing_metadata(error))
        raise AssertionError("abort raises") from error
