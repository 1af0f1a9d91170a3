from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class Selector(_message.Message):
    __slots__ = ("model", "namespace", "block_hashes", "prefix_text", "prefix_token_ids", "idle_for_s", "older_than_s", "created_before_unix_ms", "holders", "tier", "tenant", "free_bytes")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TEXT_FIELD_NUMBER: _ClassVar[int]
    PREFIX_TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    IDLE_FOR_S_FIELD_NUMBER: _ClassVar[int]
    OLDER_THAN_S_FIELD_NUMBER: _ClassVar[int]
    CREATED_BEFORE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    FREE_BYTES_FIELD_NUMBER: _ClassVar[int]
    model: str
    namespace: str
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    prefix_text: str
    prefix_token_ids: _containers.RepeatedScalarFieldContainer[int]
    idle_for_s: float
    older_than_s: float
    created_before_unix_ms: int
    holders: _containers.RepeatedScalarFieldContainer[str]
    tier: str
    tenant: str
    free_bytes: int
    def __init__(self, model: _Optional[str] = ..., namespace: _Optional[str] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., prefix_text: _Optional[str] = ..., prefix_token_ids: _Optional[_Iterable[int]] = ..., idle_for_s: _Optional[float] = ..., older_than_s: _Optional[float] = ..., created_before_unix_ms: _Optional[int] = ..., holders: _Optional[_Iterable[str]] = ..., tier: _Optional[str] = ..., tenant: _Optional[str] = ..., free_bytes: _Optional[int] = ...) -> None: ...

class ListBlocksRequest(_message.Message):
    __slots__ = ("selector", "with_text", "limit")
    SELECTOR_FIELD_NUMBER: _ClassVar[int]
    WITH_TEXT_FIELD_NUMBER: _ClassVar[int]
    LIMIT_FIELD_NUMBER: _ClassVar[int]
    selector: Selector
    with_text: bool
    limit: int
    def __init__(self, selector: _Optional[_Union[Selector, _Mapping]] = ..., with_text: _Optional[bool] = ..., limit: _Optional[int] = ...) -> None: ...

class ListBlocksReply(_message.Message):
    __slots__ = ("blocks", "total_blocks", "errors")
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    blocks: _containers.RepeatedCompositeFieldContainer[BlockEntry]
    total_blocks: int
    errors: _containers.RepeatedCompositeFieldContainer[HolderError]
    def __init__(self, blocks: _Optional[_Iterable[_Union[BlockEntry, _Mapping]]] = ..., total_blocks: _Optional[int] = ..., errors: _Optional[_Iterable[_Union[HolderError, _Mapping]]] = ...) -> None: ...

class BlockEntry(_message.Message):
    __slots__ = ("namespace", "model", "block_hash", "parent_hash", "position", "token_ids", "bytes", "holder", "tier", "hits", "age_s", "idle_s", "leases", "text", "producer", "created_unix_ms", "payload_xxh3", "base_namespace", "pinned_until_unix_ms", "protected_by_pin", "expires_unix_ms", "tenant", "narrowed_from")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    PARENT_HASH_FIELD_NUMBER: _ClassVar[int]
    POSITION_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    HITS_FIELD_NUMBER: _ClassVar[int]
    AGE_S_FIELD_NUMBER: _ClassVar[int]
    IDLE_S_FIELD_NUMBER: _ClassVar[int]
    LEASES_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    CREATED_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_XXH3_FIELD_NUMBER: _ClassVar[int]
    BASE_NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PINNED_UNTIL_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    PROTECTED_BY_PIN_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    TENANT_FIELD_NUMBER: _ClassVar[int]
    NARROWED_FROM_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    model: str
    block_hash: bytes
    parent_hash: bytes
    position: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    bytes: int
    holder: str
    tier: str
    hits: int
    age_s: float
    idle_s: float
    leases: int
    text: str
    producer: str
    created_unix_ms: int
    payload_xxh3: int
    base_namespace: str
    pinned_until_unix_ms: int
    protected_by_pin: bool
    expires_unix_ms: int
    tenant: str
    narrowed_from: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, namespace: _Optional[str] = ..., model: _Optional[str] = ..., block_hash: _Optional[bytes] = ..., parent_hash: _Optional[bytes] = ..., position: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., bytes: _Optional[int] = ..., holder: _Optional[str] = ..., tier: _Optional[str] = ..., hits: _Optional[int] = ..., age_s: _Optional[float] = ..., idle_s: _Optional[float] = ..., leases: _Optional[int] = ..., text: _Optional[str] = ..., producer: _Optional[str] = ..., created_unix_ms: _Optional[int] = ..., payload_xxh3: _Optional[int] = ..., base_namespace: _Optional[str] = ..., pinned_until_unix_ms: _Optional[int] = ..., protected_by_pin: _Optional[bool] = ..., expires_unix_ms: _Optional[int] = ..., tenant: _Optional[str] = ..., narrowed_from: _Optional[_Iterable[str]] = ...) -> None: ...

