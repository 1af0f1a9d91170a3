"""Which fields the bodies of OpenAI's HTTP API may have here: those that are read, those without effect, and no others.

A field that would change what is asked for, and one that nobody here has heard of, is refused by name: an answer to
another question is worse than none, and a mistyped field should not go unnoticed. OpenAI's own API does the same. A
null is no field, as OpenAI's clients send it; so is a value that says that the field is not used.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.core.errors import InvalidRequest, UnsupportedField
from headrace.core.front_door_limits import FIELD_NAME_CHARS_MAX

JsonObject = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Fields:
    """The fields of one kind of object."""

    read: frozenset[str]
    # Taken and not looked at, but for their type: they change nothing of the answer.
    without_effect: Mapping[str, type] = field(default_factory=dict)
    # Known and not supported, with the values that mean "not used".
    unsupported: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)

    def check(self, given: JsonObject, *, prefix: str = "") -> None:
        """Raise UnsupportedField for the first field that asks for something that is not done here, and InvalidRequest
        for one without effect that is of the wrong type."""
        for name, value in given.items():
            if value is None or name in self.read:
                continue
            param = prefix + _printable(name)
            if name in self.without_effect:
                if not isinstance(value, self.without_effect[name]):
                    raise InvalidRequest(f"{param} must be {_KIND_NAMES[self.without_effect[name]]}", param=param)
            elif name not in self.unsupported:
                raise UnsupportedField(f"{param} is not a field that is known here; leave it out", param=param)
            elif not any(_same(value, unused) for unused in self.unsupported[name]):
                raise UnsupportedField(f"{param} is not supported here; leave it out", param=param)


_KIND_NAMES = {str: "a string", bool: "true or false", dict: "an object"}


def _same(value: Any, unused: Any) -> bool:
    """Equality in which true is not 1 and false is not 0."""
    return isinstance(value, bool) == isinstance(unused, bool) and bool(value == unused)


def _printable(name: str) -> str:
    """A field's name as it can be told: JSON's escapes can spell half a surrogate pair."""
    return name[:FIELD_NAME_CHARS_MAX].encode("utf-8", "replace").decode()


_READ = frozenset(
    {"model", "stream", "stream_options", "n", "max_tokens", "max_completion_tokens", "temperature", "top_p", "top_k"}
    | {"seed", "stop", "logprobs", "ignore_eos", "service_tier", "cache_salt", "cache_control", "headrace"}
    | {"prompt_cache_key", "prompt_cache_retention"}
)
_WITHOUT_EFFECT: dict[str, type] = {"user": str, "safety_identifier": str, "metadata": dict, "store": bool}
# Of OpenAI's API, then of what other servers of open models add to it.
_UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "frequency_penalty": (0,),
    "presence_penalty": (0,),
    "logit_bias": ({},),
    "response_format": ({"type": "text"},),
    "repetition_penalty": (1,),
    "length_penalty": (1,),
    "min_p": (0,),
    "min_tokens": (0,),
    "use_beam_search": (False,),
    "stop_token_ids": ([],),
    "bad_words": ([],),
    "include_stop_str_in_output": (False,),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "echo": (False,),
    "prompt_logprobs": (),
    "structured_outputs": (),
}

CHAT = Fields(
    read=_READ | {"messages", "top_logprobs"},
    without_effect=_WITHOUT_EFFECT | {"parallel_tool_calls": bool},
    unsupported=_UNSUPPORTED
    | {
        "tools": ([],),
        "tool_choice": ("none", "auto"),
        "functions": ([],),
        "function_call": ("none", "auto"),
        "modalities": (["text"],),
        "audio": (),
        "web_search_options": (),
        "prediction": (),
        "moderation": (),
        "reasoning_effort": ("none",),
        "verbosity": ("medium",),
        "prompt_cache_options": (),
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "add_special_tokens": (False,),
        "chat_template": (),
        "chat_template_kwargs": ({},),
        "documents": ([],),
    },
)
COMPLETION = Fields(
    read=_READ | {"prompt", "best_of"},
    without_effect=_WITHOUT_EFFECT,
    unsupported=_UNSUPPORTED | {"suffix": ("",), "add_special_tokens": (True,)},
)
STREAM_OPTIONS = Fields(
    read=frozenset({"include_usage", "continuous_usage_stats"}),
    unsupported={"include_obfuscation": (False,)},
)
CONTROL = Fields(  # of the object `headrace`
    read=frozenset(
        {"bypass", "sources", "no_publish", "ttl", "not_on_disk", "decode_worker", "prefill_worker"}
        | {"timeout_ms", "priority"}
    )
)
# What an answer has beside its text comes back in the next turn, empty where it was not used.
MESSAGE = Fields(
    read=frozenset({"role", "content", "name", "cache_control"}),
    unsupported={
        "tool_calls": ([],),
        "tool_call_id": ("",),
        "function_call": (),
        "refusal": ("",),
        "annotations": ([],),
        "audio": (),
        "reasoning_content": ("",),
        "provider_specific_fields": ({}, {"refusal": None}),
    },
)
TEXT_PART = Fields(
    read=frozenset({"type", "text", "cache_control"}),
    without_effect={"prompt_cache_breakpoint": dict},  # every full block is kept anyway
)
