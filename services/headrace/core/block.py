"""KV block identity: what a block is called, and when two blocks are the same.

This file owns the hash chain, the namespace and the header's meaning. It knows nothing of bytes in memory, of files,
of Redis or of the network.

The words of this field, fixed here once:

- *KV block*: all layers' K and V for `block_tokens` consecutive tokens of one sequence.
- *chain*: the block hashes of a prompt, in order; full blocks only, so `len(chain) == num_tokens // block_tokens`.
- *namespace*: everything that must be equal for two workers' KV bytes to mean the same thing.
- *holder*: whoever keeps a block: a store node (host tier) or a worker (device tier).
- *token hit rate* = cached_tokens / prompt_tokens.  *block hit rate* = hit_blocks / looked_up_blocks. They differ (the
  partial last block is never looked up), so neither is called just "hit rate".
- *cached token*: a prompt token whose KV was not computed for this request by anyone.
- *TTFT*: request accepted to first token sent.  *ITL*: gap between consecutive tokens of one stream.
- *lease*: a reader's claim on committed slots; *reservation*: a writer's claim on a slot; both expire.
"""

import hashlib
import struct
import sys
import zlib
from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from typing import NewType, cast

import xxhash

from headrace.core.index_limits import INDEX_SHARDS

NamespaceId = NewType("NamespaceId", str)  # 32 hex digits
BlockHash = NewType("BlockHash", bytes)  # 16 bytes (xxh3-128) or 32 bytes (SHA-256)
HolderId = NewType("HolderId", str)  # "node:..." or "worker:..."
Chain = tuple[BlockHash, ...]

FORMAT_VERSION = 1  # of identity: namespaces and hashes
HEADER_VERSION = 2  # of the header's fields; 2 added `narrowed_from`


class HashAlgorithm(StrEnum):
    """XXH3 where all callers trust each other; SHA256 where a caller might construct collisions."""

    XXH3_128 = "xxh3-128"
    SHA256 = "sha256"