class HolderError(_message.Message):
    __slots__ = ("holder", "error")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    holder: str
    error: str
    def __init__(self, holder: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class StatRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatReply(_message.Message):
    __slots__ = ("holders",)
    HOLDERS_FIELD_NUMBER: _ClassVar[int]
    holders: _containers.RepeatedCompositeFieldContainer[HolderStat]
    def __init__(self, holders: _Optional[_Iterable[_Union[HolderStat, _Mapping]]] = ...) -> None: ...

class HolderStat(_message.Message):
    __slots__ = ("holder", "tier", "incarnation", "total_blocks", "free_blocks", "committed_blocks", "reserved_blocks", "leased_blocks", "block_bytes", "lookups_tokens", "hits_tokens", "evicted_blocks", "error", "pinned_bytes", "pin_bytes_max", "lookups", "read_bytes", "written_bytes")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    TIER_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    COMMITTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RESERVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    LEASED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    HITS_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PIN_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    LOOKUPS_FIELD_NUMBER: _ClassVar[int]
    READ_BYTES_FIELD_NUMBER: _ClassVar[int]
    WRITTEN_BYTES_FIELD_NUMBER: _ClassVar[int]
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
    error: str
    pinned_bytes: int
    pin_bytes_max: int
    lookups: int
    read_bytes: int
    written_bytes: int
    def __init__(self, holder: _Optional[str] = ..., tier: _Optional[str] = ..., incarnation: _Optional[int] = ..., total_blocks: _Optional[int] = ..., free_blocks: _Optional[int] = ..., committed_blocks: _Optional[int] = ..., reserved_blocks: _Optional[int] = ..., leased_blocks: _Optional[int] = ..., block_bytes: _Optional[int] = ..., lookups_tokens: _Optional[int] = ..., hits_tokens: _Optional[int] = ..., evicted_blocks: _Optional[int] = ..., error: _Optional[str] = ..., pinned_bytes: _Optional[int] = ..., pin_bytes_max: _Optional[int] = ..., lookups: _Optional[int] = ..., read_bytes: _Optional[int] = ..., written_bytes: _Optional[int] = ...) -> None: ...

class EvictRequest(_message.Message):
    __slots__ = ("selector", "dry_run", "who", "tokens_per_s")
    SELECTOR_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    selector: Selector
    dry_run: bool
    who: str
    tokens_per_s: float
    def __init__(self, selector: _Optional[_Union[Selector, _Mapping]] = ..., dry_run: _Optional[bool] = ..., who: _Optional[str] = ..., tokens_per_s: _Optional[float] = ...) -> None: ...

class EvictReply(_message.Message):
    __slots__ = ("reports", "lost_tokens", "lost_tokens_at_most", "tokens_per_s", "tokens_per_s_from", "tenants", "prefixes", "hits_at_least")
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    LOST_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOST_TOKENS_AT_MOST_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_S_FROM_FIELD_NUMBER: _ClassVar[int]
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    HITS_AT_LEAST_FIELD_NUMBER: _ClassVar[int]
    reports: _containers.RepeatedCompositeFieldContainer[EvictReport]
    lost_tokens: int
    lost_tokens_at_most: bool
    tokens_per_s: float
    tokens_per_s_from: str
    tenants: _containers.RepeatedCompositeFieldContainer[TenantHit]
    prefixes: int
    hits_at_least: bool
    def __init__(self, reports: _Optional[_Iterable[_Union[EvictReport, _Mapping]]] = ..., lost_tokens: _Optional[int] = ..., lost_tokens_at_most: _Optional[bool] = ..., tokens_per_s: _Optional[float] = ..., tokens_per_s_from: _Optional[str] = ..., tenants: _Optional[_Iterable[_Union[TenantHit, _Mapping]]] = ..., prefixes: _Optional[int] = ..., hits_at_least: _Optional[bool] = ...) -> None: ...

class TenantHit(_message.Message):
    __slots__ = ("tenant", "blocks", "prefixes")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PREFIXES_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    blocks: int
    prefixes: int
    def __init__(self, tenant: _Optional[str] = ..., blocks: _Optional[int] = ..., prefixes: _Optional[int] = ...) -> None: ...

class EvictReport(_message.Message):
    __slots__ = ("holder", "blocks", "tokens", "bytes", "skipped_leased_blocks", "dry_run", "error", "block_hashes", "skipped_pinned_blocks")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_LEASED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DRY_RUN_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    BLOCK_HASHES_FIELD_NUMBER: _ClassVar[int]
    SKIPPED_PINNED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    holder: str
    blocks: int
    tokens: int
    bytes: int
    skipped_leased_blocks: int
    dry_run: bool
    error: str
    block_hashes: _containers.RepeatedScalarFieldContainer[bytes]
    skipped_pinned_blocks: int
    def __init__(self, holder: _Optional[str] = ..., blocks: _Optional[int] = ..., tokens: _Optional[int] = ..., bytes: _Optional[int] = ..., skipped_leased_blocks: _Optional[int] = ..., dry_run: _Optional[bool] = ..., error: _Optional[str] = ..., block_hashes: _Optional[_Iterable[bytes]] = ..., skipped_pinned_blocks: _Optional[int] = ...) -> None: ...

class StatusRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class StatusReply(_message.Message):
    __slots__ = ("store_nodes", "workers", "index_available", "unix_ms", "version", "gateways", "gone")
    STORE_NODES_FIELD_NUMBER: _ClassVar[int]
    WORKERS_FIELD_NUMBER: _ClassVar[int]
    INDEX_AVAILABLE_FIELD_NUMBER: _ClassVar[int]
    UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GATEWAYS_FIELD_NUMBER: _ClassVar[int]
    GONE_FIELD_NUMBER: _ClassVar[int]
    store_nodes: _containers.RepeatedCompositeFieldContainer[StoreNodeStatus]
    workers: _containers.RepeatedCompositeFieldContainer[WorkerStatus]
    index_available: bool
    unix_ms: int
    version: str
    gateways: _containers.RepeatedCompositeFieldContainer[GatewayStatus]
    gone: _containers.RepeatedCompositeFieldContainer[GoneMember]
    def __init__(self, store_nodes: _Optional[_Iterable[_Union[StoreNodeStatus, _Mapping]]] = ..., workers: _Optional[_Iterable[_Union[WorkerStatus, _Mapping]]] = ..., index_available: _Optional[bool] = ..., unix_ms: _Optional[int] = ..., version: _Optional[str] = ..., gateways: _Optional[_Iterable[_Union[GatewayStatus, _Mapping]]] = ..., gone: _Optional[_Iterable[_Union[GoneMember, _Mapping]]] = ...) -> None: ...

class GoneMember(_message.Message):
    __slots__ = ("member", "host", "last_seen_unix_ms")
    MEMBER_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    LAST_SEEN_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    member: str
    host: str
    last_seen_unix_ms: int
    def __init__(self, member: _Optional[str] = ..., host: _Optional[str] = ..., last_seen_unix_ms: _Optional[int] = ...) -> None: ...

class GatewayStatus(_message.Message):
    __slots__ = ("gateway_id", "host", "address", "pid", "metrics_port", "version")
    GATEWAY_ID_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    METRICS_PORT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    gateway_id: str
    host: str
    address: str
    pid: int
    metrics_port: int
    version: str
    def __init__(self, gateway_id: _Optional[str] = ..., host: _Optional[str] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., metrics_port: _Optional[int] = ..., version: _Optional[str] = ...) -> None: ...

class StoreNodeStatus(_message.Message):
    __slots__ = ("node_id", "incarnation", "host", "address", "pid", "metrics_port", "draining")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    METRICS_PORT_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    incarnation: int
    host: str
    address: str
    pid: int
    metrics_port: int
    draining: bool
    def __init__(self, node_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., host: _Optional[str] = ..., address: _Optional[str] = ..., pid: _Optional[int] = ..., metrics_port: _Optional[int] = ..., draining: _Optional[bool] = ...) -> None: ...

class WorkerStatus(_message.Message):
    __slots__ = ("worker_id", "role", "host", "store_node", "model", "namespace", "pid", "running", "waiting", "free_blocks", "pool_blocks", "context_tokens_max", "metrics_port")
    WORKER_ID_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    STORE_NODE_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    RUNNING_FIELD_NUMBER: _ClassVar[int]
    WAITING_FIELD_NUMBER: _ClassVar[int]
    FREE_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    POOL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    CONTEXT_TOKENS_MAX_FIELD_NUMBER: _ClassVar[int]
    METRICS_PORT_FIELD_NUMBER: _ClassVar[int]
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
    def __init__(self, worker_id: _Optional[str] = ..., role: _Optional[str] = ..., host: _Optional[str] = ..., store_node: _Optional[str] = ..., model: _Optional[str] = ..., namespace: _Optional[str] = ..., pid: _Optional[int] = ..., running: _Optional[int] = ..., waiting: _Optional[int] = ..., free_blocks: _Optional[int] = ..., pool_blocks: _Optional[int] = ..., context_tokens_max: _Optional[int] = ..., metrics_port: _Optional[int] = ...) -> None: ...

class WhyMissRequest(_message.Message):
    __slots__ = ("model", "text", "chat", "token_ids", "request_id", "cache_salt")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    CACHE_SALT_FIELD_NUMBER: _ClassVar[int]
    model: str
    text: str
    chat: _containers.RepeatedCompositeFieldContainer[ChatTurn]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    request_id: str
    cache_salt: str
    def __init__(self, model: _Optional[str] = ..., text: _Optional[str] = ..., chat: _Optional[_Iterable[_Union[ChatTurn, _Mapping]]] = ..., token_ids: _Optional[_Iterable[int]] = ..., request_id: _Optional[str] = ..., cache_salt: _Optional[str] = ...) -> None: ...

class ChatTurn(_message.Message):
    __slots__ = ("role", "content")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ...) -> None: ...

