"""Outside input in protobuf form becomes values that cannot be wrong, or InvalidRequest naming the field.

Also home of the checks that protobuf and JSON share. Nothing here asks a worker, a tokenizer or a clock: whether a
prompt fits a model's context is known only after tokenising and is the gateway's to say.
"""

import math
from collections.abc import Sequence

from headrace.core.block import CacheSource, NamespaceId, Tier
from headrace.core.budgets import Budget
from headrace.core.errors import InvalidRequest
from headrace.core.front_door_limits import SPEAKER_CHARS_MAX
from headrace.core.generation import ALL_SOURCES, CacheControl, EvictSelector, WorkerId
from headrace.core.limits import (
    AFFINITY_KEY_CHARS_MAX,
    CACHE_SALT_CHARS_MAX,
    LOGPROBS_MAX,
    PRIORITY_MAX,
    PROMPT_CHARS_MAX,
    REQUEST_TIMEOUT_MS_MAX,
    STOP_STRING_CHARS_MAX,
    STOP_STRINGS_MAX,
)
from headrace.core.retention import KEEP, Retention, checked_ttl
from headrace.wire.client_request import (
    ChatPrompt,
    ChatTurn,
    ClientRequest,
    Prompt,
    SamplingOptions,
    TextPrompt,
    TokenPrompt,
)
from headrace.wire.v1 import admin_pb2, inference_pb2

INT32_MAX = 2**31 - 1
SEED_MAX = 2**64 - 1
TEMPERATURE_MAX = 2.0  # OpenAI's bound
ROLES = ("system", "developer", "user", "assistant")
SOURCE_OF_ENUM: dict[int, CacheSource] = {
    inference_pb2.CACHE_SOURCE_DEVICE: CacheSource.DEVICE,
    inference_pb2.CACHE_SOURCE_SHARED_MEMORY: CacheSource.SHARED_MEMORY,
    inference_pb2.CACHE_SOURCE_GRPC: CacheSource.GRPC,
}


def parse_generate_request(message: inference_pb2.GenerateRequest) -> ClientRequest:
    """Read a gRPC request. Unset fields take their documented defaults; raises InvalidRequest naming the field."""
    cache = message.cache
    return ClientRequest(
        model=checked_text(message.model, param="model"),
        prompt=_parse_prompt(message),
        sampling=_parse_sampling(message.sampling),
        cache=cache_control(
            bypass=cache.bypass,
            sources=_parse_sources(cache.sources),
            publish=not cache.no_publish,
            param="cache.sources",
            retention=Retention(
                ttl_s=checked_ttl(cache.ttl_s, param="cache.ttl_s") if cache.ttl_s else None,
                on_disk=not cache.not_on_disk,
            ),
            affinity_key=checked_affinity_key(cache.affinity_key, param="cache.affinity_key"),
        ),
        timeout_ms=checked_timeout_ms(message.timeout_ms or None, param="timeout_ms"),
        cache_salt=checked_salt(message.cache_salt),
        decode_worker=WorkerId(cache.decode_worker) if cache.decode_worker else None,
        prefill_worker=WorkerId(cache.prefill_worker) if cache.prefill_worker else None,
        priority=checked_priority(message.priority if message.HasField("priority") else None, param="priority"),
    )


def _parse_prompt(message: inference_pb2.GenerateRequest) -> Prompt:
    kind = message.WhichOneof("prompt")
    if kind == "text":
        return TextPrompt(checked_prompt_text(message.text, param="text"))
    if kind == "chat":
        turns = [
            chat_turn(turn.role, turn.content, param=f"chat.messages[{i}]")
            for i, turn in enumerate(message.chat.messages)
        ]
        return chat_prompt(turns, param="chat.messages")
    if kind == "token_ids":
        return token_prompt(message.token_ids.ids, param="token_ids")
    raise InvalidRequest("a prompt is needed: text, chat or token_ids", param="prompt")


def parse_admin_prompt(message: admin_pb2.WhyMissRequest) -> Prompt:
    """The one prompt that an admin request names; raises InvalidRequest for none or several."""
    given = [name for name in ("text", "chat", "token_ids") if getattr(message, name)]
    if len(given) != 1:
        raise InvalidRequest("give one of text, chat, token_ids and request_id", param="text")
    if message.text:
        return TextPrompt(checked_prompt_text(message.text, param="text"))
    if message.chat:
        turns = [chat_turn(turn.role, turn.content, param=f"chat[{i}]") for i, turn in enumerate(message.chat)]
        return chat_prompt(turns, param="chat")
    return token_prompt(message.token_ids, param="token_ids")


