"""The paged KV pool: the tensors that hold every sequence's K and V, and the copies of single blocks in and out.

This file owns the pool's memory layout. It keeps no account of who owns which block (`block_pool.py` does) and knows
nothing of hashes, stores or models. A block id is an index into the pool's block axis; the caller owns the blocks that
it writes.

Layout: one tensor `[num_layers, 2, num_kv_heads, num_blocks, block_tokens, head_dim]`. Per layer and head the blocks lie
side by side, so that attention gathers a sequence's keys of one layer by one `index_select` along the block axis and
gets them in the shape that it multiplies. A block of the payload layout is then `num_layers x 2 x num_kv_heads`
contiguous runs of `block_tokens x head_dim` elements.
"""

from typing import Any

import numpy as np
import torch
import xxhash

from headrace.core.block import KvLayout

TORCH_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


class PagedKV:
    """K and V of `num_blocks` blocks on one device. Copies of different blocks may run in different threads at once."""

    def __init__(self, layout: KvLayout, num_blocks: int, *, device: torch.device | str = "cpu") -> None:
        assert layout.codec == "raw", "the pool holds the model's own numbers; codecs live in transfer"
        assert num_blocks > 0
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = torch.device(device)
        layers, two, heads, block_tokens, head_dim = layout.shape
        # [num_layers, 2, num_kv_heads, num_blocks, block_tokens, head_dim]
        self.pool = torch.empty(
            (layers, two, heads, num_blocks, block_tokens, head_dim),
            dtype=TORCH_DTYPES[layout.dtype],
            device=self.device,
        )
        # Writing the zeros also maps every page now, so that no request pays for page faults.
        self.pool.zero_()
        self._blocks: np.ndarray[Any, Any] | None = None
        if self.device.type == "cpu":
            run_bytes = layout.block_bytes // (layers * two * heads)
            # [layers * 2 * heads, num_blocks, bytes of one run]
            self._blocks = self.pool.view(torch.uint8).view(-1, num_blocks, run_bytes).numpy()

    def write_block(self, block_id: int, payload: memoryview) -> int:
        """Copy a payload into a block the caller owns; returns xxh3-64 of the bytes now in the pool.

        payload: `layout.block_bytes` contiguous bytes in payload layout. The digest is taken from the pool after the
        copy, so a payload that changes underneath (shared memory) cannot differ from what was digested.
        """
        assert 0 <= block_id < self.num_blocks
        assert payload.nbytes == self.layout.block_bytes
        source = np.frombuffer(payload, dtype=np.uint8)
        assert self._blocks is not None
        block = self._blocks[:, block_id]
        np.copyto(block, source.reshape(block.shape))
        return xxhash.xxh3_64_intdigest(np.ascontiguousarray(block))

    def read_block(self, block_id: int, out: memoryview) -> int:
        """Copy a block out in payload layout; returns xxh3-64 of the bytes copied.

        out: writable, `layout.block_bytes` contiguous bytes.
        """
        assert 0 <= block_id < self.num_blocks
        assert out.nbytes == self.layout.block_bytes
        target = np.frombuffer(out, dtype=np.uint8)
        assert self._blocks is not None
        block = self._blocks[:, block_id]
        np.copyto(target.reshape(block.shape), block)
        return xxhash.xxh3_64_intdigest(target)
