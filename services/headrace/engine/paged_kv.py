"""The paged KV pool: the tensors that hold every sequence's K and V, and the copies of single blocks in and out.

This file owns the pool's memory layout. It keeps no account of who owns which block (`block_pool.py` does) and knows
nothing of hashes, stores or models. A block id is an index into the pool's block axis; the caller owns the blocks that
it writes.

Layout: one tensor `[num_layers, 2, num_kv_heads, num_blocks, block_tokens, head_dim]`. Per layer and head the blocks
lie side by side, so that attention gathers a sequence's keys of one layer by one `index_select` along the block axis
and gets them in the shape that it multiplies. A block in payload layout is then `num_layers x 2 x num_kv_heads`
contiguous runs of `block_tokens x head_dim` elements.

Copies run in numpy and xxhash, which let go of the interpreter lock for large inputs, so that they run beside the step.
"""

import threading
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
        self._num_runs, self._run_bytes = layers * two * heads, block_tokens * head_dim * self.pool.element_size()
        self._staging = threading.local()
        self._blocks: np.ndarray[Any, Any] | None = None
        if self.device.type == "cpu":
            # [runs, num_blocks, run bytes], the same memory as the pool
            self._blocks = self.pool.view(torch.uint8).view(self._num_runs, num_blocks, self._run_bytes).numpy()

    def block(self, block_id: int) -> torch.Tensor:
        """One block's numbers in place, `layout.shape`, strided; for those who own it."""
        assert 0 <= block_id < self.num_blocks
        return self.pool[:, :, :, block_id]

    def finish_copies(self) -> None:
        """Wait for what the calling thread has begun to copy on a CUDA device; elsewhere copying waits by itself."""
        if self.device.type == "cuda":
            torch.cuda.current_stream(self.device).synchronize()

    def write_block(self, block_id: int, payload: memoryview) -> int:
        """Copy a payload into a block the caller owns; returns xxh3-64 of the bytes now in the pool.

        payload: `layout.block_bytes` contiguous bytes in payload layout. The digest is taken from our copy, not from
        the payload, so that a payload which changes meanwhile (shared memory) cannot differ from what was digested.
        """
        assert 0 <= block_id < self.num_blocks
        assert payload.nbytes == self.layout.block_bytes
        source = np.frombuffer(payload, dtype=np.uint8).reshape(self._num_runs, self._run_bytes)
        staging, staging_bytes = self._staging_block()
        if self._blocks is not None:
            block = self._blocks[:, block_id]
            np.copyto(block, source)
            np.copyto(staging_bytes, block)
        else:
            np.copyto(staging_bytes, source)
            self.block(block_id).copy_(staging, non_blocking=True)
            self.finish_copies()
        return xxhash.xxh3_64_intdigest(staging_bytes)

    def read_block(self, block_id: int, out: memoryview) -> int:
        """Copy a block out in payload layout; returns xxh3-64 of the bytes copied.

        out: writable, `layout.block_bytes` contiguous bytes.
        """
        assert 0 <= block_id < self.num_blocks
        assert out.nbytes == self.layout.block_bytes
        target = np.frombuffer(out, dtype=np.uint8).reshape(self._num_runs, self._run_bytes)
        if self._blocks is not None:
            np.copyto(target, self._blocks[:, block_id])
        else:
            staging, staging_bytes = self._staging_block()
            staging.copy_(self.block(block_id), non_blocking=True)
            self.finish_copies()
            np.copyto(target, staging_bytes)
        return xxhash.xxh3_64_intdigest(target)

    def _staging_block(self) -> tuple[torch.Tensor, np.ndarray[Any, Any]]:
        """This thread's own buffer of one block, as tensor (payload layout) and as bytes; pinned for a CUDA pool."""
        kept = getattr(self._staging, "block", None)
        if kept is None:
            pinned = self.device.type == "cuda"
            tensor = torch.empty(self.layout.shape, dtype=self.pool.dtype, pin_memory=pinned)
            as_bytes = tensor.view(torch.uint8).view(self._num_runs, self._run_bytes).numpy()
            kept = self._staging.block = (tensor, as_bytes)
        return kept
