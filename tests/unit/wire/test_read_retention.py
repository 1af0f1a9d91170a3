"""How long blocks may stay, by the fields that OpenAI's and Anthropic's clients send and by our own."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.core.errors import InvalidRequest
from headrace.core.retention import KEEP, Retention
from headrace.wire.openai_body import parse_chat_body, parse_completion_body

HI = {"role": "user", "content": "hi"}
FIVE_MINUTES, ONE_HOUR = {"type": "ephemeral", "ttl": "5m"}, {"type": "ephemeral", "ttl": "1h"}
BARE = {"type": "ephemeral"}


def cache(**fields):
    (request,) = parse_chat_body({"model": "m", "messages": [HI]} | fields).requests
    return request.cache


def marked(*marks, **fields):
    """A chat whose content parts carry these `cache_control` values; None for none."""
    parts = [{"type": "text", "text": "a"} | ({} if mark is None else {"cache_control": mark}) for mark in marks]
    return cache(messages=[{"role": "user", "content": parts}], **fields)


def test_a_request_that_says_nothing_bounds_nothing():
    """Fails when blocks of ordinary requests get a time, or are kept off disk."""
    assert cache().retention == KEEP
    assert cache(prompt_cache_retention=None, cache_control=None, headrace={"ttl": None}).retention == KEEP
    assert cache().affinity_key == ""


@pytest.mark.parametrize(
    ("fields", "retention"),
    [
        ({"prompt_cache_retention": "in_memory"}, Retention(3_600, on_disk=False)),
        ({"prompt_cache_retention": "in-memory"}, Retention(3_600, on_disk=False)),
        ({"prompt_cache_retention": "24h"}, Retention(86_400)),
        ({"cache_control": FIVE_MINUTES}, Retention(300)),
        ({"cache_control": ONE_HOUR}, Retention(3_600)),
        ({"cache_control": BARE}, Retention(300)),
        ({"cache_control": BARE | {"ttl": None}}, Retention(300)),
        ({"headrace": {"ttl": "90s"}}, Retention(90)),
        ({"headrace": {"ttl": "7d"}}, Retention(7 * 86_400)),
        ({"headrace": {"not_on_disk": True}}, Retention(None, on_disk=False)),
        ({"headrace": {"ttl": "5m", "not_on_disk": True}}, Retention(300, on_disk=False)),
    ],
)
def test_each_field_means_what_its_own_service_means_by_it(fields, retention):
    """Fails when a time or a tier is mistaken."""
    assert cache(**fields).retention == retention


def test_completions_read_the_same_fields():
    """Fails when one endpoint ignores what the other honours."""
    body = {"model": "m", "prompt": ["a", "b"], "prompt_cache_retention": "24h", "prompt_cache_key": "chat-7"}
    for request in parse_completion_body(body).requests:
        assert (request.cache.retention, request.cache.affinity_key) == (Retention(86_400), "chat-7")
    (one,) = parse_completion_body({"model": "m", "prompt": "a", "cache_control": ONE_HOUR}).requests
    assert one.cache.retention == Retention(3_600)


def test_of_several_marks_the_longest_holds_wherever_it_stands():
    """Fails when marks on messages or parts are overlooked, or the last one wins."""
    assert marked(ONE_HOUR, FIVE_MINUTES, None).retention.ttl_s == 3_600
    assert marked(BARE, ONE_HOUR).retention.ttl_s == 3_600
    assert marked(FIVE_MINUTES, cache_control=ONE_HOUR).retention.ttl_s == 3_600
    on_message = [HI | {"cache_control": ONE_HOUR}, HI | {"cache_control": FIVE_MINUTES}]
    assert cache(messages=on_message).retention.ttl_s == 3_600


def test_a_mark_without_a_time_follows_what_else_the_request_names():
    """Fails when a bare mark's default contradicts, or cuts, a time that was asked for."""
    assert marked(BARE, prompt_cache_retention="24h").retention == Retention(86_400)
    assert marked(BARE, headrace={"ttl": "90s"}).retention == Retention(90)


