"""OpenAI bodies: what each parameter may be, what is refused, and that nothing else can come out."""

import contextlib
import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from openai.types.chat.completion_create_params import CompletionCreateParamsStreaming as ChatParams
from openai.types.completion_create_params import CompletionCreateParamsStreaming as CompletionParams

from headrace.core.block import CacheSource
from headrace.core.errors import InvalidRequest, UnsupportedField
from headrace.core.limits import CHOICES_MAX, OUTPUT_TOKENS_DEFAULT, PROMPT_CHARS_MAX
from headrace.wire.client_request import ChatPrompt, ChatTurn, TextPrompt, TokenPrompt
from headrace.wire.openai_body import OpenAiRequest, parse_chat_body, parse_completion_body, parse_json_body
from headrace.wire.openai_fields import CHAT as CHAT_FIELDS
from headrace.wire.openai_fields import COMPLETION as COMPLETION_FIELDS
from headrace.wire.openai_fields import CONTROL, STREAM_OPTIONS

CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
COMPLETION = {"model": "m", "prompt": "hi"}
TEXT_PART = {"type": "text", "text": "x"}


BODIES = {parse_chat_body: CHAT, parse_completion_body: COMPLETION}


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
        ("messages", [{"role": "user", "content": [{"type": "text", "text": 3}]}], "messages[0].content[0].text"),
        (
            "messages",
            [{"role": "user", "content": [{"type": "text", "text": "x", "id": 1}]}],
            "messages[0].content[0].id",
        ),
        ("messages", [{"role": "user", "content": "x", "id": 7}], "messages[0].id"),
        ("messages", [{"role": "user", "content": "x", "name": 7}], "messages[0].name"),
        ("messages", [{"role": "user", "content": "x", "name": "x" * 65}], "messages[0].name"),
        ("messages", [{"role": "assistant", "content": "x", "refusal": "no"}], "messages[0].refusal"),
        ("messages", [{"role": "user", "content": ["x"]}], "messages[0].content"),
        ("messages", [{"role": "assistant", "content": "x", "tool_calls": [{}]}], "messages[0].tool_calls"),
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
        ("top_k", -2, "top_k"),
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
        ("headrace", {"timeout_ms": 0}, "headrace.timeout_ms"),
        ("headrace", {"bypas": True}, "headrace.bypas"),
        ("user", 5, "user"),
        ("metadata", "x", "metadata"),
        ("store", "yes", "store"),
        ("service_tier", 3, "service_tier"),
        ("max_token", 5, "max_token"),
        ("\ud800", 1, "?"),
        ("x" * 1000, 1, "x" * 64),
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
        ("tools", [{"type": "function"}], "tools"),
        ("messages", [{"role": "user", "content": "x"}], "messages"),
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


HARMLESS = {
    "user": "u",
    "store": True,
    "metadata": {"a": "b"},
    "safety_identifier": "s",
    "parallel_tool_calls": True,
    "service_tier": "default",
    "n": None,
    "tools": [],
    "tool_choice": "auto",
    "logit_bias": {},
    "frequency_penalty": 0.0,
    "top_k": -1,
    "min_p": 0,
    "wild": None,
}


@pytest.mark.parametrize("field", HARMLESS)
def test_parameters_without_effect_or_that_say_not_used_are_taken(field):
    """Fails when a client that sends what OpenAI also takes is turned away, or what it sends changes the request."""
    assert chat(**{field: HARMLESS[field]}) == chat()


@pytest.mark.parametrize(("read", "params"), [(parse_chat_body, ChatParams), (parse_completion_body, CompletionParams)])
def test_every_field_that_openais_library_can_send_is_known(read, params):
    """Fails when the library learns a field of which nobody has said what becomes of it here."""
    refusals = {name: refusal(read, BODIES[read] | {name: object()}) for name in params.__annotations__}
    assert len(refusals) > 15
    assert not [name for name, why in refusals.items() if "not a field that is known" in why]