class WhyMissReply(_message.Message):
    __slots__ = ("model", "namespace", "prompt_tokens", "block_tokens", "num_blocks", "runs", "reasons", "errors")
    MODEL_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    BLOCK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    RUNS_FIELD_NUMBER: _ClassVar[int]
    REASONS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    model: str
    namespace: str
    prompt_tokens: int
    block_tokens: int
    num_blocks: int
    runs: _containers.RepeatedCompositeFieldContainer[HolderRun]
    reasons: _containers.RepeatedCompositeFieldContainer[MissReason]
    errors: _containers.RepeatedCompositeFieldContainer[HolderError]
    def __init__(self, model: _Optional[str] = ..., namespace: _Optional[str] = ..., prompt_tokens: _Optional[int] = ..., block_tokens: _Optional[int] = ..., num_blocks: _Optional[int] = ..., runs: _Optional[_Iterable[_Union[HolderRun, _Mapping]]] = ..., reasons: _Optional[_Iterable[_Union[MissReason, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[HolderError, _Mapping]]] = ...) -> None: ...

class HolderRun(_message.Message):
    __slots__ = ("holder", "held_blocks", "indexed_blocks")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    INDEXED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    holder: str
    held_blocks: int
    indexed_blocks: int
    def __init__(self, holder: _Optional[str] = ..., held_blocks: _Optional[int] = ..., indexed_blocks: _Optional[int] = ...) -> None: ...

class MissReason(_message.Message):
    __slots__ = ("kind", "detail", "holder", "first_block", "num_blocks")
    KIND_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    kind: str
    detail: str
    holder: str
    first_block: int
    num_blocks: int
    def __init__(self, kind: _Optional[str] = ..., detail: _Optional[str] = ..., holder: _Optional[str] = ..., first_block: _Optional[int] = ..., num_blocks: _Optional[int] = ...) -> None: ...

class ExplainRequest(_message.Message):
    __slots__ = ("namespace", "chain")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    chain: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, namespace: _Optional[str] = ..., chain: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ExplainReply(_message.Message):
    __slots__ = ("held_blocks", "removals", "remembers_since_unix_ms")
    HELD_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REMOVALS_FIELD_NUMBER: _ClassVar[int]
    REMEMBERS_SINCE_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    held_blocks: int
    removals: _containers.RepeatedCompositeFieldContainer[Removal]
    remembers_since_unix_ms: int
    def __init__(self, held_blocks: _Optional[int] = ..., removals: _Optional[_Iterable[_Union[Removal, _Mapping]]] = ..., remembers_since_unix_ms: _Optional[int] = ...) -> None: ...

class Removal(_message.Message):
    __slots__ = ("position", "reason", "unix_ms")
    POSITION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    position: int
    reason: str
    unix_ms: int
    def __init__(self, position: _Optional[int] = ..., reason: _Optional[str] = ..., unix_ms: _Optional[int] = ...) -> None: ...

class ReadBlockRequest(_message.Message):
    __slots__ = ("holder", "namespace", "chain")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    holder: str
    namespace: str
    chain: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, holder: _Optional[str] = ..., namespace: _Optional[str] = ..., chain: _Optional[_Iterable[bytes]] = ...) -> None: ...

