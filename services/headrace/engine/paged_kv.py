"""The paged KV pool: the tensors that hold every sequence's K and V, and the copies of single blocks in and out.

This file owns the pool's memory layout. It keeps no account of who owns which block (`block_pool.py` does) and knows
nothing of hashes, stores or models. A block id is an index into the pool's block axis; the caller owns the blocks that
it writes.

Layout: one tensor `[num_layers, 2, num_kv_heads, num_blocks, block_tokens, head_dim]`. Per layer and head the blocks
lie side by side, so that attention gathers a sequence's keys of one layer by one `index_select` along the block axis
and gets them in the shape that it multiplies. A block in payload layout is then `num_layers x 2 x num_kv_heads`
contiguous runs of `block_tokens x head_dim` elements.

A quantised pool holds codes in that tensor and beside it one scale for each row of a token and head,
`[num_layers, 2, num_kv_heads, num_blocks, block_tokens]`. A row is quantised as it is written and everybody reads what
was written, also the step that wrote it: so a row's bits depend on its own numbers only, however a prompt was cut.

Copies run in numpy and xxhash, which let go of the interpreter lock for large inputs, so that they run beside the step.
Those of a CUDA pool go through pinned memory, in a stream of the copying thread's own (`copy_streams.py`).
"""

import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np
import torch
import xxhash

from headrace.blocks.kv_codecs import STEP_NUMBERS, TORCH_DTYPES, amax_of, decode_rows, encode_rows, is_finite
from headrace.core.block import KvCodec, KvLayout
from headrace.engine.copy_streams import CopyStreams, finish_stream


