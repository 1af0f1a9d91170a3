"""Packed linear layers: bits that do not depend on how many rows there are, on whatever processor this is."""

import pytest
import torch
from torch import nn

from headrace.engine.packed_linear import FAST, PackedLinear, Packing, choose_packing, pack_linears

# Of SmolLM2-135M, and one with a longer sum. A processor that multiplies tiles has edges at other rows for each.
SHAPES = [(576, 960), (576, 3072), (1536, 576), (4096, 512)]


def make_linear(in_features, out_features, dtype=torch.bfloat16, *, bias=False):
    torch.manual_seed(3)
    return nn.Linear(in_features, out_features, bias=bias).to(dtype)


@pytest.fixture
def threads_restored():
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.inference_mode()
def test_a_rows_bits_do_not_depend_on_how_many_there_are_as_a_weight_is_packed_here(shape, threads, threads_restored):
    """Where products of tiles differ between few rows and many, fails with the packing of other processors."""
    linear = make_linear(*shape)
    packed = PackedLinear(linear, choose_packing(linear, threads=threads))
    rows, residual = torch.randn(600, shape[0]).bfloat16(), torch.randn(600, shape[1]).bfloat16()
    torch.set_num_threads(1)
    product, added = packed(rows), packed.add_to(residual, rows)
    torch.set_num_threads(threads)
    for count in (4, 20, 32, 44, 100, 132, 144, 200, 256, 272, 300, 400, 512):
        for some in (slice(first, first + count) for first in range(0, 600 - count + 1, count)):
            assert torch.equal(packed(rows[some]), product[some]), count
            assert torch.equal(packed.add_to(residual[some], rows[some]), added[some]), count


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("dims", [(70,), (2, 35)], ids=str)
@torch.inference_mode()
def test_more_rows_than_a_product_takes_are_several_products_in_their_order(dims, dtype):
    linear = make_linear(24, 40, dtype, bias=True)
    packed = PackedLinear(linear, packing := Packing(for_rows=1, rows_max=32, rows_step=8))
    assert packing.cut(70) == [32, 32, 6]
    assert [packing.cut(rows) for rows in (4, 8, 20, 32, 60)] == [[4], [8], [16, 4], [32], [32, 24, 4]]
    rows, residual = torch.randn(*dims, 24).to(dtype), torch.randn(*dims, 40).to(dtype)
    product, added = packed(rows), packed.add_to(residual, rows)
    assert product.shape == added.shape == (*dims, 40)
    first = rows.reshape(-1, 24)[32:64]
    assert torch.equal(product.reshape(-1, 40)[32:64], packed(first))
    assert torch.equal(added.reshape(-1, 40)[32:64], packed.add_to(residual.reshape(-1, 40)[32:64], first))
    assert torch.allclose(product, linear(rows), rtol=0.02, atol=0.02)
    assert torch.allclose(added, residual + linear(rows), rtol=0.02, atol=0.04)


def test_what_needs_no_trial_is_packed_as_is_fastest():
    """A number format without tiles, and a model of which nobody wants bits."""
    assert choose_packing(make_linear(576, 960, torch.float32), threads=1) == FAST
    model = nn.Sequential(make_linear(576, 960), make_linear(960, 576))
    assert pack_linears(model, exact=False, threads=1) == 2
    assert [layer.packing for layer in model] == [FAST] * 2


def test_a_trial_leaves_the_number_of_threads_as_it_was(threads_restored):
    torch.set_num_threads(2)
    choose_packing(make_linear(64, 96), threads=1)
    assert torch.get_num_threads() == 2
