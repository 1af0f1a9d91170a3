"""Results become the JSON objects of OpenAI's HTTP API. Values in, plain dicts out; nothing is decided here."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

from headrace.core.block import CacheSource
from headrace.core.errors import InvalidRequest
from headrace.core.generation import CachedTokens, FinishReason, RequestId, TokenDelta, Usage, WorkerId
from headrace.wire.status import message_of, status_of

Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ReplyHead:
    """What every object of one reply repeats."""

    request_id: RequestId
    model: str
    created_unix_s: int
    chat: bool

    def render(self, *, chunk: bool) -> Json:
        """`id`, `object`, `created`, `model`."""
        kind = ("chat.completion.chunk" if chunk else "chat.completion") if self.chat else "text_completion"
        prefix = "chatcmpl" if self.chat else "cmpl"
        return {
            "id": f"{prefix}-{self.request_id}",
            "object": kind,
            "created": self.created_unix_s,
            "model": self.model,
        }


@dataclass(slots=True)
class ChoiceText:
    """One choice of a reply that is sent whole, collected token by token."""

    index: int
    pieces: list[str] = field(default_factory=list)
    deltas: list[TokenDelta] = field(default_factory=list)  # kept only where log-probabilities were asked for
    finish_reason: FinishReason | None = None

    @property
    def text(self) -> str:
        """All of the text so far."""
        return "".join(self.pieces)


def render_reply(head: ReplyHead, choices: Sequence[ChoiceText], usage: Usage, workers: Json) -> Json:
    """A reply that is sent whole."""
    rendered = []
    for choice in choices:
        assert choice.finish_reason is not None
        body: Json = {"index": choice.index, "finish_reason": choice.finish_reason.value, "logprobs": None}
        if choice.deltas:
            body["logprobs"] = render_logprobs(choice.deltas, chat=head.chat)
        if head.chat:
            body["message"] = {"role": "assistant", "content": choice.text, "refusal": None}
        else:
            body["text"] = choice.text
        rendered.append(body)
    return head.render(chunk=False) | {"choices": rendered, "usage": render_usage(usage), "headrace": workers}


def render_chunk(
    head: ReplyHead,
    *,
    index: int,
    text: str,
    delta: TokenDelta | None = None,
    text_offset: int = 0,
    finish_reason: FinishReason | None = None,
    first: bool = False,
) -> Json:
    """One piece of a streamed reply. `delta` is given where log-probabilities were asked for; `text_offset`: characters
    of the tokens before it."""
    choice: Json = {
        "index": index,
        "finish_reason": finish_reason.value if finish_reason else None,
        "logprobs": None if delta is None else render_logprobs([delta], chat=head.chat, text_offset=text_offset),
    }
    if head.chat:
        message: Json = {"role": "assistant"} if first else {}
        choice["delta"] = message | ({"content": text} if text or first else {})
    else:
        choice["text"] = text
    return head.render(chunk=True) | {"choices": [choice]}


def render_usage_chunk(head: ReplyHead, usage: Usage, workers: Json) -> Json:
    """The last piece of a stream whose caller asked for `include_usage`."""
    return head.render(chunk=True) | {"choices": [], "usage": render_usage(usage), "headrace": workers}


def render_running_usage(prompt_tokens: int, completion_tokens: int) -> Json:
    """Token counts in the midst of a stream; what was cached is settled at its end."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
    }


def render_usage(usage: Usage) -> Json:
    """Token counts; `cached_tokens` is exact, and `headrace` splits it by source. Drafts, where there were any, are
    what OpenAI's API calls predictions; unlike there, nobody pays for rejected ones as output."""
    by_source = {source.value: tokens for source, tokens in usage.cached.by_source().items()}
    assert sum(by_source.values()) == usage.cached.total
    rendered = render_running_usage(usage.prompt_tokens, usage.completion_tokens) | {
        "prompt_tokens_details": {"cached_tokens": usage.cached.total},
        "headrace": {"cached_tokens": by_source},
    }
    if usage.drafted_tokens:
        rendered["completion_tokens_details"] = {
            "accepted_prediction_tokens": usage.accepted_draft_tokens,
            "rejected_prediction_tokens": usage.drafted_tokens - usage.accepted_draft_tokens,
        }
    return rendered


def render_workers(decode: Sequence[WorkerId], prefill: WorkerId | None) -> Json:
    """Who served a request: one decode worker for each choice."""
    return {"decode_workers": list(decode), "prefill_worker": prefill}


def join_usage(usages: Sequence[Usage]) -> Usage:
    """Usage of one prompt with several choices: the prompt counts once, as the first choice saw it."""
    return Usage(
        prompt_tokens=usages[0].prompt_tokens,
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached=usages[0].cached,
        drafted_tokens=sum(usage.drafted_tokens for usage in usages),
        accepted_draft_tokens=sum(usage.accepted_draft_tokens for usage in usages),
    )


def add_usage(usages: Sequence[Usage]) -> Usage:
    """Usage of several prompts in one request."""
    by_source = [usage.cached.by_source() for usage in usages]
    return Usage(
        prompt_tokens=sum(usage.prompt_tokens for usage in usages),
        completion_tokens=sum(usage.completion_tokens for usage in usages),
        cached=CachedTokens(**{source.value: sum(row[source] for row in by_source) for source in CacheSource}),
        drafted_tokens=sum(usage.drafted_tokens for usage in usages),
        accepted_draft_tokens=sum(usage.accepted_draft_tokens for usage in usages),
    )


def render_logprobs(deltas: Sequence[TokenDelta], *, chat: bool, text_offset: int = 0) -> Json:
    """Log-probabilities in the shape of the endpoint. `text_offset`: where the first token's text begins."""
    if chat:
        return {"content": [_chat_logprob(delta) for delta in deltas], "refusal": None}
    texts = [token_text(delta) for delta in deltas]
    return {
        "tokens": texts,
        "token_logprobs": [delta.logprob for delta in deltas],
        "top_logprobs": [{top.text: top.logprob for top in delta.top_logprobs} for delta in deltas],
        "text_offset": list(accumulate(map(len, texts), initial=text_offset))[:-1],
    }


def _chat_logprob(delta: TokenDelta) -> Json:
    return _logprob_entry(token_text(delta), delta.logprob) | {
        "top_logprobs": [_logprob_entry(top.text, top.logprob) for top in delta.top_logprobs]
    }


def _logprob_entry(text: str, logprob: float | None) -> Json:
    return {"token": text, "logprob": logprob, "bytes": list(text.encode("utf-8"))}


def token_text(delta: TokenDelta) -> str:
    """The token's own text. `delta.text` is what became printable with it, which may be less or more."""
    return next((top.text for top in delta.top_logprobs if top.token_id == delta.token_id), delta.text)


def render_model(name: str, *, created_unix_s: int, context_tokens_max: int) -> Json:
    """One entry of `/v1/models`."""
    return {
        "id": name,
        "object": "model",
        "created": created_unix_s,
        "owned_by": "headrace",
        "max_model_len": context_tokens_max,
    }


def render_error(error: BaseException) -> Json:
    """An error in OpenAI's shape."""
    status = status_of(error)
    param = error.param if isinstance(error, InvalidRequest) else None
    return {
        "error": {
            "message": message_of(error),
            "type": status.openai_type,
            "param": param,
            "code": status.openai_code,
        }
    }
