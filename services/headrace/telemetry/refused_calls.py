"""Why a call was refused, as the label of `headrace_refused_calls_total`: of gateways' APIs and of store nodes'."""

from headrace.core.errors import (
    BlockCorrupt,
    ContextExceeded,
    DeadlineExceeded,
    InvalidRequest,
    LeaseExpired,
    Overloaded,
    PermissionDenied,
    RequestTooLarge,
    Unauthenticated,
    UnknownModel,
)

# Narrower classes before wider ones: the first that fits counts.
ERROR_TO_REASON: dict[type[Exception], str] = {
    Unauthenticated: "unauthenticated",
    PermissionDenied: "permission_denied",
    RequestTooLarge: "too_large",
    UnknownModel: "unknown_model",
    ContextExceeded: "context_exceeded",
    InvalidRequest: "invalid",
    Overloaded: "no_room",
    DeadlineExceeded: "deadline",
    TimeoutError: "deadline",
    BlockCorrupt: "corrupt",
    LeaseExpired: "not_held",
    ValueError: "invalid",
}
REFUSED_CALLS = (*dict.fromkeys(ERROR_TO_REASON.values()), "other")


def reason_of(error: Exception) -> str:
    """One of REFUSED_CALLS."""
    return next((reason for kind, reason in ERROR_TO_REASON.items() if isinstance(error, kind)), "other")