class StoredBlock(_message.Message):
    __slots__ = ("header", "payload", "holder", "namespace_fields")
    class NamespaceFieldsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    NAMESPACE_FIELDS_FIELD_NUMBER: _ClassVar[int]
    header: bytes
    payload: bytes
    holder: str
    namespace_fields: _containers.ScalarMap[str, str]
    def __init__(self, header: _Optional[bytes] = ..., payload: _Optional[bytes] = ..., holder: _Optional[str] = ..., namespace_fields: _Optional[_Mapping[str, str]] = ...) -> None: ...

class WriteBlockReply(_message.Message):
    __slots__ = ("outcome",)
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    outcome: str
    def __init__(self, outcome: _Optional[str] = ...) -> None: ...

class ReregisterRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ReregisterReply(_message.Message):
    __slots__ = ("blocks",)
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    blocks: int
    def __init__(self, blocks: _Optional[int] = ...) -> None: ...

class DoctorRequest(_message.Message):
    __slots__ = ("fix",)
    FIX_FIELD_NUMBER: _ClassVar[int]
    fix: bool
    def __init__(self, fix: _Optional[bool] = ...) -> None: ...

class DoctorReply(_message.Message):
    __slots__ = ("findings",)
    FINDINGS_FIELD_NUMBER: _ClassVar[int]
    findings: _containers.RepeatedCompositeFieldContainer[Finding]
    def __init__(self, findings: _Optional[_Iterable[_Union[Finding, _Mapping]]] = ...) -> None: ...

