"""Values of requests and streams to protobuf messages and back; those of operators are `admin_messages.py`'s.

Where a value has a message's fields under the same names, it is read by its names (`from_message`).
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import fields
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from headrace.client.values import Accepted, CacheOptions, Done, Event, Message, Prompt, Sampling, ServedModel
from headrace.core.block import CacheSource
from headrace.core.errors import InvalidRequest
from headrace.core.generation import ALL_SOURCES, CachedTokens, TokenDelta, TokenLogprob, Usage
from headrace.wire.v1 import inference_pb2

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Arguments = ParamSpec("Arguments")
Encoded = TypeVar("Encoded")

SOURCE_TO_WIRE = {
    CacheSource.DEVICE: inference_pb2.CACHE_SOURCE_DEVICE,
    CacheSource.SHARED_MEMORY: inference_pb2.CACHE_SOURCE_SHARED_MEMORY,
    CacheSource.GRPC: inference_pb2.CACHE_SOURCE_GRPC,
}


def generate_request_message(
    prompt: Prompt,
    *,
    model: str,
    sampling: Sampling,
    cache: CacheOptions,
    timeout_ms: int,
    cache_salt: str,
    priority: int | None = None,
) -> inference_pb2.GenerateRequest:
    """Encode a request. Raises InvalidRequest where a value cannot be sent at all (the server checks the rest)."""
    with refusing_unencodable():
        request = inference_pb2.GenerateRequest(
            model=model, timeout_ms=timeout_ms, cache_salt=cache_salt, priority=priority
        )
        set_prompt(request, prompt)
        _set_sampling(request.sampling, sampling)
        request.cache.CopyFrom(
            inference_pb2.CacheOptions(
                bypass=not cache.sources,
                sources=[] if cache.sources == ALL_SOURCES else [SOURCE_TO_WIRE[s] for s in sorted(cache.sources)],
                no_publish=not cache.publish,
                ttl_s=cache.retention.ttl_s or 0.0,
                not_on_disk=not cache.retention.on_disk,
                affinity_key=cache.affinity_key,
                decode_worker=cache.decode_worker,
                prefill_worker=cache.prefill_worker,
            )
        )
    return request


def encode(kind: Callable[Arguments, Encoded], *args: Arguments.args, **values: Arguments.kwargs) -> Encoded:
    """A message with these fields. Raises InvalidRequest where one of them cannot be sent at all.

    Typed as the message itself is: a misspelt field is our mistake, and must not be told to callers as one of theirs.
    """
    with refusing_unencodable():
        return kind(*args, **values)


@contextmanager
def refusing_unencodable() -> Iterator[None]:
    """Raise InvalidRequest where a value fits no message: text that is no Unicode, a number out of a field's range."""
    try:
        yield
    except (ValueError, TypeError) as error:
        raise InvalidRequest(f"the request cannot be encoded: {error}") from error


def set_prompt(request: inference_pb2.GenerateRequest, prompt: Prompt) -> None:
    """Encode a prompt as what it is. Raises InvalidRequest for anything else, and for nothing."""
    if isinstance(prompt, str):
        request.text = prompt
    elif isinstance(prompt, Sequence) and prompt and all(isinstance(part, Message) for part in prompt):
        request.chat.messages.extend(
            inference_pb2.ChatMessage(role=part.role, content=part.content)
            for part in prompt
            if isinstance(part, Message)
        )
    elif isinstance(prompt, Sequence) and prompt and all(type(part) is int for part in prompt):
        request.token_ids.ids.extend(part for part in prompt if isinstance(part, int))
    else:
        raise InvalidRequest("the prompt must be text, Message values or token ids, and not empty", param="prompt")


def _set_sampling(message: inference_pb2.Sampling, sampling: Sampling) -> None:
    for name in ("max_tokens", "temperature", "top_k", "top_p", "seed", "logprobs"):
        value = getattr(sampling, name)
        if value is not None:
            setattr(message, name, value)
    message.stop.extend(sampling.stop)
    message.ignore_eos = sampling.ignore_eos


def event_from_message(message: inference_pb2.GenerateEvent) -> Event | None:
    """Decode one event; None for a kind that this client does not know (a newer server's)."""
    match message.WhichOneof("event"):
        case "accepted":
            return Accepted(request_id=message.accepted.request_id, model=message.accepted.model)
        case "token":
            return _token_from_message(message.token)
        case "done":
            return _done_from_message(message.done)
    return None


def _token_from_message(token: inference_pb2.Token) -> TokenDelta:
    top = tuple(from_message(TokenLogprob, each) for each in token.top_logprobs)
    return from_message(TokenDelta, token, logprob=if_set(token, "logprob"), top_logprobs=top)


def _done_from_message(done: inference_pb2.Done) -> Done:
    cached_tokens = from_message(CachedTokens, done.usage.cached_tokens)
    return from_message(Done, done, usage=from_message(Usage, done.usage, cached=cached_tokens))


def models_from_message(message: inference_pb2.ListModelsReply) -> tuple[ServedModel, ...]:
    """Decode the list of models."""
    return tuple(from_message(ServedModel, model) for model in message.models)


Value = TypeVar("Value", bound="DataclassInstance")


def from_message(kind: type[Value], message: Any, **others: Any) -> Value:
    """A value of this dataclass whose fields are the message's, but for `others`."""
    same = (field.name for field in fields(kind) if field.name not in others)
    return kind(**{name: getattr(message, name) for name in same}, **others)


def if_set(message: Any, name: str) -> Any:
    """A field that may be absent: None where it is."""
    return getattr(message, name) if message.HasField(name) else None
