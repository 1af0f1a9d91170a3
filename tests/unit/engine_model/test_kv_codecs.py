"""Codecs: what comes back, how near it is, and that coding it again changes nothing more."""

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.blocks.kv_codecs import (
    STEP_NUMBERS,
    TORCH_DTYPES,
    BlockCoder,
    amax_of,
    decode_rows,
    encode_rows,
    is_finite,
    read_codes,
)
from headrace.core.block import KvCodec, KvLayout
from headrace.core.errors import BlockCorrupt

GOLDEN = Path(__file__).parents[2] / "golden" / "kv_codecs.json"
CODECS = [codec.value for codec in KvCodec if codec is not KvCodec.RAW]
INTEGERS = {"bfloat16": torch.int16, "float16": torch.int16, "float32": torch.int32}


def make_layout(codec="int8", dtype="bfloat16", **changes) -> KvLayout:
    return replace(KvLayout(dtype, 2, 3, 4, 5, codec=codec), **changes)


def make_block(layout: KvLayout, seed: int = 0) -> torch.Tensor:
    block = torch.randn(layout.shape, generator=torch.Generator().manual_seed(seed))
    return block.to(TORCH_DTYPES[layout.dtype])


def encode(coder: BlockCoder, block: torch.Tensor) -> torch.Tensor:
    coded = torch.full((coder.layout.block_bytes,), 0xAA, dtype=torch.uint8)
    coder.encode(block, coded)
    return coded


def decode(coder: BlockCoder, coded: torch.Tensor) -> torch.Tensor:
    block = torch.full(coder.layout.shape, torch.nan, dtype=TORCH_DTYPES[coder.layout.dtype])
    coder.decode(coded, block)
    return block


def same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left.reshape(-1).view(torch.uint8), right.reshape(-1).view(torch.uint8))


def rows_back(codes: torch.Tensor, amax: torch.Tensor, codec: str) -> torch.Tensor:
    return decode_rows(codes, amax, torch.empty(codes.shape, dtype=amax.dtype), codec=codec)


@st.composite
def finite_blocks(draw, dtype: str):
    """Any finite bits at all: zeros of both signs, subnormals, the largest; often of one order of magnitude."""
    layout = make_layout(dtype=dtype)
    magnitude = {"bfloat16": 0x7F7F, "float16": 0x7BFF, "float32": 0x7F7FFFFF}[dtype]
    largest = draw(st.one_of(st.just(magnitude), st.integers(0, magnitude), st.sampled_from([0, 1, 2, 3])))
    rng = np.random.default_rng(draw(st.integers(0, 2**32)))
    bits = rng.integers(0, largest + 1, layout.shape)
    if draw(st.booleans()):
        bits = np.maximum(bits, largest - rng.integers(0, largest // 20 + 1, layout.shape))
    bits = np.where(rng.random(layout.shape) < 0.1, 0, bits)
    width = {2: np.int16, 4: np.int32}[2 if dtype != "float32" else 4]
    sign = rng.random(layout.shape) < 0.5
    numbers = torch.from_numpy(bits.astype(width)).view(TORCH_DTYPES[dtype])
    return torch.where(torch.from_numpy(sign), -numbers, numbers)


@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPES))
@pytest.mark.parametrize("codec", CODECS)
@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_what_was_coded_once_is_coded_alike_for_ever(dtype, codec, data):
    """Fails if amax were not given back bit for bit, or a number came back nearer to another code than to its own."""
    coder = BlockCoder(make_layout(codec, dtype))
    coded = encode(coder, data.draw(finite_blocks(dtype)))
    given_back = decode(coder, coded)
    assert torch.equal(encode(coder, given_back), coded)
    assert same_bits(decode(coder, encode(coder, given_back)), given_back)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("codec", ["int8_token", "fp8_token"])
