"""gRPC requests and selectors become values or are refused by the name of the field."""

import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.block import CacheSource
from headrace.core.errors import InvalidRequest
from headrace.core.generation import EvictSelector
from headrace.core.limits import PROMPT_CHARS_MAX
from headrace.wire.client_request import ChatPrompt, ChatTurn, ClientRequest, TextPrompt, TokenPrompt
from headrace.wire.parse import parse_generate_request, parse_selector
from headrace.wire.render import render_selector
from headrace.wire.v1 import admin_pb2, inference_pb2


def parse(**fields) -> ClientRequest:
    return parse_generate_request(inference_pb2.GenerateRequest(**fields))


def test_unset_fields_have_the_documented_defaults():
    """Fails when an unset field is read as zero."""
    request = parse(text="hi")
    assert request.prompt == TextPrompt("hi")
    assert (request.model, request.timeout_ms, request.choices, request.cache_salt) == ("", None, 1, "")
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_p, sampling.seed) == (None, 0.0, 1.0, None)
    assert sampling.logprobs is None
    assert request.cache.sources == frozenset(CacheSource)
    assert request.cache.publish
    assert request.decode_worker is None


def test_every_field_is_read():
    """Fails when a field of the proto is dropped."""
    request = parse(
        model="m",
        chat={"messages": [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]},
        sampling={
            "max_tokens": 3, "temperature": 0.5, "top_k": 4, "top_p": 0.9, "seed": 2**64 - 1, "stop": ["x"],
            "logprobs": 0, "ignore_eos": True,
        },
        cache={"sources": [2], "no_publish": True, "decode_worker": "d", "prefill_worker": "p"},
        timeout_ms=9,
        cache_salt="s",
    )  # fmt: skip
    assert request.prompt == ChatPrompt((ChatTurn("system", "a"), ChatTurn("user", "b")))
    sampling = request.sampling
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p) == (3, 0.5, 4, 0.9)
    assert (sampling.seed, sampling.stop, sampling.logprobs, sampling.ignore_eos) == (2**64 - 1, ("x",), 0, True)
    assert request.cache.sources == {CacheSource.SHARED_MEMORY}
    assert not request.cache.publish
    assert (request.decode_worker, request.prefill_worker) == ("d", "p")
    assert (request.model, request.timeout_ms, request.cache_salt) == ("m", 9, "s")
    assert parse(token_ids={"ids": [1, 2]}).prompt == TokenPrompt((1, 2))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "prompt"),
        ({"text": ""}, "text"),
        ({"text": "x" * (PROMPT_CHARS_MAX + 1)}, "text"),
        ({"token_ids": {}}, "token_ids"),
        ({"chat": {}}, "chat.messages"),
        ({"chat": {"messages": [{"role": "user"}]}}, "chat.messages"),
        ({"chat": {"messages": [{"role": "tool", "content": "x"}]}}, "chat.messages[0].role"),
        ({"text": "x", "sampling": {"max_tokens": -1}}, "max_tokens"),
        ({"text": "x", "sampling": {"max_tokens": 0}}, "max_tokens"),
        ({"text": "x", "sampling": {"temperature": float("nan")}}, "temperature"),
        ({"text": "x", "sampling": {"temperature": -1.0}}, "temperature"),
        ({"text": "x", "sampling": {"top_p": 0.0}}, "top_p"),
        ({"text": "x", "sampling": {"top_p": float("inf")}}, "top_p"),
        ({"text": "x", "sampling": {"top_k": -1}}, "top_k"),
        ({"text": "x", "sampling": {"logprobs": 21}}, "logprobs"),
        ({"text": "x", "sampling": {"logprobs": -1}}, "logprobs"),
        ({"text": "x", "sampling": {"stop": [""]}}, "stop"),
        ({"text": "x", "cache": {"sources": [0]}}, "cache.sources"),
        ({"text": "x", "cache": {"bypass": True, "sources": [1]}}, "cache.sources"),
        ({"text": "x", "cache_salt": "x" * 257}, "cache_salt"),
        ({"text": "x", "timeout_ms": 2**32 - 1}, "timeout_ms"),
    ],
)
def test_wrong_requests_are_refused_by_name(fields, param):
    """Fails when a wrong value is served, or the wrong field is blamed."""
    with pytest.raises(InvalidRequest) as raised:
        parse(**fields)
    assert raised.value.param == param


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=80))
def test_any_readable_message_becomes_a_request_or_is_refused(data):
    """Fails when some message raises anything but InvalidRequest."""
    message = inference_pb2.GenerateRequest(text="x")  # without the prompt hardly one would be a request
    try:
        message.MergeFromString(data)
    except Exception:
        return  # gRPC itself refuses what is no message
    with contextlib.suppress(InvalidRequest):
        assert isinstance(parse_generate_request(message), ClientRequest)


@pytest.mark.parametrize(
    "selector",
    [
        EvictSelector(),
        EvictSelector(namespace="n", model="m", block_hashes=(b"a" * 16, b"b" * 32), idle_for_s=0.0),
        EvictSelector(namespace="n", prefix_token_ids=(1, 2, 3)),
    ],
)
def test_a_selector_survives_the_wire(selector):
    """Fails when a field is lost, so that an eviction means more than was asked."""
    assert parse_selector(render_selector(selector)) == selector


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prefix_text": "x"}, "prefix_text"),
        ({"prefix_token_ids": [1], "block_hashes": [b"a" * 16]}, "selector"),
        ({"idle_for_s": -1.0}, "idle_for_s"),
        ({"idle_for_s": float("nan")}, "idle_for_s"),
        ({"block_hashes": [b"short"]}, "block_hashes"),
    ],
)
def test_wrong_selectors_are_refused(fields, param):
    """Fails when a selector that is not understood is taken for a wider one."""
    with pytest.raises(InvalidRequest) as raised:
        parse_selector(admin_pb2.Selector(**fields))
    assert raised.value.param == param
