"""How long a request's blocks may stay, from the HTTP fields that OpenAI's and Anthropic's clients send, and our own.

    prompt_cache_retention   "in_memory" (or "in-memory"): 1 h, not on disk; "24h": 24 h
    cache_control            {"type": "ephemeral", "ttl": "5m" | "1h"} at the top, on a message or on a content part
    headrace.ttl             90s, 5m, 7d; headrace.not_on_disk

Two fields that name different times are refused: whichever held, somebody would be surprised. A `cache_control` marks a
point in the prompt where it comes from; here all full blocks are kept anyway, so it says how long and no more, and the
longest one of a request holds. One without `ttl` means 5 minutes where nothing else in the request names a time. See
docs/retention.md.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from headrace.core.errors import InvalidRequest
from headrace.core.retention import Retention, parse_ttl
from headrace.wire.openai_fields import JsonObject

OPENAI_RETENTIONS = {
    "in_memory": Retention(ttl_s=3_600.0, on_disk=False),
    "in-memory": Retention(ttl_s=3_600.0, on_disk=False),  # as OpenAI's own Python library spelled it for a while
    "24h": Retention(ttl_s=86_400.0),
}
ANTHROPIC_TTLS_S = {"5m": 300.0, "1h": 3_600.0}
ANTHROPIC_TTL_DEFAULT_S = ANTHROPIC_TTLS_S["5m"]


def read_retention(body: JsonObject, control: JsonObject) -> Retention:
    """What the request asks for; without any of the fields nothing is bounded. `control` is the body's `headrace`.

    Raises InvalidRequest for what is no such value, and for two fields that name different times.
    """
    openai = _openai_retention(body.get("prompt_cache_retention"))
    marked, ttl_s_of_marks = False, list[float]()
    for param, mark in _marks(body):
        marked = True
        ttl_s = _mark_ttl_s(mark, param=param)
        if ttl_s is not None:
            ttl_s_of_marks.append(ttl_s)
    named = {
        "headrace.ttl": _own_ttl_s(control.get("ttl")),
        "prompt_cache_retention": openai.ttl_s,
        "cache_control": max(ttl_s_of_marks, default=None),
    }
    times = {param: ttl_s for param, ttl_s in named.items() if ttl_s is not None}
    if len(set(times.values())) > 1:
        spelled = " and ".join(f"{param} ({ttl_s:g} s)" for param, ttl_s in times.items())
        raise InvalidRequest(f"{spelled} name different times to live; give one", param=next(iter(times)))
    return Retention(
        ttl_s=next(iter(times.values()), ANTHROPIC_TTL_DEFAULT_S if marked else None),
        on_disk=openai.on_disk and not _not_on_disk(control.get("not_on_disk")),
    )


def _openai_retention(value: Any) -> Retention:
    if value is None:
        return Retention()
    if not isinstance(value, str) or value not in OPENAI_RETENTIONS:
        raise InvalidRequest(
            f"prompt_cache_retention must be in_memory or 24h, not {value!r:.60}", param="prompt_cache_retention"
        )
    return OPENAI_RETENTIONS[value]


def _marks(body: JsonObject) -> Iterator[tuple[str, Any]]:
    """Every `cache_control` of the body, with its place. What is no message or part is the caller's to refuse."""
    messages = body.get("messages")
    places: list[tuple[str, Any]] = [("", body)]
    for number, message in enumerate(messages if isinstance(messages, list) else ()):
        places.append((f"messages[{number}].", message))
        content = message.get("content") if isinstance(message, dict) else None
        if isinstance(content, list):
            places += [(f"messages[{number}].content[{i}].", part) for i, part in enumerate(content)]
    for prefix, place in places:
        if isinstance(place, Mapping) and place.get("cache_control") is not None:
            yield prefix + "cache_control", place["cache_control"]


def _mark_ttl_s(mark: Any, *, param: str) -> float | None:
    """Seconds that a `cache_control` names; None when it leaves them open."""
    if not isinstance(mark, dict):
        raise InvalidRequest(f"{param} must be an object", param=param)
    kind, ttl = mark.get("type"), mark.get("ttl")
    if kind != "ephemeral":
        raise InvalidRequest(f"{param}.type must be ephemeral, not {kind!r:.60}", param=f"{param}.type")
    if ttl is None:
        return None
    if not isinstance(ttl, str) or ttl not in ANTHROPIC_TTLS_S:
        raise InvalidRequest(f"{param}.ttl must be 5m or 1h, not {ttl!r:.60}", param=f"{param}.ttl")
    return ANTHROPIC_TTLS_S[ttl]


def _own_ttl_s(value: Any) -> float | None:
    if value is None:
        return None
    if not isinstance(value, str):
        raise InvalidRequest(f"headrace.ttl must be a string as 5m, not {value!r:.60}", param="headrace.ttl")
    return parse_ttl(value, param="headrace.ttl")


def _not_on_disk(value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest("headrace.not_on_disk must be true or false", param="headrace.not_on_disk")
    return bool(value)
