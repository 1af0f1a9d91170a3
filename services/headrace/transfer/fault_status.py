"""Cache faults as gRPC statuses between store nodes and workers, both ways. They never reach a client of the system."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager

import grpc
import grpc.aio

from headrace.core.errors import BlockCorrupt, CacheFault, LeaseExpired, StoreUnavailable
from headrace.transfer.explain_handshake import explain_handshake

_CORRUPT = grpc.StatusCode.DATA_LOSS
_GONE = grpc.StatusCode.NOT_FOUND
_INVALID = grpc.StatusCode.INVALID_ARGUMENT


def status_of(fault: CacheFault | ValueError) -> tuple[grpc.StatusCode, str]:
    """The status that a store node answers with."""
    match fault:
        case BlockCorrupt():
            return _CORRUPT, fault.why
        case LeaseExpired():
            return _GONE, fault.lease_id
        case _:
            return _INVALID, str(fault)


def fault_of(error: grpc.RpcError, *, node_id: str, lease_id: str = "", block_hash: bytes = b"") -> CacheFault:
    """The fault that a worker raises for a failed call. Anything but the node's own word is StoreUnavailable."""
    if not isinstance(error, grpc.aio.AioRpcError):
        return StoreUnavailable(node_id, type(error).__name__)
    code = error.code()
    if code is _CORRUPT:
        return BlockCorrupt(block_hash, error.details() or "refused by the store node")
    if code is _GONE:
        return LeaseExpired(lease_id)
    details = error.details() or ""
    why = explain_handshake(details, tls=None)
    return StoreUnavailable(node_id, f"{code.name}: {why or details}"[:300])


@contextmanager
def cache_faults(node_id: str, *, lease_id: str = "", block_hash: bytes = b"") -> Iterator[None]:
    """Around each await of a call to a store node: whatever it ends with is a CacheFault, but for our own cancellation.

    A node that left (or was paused until its record ran out) has its channel closed while calls are under way. grpc.aio
    ends those with CancelledError and refuses later ones with UsageError; neither is about this request, which goes on
    without that node.
    """
    try:
        yield
    except grpc.RpcError as error:
        raise fault_of(error, node_id=node_id, lease_id=lease_id, block_hash=block_hash) from error
    except grpc.aio.UsageError as error:
        raise StoreUnavailable(node_id, f"its channel was closed: {error}") from error
    except asyncio.CancelledError:
        task = asyncio.current_task()
        if task is None or task.cancelling():
            raise
        raise StoreUnavailable(node_id, "it left while the call was under way") from None
