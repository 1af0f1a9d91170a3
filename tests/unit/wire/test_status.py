"""Errors on the wire: every class has a row, and what is raised on one side is raised on the other."""

import grpc
import pytest

from headrace.core.errors import (
    ContextExceeded,
    DeadlineExceeded,
    HeadraceError,
    IndexUnavailable,
    InvalidRequest,
    ModelRefused,
    Overloaded,
    PermissionDenied,
    RateLimited,
    RequestTooLarge,
    StoreFull,
    TenantOverShare,
    Unauthenticated,
    UnknownModel,
    UnsupportedField,
    WorkerUnavailable,
)
from headrace.wire.openai_reply import render_error
from headrace.wire.status import error_of, http_headers, message_of, status_of, trailing_metadata

ERRORS = [
    (InvalidRequest("n is wrong", param="n"), 400, "INVALID_ARGUMENT"),
    (ContextExceeded("too long", tokens_max=5, param="prompt"), 400, "INVALID_ARGUMENT"),
    (RequestTooLarge(10), 413, "INVALID_ARGUMENT"),
    (UnsupportedField("no tools here", param="tools"), 400, "INVALID_ARGUMENT"),
    (UnknownModel("x", ["m"]), 404, "NOT_FOUND"),
    (Unauthenticated("no API key"), 401, "UNAUTHENTICATED"),
    (PermissionDenied("see other groups"), 403, "PERMISSION_DENIED"),
    (Overloaded("full", retry_after_ms=1500), 503, "RESOURCE_EXHAUSTED"),
    (TenantOverShare("its share", retry_after_ms=1500), 429, "RESOURCE_EXHAUSTED"),
    (RateLimited("tokens_per_minute", "used up", retry_after_ms=1500), 429, "RESOURCE_EXHAUSTED"),
    (WorkerUnavailable("d0", "it died"), 503, "UNAVAILABLE"),
    (WorkerUnavailable("", "nobody"), 503, "UNAVAILABLE"),
    (DeadlineExceeded("decode on d0"), 504, "DEADLINE_EXCEEDED"),
    (ModelRefused("m", "why"), 503, "FAILED_PRECONDITION"),
    (IndexUnavailable("away"), 503, "UNAVAILABLE"),
    (StoreFull(3), 503, "UNAVAILABLE"),
    (ValueError("secret path"), 500, "INTERNAL"),
]


@pytest.mark.parametrize(("error", "http", "code"), ERRORS)
def test_every_kind_of_error_has_its_code_and_status(error, http, code):
    """Fails when a kind falls through to another row."""
    assert (status_of(error).http_status, status_of(error).grpc_code.name) == (http, code)
    body = render_error(error)["error"]
    assert set(body) == {"message", "type", "param", "code"}
    assert body["param"] == getattr(error, "param", None)


@pytest.mark.parametrize("error", [row[0] for row in ERRORS if isinstance(row[0], HeadraceError)])
def test_an_error_crosses_the_wire_with_its_class_and_words(error):
    """Fails when the far side raises something that callers do not catch, or wraps the message twice."""
    told = error_of(status_of(error).grpc_code, message_of(error), trailing_metadata(error))
    caught = (InvalidRequest, Unauthenticated, PermissionDenied, Overloaded, WorkerUnavailable, DeadlineExceeded)
    if isinstance(error, caught):
        kind = next(k for k in caught if isinstance(error, k))
        assert isinstance(told, kind)
        assert isinstance(told, TenantOverShare) == isinstance(error, TenantOverShare)
        assert getattr(told, "limit", None) == getattr(error, "limit", None)
        assert str(told) == str(error)
    assert getattr(told, "retry_after_ms", None) == getattr(error, "retry_after_ms", None)
    assert isinstance(told, HeadraceError)
    if isinstance(error, InvalidRequest):
        assert told.param == error.param


def test_faults_of_our_own_are_not_told_in_detail():
    """Fails when a stack's words reach callers."""
    assert "secret" not in message_of(ValueError("secret path"))
    assert "secret" not in str(render_error(ValueError("secret path")))


def test_retry_after_is_whole_seconds_rounded_up_and_milliseconds_beside_it():
    """Fails when a client is told to come back too early, or at once."""
    for wait_ms, wait_s in ((1500, "2"), (1, "1")):
        expected = {"retry-after": wait_s, "retry-after-ms": str(wait_ms)}
        assert http_headers(Overloaded("full", retry_after_ms=wait_ms)) == expected
    assert http_headers(InvalidRequest("x")) == {}
    assert http_headers(Unauthenticated("x")) == {"www-authenticate": "Bearer"}


def test_metadata_stays_printable_and_bounded():
    """Fails when a parameter's name from a caller breaks the reply's headers."""
    pairs = dict(trailing_metadata(InvalidRequest("x", param="naïve\n" + "x" * 1000)))
    assert all(" " <= c <= "~" for c in pairs["headrace-param"])
    assert len(pairs["headrace-param"]) <= 128


def test_codes_of_other_servers_become_errors_too():
    """Fails when a proxy's own refusal raises something untyped."""
    assert isinstance(error_of(grpc.StatusCode.UNAVAILABLE, "connection refused"), WorkerUnavailable)
    assert isinstance(error_of(grpc.StatusCode.RESOURCE_EXHAUSTED, "too large"), Overloaded)
    assert str(error_of(grpc.StatusCode.INTERNAL, "boom")) == "INTERNAL: boom"