class Tier(StrEnum):
    """Where a block lies, fastest first."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class CacheSource(StrEnum):
    """How a cached token reached the worker that decodes: the `source` label of cached-token counts."""

    DEVICE = "device"
    SHARED_MEMORY = "shared_memory"
    GRPC = "grpc"


class KvCodec(StrEnum):
    """How the numbers of a payload are written down (docs/codecs.md). All but RAW lose something."""

    RAW = "raw"  # the model's own numbers
    INT8 = "int8"  # keys scaled per channel over the block's tokens, values per token
    FP8 = "fp8"  # e4m3, keys and values scaled per token
    INT8_TOKEN = "int8_token"  # as an int8 pool has them: keys and values scaled per token
    FP8_TOKEN = "fp8_token"  # as an fp8 pool has them


@dataclass(frozen=True, slots=True)
class KvLayout:
    """Shape and meaning of one block's payload: `[num_layers, 2, num_kv_heads, block_tokens, head_dim]`, contiguous.

    Every codec but raw puts the scales before the numbers: `[amax of the keys, amax of the values, codes]`.
    Where some layers have a window and others see everything, the payload has two parts (`blocks/two_parts.py`): the
    `wide` one of the layers that see everything, and the `near` one of the others, which is read of a prefix's last
    window only. Each is laid out as said, and has a checksum of its own behind it.
    """

    dtype: str  # of the model: "bfloat16" | "float32" | "float16"
    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_tokens: int
    codec: str = "raw"  # a KvCodec's value
    tensor_parallel_rank: int = 0
    tensor_parallel_size: int = 1
    near_layers: int = 0  # of num_layers, those in the near part; 0: the payload is one part

    @property
    def wide(self) -> "KvLayout":
        """Of the wide part alone; of a payload of one part, the layout itself."""
        return replace(self, num_layers=self.num_layers - self.near_layers, near_layers=0) if self.near_layers else self

    @property
    def near(self) -> "KvLayout":
        """Of the near part alone."""
        assert self.near_layers
        return replace(self, num_layers=self.near_layers, near_layers=0)

    @property
    def wide_bytes(self) -> int:
        """How much of a payload is read where the near part is not needed: the wide part and its checksum."""
        return self.wide.block_bytes + PART_CHECK_BYTES if self.near_layers else self.block_bytes

    @property
    def shape(self) -> tuple[int, int, int, int, int]:
        """The axes of a block's numbers: `[num_layers, 2, num_kv_heads, block_tokens, head_dim]`."""
        return (self.num_layers, 2, self.num_kv_heads, self.block_tokens, self.head_dim)

    @property
    def in_pool(self) -> "KvLayout":
        """The layout in which a worker's pool holds such blocks: loading undoes a codec that is the store's only."""
        return replace(self, codec=KvCodec.RAW.value) if self.codec in (KvCodec.INT8, KvCodec.FP8) else self

    @property
    def token_bytes(self) -> int:
        """Payload bytes of one token: a block's divided by its tokens, rounded up.

        Raw: 2 x layers x kv heads x head dim x bytes per element.
        """
        return -(-self.block_bytes // self.block_tokens)

    @property
    def block_bytes(self) -> int:
        """Payload bytes of one block.

        Numbers: 2 x layers x kv heads x block tokens x head dim, at the dtype's bytes each in raw, at 1 byte else.
        Scales, at the dtype's bytes each: none in raw; layers x kv heads x (head dim + block tokens) in int8, one for
        each channel of the keys and each token of the values; 2 x layers x kv heads x block tokens in the others.
        Two parts have a checksum of PART_CHECK_BYTES each.
        """
        if self.near_layers:
            return self.wide.block_bytes + self.near.block_bytes + 2 * PART_CHECK_BYTES
        heads, width = self.num_layers * self.num_kv_heads, DTYPE_BYTES[self.dtype]
        numbers = 2 * heads * self.block_tokens * self.head_dim
        if self.codec == KvCodec.RAW:
            return numbers * width
        if self.codec == KvCodec.INT8:
            return numbers + heads * (self.head_dim + self.block_tokens) * width
        assert self.codec in _ROW_CODECS, self.codec
        return numbers + 2 * heads * self.block_tokens * width


PART_CHECK_BYTES = 8  # behind each part of a payload of two
_ROW_CODECS = (KvCodec.FP8, KvCodec.INT8_TOKEN, KvCodec.FP8_TOKEN)  # one scale for each head's row of a token
_NEAR = "near_layers"
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True, slots=True)
class Namespace:
    """Every field that must agree before two workers may share blocks. Order and names are part of the format."""

    model_id: str
    weights_digest: str
    tokenizer_digest: str
    adapter_digest: str
    layout: KvLayout
    position_digest: str  # rotary and window parameters
    numerics_probe: str  # digest of a fixed probe prompt's KV bytes; where exactness is not claimed "", or "flex"
    hash_algorithm: HashAlgorithm
    trust_group: str
    format_version: int = FORMAT_VERSION

    @property
    def id(self) -> NamespaceId:
        """SHA-256 over length-prefixed (name, value) pairs, cut to 128 bits.

        Length prefixes make the encoding unambiguous: no two different field lists give the same bytes.
        """
        digest = hashlib.sha256(b"headrace namespace")
        for name, value in self.named_fields():
            for part in (name.encode(), value.encode()):
                digest.update(struct.pack("<I", len(part)) + part)
        return NamespaceId(digest.hexdigest()[:32])

    def narrowed(self, salt: str, *, trust_group: str = "") -> "Namespace":
        """This namespace for callers of one trust group who gave the same salt only; both "" is this namespace itself.

        Neither can be spelled so that it widens the other: what they narrow stands before them with its length, and a
        sign that tells which of the two follows, so that no two (group, salt) pairs are spelled alike.
        """
        narrowed = self.trust_group
        if trust_group:
            narrowed = f"{len(narrowed)}:{narrowed}@{trust_group}"
        if salt:
            narrowed = f"{len(narrowed)}:{narrowed}:{salt}"
        return self if narrowed == self.trust_group else replace(self, trust_group=narrowed)

    def named_fields(self) -> list[tuple[str, str]]:
        """The flat (name, value) list that the digest covers, layout fields spelled `layout.<name>`."""
        pairs = []
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, KvLayout):
                pairs += [(f"layout.{f.name}", str(getattr(value, f.name))) for f in fields(value) if f.name != _NEAR]
                if value.near_layers:  # a payload of one part is named as it was before there were two
                    pairs.append((f"layout.{_NEAR}", str(value.near_layers)))
            else:
                pairs.append((field.name, str(value)))
        return pairs

    def differing_fields(self, other: "Namespace") -> list[str]:
        """Names of the fields that keep two namespaces apart, in order; empty iff they are the same namespace."""
        here, there = dict(self.named_fields()), dict(other.named_fields())
        return [name for name in here | there if here.get(name) != there.get(name)]