class Finding(_message.Message):
    __slots__ = ("check", "holder", "ok", "detail", "fixed")
    CHECK_FIELD_NUMBER: _ClassVar[int]
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    OK_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    FIXED_FIELD_NUMBER: _ClassVar[int]
    check: str
    holder: str
    ok: bool
    detail: str
    fixed: str
    def __init__(self, check: _Optional[str] = ..., holder: _Optional[str] = ..., ok: _Optional[bool] = ..., detail: _Optional[str] = ..., fixed: _Optional[str] = ...) -> None: ...

class PinRequest(_message.Message):
    __slots__ = ("selector", "for_s", "who", "carried")
    SELECTOR_FIELD_NUMBER: _ClassVar[int]
    FOR_S_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    CARRIED_FIELD_NUMBER: _ClassVar[int]
    selector: Selector
    for_s: float
    who: str
    carried: bool
    def __init__(self, selector: _Optional[_Union[Selector, _Mapping]] = ..., for_s: _Optional[float] = ..., who: _Optional[str] = ..., carried: _Optional[bool] = ...) -> None: ...

class SetTtlRequest(_message.Message):
    __slots__ = ("selector", "ttl_s", "who", "carried")
    SELECTOR_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    CARRIED_FIELD_NUMBER: _ClassVar[int]
    selector: Selector
    ttl_s: float
    who: str
    carried: bool
    def __init__(self, selector: _Optional[_Union[Selector, _Mapping]] = ..., ttl_s: _Optional[float] = ..., who: _Optional[str] = ..., carried: _Optional[bool] = ...) -> None: ...

class ControlReply(_message.Message):
    __slots__ = ("reports",)
    REPORTS_FIELD_NUMBER: _ClassVar[int]
    reports: _containers.RepeatedCompositeFieldContainer[ControlReport]
    def __init__(self, reports: _Optional[_Iterable[_Union[ControlReport, _Mapping]]] = ...) -> None: ...

class ControlReport(_message.Message):
    __slots__ = ("holder", "outcome", "blocks", "tokens", "bytes", "pinned_bytes", "pin_bytes_max", "until_unix_ms", "why", "error")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    PIN_BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    UNTIL_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    WHY_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    holder: str
    outcome: str
    blocks: int
    tokens: int
    bytes: int
    pinned_bytes: int
    pin_bytes_max: int
    until_unix_ms: int
    why: str
    error: str
    def __init__(self, holder: _Optional[str] = ..., outcome: _Optional[str] = ..., blocks: _Optional[int] = ..., tokens: _Optional[int] = ..., bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., pin_bytes_max: _Optional[int] = ..., until_unix_ms: _Optional[int] = ..., why: _Optional[str] = ..., error: _Optional[str] = ...) -> None: ...

class GetBudgetsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Budgets(_message.Message):
    __slots__ = ("budgets",)
    BUDGETS_FIELD_NUMBER: _ClassVar[int]
    budgets: _containers.RepeatedCompositeFieldContainer[Budget]
    def __init__(self, budgets: _Optional[_Iterable[_Union[Budget, _Mapping]]] = ...) -> None: ...