def _parse_sampling(message: inference_pb2.Sampling) -> SamplingOptions:
    def given(name: str) -> bool:
        return bool(message.HasField(name))

    return checked_sampling(
        SamplingOptions(
            max_tokens=message.max_tokens if given("max_tokens") else None,
            temperature=message.temperature if given("temperature") else 0.0,
            top_k=message.top_k if given("top_k") else 0,
            top_p=message.top_p if given("top_p") else 1.0,
            seed=message.seed if given("seed") else None,
            stop=tuple(message.stop),
            logprobs=message.logprobs if given("logprobs") else None,
            ignore_eos=message.ignore_eos,
        )
    )


def _parse_sources(values: Sequence[int]) -> tuple[CacheSource, ...]:
    for value in values:
        if value not in SOURCE_OF_ENUM:
            raise InvalidRequest(f"cache.sources: {value} is not a known source", param="cache.sources")
    return tuple(SOURCE_OF_ENUM[value] for value in values)


def parse_selector(selector: admin_pb2.Selector) -> EvictSelector:
    """Read a selector that names blocks by hash, prefix, namespace, model or age; raises InvalidRequest.

    `prefix_text` is the gateway's to tokenise and is refused here.
    """
    if selector.prefix_text:
        raise InvalidRequest("text is tokenised by the gateway only; ask it, or give token ids", param="prefix_text")
    if selector.prefix_token_ids and selector.block_hashes:
        raise InvalidRequest("give a prefix or block hashes, not both", param="selector")
    idle_for_s = selector.idle_for_s if selector.HasField("idle_for_s") else None
    if idle_for_s is not None and not (math.isfinite(idle_for_s) and idle_for_s >= 0):
        raise InvalidRequest("idle_for_s must be a number of seconds, at least 0", param="idle_for_s")
    if selector.HasField("older_than_s") or selector.holders or selector.tenant:
        raise InvalidRequest("older_than_s, holders and tenant are the gateway's to resolve; ask it", param="selector")
    if selector.tier not in ("", *Tier):
        raise InvalidRequest(f"tier is one of {', '.join(Tier)}, not {selector.tier!r:.40}", param="tier")
    for block_hash in selector.block_hashes:
        if len(block_hash) not in (16, 32):
            raise InvalidRequest("a block hash has 16 or 32 bytes", param="block_hashes")
    return EvictSelector(
        namespace=selector.namespace or None,
        model=selector.model or None,
        block_hashes=tuple(selector.block_hashes),
        prefix_token_ids=tuple(selector.prefix_token_ids),
        idle_for_s=idle_for_s,
        created_before_unix_ms=selector.created_before_unix_ms if selector.HasField("created_before_unix_ms") else None,
        tier=selector.tier or None,
        free_bytes=selector.free_bytes if selector.HasField("free_bytes") else None,
    )


def checked_sampling(options: SamplingOptions) -> SamplingOptions:
    """The same options, every one within its range; raises InvalidRequest naming the first that is not."""
    if options.max_tokens is not None:
        _check_range("max_tokens", options.max_tokens, low=1, high=INT32_MAX)
    _check_range("temperature", options.temperature, low=0.0, high=TEMPERATURE_MAX)
    _check_range("top_k", options.top_k, low=0, high=INT32_MAX)
    _check_range("top_p", options.top_p, low=0.0, high=1.0)
    if options.top_p == 0.0:
        raise InvalidRequest("top_p must be greater than 0", param="top_p")
    if options.seed is not None:
        _check_range("seed", options.seed, low=0, high=SEED_MAX)
    if options.logprobs is not None:
        _check_range("logprobs", options.logprobs, low=0, high=LOGPROBS_MAX)
    if len(options.stop) > STOP_STRINGS_MAX:
        raise InvalidRequest(f"at most {STOP_STRINGS_MAX} stop strings", param="stop")
    for text in options.stop:
        if not 1 <= len(checked_text(text, param="stop")) <= STOP_STRING_CHARS_MAX:
            raise InvalidRequest(f"a stop string has 1 to {STOP_STRING_CHARS_MAX} characters", param="stop")
    return options


def _check_range(param: str, value: float, *, low: float, high: float) -> None:
    if not low <= value <= high:  # false for NaN too
        raise InvalidRequest(f"{param} must lie in {low}..{high}, not {value!r:.40}", param=param)


