"""The one place where errors meet gRPC codes and HTTP statuses, in both directions.

An error crosses the wire as code, message and a few metadata entries, so that the other side can raise the same type.
What is not ours becomes an internal error without details: a stack trace is for our log, not for callers.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

import grpc

from headrace.core.errors import (
    CacheFault,
    ContextExceeded,
    DeadlineExceeded,
    HeadraceError,
    InvalidRequest,
    ModelRefused,
    Overloaded,
    PermissionDenied,
    RateLimited,
    RequestTooLarge,
    TenantOverShare,
    Unauthenticated,
    UnknownModel,
    UnsupportedField,
    WorkerUnavailable,
)
from headrace.core.limits import RETRY_AFTER_MS

ERROR_KEY = "headrace-error"  # the error's class name
PARAM_KEY = "headrace-param"  # the request field that is wrong
RETRY_AFTER_KEY = "retry-after-ms"
LIMIT_KEY = "headrace-limit"  # which of its tenant's rates a refused request went beyond

# Metadata values are cut here: headers of a reply are bounded by gRPC's own 8 KiB.
DETAIL_CHARS_MAX = 2_048


class UnknownService(InvalidRequest):
    """A health check for a service that is not served here; gRPC's health protocol asks for NOT_FOUND."""


@dataclass(frozen=True, slots=True)
class ErrorStatus:
    """One row of the table: how a kind of error looks to callers of either API."""

    grpc_code: grpc.StatusCode
    http_status: int
    openai_type: str
    openai_code: str | None


INTERNAL = ErrorStatus(grpc.StatusCode.INTERNAL, 500, "server_error", "internal_error")