class PagedKV:
    """K and V of `num_blocks` blocks on one device. Copies of different blocks may run in different threads at once."""

    def __init__(self, layout: KvLayout, num_blocks: int, *, device: torch.device | str = "cpu") -> None:
        """layout: in codec raw, int8_token or fp8_token: a pool's rows are quantised one by one."""
        assert layout.codec in (KvCodec.RAW, KvCodec.INT8_TOKEN, KvCodec.FP8_TOKEN)
        assert num_blocks > 0
        self.layout = layout
        self.num_blocks = num_blocks
        self.device = torch.device(device)
        self.dtype = TORCH_DTYPES[layout.dtype]  # of the numbers, whatever the pool keeps of them
        self._is_raw = layout.codec == KvCodec.RAW
        layers, two, heads, block_tokens, head_dim = layout.shape
        # [num_layers, 2, num_kv_heads, num_blocks, block_tokens, head_dim]: the numbers, or a byte's code for each.
        # Writing the zeros also maps every page now, so that no request pays for page faults.
        self.pool = torch.empty(
            (layers, two, heads, num_blocks, block_tokens, head_dim),
            dtype=self.dtype if self._is_raw else torch.uint8,
            device=self.device,
        ).zero_()
        self._scales = torch.empty(
            (layers, two, heads, 0 if self._is_raw else num_blocks, block_tokens), dtype=self.dtype, device=self.device
        ).zero_()
        # What a payload has of each block, in its order.
        self._parts = (self.pool,) if self._is_raw else (self._scales, self.pool)
        self._num_runs = layers * two * heads
        # Views of each layer's part, made once since they are wanted in every layer of every step: by
        # [K's and V's heads, slots, head_dim], and by [K's and V's heads x blocks, numbers of a block].
        self._by_slot = tuple(layer.view(two * heads, -1, head_dim) for layer in self.pool)
        self._by_run = tuple(layer.view(-1, block_tokens * head_dim) for layer in self.pool)
        self._staging = threading.local()
        self._streams = CopyStreams(self.device)
        finish_stream(self.device)  # the zeros are there before other streams write
        self._blocks: tuple[np.ndarray[Any, Any], ...] | None = None
        if self.device.type == "cpu":
            # Each part as [runs, num_blocks, run bytes], the same memory.
            self._blocks = tuple(
                part.flatten(4).view(torch.uint8).view(self._num_runs, num_blocks, -1).numpy() for part in self._parts
            )

    def write_rows(self, layer: int, slots: torch.Tensor, rows: torch.Tensor) -> None:
        """Store one layer's K and V of some tokens, `[2 * num_kv_heads, tokens, head_dim]`, all heads of K first.

        slots: [tokens] int64, block_id * block_tokens + offset; the caller owns the blocks.
        """
        codes = rows
        if not self._is_raw:
            codes, scales = encode_rows(rows, codec=self.layout.codec)
            self._scales[layer].view(rows.shape[0], -1)[:, slots] = scales
        self._by_slot[layer].index_copy_(1, slots, codes)

    def rows_of(self, block_tables: torch.Tensor) -> torch.Tensor:
        """For `gather`: where K and V of these blocks are, `[2, sequences, num_kv_heads, blocks]` of the pool's runs.

        block_tables: [sequences, blocks] int64 on the pool's device.
        """
        heads = self.layout.num_kv_heads
        runs = torch.arange(2 * heads, device=self.device) * self.num_blocks
        return runs.view(2, 1, heads, 1) + block_tables.unsqueeze(1)

    def gather(self, layer: int, rows: torch.Tensor, out: torch.Tensor) -> None:
        """Copy one layer's blocks in the model's dtype. rows: [n]; out: [n, block_tokens * head_dim]."""
        codes = self._by_run[layer]
        if self._is_raw:
            torch.index_select(codes, 0, rows, out=out)
            return
        # In pieces that stay in a core's cache: in one, four passes over memory would be most of a decode step.
        scales, head_dim = self._scales[layer].view(-1, self.layout.block_tokens), self.layout.head_dim
        rows_at_once = max(1, STEP_NUMBERS // out.shape[1])
        for piece, target in zip(rows.split(rows_at_once), out.split(rows_at_once), strict=True):
            some = codes.index_select(0, piece).unflatten(1, (-1, head_dim))
            rows_out = target.unflatten(1, (-1, head_dim))
            decode_rows(some, scales.index_select(0, piece), rows_out, codec=self.layout.codec)

    def in_place(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """One layer's K and V of all blocks where they lie, two `[1, num_kv_heads, slots, head_dim]`. Of a raw pool
        only."""
        assert self._is_raw
        keys, values = self._by_slot[layer].unflatten(0, (2, 1, -1))
        return keys, values

    def blank_slots(self, layer: int, slots: torch.Tensor) -> None:
        """Zero one layer's K and V of slots that nothing is in; the caller owns the blocks. Of a raw pool only."""
        assert self._is_raw
        self._by_slot[layer].index_fill_(1, slots, 0)

    def block(self, block_id: int) -> torch.Tensor:
        """One block's numbers in place, `layout.shape`, strided; for those who own it. Of a raw pool only."""
        assert self._is_raw
        assert 0 <= block_id < self.num_blocks
        return self.pool[:, :, :, block_id]

    def is_finite(self, block_ids: Sequence[int]) -> bool:
        """Whether every number of these blocks is finite; of a quantised pool its scales say it."""
        if not block_ids:
            return True
        numbers = self._parts[0].index_select(3, torch.tensor(block_ids, device=self.device))
        return is_finite(amax_of(numbers, -1) if self._is_raw else numbers)

    def bytes_in_order(self, block_ids: Sequence[int], num_tokens: int) -> bytes:
        """What the pool keeps of a sequence, token by token whatever the block size:
        `[num_layers, 2, num_kv_heads, num_tokens, ...]`, of a quantised pool the scales first."""
        blocks = torch.tensor(block_ids, device=self.device)
        in_order = (part.index_select(3, blocks).flatten(3, 4)[:, :, :, :num_tokens] for part in self._parts)
        return b"".join(part.contiguous().view(torch.uint8).cpu().numpy().tobytes() for part in in_order)

    @property
    def num_bytes(self) -> int:
        """What the pool takes of the device's memory."""
        return sum(part.nbytes for part in self._parts)

    def whole_blocks(self, num_blocks: int) -> list[int]:
        """The pool's first blocks, for those who use it without an account of it."""
        assert num_blocks <= self.num_blocks
        return list(range(num_blocks))

    def copying(self) -> AbstractContextManager[None]:
        """As CopyStreams.copying: for those who copy blocks."""
        return self._streams.copying()

    def write_block(self, block_id: int, payload: memoryview) -> int:
        """Copy a payload into a block the caller owns; returns xxh3-64 of the bytes now in the pool.

        payload: `layout.block_bytes` contiguous bytes in payload layout. The digest is taken from our copy, not from
        the payload, so that a payload which changes meanwhile (shared memory) cannot differ from what was digested.
        """
        assert 0 <= block_id < self.num_blocks
        assert payload.nbytes == self.layout.block_bytes
        staging, staged_parts = self._staging_block()
        source = np.frombuffer(payload, dtype=np.uint8)
        if self._blocks is not None:
            for blocks, part, staged in zip(self._blocks, self._runs_of(source), staged_parts, strict=True):
                block = blocks[:, block_id]
                np.copyto(block, part)
                np.copyto(staged, block)
        else:
            np.copyto(staging.numpy(), source)
            with self.copying():
                for blocks_there, staged_part in zip(self._parts, self._tensors_of(staging), strict=True):
                    blocks_there[:, :, :, block_id].copy_(staged_part, non_blocking=True)
        return xxhash.xxh3_64_intdigest(staging.numpy().data)

    def read_block(self, block_id: int, out: memoryview) -> int:
        """Copy a block out in payload layout; returns xxh3-64 of the bytes copied.

        out: writable, `layout.block_bytes` contiguous bytes.
        """
        assert 0 <= block_id < self.num_blocks
        assert out.nbytes == self.layout.block_bytes
        target = np.frombuffer(out, dtype=np.uint8)
        if self._blocks is not None:
            for blocks, part in zip(self._blocks, self._runs_of(target), strict=True):
                np.copyto(part, blocks[:, block_id])
        else:
            staging, _ = self._staging_block()
            with self.copying():
                for blocks_there, staged_part in zip(self._parts, self._tensors_of(staging), strict=True):
                    staged_part.copy_(blocks_there[:, :, :, block_id], non_blocking=True)
            np.copyto(target, staging.numpy())
        return xxhash.xxh3_64_intdigest(target.data)

    def _staging_block(self) -> tuple[torch.Tensor, list[np.ndarray[Any, Any]]]:
        """This thread's own bytes of one block, as tensor and as the runs of its parts; pinned for a CUDA pool."""
        kept = getattr(self._staging, "block", None)
        if kept is None:
            pinned = self.device.type == "cuda"
            tensor = torch.empty(self.layout.block_bytes, dtype=torch.uint8, pin_memory=pinned)
            kept = self._staging.block = (tensor, self._runs_of(tensor.numpy()))
        return kept

    def _runs_of(self, payload: np.ndarray[Any, Any]) -> list[np.ndarray[Any, Any]]:
        """A payload's parts as [runs, run bytes], the same memory."""
        runs, at = [], 0
        for part in self._parts:
            num_bytes = self._part_bytes(part)
            runs.append(payload[at : at + num_bytes].reshape(self._num_runs, -1))
            at += num_bytes
        return runs

    def _tensors_of(self, payload: torch.Tensor) -> list[torch.Tensor]:
        """A payload's parts as tensors in the shape of a block's, the same memory."""
        tensors, at = [], 0
        for part in self._parts:
            num_bytes = self._part_bytes(part)
            shape = (*part.shape[:3], *part.shape[4:])
            tensors.append(payload[at : at + num_bytes].view(part.dtype).view(shape))
            at += num_bytes
        return tensors

    def _part_bytes(self, part: torch.Tensor) -> int:
        return part.numel() // self.num_blocks * part.element_size()