def parse_budget(message: admin_pb2.Budget) -> Budget:
    """One row of a table of budgets; raises InvalidRequest for bounds that contradict each other."""
    bytes_max = message.bytes_max if message.HasField("bytes_max") else None
    if bytes_max is not None and bytes_max < message.bytes_min:
        raise InvalidRequest("a protected minimum cannot be larger than the quota", param="bytes_min")
    return Budget(
        account=message.account,
        namespaces=tuple(sorted(NamespaceId(each) for each in message.namespaces)),
        bytes_max=bytes_max,
        bytes_min=message.bytes_min,
        set_unix_ms=message.set_unix_ms,
        set_by=message.set_by,
    )


def cache_control(
    *,
    bypass: bool,
    sources: Sequence[CacheSource],
    publish: bool,
    param: str,
    retention: Retention = KEEP,
    affinity_key: str = "",
) -> CacheControl:
    """Which sources a request may read: none when it bypasses the cache, all when it names none."""
    if bypass and sources:
        raise InvalidRequest("bypass takes nothing from the cache; it cannot be joined with sources", param=param)
    readable = frozenset(sources) if sources else frozenset() if bypass else ALL_SOURCES
    return CacheControl(sources=readable, publish=publish, retention=retention, affinity_key=affinity_key)


def checked_affinity_key(key: str, *, param: str) -> str:
    """A key by which requests meet on one worker: any short text."""
    if len(key) > AFFINITY_KEY_CHARS_MAX:
        raise InvalidRequest(f"{param} has at most {AFFINITY_KEY_CHARS_MAX} characters", param=param)
    return checked_text(key, param=param)


def checked_priority(priority: int | None, *, param: str) -> int | None:
    """A priority within the bounds that hold for everybody; the tenant's own is the gateway's to check."""
    if priority is not None:
        _check_range(param, priority, low=-PRIORITY_MAX, high=PRIORITY_MAX)
    return priority


def checked_text(text: str, *, param: str) -> str:
    """The text, if it can be written as UTF-8: JSON's escapes can spell half a surrogate pair."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InvalidRequest(f"{param} is not valid Unicode text", param=param) from None
    return text


def checked_prompt_text(text: str, *, param: str) -> str:
    """A prompt's text: not empty, not beyond what a tokenizer should be given."""
    if not text:
        raise InvalidRequest(f"{param} must not be empty", param=param)
    if len(text) > PROMPT_CHARS_MAX:
        raise InvalidRequest(f"{param} has {len(text)} characters; at most {PROMPT_CHARS_MAX} are read", param=param)
    return checked_text(text, param=param)


def chat_turn(role: str, content: str, *, param: str, name: str = "") -> ChatTurn:
    """One message: a role that templates know, content that may be empty. `developer` is OpenAI's word for system."""
    if len(name) > SPEAKER_CHARS_MAX:
        raise InvalidRequest(f"{param}.name has at most {SPEAKER_CHARS_MAX} characters", param=f"{param}.name")
    if role not in ROLES:
        raise InvalidRequest(f"{param}.role must be one of {', '.join(ROLES)}, not {role!r:.60}", param=f"{param}.role")
    role = "system" if role == "developer" else role
    return ChatTurn(role=role, content=checked_text(content, param=param), name=name)


def chat_prompt(turns: Sequence[ChatTurn], *, param: str) -> ChatPrompt:
    """A chat of at least one message with some content."""
    if not any(turn.content for turn in turns):
        raise InvalidRequest(f"{param} must hold at least one message with content", param=param)
    characters = sum(len(turn.content) for turn in turns)
    if characters > PROMPT_CHARS_MAX:
        raise InvalidRequest(f"{param} has {characters} characters; at most {PROMPT_CHARS_MAX} are read", param=param)
    return ChatPrompt(turns=tuple(turns))


def token_prompt(token_ids: Sequence[int], *, param: str) -> TokenPrompt:
    """Token ids: at least one, none negative. Whether the model knows them is checked by the gateway."""
    if not token_ids:
        raise InvalidRequest(f"{param} must not be empty", param=param)
    if min(token_ids) < 0:
        raise InvalidRequest(f"{param} must not hold negative numbers", param=param)
    return TokenPrompt(token_ids=tuple(token_ids))


def checked_timeout_ms(timeout_ms: int | None, *, param: str) -> int | None:
    """A request's own deadline, if it names one."""
    if timeout_ms is not None:
        _check_range(param, timeout_ms, low=1, high=REQUEST_TIMEOUT_MS_MAX)
    return timeout_ms


def checked_salt(salt: str) -> str:
    """A cache salt: any short text."""
    if len(salt) > CACHE_SALT_CHARS_MAX:
        raise InvalidRequest(f"cache_salt has at most {CACHE_SALT_CHARS_MAX} characters", param="cache_salt")
    return checked_text(salt, param="cache_salt")
