"""KV events as bytes: what routers that follow vLLM read.

Owns the msgpack layouts and how a hash is written. Field names and order are those of vLLM's published schema
(`vllm/distributed/kv_events.py`): a batch is the array `[ts, events, data_parallel_rank]`; an event is a map with its
name under `type` since vLLM 0.24 (layout `map`), and was an array with its name first up to 0.23 (layout `array`).

A map also carries `namespace`, which vLLM does not have: a node may hold blocks of several models, and readers of maps
pass over fields that they do not know. An array has no room for it, since its readers tell fields by their place.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

import msgpack

from headrace.core.block import BlockHash, BlockHeader, NamespaceId

# vLLM's name of host memory; llm-d and Dynamo know it as the tier below the GPU's.
HOST_MEDIUM = "CPU"
_DATA_PARALLEL_RANK = 0  # a node is one publisher; readers in Rust want the field to be there


class EventLayout(StrEnum):
    """How one event is laid out."""

    MAP = "map"
    ARRAY = "array"


class EventHashes(StrEnum):
    """How a block hash is written: its last 8 bytes as an unsigned integer (vLLM's default), or all of its bytes."""

    INT = "int"
    BYTES = "bytes"


@dataclass(frozen=True, slots=True)
class BlockStored:
    """Blocks that became readable: a run of one chain, each the parent of the next. Never empty."""

    headers: tuple[BlockHeader, ...]


@dataclass(frozen=True, slots=True)
class BlockRemoved:
    """Blocks that are about to go, in the order in which they go. Never empty."""

    namespace: NamespaceId
    block_hashes: tuple[BlockHash, ...]


@dataclass(frozen=True, slots=True)
class AllBlocksCleared:
    """Whatever was said before does not hold any more."""


KvEvent = BlockStored | BlockRemoved | AllBlocksCleared


def merge_events(events: Iterable[KvEvent]) -> list[KvEvent]:
    """The same events with neighbours joined: blocks that continue a run, removals in one namespace."""
    merged: list[KvEvent] = []
    for event in events:
        match merged[-1] if merged else None, event:
            case BlockStored(headers=run), BlockStored(headers=more) if _continues(run[-1], more[0]):
                merged[-1] = BlockStored(run + more)
            case BlockRemoved(namespace=here, block_hashes=gone), BlockRemoved(namespace=there) if here == there:
                merged[-1] = BlockRemoved(here, gone + event.block_hashes)
            case _:
                merged.append(event)
    return merged


@dataclass(frozen=True, slots=True)
class EventFormat:
    """One way of writing events; all of a publisher's batches are written the same way."""

    layout: EventLayout = EventLayout.MAP
    hashes: EventHashes = EventHashes.INT

    def encode(self, events: Sequence[KvEvent], *, unix_s: float) -> bytes:
        """A batch's payload."""
        packed: bytes = msgpack.packb([unix_s, [self._lay_out(event) for event in events], _DATA_PARALLEL_RANK])
        return packed

    def _lay_out(self, event: KvEvent) -> Any:
        fields = self._fields(event)
        if self.layout is EventLayout.MAP:
            return {"type": type(event).__name__, **fields}
        fields.pop("namespace", None)
        return [type(event).__name__, *fields.values()]

    def _fields(self, event: KvEvent) -> dict[str, Any]:
        """Fields by name, in the schema's order."""
        match event:
            case BlockStored(headers=run):
                first = run[0]
                return {
                    "block_hashes": [self._hash(header.block_hash) for header in run],
                    "parent_block_hash": self._hash(first.parent_hash) if first.position > 0 else None,
                    "token_ids": [token for header in run for token in header.token_ids],
                    "block_size": len(first.token_ids),
                    "lora_id": None,
                    "medium": HOST_MEDIUM,
                    "lora_name": None,
                    "namespace": first.namespace,
                }
            case BlockRemoved(namespace=namespace, block_hashes=gone):
                return {
                    "block_hashes": [self._hash(block_hash) for block_hash in gone],
                    "medium": HOST_MEDIUM,
                    "namespace": namespace,
                }
            case AllBlocksCleared():
                return {}

    def _hash(self, block_hash: BlockHash) -> int | bytes:
        return int.from_bytes(block_hash[-8:], "big") if self.hashes is EventHashes.INT else bytes(block_hash)


def _continues(header: BlockHeader, after: BlockHeader) -> bool:
    return (
        after.parent_hash == header.block_hash
        and after.namespace == header.namespace
        and len(after.token_ids) == len(header.token_ids)
    )
