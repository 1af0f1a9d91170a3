"""OpenAI bodies: what each parameter may be, what is refused, and that nothing else can come out."""

import contextlib
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.core.block import CacheSource
from headrace.core.errors import InvalidRequest
from headrace.core.limits import CHOICES_MAX, PROMPT_CHARS_MAX
from headrace.wire.client_request import ChatPrompt, ChatTurn, TextPrompt, TokenPrompt
from headrace.wire.openai_body import OpenAiRequest, parse_chat_body, parse_completion_body, parse_json_body

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "m", "prompt": "hi"}


def chat(**changes):
    return parse_chat_body(CHAT | changes)


def completion(**changes):
    return parse_completion_body(COMPLETION | changes)


def test_a_plain_chat_has_openais_defaults():
    """Fails when a default differs from what OpenAI's clients expect."""
    request = chat()
    (one,) = request.requests
    assert one.prompt == ChatPrompt((ChatTurn("user", "hi"),))
    assert (one.sampling.temperature, one.sampling.top_p, one.sampling.max_tokens) == (1.0, 1.0, None)
    assert (one.choices, request.stream, request.include_usage, request.logprobs) == (1, False, False, False)
    assert one.cache.sources == frozenset(CacheSource)
    assert one.cache.publish


def test_a_plain_completion_has_openais_default_length():
    """Fails when completions without max_tokens run on."""
    assert completion().requests[0].sampling.max_tokens_default == 16


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("hi", [TextPrompt("hi")]),
        (["a", "b"], [TextPrompt("a"), TextPrompt("b")]),
        ([1, 2], [TokenPrompt((1, 2))]),
        ([[1], [2, 3]], [TokenPrompt((1,)), TokenPrompt((2, 3))]),
    ],
)
def test_every_form_of_a_completions_prompt_is_read(prompt, expected):
    """Fails when one of the four forms is taken for another."""
    assert [r.prompt for r in completion(prompt=prompt).requests] == expected


def test_text_parts_are_joined_and_developer_means_system():
    """Fails when structured content loses text or a new role reaches templates that do not know it."""
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [{"role": "developer", "content": "s"}, {"role": "user", "content": parts}]
    assert chat(messages=messages).requests[0].prompt == ChatPrompt((ChatTurn("system", "s"), ChatTurn("user", "ab")))


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("model", None, "model"),
        ("model", 7, "model"),
        ("model", "", "model"),
        ("messages", None, "messages"),
        ("messages", [], "messages"),
        ("messages", "hi", "messages"),
        ("messages", ["hi"], "messages[0]"),
        ("messages", [{"role": "user", "content": ""}], "messages"),
        ("messages", [{"role": "user"}], "messages[0].content"),
        ("messages", [{"role": "user", "content": None}], "messages[0].content"),
        ("messages", [{"role": "wizard", "content": "x"}], "messages[0].role"),
        ("messages", [{"role": "tool", "content": "x"}], "messages[0].role"),
        ("messages", [{"content": "x"}], "messages[0].role"),
        ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content"),
        ("messages", [{"role": "user", "content": [{"type": "text", "text": 3}]}], "messages[0].content"),
        ("messages", [{"role": "user", "content": ["x"]}], "messages[0].content"),
        ("messages", [{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0]"),
        ("messages", [{"role": "user", "content": "\ud800"}], "messages[0]"),
        ("messages", [{"role": "user", "content": "x" * (PROMPT_CHARS_MAX + 1)}], "messages"),
        ("max_tokens", 0, "max_tokens"),
        ("max_tokens", -1, "max_tokens"),
        ("max_tokens", 1.5, "max_tokens"),
        ("max_tokens", True, "max_tokens"),
        ("max_tokens", "7", "max_tokens"),
        ("max_tokens", 2**31, "max_tokens"),
        ("max_completion_tokens", -1, "max_completion_tokens"),
        ("n", 0, "n"),
        ("n", CHOICES_MAX + 1, "n"),
        ("n", True, "n"),
        ("temperature", -0.1, "temperature"),
        ("temperature", 2.1, "temperature"),
        ("temperature", "1", "temperature"),
        ("temperature", True, "temperature"),
        ("temperature", float("nan"), "temperature"),
        ("temperature", 10**400, "temperature"),
        ("top_p", 0, "top_p"),
        ("top_p", 1.1, "top_p"),
        ("top_k", -1, "top_k"),
        ("seed", "x", "seed"),
        ("stop", 7, "stop"),
        ("stop", [""], "stop"),
        ("stop", ["x"] * 17, "stop"),
        ("stop", ["x" * 257], "stop"),
        ("stop", [None], "stop"),
        ("stream", "yes", "stream"),
        ("stream_options", {"include_usage": True}, "stream_options"),
        ("logprobs", 3, "logprobs"),
        ("top_logprobs", 3, "top_logprobs"),
        ("tools", [{"type": "function"}], "tools"),
        ("tool_choice", "required", "tool_choice"),
        ("response_format", {"type": "json_object"}, "response_format"),
        ("logit_bias", {"5": 1}, "logit_bias"),
        ("presence_penalty", 0.5, "presence_penalty"),
        ("frequency_penalty", False, "frequency_penalty"),
        ("modalities", ["audio"], "modalities"),
        ("cache_salt", "x" * 257, "cache_salt"),
        ("cache_salt", 5, "cache_salt"),
        ("headrace", [], "headrace"),
        ("headrace", {"sources": ["disk"]}, "headrace.sources"),
        ("headrace", {"sources": "device"}, "headrace.sources"),
        ("headrace", {"sources": [[]]}, "headrace.sources"),
        ("headrace", {"bypass": 1}, "headrace.bypass"),
        ("headrace", {"bypass": True, "sources": ["grpc"]}, "headrace.sources"),
        ("headrace", {"decode_worker": 7}, "headrace.decode_worker"),
        ("headrace", {"timeout_ms": 0}, "timeout_ms"),
    ],
)
def test_wrong_values_in_a_chat_are_refused_by_name(field, value, param):
    """Fails when a wrong value is served, or the wrong parameter is blamed."""
    with pytest.raises(InvalidRequest) as raised:
        chat(**{field: value})
    assert raised.value.param == param