def refusal(read, body) -> str:
    try:
        read(body)
    except InvalidRequest as refused:
        return str(refused)
    return ""


def test_the_documented_fields_are_the_fields():
    """Fails when docs/openai-api.md lacks a field that is taken, or one of OpenAI's that is refused."""
    documented = (Path(__file__).parents[3] / "docs" / "openai-api.md").read_text(encoding="utf-8")
    taken = {
        *CHAT_FIELDS.read,
        *COMPLETION_FIELDS.read,
        *CHAT_FIELDS.without_effect,
        *CONTROL.read,
        *STREAM_OPTIONS.read,
    }
    of_openai = {*ChatParams.__annotations__, *CompletionParams.__annotations__}
    assert not [name for name in sorted(taken | of_openai) if f"`{name}`" not in documented]


def test_what_an_answer_has_beside_its_text_may_come_back_empty():
    """Fails when a client that sends an answer back as it came, as chats do, is turned away."""
    answer = {
        "role": "assistant",
        "content": "a",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": [],
        "provider_specific_fields": {"refusal": None},
    }
    request = chat(messages=[answer, {"role": "user", "content": "b"}])
    assert request.requests[0].prompt == ChatPrompt((ChatTurn("assistant", "a"), ChatTurn("user", "b")))


def test_a_speakers_name_is_kept():
    """Fails when two users of one chat become one."""
    (one,) = chat(messages=[{"role": "user", "content": "a", "name": "ann"}]).requests
    assert one.prompt == ChatPrompt((ChatTurn("user", "a", name="ann"),))


@pytest.mark.parametrize(
    ("changes", "error"),
    [
        ({"tools": [{"type": "function"}]}, UnsupportedField),
        ({"wild": 1}, UnsupportedField),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, UnsupportedField),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, UnsupportedField),
        ({"n": 0}, InvalidRequest),
    ],
)
def test_what_is_not_done_here_is_told_apart_from_what_is_wrong(changes, error):
    """Fails when a client cannot tell that leaving the field out would help."""
    with pytest.raises(InvalidRequest) as raised:
        chat(**changes)
    assert type(raised.value) is error


def test_usage_in_a_stream_is_asked_for_at_its_end_or_in_every_piece():
    """Fails when one of the two is taken for the other."""
    for options, expected in (
        ({}, (False, False)),
        ({"include_usage": True, "include_obfuscation": False}, (True, False)),
        ({"include_usage": True, "continuous_usage_stats": True}, (True, True)),
    ):
        request = chat(stream=True, stream_options=options)
        assert (request.include_usage, request.running_usage) == expected


def test_log_probabilities_that_come_at_once_are_bounded_and_those_of_a_stream_are_not():
    """Fails when one answer's log-probabilities keep a gateway's loop for seconds."""
    many = {"logprobs": True, "top_logprobs": 20, "n": 8, "max_tokens": 1_000}
    with pytest.raises(InvalidRequest, match="or ask for a stream") as raised:
        chat(**many)
    assert raised.value.param == "logprobs"
    assert chat(**many, stream=True).logprobs
    counted = (
        rf"choices 8 x max_tokens {OUTPUT_TOKENS_DEFAULT:,} \(the default.*\) x 21; give max_tokens of at most 595"
    )
    with pytest.raises(InvalidRequest, match=counted):
        chat(**(many | {"max_tokens": None}))
    assert chat(**(many | {"max_tokens": 595})).logprobs
    with pytest.raises(InvalidRequest, match="x max_tokens 596 x 21"):
        chat(**(many | {"max_tokens": 596}))


def test_both_spellings_of_the_length_are_read_and_may_not_differ():
    """Fails when one of the two is dropped silently."""
    assert chat(max_completion_tokens=3).requests[0].sampling.max_tokens == 3
    assert chat(max_completion_tokens=3, max_tokens=3).requests[0].sampling.max_tokens == 3
    assert completion(max_completion_tokens=3).requests[0].sampling.max_tokens == 3
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
        request = parse(BODIES[parse] | changes)
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
