"""What operators ask of the cache and are told: plain immutable values, no protobuf classes, no network.

Reports that the services share with clients (`HolderStat`, `EvictReport`, `ControlReport`) are the core's own types.
"""

from dataclasses import dataclass

from headrace.core.generation import EvictReport


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


EVERYTHING = Selector()


@dataclass(frozen=True, slots=True)
class TenantHit:
    """What of one tenant's would go: blocks, each counted once, and prompts that would be cut."""

    tenant: str  # "" where it is not known
    blocks: int
    prefixes: int


@dataclass(frozen=True, slots=True)
class Eviction:
    """What an eviction did (dry: would do), and what it loses: distinct tokens of which no copy is left."""

    reports: tuple[EvictReport, ...]
    lost_tokens: int
    lost_tokens_at_most: bool  # too many blocks to compare them all: it may be less
    tokens_per_s: float  # 0: not known
    tokens_per_s_from: str  # "measured", "configured" or ""
    tenants: tuple[TenantHit, ...] = ()  # dry runs only
    prefixes: int = 0  # distinct prompts that would be cut; dry runs only
    hits_at_least: bool = False  # too many blocks to name them all: it may be more

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
    pinned_until_unix_ms: int = 0  # of a pin on this very block; 0: none
    protected_by_pin: bool = False  # it or a block that stands on it is pinned
    expires_unix_ms: int = 0  # 0: it has no time to live
    tenant: str = ""  # whose trust group it is of, where that is known


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
    draining: bool = False  # takes no new blocks; what it holds can be read

    @property
    def holder(self) -> str:
        """Its name in listings and reports."""
        return f"node:{self.node_id}"


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
class GatewayStatus:
    """A live gateway."""

    gateway_id: str
    host: str
    address: str  # where other gateways ask it
    pid: int
    metrics_port: int
    version: str


@dataclass(frozen=True, slots=True)
class GoneMember:
    """A part that was there lately: it ended, or it cannot reach the index."""

    member: str  # "node:ID", "worker:ID" or "gateway:ID"
    host: str  # "": not known
    last_seen_unix_ms: int


@dataclass(frozen=True, slots=True)
class SystemStatus:
    """Who is alive."""

    store_nodes: tuple[StoreNodeStatus, ...]
    workers: tuple[WorkerStatus, ...]
    index_available: bool
    gateways: tuple[GatewayStatus, ...] = ()
    gone: tuple[GoneMember, ...] = ()  # were there lately, and are not now


@dataclass(frozen=True, slots=True)
class TenantUsage:
    """What one tenant's trust group has on one store node. The last two count from the node's start."""

    holder: str
    host_blocks: int
    host_bytes: int
    disk_blocks: int
    disk_bytes: int
    pinned_bytes: int
    refused_blocks: int  # its own quota left no room
    evicted_blocks: int  # gone for the quota's sake


@dataclass(frozen=True, slots=True)
class TenantEntry:
    """One tenant, its budget on each node, and what it has there. Tenants of one trust group share all of this."""

    name: str
    trust_group: str
    role: str
    bytes_max: int | None  # None: no quota
    bytes_min: int
    ttl_s: float | None  # None: its blocks have no bound of their own
    budget_from: str  # "tenants file", "operator" or ""
    requests_per_minute: int | None  # on each gateway; None: no bound
    tokens_per_minute: int | None
    concurrent_max: int | None
    nodes: tuple[TenantUsage, ...]


@dataclass(frozen=True, slots=True)
class TenantListing:
    """All tenants in sight. `errors` names nodes that did not answer: what is used there is unknown."""

    tenants: tuple[TenantEntry, ...]
    errors: tuple[tuple[str, str], ...]  # (holder, error)


@dataclass(frozen=True, slots=True)
class QuotaChange:
    """A tenant with its new budget. `errors` names nodes that were not told; they will be when they are seen again."""

    tenant: TenantEntry
    errors: tuple[tuple[str, str], ...]  # (holder, error)


@dataclass(frozen=True, slots=True)
class DrainProgress:
    """How far the drain of a node is; the last one of a stream has `done` set."""

    total_blocks: int
    moved_blocks: int  # a peer has them now
    present_blocks: int  # a peer had them already
    refused_blocks: int  # no peer had room
    moved_bytes: int
    done: bool
    state: str  # "serving", "draining" or "drained"
    error: str
    moved_to: dict[str, int]  # which peer got how many of the moved blocks, by node id
