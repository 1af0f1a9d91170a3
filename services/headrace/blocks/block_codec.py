"""BlockHeader to msgpack bytes and back, and the comparison that every reader makes before it uses a block.

Owns format version 2 of the header (docs/block-format.md). One msgpack array in fixed order; its last element is the
xxh3-64 of everything before it, so that a truncation or a flipped bit is refused before anything is read out of it.
Decoding is strict: unknown versions, other types, non-canonical spellings and oversize are `BlockCorrupt`, never a
guess. Knows nothing of slots, files or the network.
"""

import struct
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

import msgpack
import xxhash

from headrace.core.block import (
    DTYPE_BYTES,
    HEADER_VERSION,
    BlockHash,
    BlockHeader,
    HashAlgorithm,
    KvCodec,
    KvLayout,
    NamespaceId,
    hash_block,
    root_hash,
)
from headrace.core.errors import BlockCorrupt
from headrace.core.limits import BLOCK_TOKENS_MAX, BLOCK_TOKENS_MIN, HEADER_BYTES_MAX

MAGIC = "headrace-block"
_DIGEST_BYTES = 8
_HASH_BYTES = (16, 32)
_PRODUCER_CHARS_MAX = 128
_NARROWED_FROM_MAX = 2  # the model's own namespace, and its trust group's
_CODECS = frozenset(codec.value for codec in KvCodec)
_LAYOUT_TYPES = tuple((field.name, field.type) for field in fields(KvLayout))


def encode_header(header: BlockHeader) -> bytes:
    """The header's canonical bytes: equal headers give equal bytes, and the length does not depend on the checksum.

    A header of our own making always fits HEADER_BYTES_MAX (1,024 tokens x 4 bytes + about 400).
    """
    sealed = seal(msgpack.packb(_body_of(header), use_bin_type=True)[:-_DIGEST_BYTES])
    assert len(sealed) <= HEADER_BYTES_MAX, "a header outgrew its bound"
    return sealed


def pack_fields(header: BlockHeader) -> list[bytes]:
    """Each field's bytes, in order, as they stand in the header behind its first byte; the checksum's are zeros."""
    return [msgpack.packb(field, use_bin_type=True) for field in _body_of(header)]


def _body_of(header: BlockHeader) -> list[Any]:
    layout = header.layout
    return [
        MAGIC,
        header.format_version,
        bytes.fromhex(header.namespace),
        bytes(header.block_hash),
        bytes(header.parent_hash),
        header.position,
        struct.pack(f"<{len(header.token_ids)}I", *header.token_ids),
        _layout_row(layout),
        header.payload_bytes,
        struct.pack("<Q", header.payload_xxh3),  # fixed width: reserving with 0 and committing take the same space
        header.producer,
        header.created_unix_ms,
        [bytes.fromhex(namespace) for namespace in header.narrowed_from],
        bytes(_DIGEST_BYTES),
    ]


def _layout_row(layout: KvLayout) -> list[Any]:
    """The fields in order; the last one, `near_layers`, stands there only where the payload has two parts."""
    row = [getattr(layout, name) for name, _ in _LAYOUT_TYPES]
    return row if layout.near_layers else row[:-1]


def decode_header(data: bytes | bytearray | memoryview) -> BlockHeader:
    """Parse header bytes. Raises BlockCorrupt, naming what is wrong, for what `encode_header` did not write."""
    if len(data) > HEADER_BYTES_MAX:
        raise _corrupt(f"header is longer than {HEADER_BYTES_MAX} bytes")
    raw = bytes(data)
    if len(raw) <= _DIGEST_BYTES or seal(raw[:-_DIGEST_BYTES]) != raw:
        raise _corrupt("header checksum does not match")
    try:
        body = msgpack.unpackb(raw, raw=False, strict_map_key=True)
    except (ValueError, msgpack.UnpackException, RecursionError) as error:
        raise _corrupt(f"header is not msgpack: {type(error).__name__}") from None
    header = _parse(body)
    if encode_header(header) != raw:
        raise _corrupt("header is not spelled canonically")
    return header


def verify_header(
    header: BlockHeader,
    *,
    namespace: NamespaceId,
    block_hash: BlockHash,
    parent_hash: BlockHash,
    position: int,
    token_ids: Sequence[int],
    layout: KvLayout,
) -> None:
    """Compare a stored block's header with what was asked for. Raises BlockCorrupt with the first differing field.

    Layout fields are named one by one (`layout.dtype`), so that the log tells which setting keeps two workers apart.
    """
    if (
        (header.format_version, header.position, header.block_hash) == (HEADER_VERSION, position, block_hash)
        and (header.parent_hash, header.namespace, header.payload_bytes) == (parent_hash, namespace, layout.block_bytes)
        and header.layout == layout
        and header.token_ids == tuple(token_ids)
    ):
        return  # the usual case, at a third of what naming the field costs
    pairs: list[tuple[str, Any, Any]] = [
        ("format_version", header.format_version, HEADER_VERSION),
        ("namespace", header.namespace, namespace),
        ("block_hash", header.block_hash, block_hash),
        ("parent_hash", header.parent_hash, parent_hash),
        ("position", header.position, position),
    ]
    pairs += [(f"layout.{name}", getattr(header.layout, name), getattr(layout, name)) for name, _ in _LAYOUT_TYPES]
    pairs += [
        ("payload_bytes", header.payload_bytes, layout.block_bytes),
        ("token_ids", header.token_ids, tuple(token_ids)),
    ]
    for name, found, expected in pairs:
        if found != expected:
            shown = "differs" if name == "token_ids" else f"is {_show(found)}, expected {_show(expected)}"
            raise BlockCorrupt(block_hash, f"header field {name} {shown}")


