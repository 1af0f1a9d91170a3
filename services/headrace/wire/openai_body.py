"""Bodies of OpenAI's HTTP API become client requests, or InvalidRequest naming the parameter.

Which fields there may be at all is said in `openai_fields.py`; here is what the values mean, and what each may be.
`headrace` is our own object for control over the cache; how long blocks may stay is in `read_retention.py`.
"""

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from headrace.core.block import CacheSource
from headrace.core.errors import InvalidRequest, UnsupportedField
from headrace.core.front_door_limits import LOGPROBS_OF_REPLY_MAX
from headrace.core.generation import CacheControl, WorkerId
from headrace.core.limits import CHOICES_MAX, COMPLETION_TOKENS_DEFAULT, LOGPROBS_MAX, OUTPUT_TOKENS_DEFAULT
from headrace.wire.client_request import ChatTurn, ClientRequest, Prompt, SamplingOptions, TextPrompt
from headrace.wire.openai_fields import CHAT, COMPLETION, CONTROL, MESSAGE, STREAM_OPTIONS, TEXT_PART, JsonObject
from headrace.wire.parse import (
    cache_control,
    chat_prompt,
    chat_turn,
    checked_affinity_key,
    checked_priority,
    checked_prompt_text,
    checked_salt,
    checked_sampling,
    checked_text,
    checked_timeout_ms,
    token_prompt,
)
from headrace.wire.read_retention import read_retention

FLEX_PRIORITY = -1


@dataclass(frozen=True, slots=True)
class OpenAiRequest:
    """One HTTP request: a client request for each prompt, and how the answer is to be sent."""

    requests: tuple[ClientRequest, ...]
    stream: bool
    include_usage: bool  # at the end of a stream
    running_usage: bool  # and in every piece of it
    logprobs: bool

    @property
    def model(self) -> str:
        """The model as the caller named it."""
        return self.requests[0].model


