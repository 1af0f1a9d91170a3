"""CacheAdmin of one store node: list, stat and evict what this node holds, and nothing else.

A node knows namespaces, not model names: a selector that names a model is resolved through the records of live workers,
and refused when none of them serves it, so that an eviction never silently means something else.
"""

from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import grpc.aio

from headrace import __version__
from headrace.core.clock import SystemClock
from headrace.core.errors import HeadraceError, IndexUnavailable, InvalidRequest
from headrace.core.generation import BlockInfo, EvictReport, EvictSelector
from headrace.core.limits import LIST_BLOCKS_MAX
from headrace.core.members import StoreNodeRecord
from headrace.core.ports import Membership
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
    ) -> None:
        """removals: follows the node's changes; without it nothing is remembered.
        settle: awaited after an eviction, until what it removed stays removed after a crash.
        """
        self._node = node
        self._removals = removals
        self._membership = membership
        self._settle = settle
        self._record = record

    async def ListBlocks(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Readable blocks that the selector means, heads first, at most `limit` of them."""
        return await answer(context, self._list_blocks(request))

    async def Stat(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """This node's books."""
        return pb.StatReply(holders=[render.render_holder_stat(stat) for stat in self._node.stats()])

    async def Evict(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Evict here; one report."""
        return await answer(context, self._evict(request))

    async def Status(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """This node only; who else is there is for the gateway to say."""
        return pb.StatusReply(
            store_nodes=[render.render_store_node(self._record())],
            unix_ms=SystemClock().unix_ms(),
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
        removals = self._removals or RemovalLog(SystemClock(), removals_max=0)
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
            dry_run=request.dry_run,
            block_hashes=tuple(block_hash for report in reports for block_hash in report.block_hashes),
        )
        return pb.EvictReply(reports=[render.render_evict_report(total)])

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