def verify_identity(header: BlockHeader) -> None:
    """The header's hash follows from its parent and token ids. Raises BlockCorrupt."""
    algorithm = HashAlgorithm.SHA256 if len(header.block_hash) == 32 else HashAlgorithm.XXH3_128
    if header.position == 0 and header.parent_hash != root_hash(header.namespace):
        raise BlockCorrupt(header.block_hash, "parent_hash is not the namespace's root")
    if hash_block(header.namespace, header.parent_hash, header.token_ids, algorithm) != header.block_hash:
        raise BlockCorrupt(header.block_hash, "block_hash does not follow from parent_hash and token_ids")


def seal(body: bytes) -> bytes:
    """A header's bytes with its own checksum behind them."""
    return body + xxhash.xxh3_64_digest(body)


def _parse(body: Any) -> BlockHeader:
    """Typed fields out of a msgpack value; every rule that a header must keep on its own is checked here."""
    if type(body) is not list or len(body) < 2 or body[0] != MAGIC:
        raise _corrupt("not a block header")
    if body[1] != HEADER_VERSION or type(body[1]) is not int:
        raise _corrupt(f"format version {str(body[1])[:20]} is unknown; this build reads version {HEADER_VERSION}")
    if len(body) != 14:
        raise _corrupt(f"header has {len(body)} fields")
    _, _, namespace, block_hash, parent_hash, position, tokens, layout_row, size, digest, *rest = body
    producer, created, narrowed_from, _ = rest
    for name, value, kind in (
        ("namespace", namespace, bytes),
        ("block_hash", block_hash, bytes),
        ("parent_hash", parent_hash, bytes),
        ("position", position, int),
        ("token_ids", tokens, bytes),
        ("layout", layout_row, list),
        ("payload_bytes", size, int),
        ("payload_xxh3", digest, bytes),
        ("producer", producer, str),
        ("created_unix_ms", created, int),
        ("narrowed_from", narrowed_from, list),
    ):
        if type(value) is not kind:
            raise _corrupt(f"header field {name} has the wrong type")
    layout = _parse_layout(layout_row)
    _require(len(namespace) == 16, "namespace")
    _require(len(block_hash) in _HASH_BYTES, "block_hash")
    _require(len(parent_hash) == (16 if position == 0 else len(block_hash)), "parent_hash")
    _require(position >= 0, "position")
    _require(len(tokens) == 4 * layout.block_tokens, "token_ids")
    _require(size == layout.block_bytes, "payload_bytes")
    _require(len(digest) == 8, "payload_xxh3")
    _require(len(producer) <= _PRODUCER_CHARS_MAX, "producer")
    _require(created >= 0, "created_unix_ms")
    _require(len(narrowed_from) <= _NARROWED_FROM_MAX, "narrowed_from")
    for wider in narrowed_from:
        _require(type(wider) is bytes and len(wider) == 16 and wider != namespace, "narrowed_from")
    return BlockHeader(
        namespace=NamespaceId(namespace.hex()),
        block_hash=BlockHash(block_hash),
        parent_hash=BlockHash(parent_hash),
        position=position,
        token_ids=struct.unpack(f"<{layout.block_tokens}I", tokens),
        layout=layout,
        payload_bytes=size,
        payload_xxh3=int.from_bytes(digest, "little"),
        producer=producer,
        created_unix_ms=created,
        narrowed_from=tuple(NamespaceId(wider.hex()) for wider in narrowed_from),
    )


def _parse_layout(row: list[Any]) -> KvLayout:
    _require(len(row) in (len(_LAYOUT_TYPES) - 1, len(_LAYOUT_TYPES)), "layout")
    for (name, kind), value in zip(_LAYOUT_TYPES, row, strict=False):
        _require(type(value) is kind, f"layout.{name}")
    layout = KvLayout(*row)
    _require(0 <= layout.near_layers < max(1, layout.num_layers), "layout.near_layers")
    _require(layout.dtype in DTYPE_BYTES, "layout.dtype")
    _require(layout.codec in _CODECS, "layout.codec")
    for name in ("num_layers", "num_kv_heads", "head_dim", "tensor_parallel_size"):
        _require(getattr(layout, name) > 0, f"layout.{name}")
    _require(0 <= layout.tensor_parallel_rank < layout.tensor_parallel_size, "layout.tensor_parallel_rank")
    _require(BLOCK_TOKENS_MIN <= layout.block_tokens <= BLOCK_TOKENS_MAX, "layout.block_tokens")
    return layout


def _require(holds: bool, name: str) -> None:
    if not holds:
        raise _corrupt(f"header field {name} is out of range")


def _corrupt(why: str) -> BlockCorrupt:
    return BlockCorrupt(b"", why)


def _show(value: Any) -> str:
    return value.hex() if isinstance(value, bytes) else str(value)[:64]
