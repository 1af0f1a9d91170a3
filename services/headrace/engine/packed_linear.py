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
    rows_max: int  # of one product: more are several products, so that no product has more rows than were tried


# The first is used, unless the bits of a row depend under it on how many rows there are. Where this was measured,
# packing for 256 gave the best or nearly the best time for every number of rows from 1 to 256, in both number formats.
# A processor that multiplies tiles (AMX) cuts the sum of a product in one way up to 32 rows and in another above, or up
# to 128 of what is packed for a single row; by the weight's shape there are fewer or other such edges.
PACKINGS = (Packing(256, 256), Packing(1, 256), Packing(1, 128), Packing(256, 32))

# Numbers of rows that a packing is tried with on such a processor: multiples of what steps are padded to, and both
# sides of edges that were seen.
ROWS_TRIED = (4, 8, 12, 16, 24, 28, 32, 36, 40, 48, 64, 96, 128, 160, 192, 256)

# Few rows are tried in so many at least: a row's bits differ in a few of a hundred rows only.
ROWS_COMPARED_MIN = 64


class PackedLinear(nn.Module):
    """`nn.Linear` for inference over a packed weight. The plain weight is not kept."""

    def __init__(self, linear: nn.Linear, packing: Packing = PACKINGS[0]) -> None:
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
        if rows.numel() <= self.packing.rows_max * self.in_features:
            return self._product(rows, self.packed, self.bias, "none", [], "")
        pieces = rows.reshape(-1, self.in_features).split(self.packing.rows_max)
        products = [self._product(piece, self.packed, self.bias, "none", [], "") for piece in pieces]
        return torch.cat(products).view(*rows.shape[:-1], self.out_features)

    def add_to(self, residual: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """residual [..., out_features] plus the product, rounded once."""
        if rows.numel() <= self.packing.rows_max * self.in_features:
            return self._added_product(rows, residual, self.packed, self.bias, "add")
        pieces = rows.reshape(-1, self.in_features).split(self.packing.rows_max)
        added_to = residual.reshape(-1, self.out_features).split(self.packing.rows_max)
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
                packings[shape] = choose_packing(linear, threads=threads) if exact else PACKINGS[0]
            setattr(parent, name, PackedLinear(linear, packings[shape]))
    return len(targets)


def choose_packing(linear: nn.Linear, *, threads: int) -> Packing:
    """The first under which a row's bits are the same among however many rows, on one thread and on all; the first of
    all where there is none, or where the processor does not multiply tiles in this number format.

    The self-test at load judges in any case (`numerics_probe.py`).
    """
    if linear.weight.dtype is not torch.bfloat16 or not torch.cpu._is_amx_tile_supported():
        return PACKINGS[0]
    threads_before = torch.get_num_threads()
    try:
        held = (packing for packing in PACKINGS if _bits_hold(linear, packing, thread_counts=(1, threads)))
        return next(held, PACKINGS[0])
    finally:
        torch.set_num_threads(threads_before)


def _bits_hold(linear: nn.Linear, packing: Packing, *, thread_counts: Sequence[int]) -> bool:
    """Whether products and sums of few rows are those of many, bit for bit."""
    packed = PackedLinear(linear, packing)
    numbers = torch.Generator().manual_seed(0)
    rows, residual = (
        torch.randn((packing.rows_max, size), generator=numbers).to(linear.weight.dtype)
        for size in (linear.in_features, linear.out_features)
    )
    torch.set_num_threads(1)
    product, added = packed(rows), packed.add_to(residual, rows)
    for threads in thread_counts:
        torch.set_num_threads(threads)
        for count in (count for count in ROWS_TRIED if count <= packing.rows_max):
            end = count * -(-ROWS_COMPARED_MIN // count)
            for some in (slice(first, first + count) for first in range(0, min(end, packing.rows_max), count)):
                if not torch.equal(packed(rows[some]), product[some]):
                    return False
                if not torch.equal(packed.add_to(residual[some], rows[some]), added[some]):
                    return False
    return True
