"""One block of a node's disk tier as its books have it: what is known of its header, where it lies, what waits."""

import struct
from dataclasses import dataclass

from headrace.blocks.disk_tier import DiskRecord, record_bytes
from headrace.core.block import BlockHash, BlockHeader, NamespaceId
from headrace.store.held_blocks import BlockKey


@dataclass(frozen=True, slots=True)
class HeaderBrief:
    """What of a header is kept in memory: enough to select and list a block. A third of a header's size; the whole one
    is read from disk with the payload."""

    namespace: NamespaceId
    block_hash: BlockHash
    parent_hash: BlockHash
    position: int
    packed_tokens: bytes
    narrowed_from: tuple[NamespaceId, ...]
    created_unix_ms: int

    @classmethod
    def of(cls, header: BlockHeader) -> "HeaderBrief":
        """The brief of a whole header."""
        return cls(
            namespace=header.namespace,
            block_hash=header.block_hash,
            parent_hash=header.parent_hash,
            position=header.position,
            packed_tokens=struct.pack(f"<{len(header.token_ids)}I", *header.token_ids),
            narrowed_from=header.narrowed_from,
            created_unix_ms=header.created_unix_ms,
        )

    @property
    def token_ids(self) -> tuple[int, ...]:
        """As `BlockHeader.token_ids`; made anew at each call."""
        return struct.unpack(f"<{len(self.packed_tokens) // 4}I", self.packed_tokens)

    @property
    def base_namespace(self) -> NamespaceId:
        """As `BlockHeader.base_namespace`."""
        return self.narrowed_from[0] if self.narrowed_from else self.namespace

    def is_of(self, namespace: str) -> bool:
        """As `BlockHeader.is_of`."""
        return namespace == self.namespace or namespace in self.narrowed_from

    @property
    def key(self) -> BlockKey:
        """The block's name in a node."""
        return (self.namespace, self.block_hash)

    @property
    def parent_key(self) -> BlockKey | None:
        """The name of the block before; None for the first."""
        return (self.namespace, self.parent_hash) if self.position > 0 else None


@dataclass(slots=True, eq=False)
class DiskBlock:
    """One block kept on disk or on its way there. Mutable; owned by `DiskBlocks`."""

    header: HeaderBrief
    total_bytes: int  # on disk, of the newest copy
    used_s: float
    hits: int = 0
    record: DiskRecord | None = None
    waiting: "WriteJob | None" = None

    @property
    def key(self) -> BlockKey:
        """Its name in the node."""
        return self.header.key


@dataclass(slots=True, eq=False)
class WriteJob:
    """A demoted block's bytes. `record` says where they go, once it is this job's turn."""

    block: DiskBlock
    header_bytes: bytes
    payload: bytes
    record: DiskRecord | None = None

    @property
    def total_bytes(self) -> int:
        """What it will take on disk."""
        return record_bytes(len(self.header_bytes), len(self.payload))