def test_every_number_under_a_small_scale_is_coded_alike_for_ever(dtype, codec):
    """All numbers up to a scale of a few steps of the dtype, where its rounding and the codec's are of one size."""
    for largest in range(1, 600):
        numbers = torch.arange(largest + 1, dtype=torch.int16).view(TORCH_DTYPES[dtype])
        codes, amax = encode_rows(numbers, codec=codec)
        again, amax_again = encode_rows(rows_back(codes, amax, codec), codec=codec)
        assert torch.equal(again, codes), largest
        assert same_bits(amax, amax_again), largest


@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPES))
@pytest.mark.parametrize(("codec", "bound"), [("int8", 0.5 / 127), ("int8_token", 0.5 / 127), ("fp8", 1 / 16)])
def test_a_number_comes_back_within_half_a_step_of_its_scale(dtype, codec, bound):
    """Fails if keys and values exchanged their scales, or a scale were taken over the wrong axis."""
    layout = make_layout(codec, dtype, head_dim=64, block_tokens=16)
    block = make_block(layout)
    block[:, 0] *= torch.logspace(-3, 3, 64).to(block.dtype)  # channels of keys differ much
    block[:, 1] *= torch.logspace(-3, 3, 16).to(block.dtype)[:, None]  # tokens of values too
    given_back = decode(BlockCoder(layout), encode(BlockCoder(layout), block)).float()
    rounding = {"bfloat16": 2.0**-8, "float16": 2.0**-10, "float32": 2.0**-20}[dtype]
    for which, axis in ((0, -2 if codec == "int8" else -1), (1, -1)):
        scale = block[:, which].float().abs().amax(axis, keepdim=True)
        error = (given_back[:, which] - block[:, which].float()).abs() / scale
        assert error.max() <= bound * 1.001 + rounding
        assert error.max() > bound / 4  # and it is not left as it was


def test_keys_are_scaled_by_channel_and_values_by_token():
    """One channel a thousand times as large takes nothing from the other channels of the keys."""
    layout = make_layout("int8", head_dim=32, block_tokens=32)
    block = make_block(layout)
    block[..., 7] *= 1_000
    errors = (decode(BlockCoder(layout), encode(BlockCoder(layout), block)) - block).float().abs()
    errors[..., 7] = 0
    assert errors[:, 0].max() < 0.03
    assert errors[:, 1].max() > 0.5


@pytest.mark.parametrize("dtype", sorted(TORCH_DTYPES))
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_a_block_with_a_number_that_is_not_finite_is_refused(dtype, codec, number):
    """Fails if one place were not looked at: such a block would be stored as something else."""
    layout = make_layout(codec, dtype)
    for place in ((0, 0, 0, 0, 0), (1, 0, 2, 4, 3), (1, 1, 2, 4, 3)):
        block = make_block(layout)
        block[place] = number
        with pytest.raises(BlockCorrupt, match="not finite"):
            encode(BlockCoder(layout), block)


def test_a_row_that_is_not_finite_is_not_finite_when_it_is_read_and_harms_no_other():
    rows = make_block(make_layout()).flatten(0, 3)
    rows[3, 1] = torch.inf
    for codec in ("int8_token", "fp8_token"):
        codes, amax = encode_rows(rows, codec=codec)
        assert not is_finite(amax)
        read = rows_back(codes, amax, codec)
        assert not read[3].isfinite().all()
        assert read[4:].isfinite().all()
        assert (read[4:] - rows[4:]).abs().max() < 0.3


def test_zeros_come_back_as_zeros_and_the_tiniest_numbers_too():
    for dtype, floor in (("bfloat16", 2.0**-100), ("float32", 2.0**-100), ("float16", 2.0**-24)):
        numbers = torch.tensor([[0.0, 0.0], [floor / 2, -floor / 3], [floor, -floor]]).to(TORCH_DTYPES[dtype])
        for codec in ("int8_token", "fp8_token"):
            read = rows_back(*encode_rows(numbers, codec=codec), codec)
            assert not read[:2].any()
            assert torch.equal(read[2], numbers[2])