# Narrower classes before wider ones: the first that fits counts.
TABLE: tuple[tuple[type[HeadraceError], ErrorStatus], ...] = (
    (UnknownModel, ErrorStatus(grpc.StatusCode.NOT_FOUND, 404, "invalid_request_error", "model_not_found")),
    (UnknownService, ErrorStatus(grpc.StatusCode.NOT_FOUND, 404, "invalid_request_error", "not_found")),
    (
        ContextExceeded,
        ErrorStatus(grpc.StatusCode.INVALID_ARGUMENT, 400, "invalid_request_error", "context_length_exceeded"),
    ),
    (RequestTooLarge, ErrorStatus(grpc.StatusCode.INVALID_ARGUMENT, 413, "invalid_request_error", "request_too_large")),
    (
        UnsupportedField,
        ErrorStatus(grpc.StatusCode.INVALID_ARGUMENT, 400, "invalid_request_error", "unsupported_parameter"),
    ),
    (InvalidRequest, ErrorStatus(grpc.StatusCode.INVALID_ARGUMENT, 400, "invalid_request_error", None)),
    (Unauthenticated, ErrorStatus(grpc.StatusCode.UNAUTHENTICATED, 401, "invalid_request_error", "invalid_api_key")),
    (
        PermissionDenied,
        ErrorStatus(grpc.StatusCode.PERMISSION_DENIED, 403, "invalid_request_error", "insufficient_permissions"),
    ),
    (
        TenantOverShare,
        ErrorStatus(grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error", "rate_limit_exceeded"),
    ),
    (RateLimited, ErrorStatus(grpc.StatusCode.RESOURCE_EXHAUSTED, 429, "rate_limit_error", "rate_limit_exceeded")),
    (Overloaded, ErrorStatus(grpc.StatusCode.RESOURCE_EXHAUSTED, 503, "server_error", "overloaded")),
    (WorkerUnavailable, ErrorStatus(grpc.StatusCode.UNAVAILABLE, 503, "server_error", "worker_unavailable")),
    (DeadlineExceeded, ErrorStatus(grpc.StatusCode.DEADLINE_EXCEEDED, 504, "server_error", "deadline_exceeded")),
    (ModelRefused, ErrorStatus(grpc.StatusCode.FAILED_PRECONDITION, 503, "server_error", "model_refused")),
    (CacheFault, ErrorStatus(grpc.StatusCode.UNAVAILABLE, 503, "server_error", "cache_unavailable")),
)


def status_of(error: BaseException) -> ErrorStatus:
    """The row for an error; INTERNAL for what is not ours."""
    return next((status for kind, status in TABLE if isinstance(error, kind)), INTERNAL)


def message_of(error: BaseException) -> str:
    """What a caller may read: our own errors speak for themselves, others only say that something broke."""
    return str(error)[:DETAIL_CHARS_MAX] if isinstance(error, HeadraceError) else "internal error; see the server's log"


def retry_after_ms(error: BaseException) -> int | None:
    """How long the caller should wait before it tries again; None when waiting does not help."""
    if isinstance(error, Overloaded):
        return error.retry_after_ms
    return RETRY_AFTER_MS if isinstance(error, WorkerUnavailable) else None


def http_headers(error: BaseException) -> dict[str, str]:
    """`Retry-After` where trying again makes sense, in whole seconds rounded up, and beside it the milliseconds, which
    OpenAI's own libraries prefer; the scheme where a key is missing."""
    if isinstance(error, Unauthenticated):
        return {"www-authenticate": "Bearer"}
    wait_ms = retry_after_ms(error)
    if wait_ms is None:
        return {}
    return {"retry-after": str(max(1, -(-wait_ms // 1000))), "retry-after-ms": str(max(1, wait_ms))}


def trailing_metadata(error: BaseException) -> tuple[tuple[str, str], ...]:
    """What travels beside code and message, so that `error_of` can tell kinds with the same code apart."""
    pairs = [(ERROR_KEY, type(error).__name__ if isinstance(error, HeadraceError) else "Internal")]
    param = error.param if isinstance(error, InvalidRequest) else None
    if param:
        pairs.append((PARAM_KEY, _printable(param)))
    if isinstance(error, RateLimited):
        pairs.append((LIMIT_KEY, error.limit))
    wait_ms = retry_after_ms(error)
    if wait_ms is not None:
        pairs.append((RETRY_AFTER_KEY, str(wait_ms)))
    return tuple(pairs)


def _printable(text: str) -> str:
    """ASCII without control characters: all that a metadata value may hold."""
    return "".join(c if " " <= c <= "~" else "?" for c in text)[:128]


def error_of(code: grpc.StatusCode, message: str, metadata: Iterable[tuple[str, str | bytes]] = ()) -> HeadraceError:
    """The error that a failed gRPC call stands for, of the class and with the words that the far side raised."""
    told = {key: value for key, value in metadata if isinstance(value, str)}
    if code in (grpc.StatusCode.INVALID_ARGUMENT, grpc.StatusCode.NOT_FOUND):
        return InvalidRequest(message, param=told.get(PARAM_KEY))
    if code is grpc.StatusCode.UNAUTHENTICATED:
        return Unauthenticated(_before_remedy(message, Unauthenticated("")))
    if code is grpc.StatusCode.PERMISSION_DENIED:
        what = _before_remedy(message, PermissionDenied(""))
        return PermissionDenied(what.removeprefix("this API key may not "))
    if code is grpc.StatusCode.RESOURCE_EXHAUSTED:
        wait = told.get(RETRY_AFTER_KEY, "")
        what = message.rpartition("; try again in ")[0] or message
        wait_ms = int(wait) if wait.isdigit() else RETRY_AFTER_MS
        if told.get(ERROR_KEY) == RateLimited.__name__:
            return RateLimited(told.get(LIMIT_KEY, ""), what, retry_after_ms=wait_ms)
        kind = TenantOverShare if told.get(ERROR_KEY) == TenantOverShare.__name__ else Overloaded
        return kind(what, retry_after_ms=wait_ms)
    if code is grpc.StatusCode.DEADLINE_EXCEEDED:
        return DeadlineExceeded(message.removeprefix("deadline exceeded: "))
    if code is grpc.StatusCode.UNAVAILABLE:
        worker = re.fullmatch(r"worker (\S+) is unavailable: (.*)", message, re.DOTALL)
        worker_id, why = worker.groups() if worker else ("(none)", message)
        return WorkerUnavailable("" if worker_id == "(none)" else worker_id, why)
    return HeadraceError(f"{code.name}: {message}")


def _before_remedy(message: str, pattern: HeadraceError) -> str:
    """A message without the remedy that its class puts behind every one."""
    return message.removesuffix("; " + str(pattern).partition("; ")[2])


def error_of_call(failed: grpc.aio.AioRpcError) -> HeadraceError:
    """`error_of` for a call of grpc.aio."""
    return error_of(failed.code(), failed.details() or "", failed.trailing_metadata() or ())
