"""What tests of KV events share: vLLM's schema as a reader writes it down, and a follower that keeps what a node holds.

The structs are written from the published field lists (`vllm/distributed/kv_events.py`): maps as of vLLM 0.24, arrays
as of 0.15 to 0.23. Decoding is strict about types; fields that the schema does not know are passed over by msgspec.
"""

from typing import Any

import msgspec

Hash = bytes | int
END = (-1).to_bytes(8, "big", signed=True)


class MapEvent(msgspec.Struct, omit_defaults=True, tag=True):
    pass


class ArrayEvent(msgspec.Struct, omit_defaults=True, tag=True, array_like=True):
    pass


class BlockStored(MapEvent):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None


class BlockRemoved(MapEvent):
    block_hashes: list[Hash]
    medium: str | None
    group_idx: int | None = None


class AllBlocksCleared(MapEvent):
    pass


class StoredArray(ArrayEvent, tag="BlockStored"):
    block_hashes: list[Hash]
    parent_block_hash: Hash | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None


class RemovedArray(ArrayEvent, tag="BlockRemoved"):
    block_hashes: list[Hash]
    medium: str | None


class ClearedArray(ArrayEvent, tag="AllBlocksCleared"):
    pass


class MapBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


class ArrayBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[StoredArray | RemovedArray | ClearedArray]
    data_parallel_rank: int | None = None


def decode_maps(payload: bytes) -> MapBatch:
    return msgspec.msgpack.decode(payload, type=MapBatch)


def decode_arrays(payload: bytes) -> ArrayBatch:
    return msgspec.msgpack.decode(payload, type=ArrayBatch)


class Follower:
    """Keeps the tokens of every block that the events say is held, and the parent of each."""

    def __init__(self) -> None:
        self.last = -1
        self.held: dict[Hash, tuple[Hash | None, tuple[int, ...]]] = {}
        self.orphans = 0  # blocks that were stored before their parent

    def misses_before(self, sequence: int) -> bool:
        return sequence != self.last + 1

    def apply(self, sequence: int, payload: bytes) -> None:
        """Take a batch, live or replayed; those that were already taken are passed over, as vLLM's example does."""
        if sequence <= self.last:
            return
        self.last = sequence
        for event in decode_maps(payload).events:
            match event:
                case AllBlocksCleared():
                    self.held.clear()
                case BlockRemoved():
                    for block_hash in event.block_hashes:
                        del self.held[block_hash]
                case BlockStored():
                    parent = event.parent_block_hash
                    self.orphans += parent is not None and parent not in self.held
                    for i, block_hash in enumerate(event.block_hashes):
                        tokens = event.token_ids[i * event.block_size : (i + 1) * event.block_size]
                        self.held[block_hash] = (parent, tuple(tokens))
                        parent = block_hash
