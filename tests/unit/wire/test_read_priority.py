"""Priorities of requests, as callers of both APIs name them."""

import pytest

from headrace.core.errors import InvalidRequest
from headrace.wire.openai_body import parse_chat_body, parse_completion_body
from headrace.wire.parse import parse_generate_request
from headrace.wire.v1 import inference_pb2

COMPLETION = {"model": "m", "prompt": ["a", "b"]}
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}


@pytest.mark.parametrize(
    ("fields", "priority"),
    [
        ({}, None),
        ({"headrace": {"priority": 4}}, 4),
        ({"headrace": {"priority": -4}}, -4),
        ({"headrace": {"priority": 0}}, 0),
        ({"service_tier": "flex"}, -1),
        ({"service_tier": "flex", "headrace": {"priority": 0}}, 0),
        ({"service_tier": "priority"}, None),
        ({"service_tier": "auto"}, None),
    ],
)
def test_an_http_body_names_its_priority(fields, priority):
    """Fails when a tier raises a request, or only one of several prompts has the priority."""
    requests = [*parse_completion_body(COMPLETION | fields).requests, *parse_chat_body(CHAT | fields).requests]
    assert [request.priority for request in requests] == [priority] * 3


@pytest.mark.parametrize("value", [5, -5, 10**30, "1", 1.0, True, [1]])
def test_what_is_no_priority_is_refused_by_name(value):
    with pytest.raises(InvalidRequest) as refusal:
        parse_completion_body(COMPLETION | {"headrace": {"priority": value}})
    assert refusal.value.param == "headrace.priority"


@pytest.mark.parametrize("value", [None, 0, -4, 3])
def test_a_grpc_request_names_its_priority_or_none(value):
    """Fails when unset and 0 are taken for each other: a tenant in the background has another default."""
    message = inference_pb2.GenerateRequest(text="hi", priority=value)
    assert parse_generate_request(message).priority == value


def test_a_grpc_priority_out_of_range_is_refused():
    with pytest.raises(InvalidRequest) as refusal:
        parse_generate_request(inference_pb2.GenerateRequest(text="hi", priority=5))
    assert refusal.value.param == "priority"
