"""A pool seen through a store's codec: coded bytes out, numbers in, digests of what a store keeps."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch

from headrace.blocks.kv_codecs import BlockCoder
from headrace.core.block import KvLayout, payload_digest
from headrace.core.errors import BlockCorrupt
from headrace.engine.paged_kv import PagedKV
from headrace.transfer.coded_pool import CodedPool, stored_pool

RAW = KvLayout("bfloat16", 3, 2, 16, 8)


def make_pools(codec="int8", *, num_blocks=6, device="cpu"):
    kv = PagedKV(RAW, num_blocks, device=device)
    kv.pool.copy_(torch.randn(kv.pool.shape, generator=torch.Generator().manual_seed(3)))
    return kv, CodedPool(kv, replace(RAW, codec=codec))


def read(pool, block_id):
    out = bytearray(pool.layout.block_bytes)
    assert pool.read_block(block_id, memoryview(out)) == payload_digest(out)
    return bytes(out)


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_what_is_read_is_the_coded_block_with_its_own_digest(codec):
    """Fails if the digest were that of the raw numbers: no reader could check it against what it got."""
    kv, pool = make_pools(codec)
    out = bytearray(pool.layout.block_bytes)
    digest = pool.read_block(2, memoryview(out))
    expected = torch.empty(pool.layout.block_bytes, dtype=torch.uint8)
    BlockCoder(pool.layout).encode(kv.block(2), expected)
    assert bytes(out) == expected.numpy().tobytes()
    assert digest == payload_digest(bytes(out))
    assert len(out) < 0.6 * RAW.block_bytes


@pytest.mark.parametrize("codec", ["int8", "fp8"])
def test_a_block_that_was_loaded_is_stored_again_with_the_same_bytes(codec):
    """From pool to store to another pool and on, five times: nothing drifts after the first coding."""
    kv, pool = make_pools(codec)
    original = kv.block(1).clone()
    first = read(pool, 1)
    payload = first
    for _ in range(5):
        other_kv, other = make_pools(codec)
        assert other.write_block(4, memoryview(payload)) == payload_digest(payload)
        payload = read(other, 4)
        assert payload == first
    assert 0 < (other_kv.block(4) - original).abs().max() < 0.2
    untouched = make_pools(codec)[0].pool
    assert torch.equal(other_kv.pool[:, :, :, [0, 1, 2, 3, 5]], untouched[:, :, :, [0, 1, 2, 3, 5]])


def test_a_block_that_is_not_finite_is_refused():
    kv, pool = make_pools()
    kv.block(3)[2, 1, 1, 7, 15] = torch.nan
    with pytest.raises(BlockCorrupt, match="not finite"):
        read(pool, 3)
    read(pool, 2)


def test_a_pool_of_the_stored_layout_is_used_as_it_is():
    kv, _ = make_pools()
    assert stored_pool(kv, RAW) is kv
    assert isinstance(stored_pool(kv, replace(RAW, codec="fp8")), CodedPool)


def test_copying_threads_leave_each_others_blocks_alone_and_take_one_core_each():
    """Fails if threads share a buffer, or torch starts threads of its own beneath them."""
    _, pool = make_pools(num_blocks=16)
    payloads = [read(pool, block) for block in range(16)]

    def copy(block):
        for _ in range(10):
            assert pool.write_block(block, memoryview(payloads[block])) == payload_digest(payloads[block])
            assert read(pool, block) == payloads[block]
        return torch.get_num_threads()

    with ThreadPoolExecutor(4) as threads:
        assert set(threads.map(copy, range(16))) == {1}


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")
def test_a_pool_on_a_cuda_device_gives_the_same_bytes():
    _, pool = make_pools(device="cuda")
    _, here = make_pools()
    payload = read(here, 2)
    assert read(pool, 2) == payload
    assert pool.write_block(5, memoryview(payload)) == payload_digest(payload)
    assert read(pool, 5) == payload