@dataclass(frozen=True, slots=True)
class BlockHeader:
    """What a stored block says of itself. Compared on use; any difference is a miss."""

    namespace: NamespaceId
    block_hash: BlockHash
    parent_hash: BlockHash  # the previous block's hash; the namespace's root for block 0
    position: int  # 0-based index of the block in its sequence
    token_ids: tuple[int, ...]
    layout: KvLayout
    payload_bytes: int
    payload_xxh3: int  # xxh3-64 of the payload; 0 until the payload is written
    producer: str
    created_unix_ms: int
    narrowed_from: tuple[NamespaceId, ...] = ()  # the model's own namespace, then its trust group's; () for the first
    format_version: int = HEADER_VERSION

    @property
    def base_namespace(self) -> NamespaceId:
        """The namespace that workers announce: what tells an operator whose model's block this is."""
        return self.narrowed_from[0] if self.narrowed_from else self.namespace

    def is_of(self, namespace: str) -> bool:
        """Whether the block belongs to a namespace: its own, or one that its own was narrowed from."""
        return namespace == self.namespace or namespace in self.narrowed_from


@dataclass(frozen=True, slots=True)
class HashedPrompt:
    """A prompt and its chain, always made together so that neither can drift from the other."""

    namespace: NamespaceId
    token_ids: tuple[int, ...]
    chain: Chain
    block_tokens: int
    narrowed_from: tuple[NamespaceId, ...] = ()  # as in BlockHeader

    def block_token_ids(self, block_index: int) -> tuple[int, ...]:
        """Token ids of one full block."""
        start = block_index * self.block_tokens
        return self.token_ids[start : start + self.block_tokens]

    def parent_of(self, block_index: int) -> BlockHash:
        """Hash of the block before `block_index`; the namespace's root for block 0."""
        return root_hash(self.namespace) if block_index == 0 else self.chain[block_index - 1]


def root_hash(namespace: NamespaceId) -> BlockHash:
    """The parent of every block 0: the namespace's own 16 bytes."""
    return BlockHash(bytes.fromhex(namespace))


def shard_of(namespace: NamespaceId) -> int:
    """The shard of the index that a namespace's blocks lie in; the same in every process."""
    return zlib.crc32(namespace.encode()) % INDEX_SHARDS


def hash_prompt(
    namespace: NamespaceId, token_ids: Sequence[int], *, block_tokens: int, algorithm: HashAlgorithm
) -> HashedPrompt:
    """Hash a prompt's full blocks: `block_hash = H(parent_hash || token ids as little-endian u32)`.

    H is xxh3-128 seeded with the namespace's first 8 bytes (little endian), or SHA-256. Depends on nothing of the
    process or platform. Equal chains mean equal namespace and equal leading tokens (up to a collision, which the
    header's token ids catch on use).
    """
    assert block_tokens > 0
    tokens = tuple(token_ids)
    num_full = len(tokens) // block_tokens
    packed = _pack(tokens[: num_full * block_tokens])
    stride = 4 * block_tokens
    parent, hash_packed = root_hash(namespace), _packed_hasher(namespace, algorithm)
    chain: list[BlockHash] = []
    add = chain.append  # the loop is most of a gateway's work on a long prompt: it looks nothing up
    for start in range(0, len(packed), stride):
        parent = hash_packed(parent, packed[start : start + stride])
        add(parent)
    return HashedPrompt(namespace=namespace, token_ids=tokens, chain=tuple(chain), block_tokens=block_tokens)


def hash_block(
    namespace: NamespaceId, parent_hash: BlockHash, token_ids: Sequence[int], algorithm: HashAlgorithm
) -> BlockHash:
    """Hash one more full block of a growing sequence; extends a chain exactly as `hash_prompt` would have."""
    return _packed_hasher(namespace, algorithm)(parent_hash, _pack(token_ids))


def _pack(token_ids: Sequence[int]) -> bytes:
    """Little-endian u32, whatever the platform's own words are."""
    packed = array("I", token_ids)
    if packed.itemsize != 4 or sys.byteorder != "little":
        return struct.pack(f"<{len(token_ids)}I", *token_ids)
    return packed.tobytes()


def _packed_hasher(namespace: NamespaceId, algorithm: HashAlgorithm) -> Callable[[BlockHash, bytes], BlockHash]:
    """`H(parent || tokens)` for one namespace."""
    if algorithm is HashAlgorithm.XXH3_128:
        digest, seed = xxhash.xxh3_128_digest, int.from_bytes(root_hash(namespace)[:8], "little")
        return cast(Callable[[BlockHash, bytes], BlockHash], lambda parent, packed: digest(parent + packed, seed))
    sha256 = hashlib.sha256
    return lambda parent, packed: BlockHash(sha256(parent + packed).digest())


def payload_digest(payload: bytes | bytearray | memoryview) -> int:
    """The checksum in every header: xxh3-64 of the payload bytes."""
    return xxhash.xxh3_64_intdigest(payload)
