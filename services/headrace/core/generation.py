"""A generation request and what comes back: the values that cross gateway, workers and clients.

All are immutable and hold plain Python values only, so they pass through pickle, msgpack or protobuf unchanged. A value
that exists is valid: `wire/parse.py` is where outside input becomes one of these or an `InvalidRequest`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NewType

from headrace.core.block import CacheSource, Chain, HashedPrompt
from headrace.core.retention import KEEP, Retention

RequestId = NewType("RequestId", str)  # minted by the server, one per client request
AttemptId = NewType("AttemptId", str)  # minted by the server, one per try at one choice of a request
WorkerId = NewType("WorkerId", str)


class FinishReason(StrEnum):
    """Why a stream ended, in OpenAI's words."""

    STOP = "stop"  # end-of-sequence token or a stop string
    LENGTH = "length"  # max_tokens or the context is used up


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token is chosen. `temperature == 0` is greedy; `top_k == 0` and `top_p == 1` switch those off."""

    max_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    seed: int = 0  # the draw for output token i depends on (seed, i) only, so a retry repeats it
    stop: tuple[str, ...] = ()
    logprobs: int | None = None  # None: none; n: log-probabilities of the chosen token and of the n best
    ignore_eos: bool = False


ALL_SOURCES = frozenset(CacheSource)


@dataclass(frozen=True, slots=True)
class CacheControl:
    """What a request may take from the cache and leave in it. `sources` empty means computed cold."""

    sources: frozenset[CacheSource] = ALL_SOURCES
    publish: bool = True
    retention: Retention = KEEP  # of the blocks that it uses or leaves
    affinity_key: str = ""  # between workers that cost the same, requests of one key meet

    @property
    def reads(self) -> bool:
        """Whether anything may be taken from the cache at all."""
        return bool(self.sources)


@dataclass(frozen=True, slots=True)
class GenerateRequest:
    """One choice of one client request, tokenised and hashed. Made by the gateway, never by a client."""

    request_id: RequestId
    model: str
    prompt: HashedPrompt
    sampling: SamplingParams
    cache: CacheControl = CacheControl()
    trust_group: str = ""  # the prompt was hashed in the model's namespace narrowed to this group, which the server
    cache_salt: str = ""  # settles by the caller's key, and to this salt, which the caller chooses
    decode_worker: WorkerId | None = None  # asked for by the caller; None: the gateway chooses
    prefill_worker: WorkerId | None = None
    priority: int = 0  # -PRIORITY_MAX..PRIORITY_MAX, higher first (core/queue_order.py)


@dataclass(frozen=True, slots=True)
class CachedTokens:
    """Cached tokens by source. Their sum is the figure users see, exactly."""

    device: int = 0
    shared_memory: int = 0
    grpc: int = 0

    @property
    def total(self) -> int:
        """Sum over the sources."""
        return self.device + self.shared_memory + self.grpc

    def by_source(self) -> dict[CacheSource, int]:
        """The same three numbers keyed by source."""
        return {
            CacheSource.DEVICE: self.device,
            CacheSource.SHARED_MEMORY: self.shared_memory,
            CacheSource.GRPC: self.grpc,
        }


@dataclass(frozen=True, slots=True)
class ReusedRun:
    """Consecutive blocks that a decode worker did not compute and where it had them from."""

    source: CacheSource
    num_blocks: int


def count_cached_tokens(reused: Sequence[ReusedRun], *, computed_from: int, block_tokens: int) -> CachedTokens:
    """Cached tokens by source of a prompt whose leading blocks were reused in these runs.

    Blocks from `computed_from` on were computed for this request by its prefill worker: reused here, but no work saved.
    """
    tokens = dict.fromkeys(CacheSource, 0)
    left = computed_from
    for run in reused:
        counted = min(run.num_blocks, left)
        tokens[run.source] += counted * block_tokens
        left -= counted
    return CachedTokens(
        device=tokens[CacheSource.DEVICE],
        shared_memory=tokens[CacheSource.SHARED_MEMORY],
        grpc=tokens[CacheSource.GRPC],
    )


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one choice. `prompt_tokens == cached.total + computed for this request`."""

    prompt_tokens: int
    completion_tokens: int
    cached: CachedTokens
    drafted_tokens: int = 0  # computed as drafts (speculative decoding)
    accepted_draft_tokens: int = 0  # of those, part of the completion


@dataclass(frozen=True, slots=True)
class PrefillCall:
    """Gateway to prefill worker: have the prompt's full blocks in the store. `hint_nodes` as in DecodeCall."""

    attempt_id: AttemptId
    request: GenerateRequest
    worker_id: WorkerId
    timeout_ms: int
    hint_nodes: tuple[str, ...] = ()
    traceparent: str = ""  # W3C trace context of the gateway's span; "": nothing is traced


@dataclass(frozen=True, slots=True)
class MeasuredWork:
    """What a worker took for a prompt: loading what it needed not compute, and then until the rest was computed."""

    load_s: float
    compute_s: float


@dataclass(frozen=True, slots=True)
class PrefillResult:
    """What a prefill worker did: blocks [0, reused_blocks) were loaded, [reused_blocks, published_blocks) computed."""

    attempt_id: AttemptId
    worker_id: WorkerId
    reused_blocks: int
    published_blocks: int  # leading blocks that are readable in the worker's store node now
    store_node: str
    work: MeasuredWork | None = None  # None: it does not say


