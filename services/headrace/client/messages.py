"""Values of requests and streams to protobuf messages and back; those of operators are `admin_messages.py`'s."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from headrace.client.values import Accepted, CacheOptions, Done, Event, Message, Prompt, Sampling, ServedModel
from headrace.core.block import CacheSource
from headrace.core.errors import InvalidRequest
from headrace.core.generation import ALL_SOURCES, CachedTokens, TokenDelta, TokenLogprob, Usage
from headrace.wire.v1 import inference_pb2

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
    return TokenDelta(
        token_id=token.token_id,
        text=token.text,
        logprob=token.logprob if token.HasField("logprob") else None,
        top_logprobs=tuple(
            TokenLogprob(token_id=top.token_id, text=top.text, logprob=top.logprob) for top in token.top_logprobs
        ),
    )


def _done_from_message(done: inference_pb2.Done) -> Done:
    cached = done.usage.cached_tokens
    usage = Usage(
        prompt_tokens=done.usage.prompt_tokens,
        completion_tokens=done.usage.completion_tokens,
        cached=CachedTokens(device=cached.device, shared_memory=cached.shared_memory, grpc=cached.grpc),
        drafted_tokens=done.usage.drafted_tokens,
        accepted_draft_tokens=done.usage.accepted_draft_tokens,
    )
    return Done(
        finish_reason=done.finish_reason,
        text=done.text,
        usage=usage,
        decode_worker=done.decode_worker,
        prefill_worker=done.prefill_worker,
    )


def models_from_message(message: inference_pb2.ListModelsReply) -> tuple[ServedModel, ...]:
    """Decode the list of models."""
    return tuple(
        ServedModel(
            id=model.id,
            context_tokens_max=model.context_tokens_max,
            block_tokens=model.block_tokens,
            namespace=model.namespace,
        )
        for model in message.models
    )