def test_the_largest_magnitude_is_that_of_the_numbers():
    numbers = torch.randn((5, 7), generator=torch.Generator().manual_seed(1))
    for dtype in TORCH_DTYPES.values():
        cast = numbers.to(dtype)
        for axis in (0, 1, -1):
            assert torch.equal(amax_of(cast, axis), cast.abs().amax(axis))


def test_e4m3_codes_are_read_as_torch_reads_them():
    codes = torch.tensor([code for code in range(256) if code & 0x7F != 0x7F], dtype=torch.uint8)
    read = read_codes(codes, torch.tensor(448.0), torch.empty(codes.shape), int8=False)
    torch.testing.assert_close(read, codes.view(torch.float8_e4m3fn).float(), rtol=1e-6, atol=0)


@pytest.mark.parametrize("codec", CODECS)
def test_a_block_of_many_layers_is_coded_in_steps_as_in_one(codec):
    """Fails if a step took another's layers; the block is longer than one step by a ragged rest."""
    one = make_layout(codec, num_layers=1, num_kv_heads=4, head_dim=64, block_tokens=64)
    num_layers = 2 * STEP_NUMBERS // (4 * 64 * 64) + 3
    whole = replace(one, num_layers=num_layers)
    pool = make_block(replace(whole, num_kv_heads=8))
    block = pool[:, :, ::2]  # strided, as blocks lie in a pool
    given_back = decode(BlockCoder(whole), encode(BlockCoder(whole), block))
    for layer in range(num_layers):
        alone = decode(BlockCoder(one), encode(BlockCoder(one), block[layer : layer + 1]))
        assert torch.equal(given_back[layer], alone[0])


def test_coding_leaves_the_numbers_as_they_were():
    for dtype in TORCH_DTYPES:
        layout = make_layout("int8", dtype)
        block, rows = make_block(layout), make_block(layout)
        encode(BlockCoder(layout), block)
        encode_rows(rows, codec="int8_token")
        assert torch.equal(block, make_block(layout))
        assert torch.equal(rows, make_block(layout))


def test_threads_that_share_a_coder_do_not_disturb_each_other():
    """Fails if they shared their work space."""
    coder = BlockCoder(make_layout("int8", num_layers=8, head_dim=64, block_tokens=64))
    blocks = [make_block(coder.layout, seed) for seed in range(6)]
    alone = [encode(coder, block) for block in blocks]
    with ThreadPoolExecutor(3) as threads:
        for _ in range(5):
            together = list(threads.map(lambda block: encode(coder, block), blocks))
            assert all(torch.equal(a, b) for a, b in zip(alone, together, strict=True))


def golden_block(layout: KvLayout) -> torch.Tensor:
    """Numbers that every machine makes alike: a few hundredths, of both signs."""
    count = int(np.prod(layout.shape))
    numbers = [((index * 7_919) % 509 - 254) / 64 for index in range(count)]
    return torch.tensor(numbers).view(layout.shape).to(TORCH_DTYPES[layout.dtype])


@pytest.mark.parametrize("codec", CODECS)
def test_coded_bytes_do_not_change_without_a_new_format_version(codec):
    """Fails when any byte of a payload moves: stores hold such payloads."""
    layout = make_layout(codec)
    golden = json.loads(GOLDEN.read_text(encoding="ascii"))[codec]
    assert encode(BlockCoder(layout), golden_block(layout)).numpy().tobytes().hex() == golden


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("codec", CODECS)
def test_a_cuda_device_makes_the_same_bytes(codec):
    coder = BlockCoder(make_layout(codec))
    block = make_block(coder.layout)
    coded = torch.empty(coder.layout.block_bytes, dtype=torch.uint8, device="cuda")
    BlockCoder(coder.layout).encode(block.cuda(), coded)
    assert torch.equal(coded.cpu(), encode(coder, block))
