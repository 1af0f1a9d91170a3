"""Blocks go in and out of the pool whole, at the right place, with the digest of what was copied."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from headrace.blocks.kv_codecs import BlockCoder
from headrace.core.block import KvLayout, payload_digest
from headrace.engine.layered_kv import LayeredKV
from headrace.engine.paged_kv import PagedKV


def make_kv(dtype="bfloat16", block_tokens=8, num_blocks=6, codec="raw"):
    return PagedKV(KvLayout(dtype, 3, 2, 16, block_tokens, codec), num_blocks)


def make_payload(kv, seed):
    return np.random.default_rng(seed).integers(0, 256, kv.layout.block_bytes, dtype=np.uint8).tobytes()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("block_tokens", [1, 8])
@pytest.mark.parametrize("codec", ["raw", "int8_token", "fp8_token"])
def test_a_block_written_is_read_back_byte_for_byte_with_its_digest(dtype, block_tokens, codec):
    kv = make_kv(dtype, block_tokens, codec=codec)
    payloads = {block: make_payload(kv, block) for block in (0, 3, 5)}
    for block, payload in payloads.items():
        assert kv.write_block(block, memoryview(payload)) == payload_digest(payload)
    for block, payload in payloads.items():
        out = bytearray(kv.layout.block_bytes)
        assert kv.read_block(block, memoryview(out)) == payload_digest(payload)
        assert bytes(out) == payload


@pytest.mark.parametrize("codec", ["raw", "int8_token", "fp8_token"])
def test_the_way_over_staging_that_devices_need_gives_the_same_bytes(codec):
    """Fails if a part of a payload were taken for another, or put elsewhere, where the pool is no memory of ours."""
    direct, staged = make_kv(codec=codec), make_kv(codec=codec)
    staged._blocks = None  # as of a pool on a device
    payload = make_payload(direct, 3)
    assert {kv.write_block(4, memoryview(payload)) for kv in (direct, staged)} == {payload_digest(payload)}
    assert staged.bytes_in_order(range(6), 48) == direct.bytes_in_order(range(6), 48)
    out = bytearray(staged.layout.block_bytes)
    assert staged.read_block(4, memoryview(out)) == payload_digest(payload)
    assert bytes(out) == payload


def test_payload_layout_is_layers_then_k_and_v_then_heads_then_tokens():
    """Fails if the axes of the payload are exchanged: the layout is part of the format that stores keep."""
    kv = make_kv("float32")
    expected = torch.arange(np.prod(kv.layout.shape), dtype=torch.float32).view(kv.layout.shape)
    kv.write_block(4, memoryview(expected.numpy().tobytes()))
    assert torch.equal(kv.pool[:, :, :, 4], expected)


def gather(kv, layer, blocks):
    """[2, heads, keys, head_dim] of one sequence, which is the second of a batch of two."""
    rows = kv.rows_of(torch.tensor([[0] * len(blocks), blocks]))
    out = torch.empty((rows.numel(), kv.layout.block_tokens * kv.layout.head_dim), dtype=kv.dtype)
    kv.gather(layer, rows.flatten(), out)
    return out.view(2, 2, kv.layout.num_kv_heads, -1, kv.layout.head_dim)[:, 1]


@pytest.mark.parametrize("codec", ["int8_token", "fp8_token"])
def test_a_quantised_pools_block_is_what_the_codec_makes_of_its_rows(codec):
    """Fails if scales and codes of a payload lie elsewhere than the format says, or a row of one step among others."""
    kv = make_kv(codec=codec)
    numbers = torch.randn(kv.layout.shape, generator=torch.Generator().manual_seed(2)).bfloat16()
    for rows in ([5, 0, 7], [1, 2, 3, 4], [6]):  # in any order, in several steps
        slots = torch.tensor(rows) + 4 * kv.layout.block_tokens
        for layer in range(3):
            kv.write_rows(layer, slots, numbers[layer].flatten(0, 1)[:, rows])
    expected = torch.empty(kv.layout.block_bytes, dtype=torch.uint8)
    coder = BlockCoder(kv.layout)
    coder.encode(numbers, expected)
    out = bytearray(kv.layout.block_bytes)
    kv.read_block(4, memoryview(out))
    assert bytes(out) == expected.numpy().tobytes()
    decoded = torch.empty_like(numbers)
    coder.decode(expected, decoded)
    for layer in range(3):
        gathered = gather(kv, layer, [4, 1])
        assert torch.equal(gathered[:, :, :8], decoded[layer])
        assert not gathered[:, :, 8:].any()


def test_a_raw_pool_gathers_what_was_written():
    kv = make_kv()
    rows = torch.randn((2, 2, 3, 16), generator=torch.Generator().manual_seed(2)).bfloat16()
    kv.write_rows(1, torch.tensor([9, 8, 47]), rows.flatten(0, 1))
    gathered = gather(kv, 1, [5, 1])
    assert torch.equal(gathered[:, :, [9, 8, 7]], rows)
    assert not kv.pool[[0, 2]].any()


def test_writing_a_block_leaves_the_others_alone():
    kv = make_kv()
    kv.write_block(2, memoryview(make_payload(kv, 1)))
    others = [block for block in range(kv.num_blocks) if block != 2]
    assert not kv.pool[:, :, :, others].any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("codec", ["raw", "int8_token", "fp8_token"])
@pytest.mark.parametrize("number", [torch.nan, torch.inf, -torch.inf])
def test_one_number_that_is_none_is_seen_in_its_block_and_in_no_other(dtype, codec, number):
    """Fails if a part of a block is not looked at, or the largest finite number passes for none."""
    kv = make_kv(dtype, codec=codec)
    largest = torch.finfo(kv.dtype).max
    rows = torch.full((4, 48, 16), largest, dtype=kv.dtype)  # [K's and V's heads, slots, head_dim]
    for layer in range(3):
        kv.write_rows(layer, torch.arange(48), rows)
    assert kv.is_finite(range(6))
    rows[3, 4 * 8 + 7, 15] = number
    kv.write_rows(2, torch.arange(48), rows)
    assert [kv.is_finite([block_id]) for block_id in range(6)] == [True, True, True, True, False, True]
    assert not kv.is_finite([0, 4, 1])
    assert kv.is_finite([])


def test_of_a_block_of_two_parts_those_that_are_there_are_looked_at():
    """Fails if near parts are left out, or a block whose near part has been passed needs one."""
    kv = LayeredKV(KvLayout("float32", 2, 1, 8, 16, near_layers=1), 6, windows={0: None, 1: 20})
    kv.near.block(3).fill_(torch.nan)
    assert kv.is_finite([2, kv.parts.join(2, 4), 5])
    assert not kv.is_finite([kv.parts.join(2, 3)])
    kv.wide.block(5).fill_(torch.nan)
    assert not kv.is_finite([2, 5])


def test_blocks_copied_by_many_threads_at_once_stay_apart():
    """Fails if threads share a staging buffer."""
    kv = make_kv(block_tokens=64, num_blocks=16)
    payloads = [make_payload(kv, seed) for seed in range(16)]

    def copy(block):
        digests = set()
        for _ in range(20):
            digests.add(kv.write_block(block, memoryview(payloads[block])))
            out = bytearray(kv.layout.block_bytes)
            digests.add(kv.read_block(block, memoryview(out)))
        return digests

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(copy, range(16))) == [{payload_digest(p)} for p in payloads]


@pytest.mark.parametrize("size", [-1, 1])
def test_a_payload_of_the_wrong_size_is_our_bug(size):
    kv = make_kv()
    with pytest.raises(AssertionError):
        kv.write_block(0, memoryview(bytes(kv.layout.block_bytes + size)))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
@pytest.mark.parametrize("codec", ["raw", "int8_token", "fp8_token"])
def test_blocks_round_trip_through_a_pool_on_the_device(codec):
    kv = PagedKV(KvLayout("bfloat16", 3, 2, 16, 8, codec), 6, device="cuda")
    payload = make_payload(kv, 7)
    assert kv.write_block(3, memoryview(payload)) == payload_digest(payload)
    out = bytearray(kv.layout.block_bytes)
    assert kv.read_block(3, memoryview(out)) == payload_digest(payload)
    assert bytes(out) == payload
