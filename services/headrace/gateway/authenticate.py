"""Who a call is from: the API key in its `Authorization` header or metadata, looked up in the key ring.

The one place where a key in clear is held; it is neither logged nor told in an error.
"""

from typing import Any

from headrace.core.errors import Unauthenticated
from headrace.core.tenants import EVERYBODY, KeyRing, Tenant, is_usable_key

AUTHORIZATION = "authorization"


def authenticate(authorization: str | None, key_ring: KeyRing | None) -> Tenant:
    """The tenant of a `Bearer KEY`. Without a key ring everybody is one tenant, and what is sent is not looked at.

    Raises Unauthenticated, in the same words for every key that is not known.
    """
    if key_ring is None:
        return EVERYBODY
    if not authorization:
        raise Unauthenticated("no API key was sent")
    scheme, _, key = authorization.partition(" ")
    key = key.strip()
    tenant = key_ring.tenant_of(key) if scheme.lower() == "bearer" and is_usable_key(key) else None
    if tenant is None:
        raise Unauthenticated("the API key is not known here")
    return tenant


def authorization_of(grpc_context: Any) -> str | None:
    """The `authorization` metadata of a gRPC call, under grpc.aio's own server or Ray Serve's proxy."""
    for key, value in grpc_context.invocation_metadata() or ():
        if key == AUTHORIZATION and isinstance(value, str):
            return value
    return None
