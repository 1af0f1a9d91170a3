"""Headers as bytes: what is written comes back, and nothing that was not written is taken for a header."""

import struct
from dataclasses import replace
from pathlib import Path

import msgpack
import pytest
import xxhash
from hypothesis import given
from hypothesis import strategies as st
from store_kit import LAYOUT, make_header, make_prompt

from headrace.blocks.block_codec import MAGIC, decode_header, encode_header, seal, verify_header, verify_identity
from headrace.core.block import DTYPE_BYTES, BlockHash, BlockHeader, HashAlgorithm, KvCodec, KvLayout, NamespaceId
from headrace.core.errors import BlockCorrupt
from headrace.core.limits import BLOCK_TOKENS_MAX, HEADER_BYTES_MAX

GOLDEN = Path(__file__).parents[2] / "golden" / "block_headers"


def make_golden_headers() -> dict[str, BlockHeader]:
    """The headers whose bytes are kept in tests/golden: both hash lengths, first and later position."""
    fast, slow = make_prompt(7, 3), make_prompt(7, 3, algorithm=HashAlgorithm.SHA256)
    return {
        "xxh3_first_block": replace(make_header(fast, 0), payload_xxh3=0x0123456789ABCDEF),
        "narrowed_first_block": replace(
            make_header(fast, 0), narrowed_from=(NamespaceId("ab" * 16), NamespaceId("cd" * 16))
        ),
        "int8_first_block": make_header(fast, 0, layout=replace(LAYOUT, codec="int8")),
        "sha256_third_block": replace(make_header(slow, 2), payload_xxh3=2**64 - 1, producer="prefill-ü"),
    }


def layouts() -> st.SearchStrategy[KvLayout]:
    size = st.integers(1, 200)
    return st.builds(
        KvLayout,
        dtype=st.sampled_from(sorted(DTYPE_BYTES)),
        num_layers=size,
        num_kv_heads=size,
        head_dim=size,
        block_tokens=st.integers(1, 40),
        codec=st.sampled_from([codec.value for codec in KvCodec]),
        tensor_parallel_rank=st.just(0),
        tensor_parallel_size=st.integers(1, 8),
    )


@st.composite
def headers(draw: st.DrawFn) -> BlockHeader:
    layout = draw(layouts())
    position = draw(st.integers(0, 2**40))
    hash_bytes = draw(st.sampled_from([16, 32]))
    width = 16 if position == 0 else hash_bytes
    tokens = st.lists(st.integers(0, 2**32 - 1), min_size=layout.block_tokens, max_size=layout.block_tokens)
    return BlockHeader(
        namespace=NamespaceId(draw(st.binary(min_size=16, max_size=16)).hex()),
        block_hash=BlockHash(draw(st.binary(min_size=hash_bytes, max_size=hash_bytes))),
        parent_hash=BlockHash(draw(st.binary(min_size=width, max_size=width))),
        position=position,
        token_ids=tuple(draw(tokens)),
        layout=layout,
        payload_bytes=layout.block_bytes,
        payload_xxh3=draw(st.integers(0, 2**64 - 1)),
        producer=draw(st.text(max_size=64)),
        created_unix_ms=draw(st.integers(0, 2**50)),
        narrowed_from=tuple(
            NamespaceId(wider) for wider in draw(st.sampled_from([(), ("5a" * 16,), ("5a" * 16, "5b" * 16)]))
        ),
    )


@given(headers())
def test_a_header_comes_back_as_it_was_written(header: BlockHeader) -> None:
    assert decode_header(encode_header(header)) == header


def test_a_header_of_two_parts_comes_back_and_is_not_spelled_in_two_ways() -> None:
    """Fails if a payload of one part is spelled otherwise than before there were two, or as one of no near layers."""
    whole = make_header(make_prompt(1, 1), 0)
    layout = replace(whole.layout, num_layers=6, near_layers=5)
    header = replace(whole, layout=layout, payload_bytes=layout.block_bytes)
    assert decode_header(encode_header(header)) == header
    body = msgpack.unpackb(encode_header(whole))
    assert len(body[7]) == 8
    for wrong in (0, -1, whole.layout.num_layers):
        spelled = [*body[:7], [*body[7], wrong], *body[8:]]
        with pytest.raises(BlockCorrupt):
            decode_header(seal(msgpack.packb(spelled, use_bin_type=True)[:-8]))


@given(headers(), st.integers(0, 2**64 - 1))
def test_the_length_does_not_depend_on_the_checksum(header: BlockHeader, digest: int) -> None:
    assert len(encode_header(header)) == len(encode_header(replace(header, payload_xxh3=digest)))


@given(headers(), st.data())
def test_every_truncation_is_refused(header: BlockHeader, data: st.DataObject) -> None:
    encoded = encode_header(header)
    with pytest.raises(BlockCorrupt):
        decode_header(encoded[: data.draw(st.integers(0, len(encoded) - 1))])


