"""A run's headers read through a mould: exactly what the strict parser accepts, and with the same result."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from store_kit import make_header, make_prompt
from test_block_codec import headers

from headrace.blocks.block_codec import decode_header, encode_header, seal
from headrace.blocks.decode_headers import decode_headers
from headrace.core.block import BlockHeader, HashAlgorithm
from headrace.core.errors import BlockCorrupt


def one_by_one(spelled: list[bytes]) -> tuple[BlockHeader, ...] | None:
    """What the strict parser says; None: it refuses one."""
    try:
        return tuple(decode_header(data) for data in spelled)
    except BlockCorrupt:
        return None


def together(spelled: list[bytes]) -> tuple[BlockHeader, ...] | None:
    try:
        return decode_headers(spelled)
    except BlockCorrupt:
        return None


@pytest.mark.parametrize("algorithm", HashAlgorithm)
def test_the_headers_of_a_run_come_back(algorithm: HashAlgorithm) -> None:
    """Fails when a field is read from a wrong offset; positions 127, 255 and their next are spelled differently."""
    prompt = make_prompt(7, 300, algorithm=algorithm)
    run = [replace(make_header(prompt, at), payload_xxh3=at * 7, created_unix_ms=2**41 + at) for at in range(300)]
    assert decode_headers([encode_header(header) for header in run]) == tuple(run)


@given(st.lists(headers(), max_size=4), st.data())
def test_any_mixture_of_headers_is_read_as_one_by_one(run: list[BlockHeader], data: st.DataObject) -> None:
    """Fails when a header is read through the mould of one that it does not fit."""
    for header in list(run):
        run.append(replace(header, position=data.draw(st.sampled_from([1, 127, 128, 255, 256, 70_000, 2**33]))))
    spelled = [encode_header(header) for header in run]
    assert together(spelled) == one_by_one(spelled)


@given(headers(), st.data())
def test_a_changed_neighbour_is_refused_or_read_as_the_strict_parser_does(
    header: BlockHeader, data: st.DataObject
) -> None:
    """Fails when one check of the strict parser is lost in the mould: any byte may change, and the checksum fits."""
    good = encode_header(header)
    at = data.draw(st.integers(0, len(good) - 1))
    changed = good[:at] + bytes([data.draw(st.integers(0, 255))]) + good[at + 1 :]
    for neighbour in (changed, seal(changed[:-8]), good[:at], good + b"\0"):
        spelled = [good, neighbour, good]
        assert together(spelled) == one_by_one(spelled)


@pytest.mark.parametrize("position", [0, 2, 200, 1_000, 70_000])
@pytest.mark.parametrize("algorithm", HashAlgorithm)
def test_every_single_byte_of_a_neighbour_is_checked_as_strictly(algorithm: HashAlgorithm, position: int) -> None:
    """As above, with no byte left to chance; each becomes what makes integers too small for their spelling."""
    prompt = make_prompt(7, 3, algorithm=algorithm)
    good = encode_header(replace(make_header(prompt, min(position, 2)), position=position, created_unix_ms=2**41))
    for at in range(len(good)):
        for value in {0, 1, 0x80, 0xCC, good[at] ^ 1}:
            changed = good[:at] + bytes([value]) + good[at + 1 :]
            for neighbour in (changed, seal(changed[:-8])):
                assert together([good, neighbour]) == one_by_one([good, neighbour])