def test_the_disk_is_allowed_only_when_nothing_in_the_request_forbids_it():
    """Fails when a wider field overrides a narrower one."""
    narrowed = cache(prompt_cache_retention="24h", headrace={"not_on_disk": True})
    assert narrowed.retention == Retention(86_400, on_disk=False)
    assert not cache(prompt_cache_retention="in_memory", headrace={"not_on_disk": False}).retention.on_disk


@pytest.mark.parametrize(
    ("fields", "named"),
    [
        ({"prompt_cache_retention": "24h", "cache_control": FIVE_MINUTES}, ("prompt_cache_retention", "cache_control")),
        (
            {"prompt_cache_retention": "in_memory", "headrace": {"ttl": "5m"}},
            ("headrace.ttl", "prompt_cache_retention"),
        ),
        ({"cache_control": ONE_HOUR, "headrace": {"ttl": "5m"}}, ("headrace.ttl", "cache_control")),
    ],
)
def test_two_fields_that_name_different_times_are_refused_by_both_names(fields, named):
    """Fails when one of them wins in silence."""
    with pytest.raises(InvalidRequest, match="different times") as refused:
        cache(**fields)
    assert all(name in str(refused.value) for name in named)
    assert refused.value.param in named


def test_two_fields_that_name_one_time_agree():
    """Fails when a request that contradicts nothing is refused."""
    agreed = cache(prompt_cache_retention="in_memory", cache_control=ONE_HOUR, headrace={"ttl": "60m"})
    assert agreed.retention == Retention(3_600, on_disk=False)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt_cache_retention": "48h"}, "prompt_cache_retention"),
        ({"prompt_cache_retention": 24}, "prompt_cache_retention"),
        ({"prompt_cache_retention": ["24h"]}, "prompt_cache_retention"),
        ({"cache_control": "ephemeral"}, "cache_control"),
        ({"cache_control": {}}, "cache_control.type"),
        ({"cache_control": {"type": "persistent"}}, "cache_control.type"),
        ({"cache_control": BARE | {"ttl": "2h"}}, "cache_control.ttl"),
        ({"cache_control": BARE | {"ttl": 300}}, "cache_control.ttl"),
        ({"messages": [HI, HI | {"cache_control": {"type": []}}]}, "messages[1].cache_control.type"),
        ({"headrace": {"ttl": "5"}}, "headrace.ttl"),
        ({"headrace": {"ttl": "5 minutes"}}, "headrace.ttl"),
        ({"headrace": {"ttl": 300}}, "headrace.ttl"),
        ({"headrace": {"ttl": "1s"}}, "headrace.ttl"),
        ({"headrace": {"ttl": "900d"}}, "headrace.ttl"),
        ({"headrace": {"not_on_disk": 1}}, "headrace.not_on_disk"),
        ({"prompt_cache_key": 7}, "prompt_cache_key"),
        ({"prompt_cache_key": "x" * 257}, "prompt_cache_key"),
        ({"prompt_cache_key": "\ud800"}, "prompt_cache_key"),
    ],
)
def test_what_is_no_such_value_is_refused_by_name(fields, param):
    """Fails when a misspelled wish is dropped: its sender would believe in it."""
    with pytest.raises(InvalidRequest) as refused:
        cache(**fields)
    assert refused.value.param == param


def test_a_part_s_mark_is_refused_by_its_place():
    """Fails when a client cannot find which of a hundred parts is wrong."""
    with pytest.raises(InvalidRequest) as refused:
        marked(None, {"type": "forever"})
    assert refused.value.param == "messages[0].content[1].cache_control.type"
    assert "'forever'" in str(refused.value)


anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=6) | st.sampled_from(["24h", "1h", "ephemeral"]),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(["type", "ttl", "x"]), inner),
)


@given(anything, anything, anything, anything)
def test_nothing_but_a_retention_or_a_refusal_comes_out(retention, top, on_message, own):
    """Fails when outside input reaches an assert or another exception."""
    fields = {"prompt_cache_retention": retention, "cache_control": top, "headrace": {"ttl": own, "not_on_disk": own}}
    with contextlib.suppress(InvalidRequest):
        read = cache(messages=[HI | {"cache_control": on_message}], **fields).retention
        assert read.ttl_s is None or read.ttl_s >= 10
