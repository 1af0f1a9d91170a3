"""Linear layers whose weights oneDNN has put in the order it multiplies in.

This file owns the replacement of `nn.Linear` on CPU. The packed weight is read about twice as fast where few rows are
multiplied, which is what decoding does. It knows nothing of models beyond their linear layers.
"""

import torch
from torch import nn

# The number of rows that the library is told to pack for. Where this was measured, 256 gave the best or nearly the best
# time for every number of rows from 1 to 256, in both number formats.
PACKED_FOR_ROWS = 256


class PackedLinear(nn.Module):
    """`nn.Linear` for inference over a packed weight. The plain weight is not kept."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), PACKED_FOR_ROWS)
        self.bias = None if linear.bias is None else linear.bias.detach()
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self._added_product = torch.ops.mkldnn._linear_pointwise.binary

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [..., in_features] -> [..., out_features]."""
        return self._product(rows, self.packed, self.bias, "none", [], "")

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """residual [..., out_features] plus the product, rounded once."""
        return self._added_product(rows, residual, self.packed, self.bias, "add")


def pack_linears(model: nn.Module) -> int:
    """Replace every plain linear layer of a CPU model, in place; returns how many.

    Layers of other classes (also subclasses of nn.Linear) and number formats that oneDNN does not pack stay.
    """
    if not torch.backends.mkldnn.is_available():
        return 0
    packable = {torch.float32}
    if torch.ops.mkldnn._is_mkldnn_bf16_supported():
        packable.add(torch.bfloat16)
    targets = [
        (parent, name, child)
        for parent in model.modules()
        for name, child in parent.named_children()
        if type(child) is nn.Linear and child.weight.dtype in packable and child.weight.device.type == "cpu"
    ]
    with torch.inference_mode():
        for parent, name, linear in targets:
            setattr(parent, name, PackedLinear(linear))
    return len(targets)
