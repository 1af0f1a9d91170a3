"""The KV pool of a model some of whose layers have a window: a `PagedKV` for the layers that see everything, and a
smaller one for the others, of which a sequence needs its last window only.

Owns which layer is in which of the two, and how tables of blocks become tables of each. Block ids are those of
`core/part_ids.py`. It keeps no account of who owns which part (`layered_pool.py` does).
"""

from collections.abc import Mapping, Sequence

import torch

from headrace.blocks.two_parts import TwoPartPool
from headrace.core.block import KvLayout
from headrace.core.layer_windows import LayerWindows
from headrace.core.part_ids import PartIds
from headrace.engine.paged_kv import PagedKV


class LayeredKV:
    """K and V of `num_blocks` wide and `num_near` near parts on one device."""

    def __init__(
        self,
        layout: KvLayout,
        num_blocks: int,
        *,
        windows: Mapping[int, int | None],
        num_near: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        """windows: of each layer, None for those that see everything. num_near: None for as many as wide parts."""
        self.layout = layout
        self.num_blocks = num_blocks
        self.num_near = num_blocks if num_near is None else num_near
        self.parts = PartIds(num_blocks)
        self.wide = PagedKV(layout.wide, num_blocks, device=device)
        # The last one is nobody's, and zero for ever: it stands in tables where the window has passed.
        self.near = PagedKV(layout.near, self.num_near + 1, device=device)
        self.device, self.dtype = self.wide.device, self.wide.dtype
        self.windows = dict(windows)
        self.near_window = LayerWindows(tuple(windows.values())).near_window(layout.block_tokens)
        self._whole = TwoPartPool(layout, self.wide, self.near, num_wide=num_blocks)
        # Layer of the model to its place in its part.
        self.place_of: dict[int, int] = {}
        for is_near in (False, True):
            layers = [layer for layer in sorted(windows) if (windows[layer] is not None) is is_near]
            self.place_of |= {layer: place for place, layer in enumerate(layers)}
        assert sum(window is not None for window in windows.values()) == layout.near_layers

    def is_near(self, layer: int) -> bool:
        """Whether this layer of the model has a window."""
        return self.windows[layer] is not None

    @property
    def num_bytes(self) -> int:
        """As PagedKV.num_bytes."""
        return self.wide.num_bytes + self.near.num_bytes

    def whole_blocks(self, num_blocks: int) -> list[int]:
        """As PagedKV.whole_blocks, each with both parts."""
        assert num_blocks <= min(self.num_blocks, self.num_near), "the pool has fewer near parts"
        return [self.parts.join(each, each) for each in range(num_blocks)]

    def block(self, block_id: int) -> torch.Tensor:
        """As PagedKV.block, of a block with both parts, layers in the model's order; a copy."""
        near = self.parts.near_of(block_id)
        assert near is not None
        blocks = self.wide.block(self.parts.wide_of(block_id)), self.near.block(near)
        return torch.stack([blocks[self.is_near(layer)][place] for layer, place in sorted(self.place_of.items())])

    def near_table(self, block_ids: Sequence[int], *, first_needed: int) -> list[int]:
        """The near part of each block; of those before `first_needed`, and of such as have none, the zero one."""
        nowhere, num_wide = self.num_near, self.num_blocks
        table = [nowhere] * min(first_needed, len(block_ids))
        table += [block_id // num_wide - 1 for block_id in block_ids[len(table) :]]
        return [nowhere if near < 0 else near for near in table]

    def is_finite(self, block_ids: Sequence[int]) -> bool:
        """As PagedKV.is_finite, of the parts that each has."""
        wide, near = self.parts.split(block_ids)
        return self.wide.is_finite(wide) and self.near.is_finite(near)

    def bytes_in_order(self, block_ids: Sequence[int], num_tokens: int) -> bytes:
        """As PagedKV.bytes_in_order, part after part; the blocks have both."""
        wide, near = self.parts.split(block_ids)
        return self.wide.bytes_in_order(wide, num_tokens) + self.near.bytes_in_order(near, num_tokens)

    def write_block(self, block_id: int, payload: memoryview) -> int:
        """As TwoPartPool.write_block."""
        return self._whole.write_block(block_id, payload)

    def read_block(self, block_id: int, out: memoryview) -> int:
        """As TwoPartPool.read_block."""
        return self._whole.read_block(block_id, out)


PoolKV = PagedKV | LayeredKV


def make_kv(
    layout: KvLayout,
    num_blocks: int,
    *,
    windows: Mapping[int, int | None],
    num_near: int | None = None,
    device: torch.device | str = "cpu",
) -> PoolKV:
    """A pool of the layout: of one part, or of two where layers differ in whether they have a window."""
    if not layout.near_layers:
        return PagedKV(layout, num_blocks, device=device)
    return LayeredKV(layout, num_blocks, windows=windows, num_near=num_near, device=device)
