"""Positions with RoPE: a cached key is turned by its position, so the same words elsewhere have other keys."""

import torch

from headrace.config import Config
from headrace.core.errors import InvalidRequest
from headrace.learn.lesson import Lesson, Report, compute_kv, fitting, load_for_lesson, read_kv, text_tokens

WORDS, SHIFT = 64, 64


def show_positions(config: Config, *, report: Report) -> Lesson:
    """The same words at position 0 and behind other words: compare keys and values, and keys turned by the shift.

    Su et al., "RoFormer", 2021: a key at position p is R(p) k, and R(s) R(p) = R(s + p). Raises InvalidRequest for
    models whose positions are not rotary.
    """
    model = load_for_lesson(config, pool_tokens=4 * (WORDS + SHIFT), report=report)
    inner = getattr(model.runner.model, "model", None)
    rotary = getattr(inner, "rotary_emb", None)
    rotary = getattr(rotary, "rotary", rotary)  # the model's own, where fused layers have put theirs around it
    if rotary is None:
        raise InvalidRequest(f"{model.name} has no rotary positions", param="model")
    num_words = fitting(model, WORDS + SHIFT, least=8) // 2
    words = text_tokens(model, 2 * num_words)[num_words:]
    before = text_tokens(model, num_words)
    other_block = -(-2 * num_words // model.kv.layout.block_tokens)
    report(f"computing {num_words} tokens at position 0, and behind {num_words} others")
    compute_kv(model, words)
    first = read_kv(model, num_words).float()  # [num_layers, 2, num_kv_heads, tokens, head_dim]
    compute_kv(model, before + words, first_block=other_block)
    later = read_kv(model, 2 * num_words, first_block=other_block).float()[:, :, :, num_words:]
    turned = _turn(first[:, 0], rotary, num_words)
    figures = {
        "values_first_layer": _difference(first[0, 1], later[0, 1]),
        "keys_first_layer": _difference(first[0, 0], later[0, 0]),
        "turned_keys_first_layer": _difference(turned[0], later[0, 0]),
        "turned_keys_last_layer": _difference(turned[-1], later[-1, 0]),
    }
    labels = (
        "values, first layer", "keys, first layer", "keys turned by the shift, first layer",
        "keys turned by the shift, last layer",
    )  # fmt: skip
    return Lesson(
        tables=(
            (
                f"The same {num_words} tokens at position 0 and at position {num_words}",
                ["what is compared ", "difference"],
                [[label, f"{value:.1%}"] for label, value in zip(labels, figures.values(), strict=True)],
            ),
        ),
        facts={"tokens": num_words, "shift": num_words} | figures,
        conclusion=(
            "In the first layer only the position tells the keys apart, and turning them makes up for it. In later "
            "layers each token has taken in what stood before it: no turning helps, and a block may be reused only "
            "behind the very tokens that it was computed behind. That is why a block's hash holds its parent's."
        ),
        notes=("Difference: mean distance of the vectors, as a share of their mean length.",),
    )


def _turn(keys: torch.Tensor, rotary: torch.nn.Module, shift: int) -> torch.Tensor:
    """Keys [..., tokens, head_dim] as if each stood `shift` positions later."""
    cos, sin = rotary(keys, torch.tensor([[shift]], device=keys.device))  # [1, 1, head_dim]
    left, right = keys.chunk(2, dim=-1)
    return keys * cos[0, 0].float() + torch.cat((-right, left), dim=-1) * sin[0, 0].float()


def _difference(left: torch.Tensor, right: torch.Tensor) -> float:
    """Mean distance of the vectors of the last axis over their mean length."""
    return float((left - right).norm(dim=-1).mean() / right.norm(dim=-1).mean())
