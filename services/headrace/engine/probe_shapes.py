"""What K and V each layer really makes, found by running the model once.

This file owns that one forward pass, and what people are told of the windows that it found. Configurations name these
shapes in many ways and not always rightly.
"""

from collections.abc import Collection

import torch
from transformers import PreTrainedModel

from headrace.core.key_window import EVERYTHING, KeyWindow
from headrace.engine.attention import ShapeProbe, attending


@torch.inference_mode()
def probe_shapes(model: PreTrainedModel) -> ShapeProbe:
    """Run two tokens through a model that uses paged attention, zeros in place of attention; returns what it saw."""
    probe = ShapeProbe()
    tokens = torch.tensor([[0, 1]], device=model.device)
    with attending(probe):
        model(input_ids=tokens, position_ids=tokens, use_cache=False)
    return probe


def windows_line(
    windows: Collection[int | None], window: KeyWindow, context_tokens_max: int, near_window: KeyWindow = EVERYTHING
) -> str | None:
    """What a model's windows mean for its cache, for people; None when no layer has one, or none that ends.

    near_window: what the layers read whose KV is in near parts, where blocks have some.
    """
    narrow = [layer for layer in windows if layer is not None and layer < context_tokens_max]
    if not narrow:
        return None
    if near_window.bounded:
        held = near_window.held_blocks(-(-context_tokens_max // near_window.block_tokens))
        return (
            f"{len(narrow)} of {len(windows)} layers see the last {max(narrow):,} tokens only, the others see all: of "
            f"these {len(narrow)} a sequence holds KV of at most {held * near_window.block_tokens:,} tokens, "
            "however long it is, and a hit loads the last window; the store keeps all blocks, since other prompts may "
            "part anywhere"
        )
    if len(narrow) < len(windows):
        return (
            f"{len(narrow)} of {len(windows)} layers see the last {max(narrow):,} tokens only, the others see all: "
            "attention reads no more than each layer sees; KV of all tokens is kept, stored and loaded for every layer"
        )
    held_blocks = window.held_blocks(-(-context_tokens_max // window.block_tokens))
    return (
        f"every layer sees the last {max(narrow):,} tokens only: a sequence holds at most {held_blocks:,} blocks of "
        f"the pool, however long it is, and a hit of any length loads at most {window.prefix_blocks:,}; the store "
        "keeps all blocks, since other prompts may part anywhere"
    )