def parse_json_body(body: bytes) -> JsonObject:
    """A body's JSON object. Refuses broken UTF-8, NaN and infinity, nesting beyond reason, and all but objects."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant)
    except UnicodeDecodeError as error:
        raise InvalidRequest(f"the body is not valid UTF-8 (byte {error.start})") from None
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not valid JSON: {str(error)[:200]}") from None
    if not isinstance(value, dict):
        raise InvalidRequest("the body must be a JSON object")
    return value


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is not a JSON number")


def parse_chat_body(body: JsonObject) -> OpenAiRequest:
    """Read a body of `/v1/chat/completions`."""
    CHAT.check(body)
    messages = body.get("messages")
    if not isinstance(messages, list):
        raise InvalidRequest("messages must be a list of messages", param="messages")
    turns = [_chat_message(message, param=f"messages[{i}]") for i, message in enumerate(messages)]
    wanted = _boolean(body, "logprobs") or False
    top = _integer(body, "top_logprobs")
    if top is not None and not wanted:
        raise InvalidRequest("top_logprobs needs logprobs: true", param="top_logprobs")
    if top is not None and not 0 <= top <= LOGPROBS_MAX:
        raise InvalidRequest(f"top_logprobs must lie in 0..{LOGPROBS_MAX}", param="top_logprobs")
    sampling = _sampling(body, max_tokens_default=None, logprobs=(top or 0) if wanted else None)
    return _openai_request(body, [chat_prompt(turns, param="messages")], sampling)


def parse_completion_body(body: JsonObject) -> OpenAiRequest:
    """Read a body of `/v1/completions`: one prompt or several, each text or token ids."""
    COMPLETION.check(body)
    prompts = _completion_prompts(body.get("prompt"))
    sampling = _sampling(body, max_tokens_default=COMPLETION_TOKENS_DEFAULT, logprobs=_integer(body, "logprobs"))
    best_of = _integer(body, "best_of")
    if best_of is not None and best_of != (_integer(body, "n") or 1):
        raise UnsupportedField("best_of is not supported here beyond n", param="best_of")
    return _openai_request(body, prompts, sampling)


def _openai_request(body: JsonObject, prompts: Sequence[Prompt], sampling: SamplingOptions) -> OpenAiRequest:
    """What both endpoints have in common."""
    stream = _boolean(body, "stream") or False
    choices = _integer(body, "n")
    choices = 1 if choices is None else choices
    if not 1 <= choices <= CHOICES_MAX:
        raise InvalidRequest(f"n must lie in 1..{CHOICES_MAX}", param="n")
    if len(prompts) * choices > CHOICES_MAX:
        raise InvalidRequest(f"at most {CHOICES_MAX} choices in one request: prompts x n", param="prompt")
    options, control = _object(body, "stream_options"), _object(body, "headrace")
    if options and not stream:
        raise InvalidRequest("stream_options needs stream: true", param="stream_options")
    STREAM_OPTIONS.check(options, prefix="stream_options.")
    CONTROL.check(control, prefix="headrace.")
    requests = tuple(
        ClientRequest(
            model=_model(body),
            prompt=prompt,
            sampling=sampling,
            cache=_cache(body, control),
            choices=choices,
            timeout_ms=_timeout_ms(control),
            cache_salt=checked_salt(_text(body, "cache_salt") or ""),
            decode_worker=_worker(control, "decode_worker"),
            prefill_worker=_worker(control, "prefill_worker"),
            priority=_priority(body, control),
        )
        for prompt in prompts
    )
    if not stream:
        _check_logprobs(sampling, num_choices=len(prompts) * choices)
    return OpenAiRequest(
        requests=requests,
        stream=stream,
        include_usage=_boolean(options, "include_usage", prefix="stream_options.") or False,
        running_usage=_boolean(options, "continuous_usage_stats", prefix="stream_options.") or False,
        logprobs=sampling.logprobs is not None,
    )


def _check_logprobs(sampling: SamplingOptions, *, num_choices: int) -> None:
    """Refuse an answer that would have to be written at once and would keep everybody else waiting meanwhile."""
    if sampling.logprobs is None:
        return
    tokens_max = sampling.max_tokens or sampling.max_tokens_default or OUTPUT_TOKENS_DEFAULT
    of_token = num_choices * (sampling.logprobs + 1)
    if tokens_max * of_token > LOGPROBS_OF_REPLY_MAX:
        counted = "" if sampling.max_tokens else " (the default, as none was given)"
        raise InvalidRequest(
            f"{tokens_max * of_token:,} log-probabilities in one answer, which may have {LOGPROBS_OF_REPLY_MAX:,}:"
            f" choices {num_choices} x max_tokens {tokens_max:,}{counted} x {sampling.logprobs + 1}; give max_tokens of"
            f" at most {LOGPROBS_OF_REPLY_MAX // of_token:,}, or ask for a stream",
            param="logprobs",
        )


def _model(body: JsonObject) -> str:
    model = _text(body, "model")
    if not model:
        raise InvalidRequest("model must be named; GET /v1/models lists what is served", param="model")
    return model


def _chat_message(message: Any, *, param: str) -> ChatTurn:
    if not isinstance(message, dict):
        raise InvalidRequest(f"{param} must be an object", param=param)
    MESSAGE.check(message, prefix=f"{param}.")
    role, name = message.get("role"), _text(message, "name", prefix=f"{param}.") or ""
    if not isinstance(role, str):
        raise InvalidRequest(f"{param}.role must be a string", param=f"{param}.role")
    return chat_turn(role, _content(message.get("content"), param=f"{param}.content"), name=name, param=param)


def _content(content: Any, *, param: str) -> str:
    """A message's text: a string, or a list of text parts, which are joined. Images, audio and files are refused."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise InvalidRequest(f"{param} must be a string or a list of text parts", param=param)
    texts = []
    for number, part in enumerate(content):
        if not isinstance(part, dict) or not isinstance(part.get("type"), str):
            raise InvalidRequest(f"{param}: each part must be an object with a type", param=param)
        if part["type"] != "text":
            raise UnsupportedField(
                f"{param}: only text parts are supported here, not {part['type']!r:.60}", param=param
            )
        TEXT_PART.check(part, prefix=f"{param}[{number}].")
        if not isinstance(part.get("text"), str):
            raise InvalidRequest(f"{param}[{number}].text must be a string", param=f"{param}[{number}].text")
        texts.append(part["text"])
    return "".join(texts)


def _completion_prompts(prompt: Any) -> list[Prompt]:
    """`str`, `[str]`, `[int]` or `[[int]]`."""
    if isinstance(prompt, str):
        return [TextPrompt(checked_prompt_text(prompt, param="prompt"))]
    if not isinstance(prompt, list) or not prompt:
        raise InvalidRequest(
            "prompt must be a string, a list of strings, of token ids or of lists of them", param="prompt"
        )
    if _are_integers(prompt):
        return [token_prompt(prompt, param="prompt")]
    if len(prompt) > CHOICES_MAX:
        raise InvalidRequest(f"at most {CHOICES_MAX} prompts in one request", param="prompt")
    prompts: list[Prompt] = []
    for item in prompt:
        if isinstance(item, str):
            prompts.append(TextPrompt(checked_prompt_text(item, param="prompt")))
        elif isinstance(item, list) and _are_integers(item):
            prompts.append(token_prompt(item, param="prompt"))
        else:
            raise InvalidRequest("prompt: each item must be a string or a list of token ids", param="prompt")
    return prompts


