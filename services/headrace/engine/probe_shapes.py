"""What K and V each layer really makes, found by running the model once.

This file owns that one forward pass. Configurations name these shapes in many ways and not always rightly.
"""

import torch
from transformers import PreTrainedModel

from headrace.engine.attention import ShapeProbe, attending


@torch.inference_mode()
def probe_shapes(model: PreTrainedModel) -> ShapeProbe:
    """Run two tokens through a model that uses paged attention, zeros in place of attention; returns what it saw."""
    probe = ShapeProbe()
    tokens = torch.tensor([[0, 1]], device=model.device)
    with attending(probe):
        model(input_ids=tokens, position_ids=tokens, use_cache=False)
    return probe