@dataclass(frozen=True, slots=True)
class HandOff:
    """A prefill that runs while the decode call waits: blocks [first_block, ...) of the prompt appear one after another
    at `store_node`, or do not. Those before were believed to be held somewhere already."""

    store_node: str
    first_block: int
    patience_ms: int  # the longest wait for the next block; after it the decode worker computes what is missing


@dataclass(frozen=True, slots=True)
class DecodeCall:
    """Gateway to decode worker. Blocks [computed_from, ...) were computed for this request and do not count as cached.

    `computed_from == len(chain)` when no prefill worker took part: whatever can be loaded was cached. With a hand-off
    it is a lower bound; the gateway settles the figure by `Finished.reused` when the prefill has said what it reused.
    `hint_nodes` are store nodes believed to hold the prefix, best first; a hint, never a promise.
    """

    attempt_id: AttemptId
    request: GenerateRequest
    worker_id: WorkerId
    timeout_ms: int
    computed_from: int
    hint_nodes: tuple[str, ...] = ()
    hand_off: HandOff | None = None
    traceparent: str = ""  # as in PrefillCall


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token, as text and id."""

    token_id: int
    text: str
    logprob: float


@dataclass(frozen=True, slots=True)
class TokenDelta:
    """One generated token. `text` is what became printable with it; empty for half a character or a possible stop."""

    token_id: int
    text: str
    logprob: float | None = None
    top_logprobs: tuple[TokenLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class Finished:
    """The last event of every stream that ends well."""

    reason: FinishReason
    usage: Usage
    worker_id: WorkerId
    text: str = ""  # text held back for a stop string that did not come
    reused: tuple[ReusedRun, ...] = ()  # the prompt's leading blocks that its worker did not compute, in order
    work: MeasuredWork | None = None  # until its first token; None: it does not say


DecodeEvent = TokenDelta | Finished


@dataclass(frozen=True, slots=True)
class EvictSelector:
    """Which blocks an eviction means: the intersection of what is given; nothing given means everything."""

    namespace: str | None = None  # with those narrowed from it
    model: str | None = None
    block_hashes: tuple[bytes, ...] = field(default=())  # each with all its descendants
    prefix_token_ids: tuple[int, ...] = ()  # the prefix's last full block and what follows it; () for no prefix
    idle_for_s: float | None = None  # last used at least this long ago
    created_before_unix_ms: int | None = None
    tier: str | None = None
    free_bytes: int | None = None  # evict only: least recently used first, until a tier of a holder gave this much


@dataclass(frozen=True, slots=True)
class EvictReport:
    """What an eviction did (or, dry, would do) on one holder."""

    holder: str
    blocks: int
    tokens: int
    bytes: int
    skipped_leased_blocks: int
    dry_run: bool
    error: str = ""  # not empty: this holder did not answer or failed; its counts are unknown
    block_hashes: Chain = ()  # what went, at most EVICT_HASHES_MAX
    skipped_pinned_blocks: int = 0


class ControlOutcome(StrEnum):
    """What a holder made of an order about a prefix."""

    DONE = "done"
    REFUSED = "refused"
    NOT_HELD = "not held"


@dataclass(frozen=True, slots=True)
class ControlReport:
    """What one holder did about a pin or a time to live; the fields of `admin.proto:ControlReport`."""

    holder: str
    outcome: ControlOutcome | None
    blocks: int = 0
    tokens: int = 0
    bytes: int = 0
    pinned_bytes: int = 0
    pin_bytes_max: int = 0
    until_unix_ms: int = 0  # 0: no end
    why: str = ""
    error: str = ""  # not empty: this holder did not answer or failed; what it did is unknown


@dataclass(frozen=True, slots=True)
class BlockInfo:
    """One block as listed to people."""

    namespace: str
    base_namespace: str  # the model's own; differs from `namespace` where a cache salt narrowed it
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
    producer: str = ""  # header fields that a tier keeps at hand; a worker's pool has none of them
    created_unix_ms: int = 0
    payload_xxh3: int = 0
    pinned_until_unix_ms: int = 0  # of a pin on this very block; 0: none
    protected_by_pin: bool = False  # it or a block that stands on it is pinned
    expires_unix_ms: int = 0  # 0: it has no time to live
    narrowed_from: tuple[str, ...] = ()  # namespaces that this one lies in, the model's own among them


@dataclass(frozen=True, slots=True)
class HolderStat:
    """One holder's books. `free + committed + reserved == total`, in slots and in bytes."""

    holder: str
    tier: str
    incarnation: int
    total_blocks: int
    free_blocks: int
    committed_blocks: int
    reserved_blocks: int
    leased_blocks: int
    block_bytes: int
    lookups_tokens: int
    hits_tokens: int
    evicted_blocks: int
    error: str = ""
    pinned_bytes: int = 0  # of all pins; host tier
    pin_bytes_max: int = 0  # what pins may take; 0: this tier has no pins
    lookups: int = 0  # since the holder started, as are the bytes
    read_bytes: int = 0  # handed to readers
    written_bytes: int = 0


@dataclass(frozen=True, slots=True)
class DeviceListing:
    """What a worker's own pool holds for reuse: at most as many blocks as asked for, how many in all, and its books."""

    blocks: tuple[BlockInfo, ...]
    total_blocks: int  # before the limit
    stat: HolderStat