def _sampling(body: JsonObject, *, max_tokens_default: int | None, logprobs: int | None) -> SamplingOptions:
    temperature, top_p, seed = _number(body, "temperature"), _number(body, "top_p"), _integer(body, "seed")
    return checked_sampling(
        SamplingOptions(
            max_tokens=_max_tokens(body),
            max_tokens_default=max_tokens_default,
            temperature=1.0 if temperature is None else temperature,
            top_p=1.0 if top_p is None else top_p,
            top_k=_top_k(body),
            seed=None if seed is None else seed % 2**64,  # OpenAI allows negative seeds
            stop=_stop(body.get("stop")),
            logprobs=logprobs,
            ignore_eos=_boolean(body, "ignore_eos") or False,
        )
    )


def _top_k(body: JsonObject) -> int:
    """0, and -1 as other servers spell it, switch it off."""
    top_k = _integer(body, "top_k")
    return 0 if top_k in (None, -1) else top_k


def _max_tokens(body: JsonObject) -> int | None:
    """Whichever of the two spellings is given; two that differ are refused."""
    names = ("max_completion_tokens", "max_tokens")
    given = {name: value for name in names if (value := _integer(body, name)) is not None}
    for name, value in given.items():
        if value < 1:
            raise InvalidRequest(f"{name} must be at least 1, not {value!r:.40}", param=name)
    if len(set(given.values())) > 1:
        raise InvalidRequest(f"{' and '.join(given)} differ; give one", param=names[0])
    return next(iter(given.values()), None)


def _stop(stop: Any) -> tuple[str, ...]:
    if stop is None:
        return ()
    stops = [stop] if isinstance(stop, str) else stop
    if not isinstance(stops, list) or not all(isinstance(text, str) for text in stops):
        raise InvalidRequest("stop must be a string or a list of strings", param="stop")
    return tuple(stops)


def _cache(body: JsonObject, control: JsonObject) -> CacheControl:
    names = control.get("sources")
    names = [] if names is None else names
    known = ", ".join(CacheSource)
    if not isinstance(names, list) or not all(isinstance(n, str) and n in set(CacheSource) for n in names):
        raise InvalidRequest(f"headrace.sources must be a list of: {known}", param="headrace.sources")
    return cache_control(
        bypass=_boolean(control, "bypass", prefix="headrace.") or False,
        sources=[CacheSource(name) for name in names],
        publish=not _boolean(control, "no_publish", prefix="headrace."),
        param="headrace.sources",
        retention=read_retention(body, control),
        affinity_key=checked_affinity_key(_text(body, "prompt_cache_key") or "", param="prompt_cache_key"),
    )


def _priority(body: JsonObject, control: JsonObject) -> int | None:
    """`headrace.priority`, else -1 for `service_tier: flex`: cheaper because others go first, which is what it means.

    The other tiers promise what a server cannot say it keeps (speed, a bill), and have no effect.
    """
    priority = _integer(control, "priority", prefix="headrace.")
    if priority is None and _text(body, "service_tier") == "flex":
        return FLEX_PRIORITY
    return checked_priority(priority, param="headrace.priority")


def _timeout_ms(control: JsonObject) -> int | None:
    return checked_timeout_ms(_integer(control, "timeout_ms", prefix="headrace."), param="headrace.timeout_ms")


def _worker(control: JsonObject, name: str) -> WorkerId | None:
    text = _text(control, name, prefix="headrace.")
    return WorkerId(text) if text else None


def _are_integers(values: Sequence[Any]) -> bool:
    """Whether all are; a prompt may have a million, so nothing of ours is called for each. JSON has no other ints."""
    return set(map(type, values)) <= {int}


def _is_integer(value: Any) -> bool:
    return type(value) is int


def _integer(body: JsonObject, name: str, *, prefix: str = "") -> int | None:
    value = body.get(name)
    if value is not None and not _is_integer(value):
        raise InvalidRequest(f"{prefix}{name} must be an integer", param=prefix + name)
    return value


def _number(body: JsonObject, name: str) -> float | None:
    value = body.get(name)
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e9 or not math.isfinite(value):
        raise InvalidRequest(f"{name} must be a finite number of usual size", param=name)
    return float(value)


def _boolean(body: JsonObject, name: str, *, prefix: str = "") -> bool | None:
    value = body.get(name)
    if value is not None and not isinstance(value, bool):
        raise InvalidRequest(f"{prefix}{name} must be true or false", param=prefix + name)
    return value


def _text(body: JsonObject, name: str, *, prefix: str = "") -> str | None:
    value = body.get(name)
    if value is None:
        return None
    if not isinstance(value, str):
        raise InvalidRequest(f"{prefix}{name} must be a string", param=prefix + name)
    return checked_text(value, param=prefix + name)


def _object(body: JsonObject, name: str) -> JsonObject:
    value = body.get(name)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise InvalidRequest(f"{name} must be an object", param=name)
    return value
