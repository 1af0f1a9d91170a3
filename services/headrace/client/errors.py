"""Failed calls as a client meets them: the server's own error, or that no server answered.

What a code means is `wire/status.py`'s business; here is only what that table cannot know, since no server said it.
"""

import grpc

from headrace.client.prepare_call import Target
from headrace.core.errors import HeadraceError, RequestTooLarge
from headrace.core.limits import GRPC_MESSAGE_BYTES_MAX
from headrace.transfer.explain_handshake import explain_handshake
from headrace.wire.status import ERROR_KEY, error_of

# Codes that a transport, or a server that is not ours, uses for "there is no such service here".
UNANSWERED = (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.UNIMPLEMENTED)

# What Serve's proxies tell a caller to ask when they find no application for it.
SERVE_APPLICATIONS = "/ray.serve.RayServeAPIService/ListApplications"


class GatewayUnreachable(HeadraceError):
    """Nothing answers at the address, or what answers is not a Headrace gateway."""

    def __init__(self, address: str, why: str) -> None:
        super().__init__(f"no Headrace gateway answers at {address} ({why}); is it up? `headrace up` starts one")
        self.address = address
        self.why = why


class TlsFailed(GatewayUnreachable):
    """Something answers at the address, and TLS with it did not come about."""

    def __init__(self, address: str, why: str) -> None:
        HeadraceError.__init__(self, f"no TLS with the gateway at {address}: {why}")
        self.address = address
        self.why = why


class ApplicationUnknown(GatewayUnreachable):
    """A Ray Serve proxy answers at the address and cannot tell which of its applications is meant."""

    def __init__(self, address: str, why: str) -> None:
        HeadraceError.__init__(
            self,
            f"the Serve proxy at {address} sent this to none of its applications ({why}); where it has several, name "
            "one: `--application`, HEADRACE_APPLICATION, or `application=` of a client",
        )
        self.address = address
        self.why = why


def error_from_rpc(error: grpc.RpcError, *, target: Target) -> HeadraceError:
    """The typed error that a failed call stands for."""
    code, details = error.code(), error.details() or ""
    metadata = tuple(error.trailing_metadata() or ())
    told_by_a_gateway = any(key == ERROR_KEY for key, _ in metadata)
    if code in UNANSWERED and not told_by_a_gateway:
        return _unreachable(target, details, _cause(details) or code.name.lower())
    if code is grpc.StatusCode.NOT_FOUND and not told_by_a_gateway and SERVE_APPLICATIONS in details:
        return ApplicationUnknown(target.address, details.partition(".")[0])
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED and not told_by_a_gateway and "larger than max" in details:
        # gRPC uses one code for a full queue and a message over its size; waiting does not help the second.
        return RequestTooLarge(GRPC_MESSAGE_BYTES_MAX)
    return error_of(code, details, metadata)


def _unreachable(target: Target, details: str, cause: str) -> GatewayUnreachable:
    files = None if target.tls is None else target.tls.files
    why = explain_handshake(
        details,
        tls=files is not None,
        address=target.address.rpartition(":")[0],
        ca=(files.ca_file if files is not None else "") or "the authorities that grpcio brings (tls_ca_file)",
        cert=files.cert_file if files is not None else "",
    )
    return TlsFailed(target.address, why) if why else GatewayUnreachable(target.address, cause)


def _cause(details: str) -> str:
    """What is at the end of gRPC's chain of causes: `Connection refused`, `Domain name not found`."""
    first_line = details.partition("\n")[0]
    return first_line.rpartition(": ")[2].strip("[] ")[:200]
