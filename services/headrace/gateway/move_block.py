"""Read single blocks from store nodes and write them to store nodes, for export and import."""

from collections.abc import Callable, Iterable
from typing import Any

import grpc

from headrace.blocks.block_codec import decode_header
from headrace.core.block import Namespace
from headrace.core.errors import BlockCorrupt, InvalidRequest
from headrace.core.members import StoreNodeRecord
from headrace.gateway.fleet import TIMEOUT_S
from headrace.wire.status import error_of_call
from headrace.wire.v1 import admin_pb2

StubOf = Callable[[StoreNodeRecord], Any]

NO_ROOM = "no room"  # a node's outcome for a block that it did not store, as `admin.proto` has it


async def move_block(
    request: admin_pb2.StoredBlock, node: StoreNodeRecord, *, live: Iterable[Namespace], stub_of: StubOf
) -> admin_pb2.WriteBlockReply:
    """Write a block to a node, once its namespace is known to be that of a live worker or narrowed from one.

    Raises InvalidRequest for a block that does not check out, and for one of another namespace: the message names the
    fields that differ, as far as the block's file says them.
    """
    try:
        base = decode_header(request.header).base_namespace
    except BlockCorrupt as corrupt:
        raise InvalidRequest(f"this block is refused: {corrupt.why}; nothing stored", param="block") from corrupt
    known = {namespace.id: namespace for namespace in live}
    if base not in known:
        raise InvalidRequest(_why_not(dict(request.namespace_fields), known.values()), param="namespace")
    try:
        reply: admin_pb2.WriteBlockReply = await stub_of(node).WriteBlock(request, timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as failed:
        raise error_of_call(failed) from failed
    return reply


async def read_block(
    request: admin_pb2.ReadBlockRequest, node: StoreNodeRecord, *, live: Iterable[Namespace], stub_of: StubOf
) -> admin_pb2.StoredBlock:
    """Read a block from a node, with the fields of its model's namespace if a live worker announces it."""
    try:
        block: admin_pb2.StoredBlock = await stub_of(node).ReadBlock(request, timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as failed:
        raise error_of_call(failed) from failed
    base = decode_header(block.header).base_namespace
    for namespace in live:
        if namespace.id == base:
            block.namespace_fields.update(dict(namespace.named_fields()))
    return block


def _why_not(told: dict[str, str], live: Iterable[Namespace]) -> str:
    refused = "these blocks are of another namespace than every live worker's, nothing was stored"
    if not told:
        return f"{refused}; the file does not say which fields differ"
    # Compared with the nearest one: a fleet of several models would otherwise name every field there is.
    differing = [[name for name, value in namespace.named_fields() if told.get(name) != value] for namespace in live]
    fields = min(differing, key=len, default=[])
    return f"{refused}; fields that differ: {', '.join(fields) or 'unknown, since no worker is live'}"
