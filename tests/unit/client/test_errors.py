"""A server's answer becomes the error class that the server raised."""

import pytest

from headrace.client import HeadraceClient
from headrace.core.errors import (
    DeadlineExceeded,
    InvalidRequest,
    Overloaded,
    RequestTooLarge,
    UnknownModel,
    WorkerUnavailable,
)

CASES = [
    (InvalidRequest("max_tokens must not be negative", param="max_tokens"), InvalidRequest),
    (UnknownModel("gpt", ["echo-1", "echo-2"]), InvalidRequest),
    (Overloaded("256 requests are under way", retry_after_ms=1500), Overloaded),
    (WorkerUnavailable("d0", "it died"), WorkerUnavailable),
    (DeadlineExceeded("decode"), DeadlineExceeded),
]


@pytest.mark.parametrize(("raised", "kind"), CASES, ids=[type(e).__name__ for e, _ in CASES])
def test_each_error_arrives_as_its_own_kind_with_its_message(small_gateway, raised, kind):
    small_gateway.failure = raised
    with HeadraceClient(small_gateway.address) as client, pytest.raises(kind) as caught:
        client.generate("x")
    assert str(caught.value) == str(raised)


def test_a_wrong_field_is_named(small_gateway):
    small_gateway.failure = InvalidRequest("must not be negative", param="max_tokens")
    with HeadraceClient(small_gateway.address) as client, pytest.raises(InvalidRequest) as caught:
        client.generate("x")
    assert caught.value.param == "max_tokens"


def test_an_overload_carries_its_retry_time(small_gateway):
    small_gateway.failure = Overloaded("full", retry_after_ms=2500)
    with HeadraceClient(small_gateway.address) as client, pytest.raises(Overloaded) as caught:
        client.generate("x")
    assert caught.value.retry_after_ms == 2500


def test_a_message_over_the_size_limit_is_the_requests_fault(small_gateway):
    """Trying again would not help; a client must not be told to."""
    with HeadraceClient(small_gateway.address) as client, pytest.raises(RequestTooLarge):
        client.generate("x" * (17 * 1024 * 1024))
