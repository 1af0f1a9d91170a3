"""NodeAdmin of one store node: what the gateway asks it for operators beyond listing and evicting.

Explains what is missing, reads and writes single blocks (a file of them is the client's business), registers
everything with the index again, and takes and tells the budgets of accounts.
"""

from collections.abc import Callable, Sequence
from contextlib import aclosing
from dataclasses import asdict
from typing import Any

import grpc.aio

from headrace.blocks.block_codec import decode_header, encode_header
from headrace.blocks.claims import SlotReserved
from headrace.core.block import BlockHash, Chain, NamespaceId, payload_digest
from headrace.core.budgets import Budget
from headrace.core.errors import BlockCorrupt, InvalidRequest
from headrace.core.limits import CHAIN_BLOCKS_MAX
from headrace.core.ports import AlreadyStored
from headrace.store.cache_admin import answer
from headrace.store.drain_node import ReadDisk, nothing_on_disk
from headrace.store.node_drain import NodeDrain
from headrace.store.removal_log import RemovalLog
from headrace.store.store_node import StoreNode
from headrace.wire.parse import parse_budget
from headrace.wire.render import render_budget
from headrace.wire.v1 import admin_pb2 as pb
from headrace.wire.v1 import admin_pb2_grpc as pb_grpc


class NodeAdmin(pb_grpc.NodeAdminServicer):
    """Register with `add_NodeAdminServicer_to_server`."""

    def __init__(
        self,
        node: StoreNode,
        removals: RemovalLog,
        *,
        want_registration: Callable[[], None],
        drain: NodeDrain | None = None,
        save_budgets: Callable[[Sequence[Budget]], None] = lambda budgets: None,
        read_disk: ReadDisk = nothing_on_disk,
    ) -> None:
        """want_registration: has everything that the node holds registered with the index again, soon.
        read_disk: how a block is read that lies on disk alone.
        save_budgets: has a table of budgets in force after the next start too."""
        self._node = node
        self._save_budgets = save_budgets
        self._read_disk = read_disk
        self._removals = removals
        self._drain = drain
        self._want_registration = want_registration

    async def Explain(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """How much of a chain is here, and what is remembered of its blocks that left, also where they came back."""
        return await answer(context, self._explain(request))

    async def ReadBlock(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Header and payload of the last block of a chain."""
        return await answer(context, self._read(request))

    async def WriteBlock(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Store one block through reserve and commit, which check it as they check a worker's."""
        return await answer(context, self._write(request))

    async def Reregister(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Void what the index says of this node, and register what it holds."""
        self._node.renew_incarnation()
        self._want_registration()
        return pb.ReregisterReply(blocks=len(self._node.inventory()))

    async def GetBudgets(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """The table that is in force."""
        return _table(self._node.room.budgets())

    async def SetBudgets(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Merge rows into the table; answers it whole. What contradicts itself or the arena is refused as a whole."""
        return await answer(context, self._set_budgets(request))

    async def Usage(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """What each account has here."""
        return pb.UsageReply(accounts=[pb.AccountUsage(**asdict(usage)) for usage in self._node.room.usage()])

    async def CheckIntegrity(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        """Whether every account of this node balances. Passes over all that is held, in one step, and reads no disk."""
        try:
            self._node.check_integrity()
        except AssertionError as broken:
            return pb.CheckIntegrityReply(broken=str(broken) or "an account of the node does not balance")
        return pb.CheckIntegrityReply()

    async def Drain(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        """Take no new blocks and hand what is here to peers, or serve again; ends when the caller does."""
        await answer(context, self._follow_drain(request, context))

    async def _follow_drain(self, request: Any, context: grpc.aio.ServicerContext) -> None:
        if self._drain is None:
            raise InvalidRequest("this node cannot be drained")
        async with aclosing(self._drain.follow(request)) as progress:
            async for step in progress:
                await context.write(step)

    async def _set_budgets(self, request: Any) -> Any:
        before = self._node.room.budgets()
        merged = self._node.room.set_budgets([parse_budget(row) for row in request.budgets])
        if merged != before:
            self._save_budgets(merged)
        return _table(merged)

    async def _explain(self, request: Any) -> Any:
        namespace, chain = _chain(request)
        reply = pb.ExplainReply(
            held_blocks=self._node.lookup(namespace, chain), remembers_since_unix_ms=self._removals.since_unix_ms
        )
        for position in range(len(chain)):
            removal = self._removals.find(namespace, chain[position])
            if removal is not None:
                reply.removals.add(position=position, reason=removal.reason, unix_ms=removal.unix_ms)
        return reply

    async def _read(self, request: Any) -> Any:
        """From the arena, or as it lies on disk. Neither a use nor a look-up: it moves nothing and counts nothing."""
        namespace, chain = _chain(request)
        if not chain:
            raise InvalidRequest("the chain is empty", param="chain")
        found = None
        if self._node.lookup(namespace, chain) == len(chain):
            found = self._node.copy_block(namespace, chain[-1]) or await self._read_disk(namespace, chain[-1])
        if found is None or payload_digest(found[1]) != found[0].payload_xxh3:
            why = f"block {chain[-1].hex()} is not there any more, whole and with all before it"
            raise InvalidRequest(why, param="chain")
        return pb.StoredBlock(header=encode_header(found[0]), payload=bytes(found[1]))

    async def _write(self, request: Any) -> Any:
        try:
            header = decode_header(request.header)
            if len(request.payload) != header.payload_bytes or payload_digest(request.payload) != header.payload_xxh3:
                raise BlockCorrupt(header.block_hash, "payload does not match its header")
            (outcome,) = self._node.reserve([header])
        except BlockCorrupt as corrupt:
            raise InvalidRequest(
                f"this block is refused: {corrupt.why}; nothing was stored", param="block"
            ) from corrupt
        if not isinstance(outcome, SlotReserved):
            return pb.WriteBlockReply(outcome="already stored" if isinstance(outcome, AlreadyStored) else "no room")
        outcome.buffer[:] = request.payload
        self._node.commit(outcome.reservation_id, header.payload_xxh3)
        return pb.WriteBlockReply(outcome="stored")


def _table(budgets: Sequence[Budget]) -> Any:
    return pb.Budgets(budgets=[render_budget(budget) for budget in budgets])


def _chain(request: Any) -> tuple[NamespaceId, Chain]:
    if len(request.chain) > CHAIN_BLOCKS_MAX:
        raise InvalidRequest(f"a chain has at most {CHAIN_BLOCKS_MAX} blocks", param="chain")
    return NamespaceId(request.namespace), tuple(BlockHash(block_hash) for block_hash in request.chain)
