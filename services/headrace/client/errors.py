"""gRPC failures back to typed errors, as a client meets them.

A server's answer becomes the class that the server raised. That no server answered is a class of its own here: it is
the one error that only a client can have.
"""

import grpc

from headrace.core.errors import (
    DeadlineExceeded,
    HeadraceError,
    InvalidRequest,
    Overloaded,
    UnknownModel,
    WorkerUnavailable,
)

# Tried again after this long when an overloaded server named no time.
RETRY_AFTER_MS_DEFAULT = 1_000


class GatewayUnreachable(HeadraceError):
    """Nothing answers at the address, or what answers is not a Headrace gateway."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(f"no Headrace gateway answers at {address} ({why}); is it up? `headrace up` starts one")
        self.address = address
        self.why = why


def error_from_rpc(error: grpc.RpcError, *, address: str) -> HeadraceError:
    """The typed error that a failed call stands for."""
    code, details = error.code(), error.details() or ""
    match code:
        case grpc.StatusCode.INVALID_ARGUMENT | grpc.StatusCode.OUT_OF_RANGE | grpc.StatusCode.FAILED_PRECONDITION:
            return InvalidRequest(details)
        case grpc.StatusCode.NOT_FOUND:
            return _unknown_model(details)
        case grpc.StatusCode.RESOURCE_EXHAUSTED:
            return _overloaded(error, details)
        case grpc.StatusCode.DEADLINE_EXCEEDED:
            return DeadlineExceeded(details.removeprefix("deadline exceeded: "))
        case grpc.StatusCode.UNAVAILABLE if not details.startswith("worker "):
            return GatewayUnreachable(address, details.splitlines()[0] if details else "unavailable")
        case grpc.StatusCode.UNIMPLEMENTED:
            return GatewayUnreachable(address, details or "unimplemented")
        case grpc.StatusCode.CANCELLED:
            return WorkerUnavailable("", "the call was cancelled by closing its stream or client")
    return WorkerUnavailable("", details.removeprefix("worker (none) is unavailable: ") or str(code))


def _unknown_model(details: str) -> HeadraceError:
    """Rebuild from the server's own sentence, so that `model` and `known` are fields here too."""
    named, separator, known = details.partition(" is not served here; served: ")
    if not separator:
        return InvalidRequest(details)
    return UnknownModel(
        named.removeprefix("model ").strip("'\""), known=[] if known == "none yet" else known.split(", ")
    )


def _overloaded(error: grpc.RpcError, details: str) -> HeadraceError:
    """A gRPC limit (message size) uses the same code as a full queue, but trying again does not help there."""
    if "larger than max" in details:
        return InvalidRequest(f"a message is larger than the limit: {details}")
    message, _, _ = details.partition("; try again in ")
    return Overloaded(message or "the server is overloaded", retry_after_ms=_retry_after_ms(error, details))


def _retry_after_ms(error: grpc.RpcError, details: str) -> int:
    metadata = dict(error.trailing_metadata() or ())
    named = metadata.get("retry-after-ms") or details.rpartition("; try again in ")[2].removesuffix(" ms")
    return int(named) if str(named).isdigit() else RETRY_AFTER_MS_DEFAULT