class Budget(_message.Message):
    __slots__ = ("account", "namespaces", "bytes_max", "bytes_min", "set_unix_ms", "set_by")
    ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    NAMESPACES_FIELD_NUMBER: _ClassVar[int]
    BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    BYTES_MIN_FIELD_NUMBER: _ClassVar[int]
    SET_UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    SET_BY_FIELD_NUMBER: _ClassVar[int]
    account: str
    namespaces: _containers.RepeatedScalarFieldContainer[str]
    bytes_max: int
    bytes_min: int
    set_unix_ms: int
    set_by: str
    def __init__(self, account: _Optional[str] = ..., namespaces: _Optional[_Iterable[str]] = ..., bytes_max: _Optional[int] = ..., bytes_min: _Optional[int] = ..., set_unix_ms: _Optional[int] = ..., set_by: _Optional[str] = ...) -> None: ...

class UsageRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class UsageReply(_message.Message):
    __slots__ = ("accounts",)
    ACCOUNTS_FIELD_NUMBER: _ClassVar[int]
    accounts: _containers.RepeatedCompositeFieldContainer[AccountUsage]
    def __init__(self, accounts: _Optional[_Iterable[_Union[AccountUsage, _Mapping]]] = ...) -> None: ...

class AccountUsage(_message.Message):
    __slots__ = ("account", "host_blocks", "host_bytes", "disk_blocks", "disk_bytes", "pinned_bytes", "refused_blocks", "evicted_blocks")
    ACCOUNT_FIELD_NUMBER: _ClassVar[int]
    HOST_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    HOST_BYTES_FIELD_NUMBER: _ClassVar[int]
    DISK_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    DISK_BYTES_FIELD_NUMBER: _ClassVar[int]
    PINNED_BYTES_FIELD_NUMBER: _ClassVar[int]
    REFUSED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    EVICTED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    account: str
    host_blocks: int
    host_bytes: int
    disk_blocks: int
    disk_bytes: int
    pinned_bytes: int
    refused_blocks: int
    evicted_blocks: int
    def __init__(self, account: _Optional[str] = ..., host_blocks: _Optional[int] = ..., host_bytes: _Optional[int] = ..., disk_blocks: _Optional[int] = ..., disk_bytes: _Optional[int] = ..., pinned_bytes: _Optional[int] = ..., refused_blocks: _Optional[int] = ..., evicted_blocks: _Optional[int] = ...) -> None: ...

class ListTenantsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListTenantsReply(_message.Message):
    __slots__ = ("tenants", "errors")
    TENANTS_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    tenants: _containers.RepeatedCompositeFieldContainer[TenantEntry]
    errors: _containers.RepeatedCompositeFieldContainer[HolderError]
    def __init__(self, tenants: _Optional[_Iterable[_Union[TenantEntry, _Mapping]]] = ..., errors: _Optional[_Iterable[_Union[HolderError, _Mapping]]] = ...) -> None: ...

class TenantEntry(_message.Message):
    __slots__ = ("name", "trust_group", "role", "bytes_max", "bytes_min", "ttl_s", "budget_from", "nodes", "requests_per_minute", "tokens_per_minute", "concurrent_max")
    NAME_FIELD_NUMBER: _ClassVar[int]
    TRUST_GROUP_FIELD_NUMBER: _ClassVar[int]
    ROLE_FIELD_NUMBER: _ClassVar[int]
    BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    BYTES_MIN_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    BUDGET_FROM_FIELD_NUMBER: _ClassVar[int]
    NODES_FIELD_NUMBER: _ClassVar[int]
    REQUESTS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    TOKENS_PER_MINUTE_FIELD_NUMBER: _ClassVar[int]
    CONCURRENT_MAX_FIELD_NUMBER: _ClassVar[int]
    name: str
    trust_group: str
    role: str
    bytes_max: int
    bytes_min: int
    ttl_s: float
    budget_from: str
    nodes: _containers.RepeatedCompositeFieldContainer[TenantOnNode]
    requests_per_minute: int
    tokens_per_minute: int
    concurrent_max: int
    def __init__(self, name: _Optional[str] = ..., trust_group: _Optional[str] = ..., role: _Optional[str] = ..., bytes_max: _Optional[int] = ..., bytes_min: _Optional[int] = ..., ttl_s: _Optional[float] = ..., budget_from: _Optional[str] = ..., nodes: _Optional[_Iterable[_Union[TenantOnNode, _Mapping]]] = ..., requests_per_minute: _Optional[int] = ..., tokens_per_minute: _Optional[int] = ..., concurrent_max: _Optional[int] = ...) -> None: ...

class TenantOnNode(_message.Message):
    __slots__ = ("holder", "usage")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    USAGE_FIELD_NUMBER: _ClassVar[int]
    holder: str
    usage: AccountUsage
    def __init__(self, holder: _Optional[str] = ..., usage: _Optional[_Union[AccountUsage, _Mapping]] = ...) -> None: ...

