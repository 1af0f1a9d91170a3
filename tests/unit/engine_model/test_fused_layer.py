"""The layers that stand in for transformers' own: which are replaced, and that each part computes what it replaces."""

import pytest
import torch
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from headrace.engine.attention import ATTENTION_NAME, register_attention
from headrace.engine.fused_layer import FusedLayer, FusedNorm, RotaryTables, fuse_layers, rotate
from headrace.engine.packed_linear import PackedLinear
from headrace.engine.probe_shapes import probe_shapes
from tests.unit.engine_model.tiny_models import ARCHITECTURES, make_model

FUSED = {
    "llama", "llama with llama3 positions", "llama with yarn positions", "mistral with a window", "qwen2", "qwen3",
    "smollm3",
}  # fmt: skip


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_layers_of_the_llama_kind_are_replaced_all_or_none(case):
    """Fails if a layer with parts that the fused one lacks were replaced, or a window or a head count got lost."""
    register_attention()
    model = make_model(case)
    model.set_attn_implementation(ATTENTION_NAME)
    before = probe_shapes(model)
    replaced = fuse_layers(model)
    assert replaced == (model.config.num_hidden_layers if case in FUSED else 0)
    assert sum(isinstance(module, FusedLayer) for module in model.modules()) == replaced
    after = probe_shapes(model)
    assert (after.shapes, after.windows, after.causal) == (before.shapes, before.windows, before.causal)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_the_norm_is_transformers_norm_within_rounding(scale):
    """Small inputs show eps, large ones an overflow of squares."""
    norm = LlamaRMSNorm(96, eps=1e-5)
    norm.weight.data.uniform_(0.5, 2.0, generator=torch.Generator().manual_seed(1))
    rows = torch.randn((1, 7, 96), generator=torch.Generator().manual_seed(2)) * scale
    assert torch.allclose(FusedNorm(norm)(rows), norm(rows), rtol=1e-5, atol=0)
    assert FusedNorm(norm)(rows.bfloat16()).dtype == torch.bfloat16


def test_rotated_heads_are_transformers_rotated_heads():
    rotary = make_model("llama").model.rotary_emb
    positions = torch.tensor([[0, 1, 77, 400, 3]])
    heads = torch.randn((5, 3, 16), generator=torch.Generator().manual_seed(3))
    cosines, sines = rotary(heads, positions)
    expected, _ = apply_rotary_pos_emb(heads.transpose(0, 1)[None], heads.transpose(0, 1)[None], cosines, sines)
    found = rotate(heads, *RotaryTables(rotary)(heads, positions))
    assert torch.allclose(found, expected[0].transpose(0, 1), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_product_added_to_a_residual_is_their_sum(bias):
    linear = torch.nn.Linear(32, 48, bias=bias)
    rows, residual = torch.randn((1, 5, 32)), torch.randn((1, 5, 48))
    with torch.inference_mode():
        found = PackedLinear(linear).add_to(residual, rows)
        assert torch.allclose(found, residual + linear(rows), rtol=1e-4, atol=1e-5)