@pytest.mark.parametrize(
    ("field", "value", "param"),
    [
        ("prompt", None, "prompt"),
        ("prompt", "", "prompt"),
        ("prompt", [], "prompt"),
        ("prompt", [[]], "prompt"),
        ("prompt", [1, "a"], "prompt"),
        ("prompt", [1, True], "prompt"),
        ("prompt", [-1], "prompt"),
        ("prompt", [1.0], "prompt"),
        ("prompt", ["a"] * (CHOICES_MAX + 1), "prompt"),
        ("echo", True, "echo"),
        ("suffix", "x", "suffix"),
        ("best_of", 2, "best_of"),
        ("logprobs", True, "logprobs"),
        ("logprobs", 21, "logprobs"),
    ],
)
def test_wrong_values_in_a_completion_are_refused_by_name(field, value, param):
    """Fails when a wrong value is served, or the wrong parameter is blamed."""
    with pytest.raises(InvalidRequest) as raised:
        completion(**{field: value})
    assert raised.value.param == param


def test_prompts_times_choices_is_bounded():
    """Fails when one request can ask for the square of the bound."""
    with pytest.raises(InvalidRequest, match="prompts x n"):
        completion(prompt=["a"] * CHOICES_MAX, n=2)


def test_unknown_and_harmless_parameters_are_ignored():
    """Fails when a client that sends what OpenAI also takes is turned away."""
    request = chat(user="u", store=True, metadata={}, n=None, tools=[], tool_choice="auto", logit_bias={}, wild=[1])
    assert request.requests[0].choices == 1


def test_both_spellings_of_the_length_are_read_and_may_not_differ():
    """Fails when one of the two is dropped silently."""
    assert chat(max_completion_tokens=3).requests[0].sampling.max_tokens == 3
    assert chat(max_completion_tokens=3, max_tokens=3).requests[0].sampling.max_tokens == 3
    with pytest.raises(InvalidRequest, match="differ"):
        chat(max_completion_tokens=3, max_tokens=4)


def test_cache_control_and_deadline_are_read_from_our_own_object():
    """Fails when a request for a cold run is answered from the cache."""
    control = {"bypass": True, "no_publish": True, "decode_worker": "d1", "timeout_ms": 50}
    (one,) = chat(headrace=control, cache_salt="s").requests
    assert not one.cache.reads
    assert not one.cache.publish
    assert (one.decode_worker, one.timeout_ms, one.cache_salt) == ("d1", 50, "s")
    (some,) = chat(headrace={"sources": ["grpc"]}).requests
    assert some.cache.sources == {CacheSource.GRPC}


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[]",
        b"null",
        b'{"a": NaN}',
        b'{"a": Infinity}',
        b"[" * 100_000,
        b'{"a":' + b"1" * 5000 + b"}",
    ],
)
def test_bodies_that_are_no_json_objects_are_refused(body):
    """Fails when a broken body is anything but the caller's fault."""
    with pytest.raises(InvalidRequest):
        parse_json_body(body)


scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8)
values = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(
            st.sampled_from(["role", "content", "type", "text", "bypass", "sources", "x"]), inner, max_size=4
        )
    ),
    max_leaves=12,
)
fields = st.sampled_from(
    [
        "model", "messages", "prompt", "max_tokens", "max_completion_tokens", "n", "temperature", "top_p", "top_k",
        "seed", "stop", "stream", "stream_options", "logprobs", "top_logprobs", "tools", "response_format",
        "logit_bias", "headrace", "cache_salt", "echo", "best_of", "ignore_eos", "anything",
    ]
)  # fmt: skip


@settings(max_examples=300, deadline=None)
@given(st.sampled_from([parse_chat_body, parse_completion_body]), st.dictionaries(fields, values, max_size=6))
def test_any_json_object_becomes_a_request_or_is_refused(parse, changes):
    """Fails when some input raises anything but InvalidRequest."""
    try:
        request = parse(CHAT | COMPLETION | changes)
    except InvalidRequest:
        return
    assert isinstance(request, OpenAiRequest)
    for one in request.requests:
        assert 0 <= one.sampling.temperature <= 2
        assert 1 <= one.choices <= CHOICES_MAX
        assert one.model


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=64) | values.map(lambda value: json.dumps(value).encode()))
def test_any_bytes_become_a_json_object_or_are_refused(body):
    """Fails when some bytes raise anything but InvalidRequest."""
    with contextlib.suppress(InvalidRequest):
        assert isinstance(parse_json_body(body), dict)