class SetQuotaRequest(_message.Message):
    __slots__ = ("tenant", "bytes_max", "bytes_min", "reset")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    BYTES_MAX_FIELD_NUMBER: _ClassVar[int]
    BYTES_MIN_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    tenant: str
    bytes_max: int
    bytes_min: int
    reset: bool
    def __init__(self, tenant: _Optional[str] = ..., bytes_max: _Optional[int] = ..., bytes_min: _Optional[int] = ..., reset: _Optional[bool] = ...) -> None: ...

class SetQuotaReply(_message.Message):
    __slots__ = ("tenant", "errors")
    TENANT_FIELD_NUMBER: _ClassVar[int]
    ERRORS_FIELD_NUMBER: _ClassVar[int]
    tenant: TenantEntry
    errors: _containers.RepeatedCompositeFieldContainer[HolderError]
    def __init__(self, tenant: _Optional[_Union[TenantEntry, _Mapping]] = ..., errors: _Optional[_Iterable[_Union[HolderError, _Mapping]]] = ...) -> None: ...

class DrainNodeRequest(_message.Message):
    __slots__ = ("holder", "undo", "without_moving")
    HOLDER_FIELD_NUMBER: _ClassVar[int]
    UNDO_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_MOVING_FIELD_NUMBER: _ClassVar[int]
    holder: str
    undo: bool
    without_moving: bool
    def __init__(self, holder: _Optional[str] = ..., undo: _Optional[bool] = ..., without_moving: _Optional[bool] = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ("peers", "undo", "without_moving", "who")
    PEERS_FIELD_NUMBER: _ClassVar[int]
    UNDO_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_MOVING_FIELD_NUMBER: _ClassVar[int]
    WHO_FIELD_NUMBER: _ClassVar[int]
    peers: _containers.RepeatedCompositeFieldContainer[DrainPeer]
    undo: bool
    without_moving: bool
    who: str
    def __init__(self, peers: _Optional[_Iterable[_Union[DrainPeer, _Mapping]]] = ..., undo: _Optional[bool] = ..., without_moving: _Optional[bool] = ..., who: _Optional[str] = ...) -> None: ...

class DrainPeer(_message.Message):
    __slots__ = ("node_id", "address")
    NODE_ID_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    node_id: str
    address: str
    def __init__(self, node_id: _Optional[str] = ..., address: _Optional[str] = ...) -> None: ...

class DrainNodeProgress(_message.Message):
    __slots__ = ("total_blocks", "moved_blocks", "present_blocks", "refused_blocks", "moved_bytes", "done", "state", "error", "moved_to")
    class MovedToEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    TOTAL_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MOVED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    PRESENT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    REFUSED_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    MOVED_BYTES_FIELD_NUMBER: _ClassVar[int]
    DONE_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    MOVED_TO_FIELD_NUMBER: _ClassVar[int]
    total_blocks: int
    moved_blocks: int
    present_blocks: int
    refused_blocks: int
    moved_bytes: int
    done: bool
    state: str
    error: str
    moved_to: _containers.ScalarMap[str, int]
    def __init__(self, total_blocks: _Optional[int] = ..., moved_blocks: _Optional[int] = ..., present_blocks: _Optional[int] = ..., refused_blocks: _Optional[int] = ..., moved_bytes: _Optional[int] = ..., done: _Optional[bool] = ..., state: _Optional[str] = ..., error: _Optional[str] = ..., moved_to: _Optional[_Mapping[str, int]] = ...) -> None: ...

class CheckIntegrityRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CheckIntegrityReply(_message.Message):
    __slots__ = ("broken",)
    BROKEN_FIELD_NUMBER: _ClassVar[int]
    broken: str
    def __init__(self, broken: _Optional[str] = ...) -> None: ...

class ExplainRouteRequest(_message.Message):
    __slots__ = ("request_id",)
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    def __init__(self, request_id: _Optional[str] = ...) -> None: ...

class ExplainRouteReply(_message.Message):
    __slots__ = ("request_id", "model", "unix_ms", "prompt_tokens", "reason", "settled_by", "attempts", "price", "chosen", "others", "num_considered", "predicted_ttft_s", "overhead_s", "outcome")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    MODEL_FIELD_NUMBER: _ClassVar[int]
    UNIX_MS_FIELD_NUMBER: _ClassVar[int]
    PROMPT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SETTLED_BY_FIELD_NUMBER: _ClassVar[int]
    ATTEMPTS_FIELD_NUMBER: _ClassVar[int]
    PRICE_FIELD_NUMBER: _ClassVar[int]
    CHOSEN_FIELD_NUMBER: _ClassVar[int]
    OTHERS_FIELD_NUMBER: _ClassVar[int]
    NUM_CONSIDERED_FIELD_NUMBER: _ClassVar[int]
    PREDICTED_TTFT_S_FIELD_NUMBER: _ClassVar[int]
    OVERHEAD_S_FIELD_NUMBER: _ClassVar[int]
    OUTCOME_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    model: str
    unix_ms: int
    prompt_tokens: int
    reason: str
    settled_by: str
    attempts: int
    price: float
    chosen: RoutePlan
    others: _containers.RepeatedCompositeFieldContainer[RoutePlan]
    num_considered: int
    predicted_ttft_s: float
    overhead_s: float
    outcome: RouteOutcome
    def __init__(self, request_id: _Optional[str] = ..., model: _Optional[str] = ..., unix_ms: _Optional[int] = ..., prompt_tokens: _Optional[int] = ..., reason: _Optional[str] = ..., settled_by: _Optional[str] = ..., attempts: _Optional[int] = ..., price: _Optional[float] = ..., chosen: _Optional[_Union[RoutePlan, _Mapping]] = ..., others: _Optional[_Iterable[_Union[RoutePlan, _Mapping]]] = ..., num_considered: _Optional[int] = ..., predicted_ttft_s: _Optional[float] = ..., overhead_s: _Optional[float] = ..., outcome: _Optional[_Union[RouteOutcome, _Mapping]] = ...) -> None: ...

class RoutePlan(_message.Message):
    __slots__ = ("prefill_worker", "decode_worker", "device_tokens", "loaded_tokens", "computed_tokens", "wait_s", "fetch_s", "compute_s", "hand_off_s", "price_s", "interference_s", "decode_s", "memory_s", "ttft_s", "cost_s", "barred")
    PREFILL_WORKER_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    DEVICE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    LOADED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    COMPUTED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    WAIT_S_FIELD_NUMBER: _ClassVar[int]
    FETCH_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    HAND_OFF_S_FIELD_NUMBER: _ClassVar[int]
    PRICE_S_FIELD_NUMBER: _ClassVar[int]
    INTERFERENCE_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_S_FIELD_NUMBER: _ClassVar[int]
    MEMORY_S_FIELD_NUMBER: _ClassVar[int]
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    COST_S_FIELD_NUMBER: _ClassVar[int]
    BARRED_FIELD_NUMBER: _ClassVar[int]
    prefill_worker: str
    decode_worker: str
    device_tokens: int
    loaded_tokens: int
    computed_tokens: int
    wait_s: float
    fetch_s: float
    compute_s: float
    hand_off_s: float
    price_s: float
    interference_s: float
    decode_s: float
    memory_s: float
    ttft_s: float
    cost_s: float
    barred: str
    def __init__(self, prefill_worker: _Optional[str] = ..., decode_worker: _Optional[str] = ..., device_tokens: _Optional[int] = ..., loaded_tokens: _Optional[int] = ..., computed_tokens: _Optional[int] = ..., wait_s: _Optional[float] = ..., fetch_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., hand_off_s: _Optional[float] = ..., price_s: _Optional[float] = ..., interference_s: _Optional[float] = ..., decode_s: _Optional[float] = ..., memory_s: _Optional[float] = ..., ttft_s: _Optional[float] = ..., cost_s: _Optional[float] = ..., barred: _Optional[str] = ...) -> None: ...

class RouteOutcome(_message.Message):
    __slots__ = ("ttft_s", "fetch_s", "compute_s", "decode_worker", "cached_device_tokens", "cached_shared_memory_tokens", "cached_grpc_tokens")
    TTFT_S_FIELD_NUMBER: _ClassVar[int]
    FETCH_S_FIELD_NUMBER: _ClassVar[int]
    COMPUTE_S_FIELD_NUMBER: _ClassVar[int]
    DECODE_WORKER_FIELD_NUMBER: _ClassVar[int]
    CACHED_DEVICE_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_SHARED_MEMORY_TOKENS_FIELD_NUMBER: _ClassVar[int]
    CACHED_GRPC_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ttft_s: float
    fetch_s: float
    compute_s: float
    decode_worker: str
    cached_device_tokens: int
    cached_shared_memory_tokens: int
    cached_grpc_tokens: int
    def __init__(self, ttft_s: _Optional[float] = ..., fetch_s: _Optional[float] = ..., compute_s: _Optional[float] = ..., decode_worker: _Optional[str] = ..., cached_device_tokens: _Optional[int] = ..., cached_shared_memory_tokens: _Optional[int] = ..., cached_grpc_tokens: _Optional[int] = ...) -> None: ...
