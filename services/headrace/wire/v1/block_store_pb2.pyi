from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class LeaseRequest(_message.Message):
    __slots__ = ("namespace", "chain", "hash_bytes", "first_block", "ttl_s", "not_on_disk", "claim_name", "wait_ms", "whole_from")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    HASH_BYTES_FIELD_NUMBER: _ClassVar[int]
    FIRST_BLOCK_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    NOT_ON_DISK_FIELD_NUMBER: _ClassVar[int]
    CLAIM_NAME_FIELD_NUMBER: _ClassVar[int]
    WAIT_MS_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FROM_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    chain: bytes
    hash_bytes: int
    first_block: int
    ttl_s: float
    not_on_disk: bool
    claim_name: str
    wait_ms: int
    whole_from: int
    def __init__(self, namespace: _Optional[str] = ..., chain: _Optional[bytes] = ..., hash_bytes: _Optional[int] = ..., first_block: _Optional[int] = ..., ttl_s: _Optional[float] = ..., not_on_disk: _Optional[bool] = ..., claim_name: _Optional[str] = ..., wait_ms: _Optional[int] = ..., whole_from: _Optional[int] = ...) -> None: ...

class LeaseReply(_message.Message):
    __slots__ = ("lease_id", "incarnation", "expires_in_ms", "blocks", "ends")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_MS_FIELD_NUMBER: _ClassVar[int]
    BLOCKS_FIELD_NUMBER: _ClassVar[int]
    ENDS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    incarnation: int
    expires_in_ms: int
    blocks: _containers.RepeatedCompositeFieldContainer[LeasedBlock]
    ends: _containers.RepeatedCompositeFieldContainer[OrderedEnd]
    def __init__(self, lease_id: _Optional[str] = ..., incarnation: _Optional[int] = ..., expires_in_ms: _Optional[int] = ..., blocks: _Optional[_Iterable[_Union[LeasedBlock, _Mapping]]] = ..., ends: _Optional[_Iterable[_Union[OrderedEnd, _Mapping]]] = ...) -> None: ...

class LeasedBlock(_message.Message):
    __slots__ = ("slot", "header")
    SLOT_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    slot: int
    header: bytes
    def __init__(self, slot: _Optional[int] = ..., header: _Optional[bytes] = ...) -> None: ...

class OrderedEnd(_message.Message):
    __slots__ = ("block_hash", "in_ms")
    BLOCK_HASH_FIELD_NUMBER: _ClassVar[int]
    IN_MS_FIELD_NUMBER: _ClassVar[int]
    block_hash: bytes
    in_ms: int
    def __init__(self, block_hash: _Optional[bytes] = ..., in_ms: _Optional[int] = ...) -> None: ...

class ReleaseRequest(_message.Message):
    __slots__ = ("lease_id", "suspect_blocks")
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    SUSPECT_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    suspect_blocks: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, lease_id: _Optional[str] = ..., suspect_blocks: _Optional[_Iterable[int]] = ...) -> None: ...

class ReleaseReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LookupRequest(_message.Message):
    __slots__ = ("namespace", "chain", "hash_bytes")
    NAMESPACE_FIELD_NUMBER: _ClassVar[int]
    CHAIN_FIELD_NUMBER: _ClassVar[int]
    HASH_BYTES_FIELD_NUMBER: _ClassVar[int]
    namespace: str
    chain: bytes
    hash_bytes: int
    def __init__(self, namespace: _Optional[str] = ..., chain: _Optional[bytes] = ..., hash_bytes: _Optional[int] = ...) -> None: ...

class LookupReply(_message.Message):
    __slots__ = ("num_blocks", "incarnation")
    NUM_BLOCKS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    num_blocks: int
    incarnation: int
    def __init__(self, num_blocks: _Optional[int] = ..., incarnation: _Optional[int] = ...) -> None: ...

class FetchRequest(_message.Message):
    __slots__ = ("lease_id",)
    LEASE_ID_FIELD_NUMBER: _ClassVar[int]
    lease_id: str
    def __init__(self, lease_id: _Optional[str] = ...) -> None: ...

class ReserveRequest(_message.Message):
    __slots__ = ("headers", "ttl_s", "not_on_disk", "claim_name")
    HEADERS_FIELD_NUMBER: _ClassVar[int]
    TTL_S_FIELD_NUMBER: _ClassVar[int]
    NOT_ON_DISK_FIELD_NUMBER: _ClassVar[int]
    CLAIM_NAME_FIELD_NUMBER: _ClassVar[int]
    headers: _containers.RepeatedScalarFieldContainer[bytes]
    ttl_s: float
    not_on_disk: bool
    claim_name: str
    def __init__(self, headers: _Optional[_Iterable[bytes]] = ..., ttl_s: _Optional[float] = ..., not_on_disk: _Optional[bool] = ..., claim_name: _Optional[str] = ...) -> None: ...

class ReserveReply(_message.Message):
    __slots__ = ("incarnation", "outcomes")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    incarnation: int
    outcomes: _containers.RepeatedCompositeFieldContainer[ReserveOutcome]
    def __init__(self, incarnation: _Optional[int] = ..., outcomes: _Optional[_Iterable[_Union[ReserveOutcome, _Mapping]]] = ...) -> None: ...

class ReserveOutcome(_message.Message):
    __slots__ = ("kind", "reservation_id", "slot")
    class Kind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
        __slots__ = ()
        KIND_UNSPECIFIED: _ClassVar[ReserveOutcome.Kind]
        KIND_RESERVED: _ClassVar[ReserveOutcome.Kind]
        KIND_ALREADY_STORED: _ClassVar[ReserveOutcome.Kind]
        KIND_NOT_STORED: _ClassVar[ReserveOutcome.Kind]
    KIND_UNSPECIFIED: ReserveOutcome.Kind
    KIND_RESERVED: ReserveOutcome.Kind
    KIND_ALREADY_STORED: ReserveOutcome.Kind
    KIND_NOT_STORED: ReserveOutcome.Kind
    KIND_FIELD_NUMBER: _ClassVar[int]
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    kind: ReserveOutcome.Kind
    reservation_id: str
    slot: int
    def __init__(self, kind: _Optional[_Union[ReserveOutcome.Kind, str]] = ..., reservation_id: _Optional[str] = ..., slot: _Optional[int] = ...) -> None: ...

class CommitRequest(_message.Message):
    __slots__ = ("reservation_id", "payload_xxh3")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_XXH3_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    payload_xxh3: int
    def __init__(self, reservation_id: _Optional[str] = ..., payload_xxh3: _Optional[int] = ...) -> None: ...

class FillStart(_message.Message):
    __slots__ = ("reservation_id", "payload_xxh3")
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    PAYLOAD_XXH3_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    payload_xxh3: int
    def __init__(self, reservation_id: _Optional[str] = ..., payload_xxh3: _Optional[int] = ...) -> None: ...

class CommitReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("reservation_id",)
    RESERVATION_ID_FIELD_NUMBER: _ClassVar[int]
    reservation_id: str
    def __init__(self, reservation_id: _Optional[str] = ...) -> None: ...

class AbortReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class EndClaimsRequest(_message.Message):
    __slots__ = ("names",)
    NAMES_FIELD_NUMBER: _ClassVar[int]
    names: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, names: _Optional[_Iterable[str]] = ...) -> None: ...

class EndClaimsReply(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...
