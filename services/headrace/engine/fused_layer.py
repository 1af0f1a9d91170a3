"""A decoder layer of the Llama kind in few operators, in place of transformers' module of the same weights.

At a small model's decode step a third of the time goes into calling operators and modules, not into what they compute.
This layer calls about twenty operators where transformers' module calls seventy: the projections of query, key and
value are one product, as those of gate and up; norms and rotations are a few operators each; residuals are added by the
products themselves.

It owns which layers it can stand for, and their arithmetic. The numbers are rounded in other places than transformers'
own, so they differ from those in the last bits: `compare_forward.py` holds them to the model's own forward, in float32
on the real weights, at the first load. Everything else of the model (embedding, rotary frequencies, head) stays.
"""

import math
from typing import Any

import torch
from torch import nn
from transformers import PreTrainedModel

from headrace.engine.attention import LayerRule, attend
from headrace.engine.packed_linear import PackedLinear

# Norm, attention, residual, norm, gated perceptron, residual; what else these layers may have is looked for below.
FUSABLE = frozenset(
    {"LlamaDecoderLayer", "MistralDecoderLayer", "Qwen2DecoderLayer", "Qwen3DecoderLayer", "SmolLM3DecoderLayer"}
)


def fuse_layers(model: PreTrainedModel) -> int:
    """Replace the decoder layers of a model, in place, before its linear layers are packed; returns how many.

    All or none: models of other kinds stay as they are. What is replaced attends over pages only.
    """
    decoder: Any = model.base_model
    layers: Any = getattr(decoder, "layers", ())
    if not all(_is_fusable(layer) for layer in layers):
        return 0
    with torch.inference_mode():
        for index, layer in enumerate(layers):
            layers[index] = FusedLayer(layer)
        if layers:
            decoder.norm = FusedNorm(decoder.norm)
            decoder.rotary_emb = RotaryTables(decoder.rotary_emb)
    return len(layers)


def _is_fusable(layer: Any) -> bool:
    """Whether `FusedLayer` computes what this layer does."""
    if type(layer).__name__ not in FUSABLE:
        return False
    linears = [child for child in layer.modules() if isinstance(child, nn.Linear)]
    whole_rotation = layer.self_attn.config.rope_parameters.get("partial_rotary_factor", 1.0) == 1.0
    return whole_rotation and len(linears) == 7 and all(type(linear) is nn.Linear for linear in linears)


class FusedLayer(nn.Module):
    """One decoder layer. Called as transformers' own; attends over the step's pages."""

    def __init__(self, layer: Any) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self.layer_idx = attention.layer_idx
        self.head_dim = attention.head_dim
        self.heads = attention.q_proj.out_features // self.head_dim
        self.kv_heads = attention.k_proj.out_features // self.head_dim
        own_window = hasattr(attention, "sliding_window")
        # Llama's configuration may name a window, which its layers do not heed.
        by_config = attention.config.sliding_window if type(layer).__name__ == "MistralDecoderLayer" else None
        window = attention.sliding_window if own_window else by_config
        self.rule = LayerRule(scale=attention.scaling, window=window)
        self.rotates = bool(getattr(attention, "use_rope", True))
        self.input_norm = FusedNorm(layer.input_layernorm)
        self.qkv_proj = _joined(attention.q_proj, attention.k_proj, attention.v_proj)
        self.q_norm = FusedNorm(attention.q_norm) if hasattr(attention, "q_norm") else None
        self.k_norm = FusedNorm(attention.k_norm) if hasattr(attention, "k_norm") else None
        self.o_proj = attention.o_proj
        self.mlp_norm = FusedNorm(layer.post_attention_layernorm)
        self.gate_up_proj = _joined(mlp.gate_proj, mlp.up_proj)
        self.activation = mlp.act_fn
        self.down_proj = mlp.down_proj

    def forward(
        self, hidden: torch.Tensor, *, position_embeddings: tuple[torch.Tensor, torch.Tensor], **_: object
    ) -> torch.Tensor:
        """hidden [1, rows, hidden size]; position_embeddings as RotaryTables gives them."""
        heads = self.heads
        # [rows, heads of the query + of K + of V, head_dim]
        projected = self.qkv_proj(self.input_norm(hidden)).view(hidden.shape[1], -1, self.head_dim)
        turned = projected[:, : heads + self.kv_heads]
        if self.q_norm is not None and self.k_norm is not None:
            turned[:, :heads] = self.q_norm(turned[:, :heads])
            turned[:, heads:] = self.k_norm(turned[:, heads:])
        if self.rotates:
            rotate(turned, *position_embeddings)
        attended = attend(self.layer_idx, projected[:, :heads], projected[:, heads:], self.rule)
        hidden = _add_product(hidden, self.o_proj, attended.unsqueeze(0))
        gate, up = self.gate_up_proj(self.mlp_norm(hidden)).chunk(2, dim=-1)
        return _add_product(hidden, self.down_proj, self.activation(gate).mul_(up))


class FusedNorm(nn.Module):
    """Root-mean-square norm over the last dimension: x / sqrt(mean(x^2) + eps) * weight, computed in float32.

    With the sum of squares s^2 over n elements, sqrt(mean + eps) = sqrt(s^2 + n * eps) / sqrt(n): a norm, a hypotenuse,
    and sqrt(n) goes into the weight.
    """

    def __init__(self, norm: Any) -> None:
        super().__init__()
        num = norm.weight.numel()
        self.weight = nn.Parameter(norm.weight.detach().float() * math.sqrt(num), requires_grad=False)
        self.floor = torch.tensor(math.sqrt(num * norm.variance_epsilon), device=norm.weight.device)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        """[..., weight's size], in the number format of `hidden`."""
        exact = hidden.float()
        length = torch.linalg.vector_norm(exact, dim=-1, keepdim=True)
        return (exact / length.hypot_(self.floor)).mul_(self.weight).to(hidden.dtype)


class RotaryTables(nn.Module):
    """The model's own cosines and sines, as `rotate` wants them."""

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(self, hidden: torch.Tensor, position_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Two [rows, 1, head_dim]; the first half of the sines is negative."""
        cosines, sines = self.rotary(hidden, position_ids)  # [1, rows, head_dim]
        half = sines.shape[-1] // 2
        sines[..., :half].neg_()
        return cosines[0].unsqueeze(1), sines[0].unsqueeze(1)


def rotate(heads: torch.Tensor, cosines: torch.Tensor, sines: torch.Tensor) -> torch.Tensor:
    """Rotary positions, in place, halves paired: (a, b) becomes (a cos - b sin, b cos + a sin).

    heads [rows, heads, head_dim].
    """
    swapped = heads.roll(heads.shape[-1] // 2, -1)
    return heads.mul_(cosines).addcmul_(swapped, sines)


def _joined(*linears: nn.Linear) -> nn.Linear:
    """One linear layer with the outputs of all, side by side."""
    first = linears[0]
    joined = nn.Linear(
        first.in_features,
        sum(linear.out_features for linear in linears),
        bias=first.bias is not None,
        device=first.weight.device,
        dtype=first.weight.dtype,
    )
    joined.weight = nn.Parameter(torch.cat([linear.weight for linear in linears]), requires_grad=False)
    if first.bias is not None:
        joined.bias = nn.Parameter(torch.cat([linear.bias for linear in linears]), requires_grad=False)
    return joined


def _add_product(residual: torch.Tensor, linear: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    """residual + linear(rows)"""
    if isinstance(linear, PackedLinear):
        return linear.add_to(residual, rows)
    return residual + linear(rows)
