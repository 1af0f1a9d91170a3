"""Linear layers whose weights oneDNN has put in the order it multiplies in.

This file owns the replacement of `nn.Linear` on CPU, and how many rows one product takes at most. The packed weight is
read about twice as fast where few rows are multiplied, which is what decoding does. It knows nothing of models beyond
their linear layers.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn


@dataclass(frozen=True, slots=True)
class Packing:
    """How a weight is packed, and how it is used."""

    for_rows: int  # the number of rows that the library is told to pack for
    rows_max: int  # of one product: more are several products
    rows_step: int = 1  # a product of more than so many rows has a multiple of it; what is left over is one of its own

    def cut(self, num_rows: int) -> list[int]:
        """Rows of each product."""
        whole, left = divmod(num_rows, self.rows_max)
        over = left % self.rows_step
        return [*[self.rows_max] * whole, *[rows for rows in (left - over, over) if rows]]


# Where this was measured, packing for 256 gave the best or nearly the best time for every number of rows from 1 to 256,
# in both number formats. No product has more rows than the self-test at load tries.
FAST = Packing(256, 256)

# For a processor that multiplies tiles (AMX), where the sum of a product is cut in ways that depend on how many rows it
# has, the weight's shape and the number of threads. So its products have few different numbers of rows, each of which
# is tried; the first of these packings is used under which none makes a difference.
CUT = (Packing(256, 256, 32), Packing(1, 256, 32), Packing(1, 128, 32), Packing(256, 32, 32))

ROW_MULTIPLE = 4  # of what steps are padded to, at least

# Few rows are tried in so many at least: a row's bits differ in a few of a hundred rows only.
ROWS_COMPARED_MIN = 128

# Of layers with more outputs for an input nothing is added to a residual: they project up, or to the vocabulary.
SUM_OUTPUTS_MAX = 4


class PackedLinear(nn.Module):
    """`nn.Linear` for inference over a packed weight. The plain weight is not kept."""

    def __init__(self, linear: nn.Linear, packing: Packing = FAST) -> None:
        super().__init__()
        self.in_features = linear.in_features
        self.out_features = linear.out_features
        self.packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), packing.for_rows)
        self.bias = None if linear.bias is None else linear.bias.detach()
        self.packing = packing
        self._product = torch.ops.mkldnn._linear_pointwise.default
        self._added_product = torch.ops.mkldnn._linear_pointwise.binary

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        """rows [..., in_features] -> [..., out_features]."""
        cut = self.packing.cut(rows.numel() // self.in_features)
        if len(cut) <= 1:
            return self._product(rows, self.packed, self.bias, "none", [], "")
        pieces = rows.reshape(-1, self.in_features).split(cut)
        products = [self._product(piece, self.packed, self.bias, "none", [], "") for piece in pieces]
        return torch.cat(products).view(*rows.shape[:-1], self.out_features)

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """residual [..., out_features] plus the product, rounded once."""
        cut = self.packing.cut(rows.numel() // self.in_features)
        if len(cut) <= 1:
            return self._added_product(rows, residual, self.packed, self.bias, "add")
        pieces = rows.reshape(-1, self.in_features).split(cut)
        added_to = residual.reshape(-1, self.out_features).split(cut)
        sums = [
            self._added_product(piece, added, self.packed, self.bias, "add")
            for piece, added in zip(pieces, added_to, strict=True)
        ]
        return torch.cat(sums).view(residual.shape)


def pack_linears(model: nn.Module, *, exact: bool, threads: int) -> int:
    """Replace every plain linear layer of a CPU model, in place; returns how many.

    Layers of other classes (also subclasses of nn.Linear) and number formats that oneDNN does not pack stay.
    exact: so that a row's bits do not depend on how many rows there are; else as is fastest.
    threads: on which steps will run.
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
    packings: dict[tuple[int, int, torch.dtype], Packing] = {}
    with torch.inference_mode():
        for parent, name, linear in targets:
            shape = (linear.in_features, linear.out_features, linear.weight.dtype)
            if shape not in packings:
                packings[shape] = choose_packing(linear, threads=threads) if exact else FAST
            setattr(parent, name, PackedLinear(linear, packings[shape]))
    return len(targets)


def choose_packing(linear: nn.Linear, *, threads: int) -> Packing:
    """The fast one, but on a processor that multiplies tiles in this number format the first under which a row's bits
    are the same among however many rows, on one thread and on all; the fast one, too, where none is.

    The self-test at load judges in any case (`numerics_probe.py`).
    """
    if linear.weight.dtype is not torch.bfloat16 or not torch.cpu._is_amx_tile_supported():
        return FAST
    threads_before = torch.get_num_threads()
    try:
        return next((packing for packing in CUT if _bits_hold(linear, packing, thread_counts=(1, threads))), FAST)
    finally:
        torch.set_num_threads(threads_before)


def _bits_hold(linear: nn.Linear, packing: Packing, *, thread_counts: Sequence[int]) -> bool:
    """Whether rows have the same bits in products of every number of rows that are cut so, and in sums."""
    packed = PackedLinear(linear, packing)
    numbers = torch.Generator().manual_seed(0)
    rows, residual = (
        torch.randn((max(packing.rows_max, ROWS_COMPARED_MIN), size), generator=numbers).to(linear.weight.dtype)
        for size in (linear.in_features, linear.out_features)
    )
    with_sums = linear.out_features <= SUM_OUTPUTS_MAX * linear.in_features
    torch.set_num_threads(1)
    product, added = packed(rows), packed.add_to(residual, rows) if with_sums else residual
    sizes = [*range(ROW_MULTIPLE, packing.rows_step, ROW_MULTIPLE)]
    sizes += range(packing.rows_step, packing.rows_max + 1, packing.rows_step)
    for threads in thread_counts:
        torch.set_num_threads(threads)
        for size in sizes:
            for some in (slice(first, first + size) for first in range(0, len(rows) - size + 1, size)):
                if some.start >= ROWS_COMPARED_MIN:
                    break
                if not torch.equal(packed(rows[some]), product[some]):
                    return False
                if with_sums and not torch.equal(packed.add_to(residual[some], rows[some]), added[some]):
                    return False
    return True
