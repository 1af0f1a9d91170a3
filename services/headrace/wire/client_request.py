"""A client's request once its shape is known to be right: what `parse` makes of protobuf or JSON, before tokenising.

Plain frozen values; none of them knows which protocol it came from.
"""

from dataclasses import dataclass

from headrace.core.generation import CacheControl, WorkerId

READ_AND_PUBLISH = CacheControl()


@dataclass(frozen=True, slots=True)
class TextPrompt:
    """Text to be continued as it stands."""

    text: str


@dataclass(frozen=True, slots=True)
class ChatTurn:
    """One message of a chat."""

    role: str
    content: str
    name: str = ""  # of who speaks, for templates that tell several users apart


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """Messages to be put through the model's own chat template."""

    turns: tuple[ChatTurn, ...]


@dataclass(frozen=True, slots=True)
class TokenPrompt:
    """Token ids as the model knows them."""

    token_ids: tuple[int, ...]


Prompt = TextPrompt | ChatPrompt | TokenPrompt


@dataclass(frozen=True, slots=True)
class SamplingOptions:
    """Sampling as asked for. What is None is settled by the gateway, which knows the context and draws seeds."""

    max_tokens: int | None = None
    max_tokens_default: int | None = None  # None: whatever the context leaves, up to the server's bound
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class ClientRequest:
    """One prompt with `choices` independent answers. `model` is "" when the caller leaves it to a server with one."""

    model: str
    prompt: Prompt
    sampling: SamplingOptions = SamplingOptions()
    cache: CacheControl = READ_AND_PUBLISH
    choices: int = 1
    timeout_ms: int | None = None
    cache_salt: str = ""
    decode_worker: WorkerId | None = None
    prefill_worker: WorkerId | None = None
    priority: int | None = None  # None: the tenant's usual one
