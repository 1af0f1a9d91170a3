"""A pool whose blocks go in and out in the store's codec, over an engine's pool of the model's own numbers.

Owns the way of a block between the two: coded where the pool lies (on a CUDA device fewer bytes then cross the bus), in
the threads that copy, each of which has buffers of its own. A digest is always that of the coded bytes, since those are
what a store keeps. The arithmetic is `blocks/kv_codecs.py`'s.
"""

import threading
from typing import Any

import numpy as np
import torch
import xxhash

from headrace.blocks.kv_codecs import BlockCoder
from headrace.blocks.two_parts import TwoPartPool
from headrace.core.block import KvLayout
from headrace.core.ports import PrefixPool
from headrace.engine.layered_kv import LayeredKV, PoolKV
from headrace.engine.paged_kv import PagedKV


def stored_pool(kv: PoolKV, layout: KvLayout) -> PrefixPool:
    """The engine's pool as loading and publishing see it: its blocks in `layout`, which differs by codec at most."""
    if isinstance(kv, LayeredKV):
        wide, near = stored_pool(kv.wide, layout.wide), stored_pool(kv.near, layout.near)
        return TwoPartPool(layout, wide, near, num_wide=kv.num_blocks)
    return kv if kv.layout == layout else CodedPool(kv, layout)


class CodedPool:
    """A PrefixPool. Copies of different blocks may run in different threads at once."""

    def __init__(self, kv: PagedKV, layout: KvLayout) -> None:
        """layout: of the payloads; `kv` holds raw numbers of the same shape."""
        assert kv.layout.codec == "raw"
        assert kv.layout.shape == layout.shape
        self.layout = layout
        self._kv = kv
        self._coder = BlockCoder(layout)
        self._buffers = threading.local()

    def write_block(self, block_id: int, payload: memoryview) -> int:
        """As PagedKV.write_block. Decodes whatever bytes there are: the caller compares the digest afterwards."""
        assert payload.nbytes == self.layout.block_bytes
        _use_one_thread()
        with self._kv.copying():
            staging, staging_bytes, coded = self._own_buffers()
            np.copyto(staging_bytes, np.frombuffer(payload, dtype=np.uint8))
            if coded is not staging:
                coded.copy_(staging, non_blocking=True)
            self._coder.decode(coded, self._kv.block(block_id))
        return xxhash.xxh3_64_intdigest(staging_bytes.data)

    def read_block(self, block_id: int, out: memoryview) -> int:
        """As PagedKV.read_block. Raises BlockCorrupt when the block holds a number that is not finite."""
        assert out.nbytes == self.layout.block_bytes
        _use_one_thread()
        with self._kv.copying():
            staging, staging_bytes, coded = self._own_buffers()
            self._coder.encode(self._kv.block(block_id), coded)
            if coded is not staging:
                staging.copy_(coded, non_blocking=True)
        np.copyto(np.frombuffer(out, dtype=np.uint8), staging_bytes)
        return xxhash.xxh3_64_intdigest(staging_bytes.data)

    def _own_buffers(self) -> tuple[torch.Tensor, np.ndarray[Any, Any], torch.Tensor]:
        """This thread's bytes of one block: as tensor and array in memory, and as tensor where the pool lies."""
        kept = getattr(self._buffers, "block", None)
        if kept is None:
            on_cpu = self._kv.device.type == "cpu"
            staging = torch.empty(self.layout.block_bytes, dtype=torch.uint8, pin_memory=not on_cpu)
            coded = staging if on_cpu else torch.empty_like(staging, device=self._kv.device)
            kept = self._buffers.block = (staging, staging.numpy(), coded)
        return kept


def _use_one_thread() -> None:
    """Torch's thread count belongs to the calling thread. A thread that copies must not take the step's cores."""
    if torch.get_num_threads() != 1:
        torch.set_num_threads(1)
