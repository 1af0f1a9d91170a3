"""What a client sends and gets: plain immutable values, no protobuf classes, no network.

Counts and events that the services share with clients (`Usage`, `TokenDelta`, `HolderStat`, `EvictReport`) are the
core's own types; what operators ask and are told is in `admin_values.py`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.block import CacheSource
from headrace.core.errors import WorkerUnavailable
from headrace.core.generation import ALL_SOURCES, TokenDelta, Usage
from headrace.core.retention import KEEP, Retention


@dataclass(frozen=True, slots=True)
class Message:
    """One turn of a chat."""

    role: str
    content: str


# Text, chat messages, or token ids.
Prompt = str | Sequence[Message] | Sequence[int]


@dataclass(frozen=True, slots=True)
class Sampling:
    """How tokens are chosen; None leaves the choice to the server (greedy, its own token bound)."""

    max_tokens: int | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    seed: int | None = None
    stop: tuple[str, ...] = ()
    logprobs: int | None = None
    ignore_eos: bool = False


@dataclass(frozen=True, slots=True)
class CacheOptions:
    """What the request may take from the cache and leave in it, and, for measurements, where it runs."""

    sources: frozenset[CacheSource] = ALL_SOURCES  # empty: compute all of the prompt
    publish: bool = True
    retention: Retention = KEEP  # how long the blocks may stay unused, and whether a copy may go to a disk
    affinity_key: str = ""  # between workers that cost the same, requests of one key meet
    decode_worker: str = ""  # "": the gateway chooses
    prefill_worker: str = ""


# Computes the whole prompt whatever is cached, and leaves nothing behind: the yardstick of every comparison.
COLD = CacheOptions(sources=frozenset(), publish=False)
ANY_CACHE = CacheOptions()
ANY_SAMPLING = Sampling()


@dataclass(frozen=True, slots=True)
class Accepted:
    """First event of every stream."""

    request_id: str
    model: str


@dataclass(frozen=True, slots=True)
class Done:
    """Last event of every stream that ends well. `text` was held back for a stop string that did not come."""

    finish_reason: str  # "stop" | "length"
    text: str
    usage: Usage
    decode_worker: str
    prefill_worker: str


Event = Accepted | TokenDelta | Done


@dataclass(frozen=True, slots=True)
class GenerateResult:
    """A whole stream, collected. `ttft_ms` and `total_ms` are what this client saw, from sending the request."""

    request_id: str
    model: str
    text: str
    token_ids: tuple[int, ...]
    finish_reason: str
    usage: Usage
    ttft_ms: float
    total_ms: float
    decode_worker: str
    prefill_worker: str
    tokens: tuple[TokenDelta, ...]  # with log-probabilities where they were asked for


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model that can be asked for."""

    id: str
    context_tokens_max: int
    block_tokens: int
    namespace: str


class ResultCollector:
    """Adds up one stream's events; the clock readings come from the caller, in seconds."""

    def __init__(self, *, started_s: float) -> None:
        self._started_s = started_s
        self._first_token_s: float | None = None
        self._accepted = Accepted(request_id="", model="")
        self._tokens: list[TokenDelta] = []
        self._done: Done | None = None

    def add(self, event: Event, *, now_s: float) -> None:
        """Take the next event."""
        match event:
            case Accepted():
                self._accepted = event
            case TokenDelta():
                self._first_token_s = now_s if self._first_token_s is None else self._first_token_s
                self._tokens.append(event)
            case Done():
                self._done = event

    def result(self, *, now_s: float) -> GenerateResult:
        """The whole. Raises WorkerUnavailable when the stream ended without its last event: it is not the answer."""
        if self._done is None:
            raise WorkerUnavailable("", "its stream ended without a last event, so the answer is not whole; ask again")
        first_token_s = now_s if self._first_token_s is None else self._first_token_s
        return GenerateResult(
            request_id=self._accepted.request_id,
            model=self._accepted.model,
            text="".join(token.text for token in self._tokens) + self._done.text,
            token_ids=tuple(token.token_id for token in self._tokens),
            finish_reason=self._done.finish_reason,
            usage=self._done.usage,
            ttft_ms=(first_token_s - self._started_s) * 1e3,
            total_ms=(now_s - self._started_s) * 1e3,
            decode_worker=self._done.decode_worker,
            prefill_worker=self._done.prefill_worker,
            tokens=tuple(self._tokens),
        )