def test_every_single_flipped_bit_is_refused() -> None:
    encoded = encode_header(make_header(make_prompt(1, 1), 0))
    for bit in range(8 * len(encoded)):
        flipped = bytearray(encoded)
        flipped[bit // 8] ^= 1 << bit % 8
        with pytest.raises(BlockCorrupt):
            decode_header(flipped)


@given(st.binary(max_size=300))
def test_junk_is_refused(junk: bytes) -> None:
    with pytest.raises(BlockCorrupt):
        decode_header(junk)


def test_bytes_after_the_header_are_refused() -> None:
    with pytest.raises(BlockCorrupt):
        decode_header(encode_header(make_header(make_prompt(1, 1), 0)) + b"\0")


def test_the_largest_block_fits_the_header_bound() -> None:
    layout = replace(LAYOUT, block_tokens=BLOCK_TOKENS_MAX)
    header = replace(
        make_header(make_prompt(1, 1, algorithm=HashAlgorithm.SHA256), 0),
        layout=layout,
        token_ids=(2**32 - 1,) * BLOCK_TOKENS_MAX,
        payload_bytes=layout.block_bytes,
        producer="p" * 128,
        created_unix_ms=2**60,
    )
    assert len(encode_header(header)) <= HEADER_BYTES_MAX
    assert decode_header(encode_header(header)) == header


def reseal(fields: list[object]) -> bytes:
    """Bytes with a right checksum around whatever the fields are: what a forger or a later version would write."""
    body = msgpack.packb([*fields[:-1], bytes(8)], use_bin_type=True)[:-8]
    return body + xxhash.xxh3_64_digest(body)


@pytest.mark.parametrize(
    ("index", "value", "named"),
    [
        (0, "other", "not a block header"),
        (1, 1, "format version 1 is unknown"),
        (1, 3, "format version 3 is unknown"),
        (2, b"short", "namespace"),
        (3, b"x" * 20, "block_hash"),
        (4, b"x" * 32, "parent_hash"),
        (5, -1, "position"),
        (5, "0", "position"),
        (6, struct.pack("<3I", 1, 2, 3), "token_ids"),
        (7, ["float64", 1, 2, 32, 4, "raw", 0, 1], "layout.dtype"),
        (7, ["float32", 1, 2, 32, 4, "zip", 0, 1], "layout.codec"),
        (7, ["float32", 0, 2, 32, 4, "raw", 0, 1], "layout.num_layers"),
        (7, ["float32", 1, 2, 32, 4, "raw", 1, 1], "layout.tensor_parallel_rank"),
        (7, ["float32", True, 2, 32, 4, "raw", 0, 1], "layout.num_layers"),
        (8, 1, "payload_bytes"),
        (9, b"", "payload_xxh3"),
        (10, "p" * 129, "producer"),
        (11, -5, "created_unix_ms"),
        (12, b"x" * 16, "narrowed_from"),
        (12, [b"x" * 15], "narrowed_from"),
        (12, [b"x" * 16, b"y" * 16, b"z" * 16], "narrowed_from"),
        (12, [bytes.fromhex(make_prompt(1, 1).namespace)], "narrowed_from"),
    ],
)
def test_a_well_sealed_header_with_a_wrong_field_is_refused_by_name(index: int, value: object, named: str) -> None:
    fields = msgpack.unpackb(encode_header(make_header(make_prompt(1, 1), 0)))
    assert fields[0] == MAGIC
    fields[index] = value
    with pytest.raises(BlockCorrupt) as caught:
        decode_header(reseal(fields))
    assert named in caught.value.why


def test_another_number_of_fields_is_refused() -> None:
    fields = msgpack.unpackb(encode_header(make_header(make_prompt(1, 1), 0)))
    for changed in (fields[:6], [*fields[:-1], 0, fields[-1]]):
        with pytest.raises(BlockCorrupt):
            decode_header(reseal(changed))


@pytest.mark.parametrize("name", sorted(make_golden_headers()))
def test_header_bytes_do_not_change_without_a_new_format_version(name: str) -> None:
    """Fails when any byte of the format moves; the files are hexadecimal."""
    golden = bytes.fromhex((GOLDEN / f"{name}.hex").read_text(encoding="ascii"))
    assert encode_header(make_golden_headers()[name]) == golden
    assert decode_header(golden) == make_golden_headers()[name]


def expected_of(header: BlockHeader) -> dict[str, object]:
    names = ("namespace", "block_hash", "parent_hash", "position", "token_ids", "layout")
    return {name: getattr(header, name) for name in names}


def test_a_header_that_is_what_was_asked_for_passes() -> None:
    header = make_header(make_prompt(1, 2), 1)
    verify_header(header, **expected_of(header))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changed", "named"),
    [
        ({"namespace": "ff" * 16}, "namespace"),
        ({"block_hash": b"y" * 16}, "block_hash"),
        ({"parent_hash": b"y" * 16}, "parent_hash"),
        ({"position": 2}, "position"),
        ({"token_ids": (9, 9, 9, 9)}, "token_ids"),
        ({"layout": replace(LAYOUT, dtype="bfloat16")}, "layout.dtype"),
        ({"layout": replace(LAYOUT, head_dim=64)}, "layout.head_dim"),
        ({"layout": replace(LAYOUT, tensor_parallel_size=2)}, "layout.tensor_parallel_size"),
    ],
)
def test_a_header_that_differs_is_refused_by_the_name_of_the_field(changed: dict[str, object], named: str) -> None:
    header = make_header(make_prompt(1, 2), 1)
    with pytest.raises(BlockCorrupt, match=f"header field {named} "):
        verify_header(header, **(expected_of(header) | changed))  # type: ignore[arg-type]


@pytest.mark.parametrize("algorithm", list(HashAlgorithm))
def test_identity_holds_for_our_own_headers_and_for_no_other_tokens(algorithm: HashAlgorithm) -> None:
    header = make_header(make_prompt(1, 2, algorithm=algorithm), 1)
    verify_identity(header)
    with pytest.raises(BlockCorrupt):
        verify_identity(replace(header, token_ids=(1, 2, 3, 4)))
    with pytest.raises(BlockCorrupt):
        verify_identity(replace(header, position=0))
