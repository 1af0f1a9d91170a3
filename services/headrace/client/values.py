"""What a client sends and gets: plain immutable values, no protobuf classes, no network.

Counts and events that the services share with clients (`Usage`, `TokenDelta`, `HolderStat`, `EvictReport`) are the
core's own types; the rest of the client API's nouns are here.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.block import CacheSource
from headrace.core.errors import WorkerUnavailable
from headrace.core.generation import ALL_SOURCES, EvictReport, TokenDelta, Usage


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
    decode_worker: str = ""  # "": the gateway chooses
    prefill_worker: str = ""


# Computes the whole prompt whatever is cached, and leaves nothing behind: the yardstick of every comparison.
COLD = CacheOptions(sources=frozenset(), publish=False)


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


@dataclass(frozen=True, slots=True)
class Selector:
    """Which blocks are meant: the intersection of what is set; nothing set means everything."""

    model: str = ""
    namespace: str = ""
    block_hashes: tuple[bytes, ...] = ()  # each with its descendants
    prefix_text: str = ""
    prefix_token_ids: tuple[int, ...] = ()
    idle_for_s: float | None = None
    older_than_s: float | None = None
    holders: tuple[str, ...] = ()  # "node:ID", "worker:ID"
    tier: str = ""
    tenant: str = ""  # blocks of its trust group
    free_bytes: int | None = None  # evict only: least recently used first, until a tier of a holder gave this much

    @property
    def selects_everything(self) -> bool:
        """Whether nothing narrows it."""
        return self == Selector()


@dataclass(frozen=True, slots=True)
class Eviction:
    """What an eviction did (dry: would do), and what it loses: distinct tokens of which no copy is left."""

    reports: tuple[EvictReport, ...]
    lost_tokens: int
    lost_tokens_at_most: bool  # too many blocks to compare them all: it may be less
    tokens_per_s: float  # 0: not known
    tokens_per_s_from: str  # "measured", "configured" or ""

    @property
    def recompute_s(self) -> float | None:
        """Seconds to compute the lost tokens again; None when the rate is not known."""
        return self.lost_tokens / self.tokens_per_s if self.tokens_per_s else None


@dataclass(frozen=True, slots=True)
class BlockEntry:
    """One cached block on one holder."""

    namespace: str
    base_namespace: str  # the model's own; differs from `namespace` where a cache_salt narrowed it
    model: str
    block_hash: bytes
    parent_hash: bytes
    position: int
    token_ids: tuple[int, ...]
    bytes: int
    holder: str
    tier: str
    hits: int
    age_s: float
    idle_s: float
    leases: int
    text: str
    producer: str = ""  # header fields; empty where the holder does not keep them at hand
    created_unix_ms: int = 0
    payload_xxh3: int = 0


@dataclass(frozen=True, slots=True)
class BlockListing:
    """Blocks over all holders. `errors` names holders that did not answer: what they hold is unknown."""

    blocks: tuple[BlockEntry, ...]
    total_blocks: int  # before the limit
    errors: tuple[tuple[str, str], ...]  # (holder, error)


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that `doctor` looked at; `holder` is "" for what concerns everybody."""

    check: str
    holder: str
    ok: bool
    detail: str
    fixed: str


@dataclass(frozen=True, slots=True)
class StoredBlock:
    """One block's header and payload as a node stores them, and the fields of its model's namespace where known."""

    header: bytes
    payload: bytes
    namespace_fields: dict[str, str]


@dataclass(frozen=True, slots=True)
class HolderRun:
    """How many of a prompt's leading blocks one holder has, and how many the index says."""

    holder: str
    held_blocks: int
    indexed_blocks: int


@dataclass(frozen=True, slots=True)
class MissReason:
    """One reason why blocks are not there; `kind` is one of `gateway/explain_miss.py`'s."""

    kind: str
    detail: str
    holder: str
    first_block: int
    num_blocks: int


@dataclass(frozen=True, slots=True)
class MissExplanation:
    """Why a prompt's blocks are not all in the cache, as of now."""

    model: str
    namespace: str
    prompt_tokens: int
    block_tokens: int
    num_blocks: int
    runs: tuple[HolderRun, ...]
    reasons: tuple[MissReason, ...]
    errors: tuple[tuple[str, str], ...]  # (holder, error)


@dataclass(frozen=True, slots=True)
class StoreNodeStatus:
    """A live store node."""

    node_id: str
    incarnation: int
    host: str
    address: str
    pid: int
    metrics_port: int


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A live worker and its load."""

    worker_id: str
    role: str
    host: str
    store_node: str
    model: str
    namespace: str
    pid: int
    running: int
    waiting: int
    free_blocks: int
    pool_blocks: int
    context_tokens_max: int
    metrics_port: int


@dataclass(frozen=True, slots=True)
class SystemStatus:
    """Who is alive."""

    store_nodes: tuple[StoreNodeStatus, ...]
    workers: tuple[WorkerStatus, ...]
    index_available: bool


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
