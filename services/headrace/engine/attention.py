"""Attention over the paged KV pool, as one function that transformers' model code calls in place of its own.

This file owns the arithmetic of attention and the rules that make a row's bits independent of chunking and batch:

- One sequence per matrix product. Its queries are cut on an absolute grid of `TILE` positions, and the keys of a tile
  always reach to the end of that tile, the tail masked: the number of keys changes the bits of a row even under a mask,
  so a row must see the same number whoever computes it.
- The query heads that share a KV head are the rows of one matrix, padded to a multiple of `HEAD_ROWS`. How many such
  rows one product takes is then free, since each row's bits do not depend on the others.
- Keys and values behind the sequence's end are zeroed in the gathered copy. Whatever a block held before (a payload that
  failed its checksum, say) must not reach a product, since 0 x NaN is NaN.

It knows nothing of models, schedulers or who owns a block. The step's context travels by a contextvar, because some
models drop unknown keyword arguments on the way to the attention function.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import AttentionInterface

from headrace.engine.paged_kv import PagedKV

ATTENTION_NAME = "headrace_paged"

TILE = 128  # positions; changing it changes bits, so the numerics probe keeps old and new workers apart
HEAD_ROWS = 4

# Scores of one product, all heads together: 4 M elements are 8 MiB in bfloat16, which a large cache holds and which
# keeps a tile of a 9-head model whole up to a context of 3,600.
SCORES_ELEMENTS_MAX = 4 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """One sequence's part of a step: `num_rows` rows of the flattened batch from `row` are its positions from `start`."""

    row: int
    num_rows: int
    start: int
    block_table: torch.Tensor  # [blocks] int64; covers the end of the last tile, filled up with any valid block id

    @property
    def end(self) -> int:
        """First position behind the sequence."""
        return self.start + self.num_rows


class Scratch:
    """Buffers that live from step to step: fresh ones of this size would be mapped and zeroed by the kernel each time."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """A tensor of `shape` with old contents; valid until `name` is taken again."""
        numel = 1
        for size in shape:
            numel *= size
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < numel or buffer.dtype != like.dtype:
            buffer = self._buffers[name] = torch.empty(numel, dtype=like.dtype, device=like.device)
        return buffer[:numel].view(shape)


@dataclass(slots=True)
class StepContext:
    """What one forward pass needs to find its KV; valid for that pass only."""

    kv: PagedKV
    spans: Sequence[SequenceSpan]
    slots: torch.Tensor  # [real rows] int64: block_id * block_tokens + offset of each row
    scratch: Scratch
    masks: dict[tuple[int, int, int | None], torch.Tensor] = field(default_factory=dict)  # shared by the layers


@dataclass(slots=True)
class ShapeProbe:
    """Collects, in place of attention, what each layer's K and V look like: configs do not say it reliably."""

    shapes: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # layer -> (kv heads, key dim, value dim)
    windows: dict[int, int | None] = field(default_factory=dict)
    causal: bool = True


_context: ContextVar[StepContext | ShapeProbe] = ContextVar("headrace_step_context")


@contextmanager
def attending(context: StepContext | ShapeProbe) -> Iterator[None]:
    """Every attention layer called inside, in this thread, works on `context`."""
    token = _context.set(context)
    try:
        yield
    finally:
        _context.reset(token)


def register_attention() -> None:
    """Make `attn_implementation="headrace_paged"` known to transformers. Idempotent.

    The name is in no mask registry on purpose: models then build no mask, and this file owns causality.
    """
    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Store the rows' K and V in the pool, then attend over each sequence's blocks.

    query [1, heads, rows, head_dim]; key, value [1, kv_heads, rows, head_dim]. Rows behind the context's real ones are
    padding: stored nowhere, and zero in the result ([1, rows, heads, head_dim], None).
    softcap: scores become softcap * tanh(scores / softcap). s_aux: one sink logit for each head.
    """
    context = _context.get()
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    if isinstance(context, ShapeProbe):
        context.shapes[layer] = (key.shape[1], key.shape[3], value.shape[3])
        context.windows[layer] = sliding_window
        context.causal &= bool(getattr(module, "is_causal", True))
        return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3])), None

    layer_pool = context.kv.pool[layer]  # [2, kv_heads, blocks, block_tokens, head_dim]
    num_rows = context.slots.shape[0]
    layer_pool[0].flatten(1, 2)[:, context.slots] = key[0, :, :num_rows]
    layer_pool[1].flatten(1, 2)[:, context.slots] = value[0, :, :num_rows]
    tile_attention = _TileAttention(
        scale=scaling if scaling is not None else query.shape[3] ** -0.5,
        group=query.shape[1] // layer_pool.shape[1],
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    # [rows, heads, head_dim]
    output = query.new_zeros((query.shape[2], query.shape[1], query.shape[3]))
    for span_index, span in enumerate(context.spans):
        # [2, kv_heads, keys, head_dim]
        gathered = layer_pool.index_select(2, span.block_table).flatten(2, 3)
        if span.end < gathered.shape[2]:
            gathered[:, :, span.end :] = 0
        for first, last in _cut_rows(span, heads=query.shape[1]):
            rows = slice(span.row + first - span.start, span.row + last - span.start)
            tile_end = (first // TILE + 1) * TILE
            mask = tile_attention.mask(context, span_index, first, last)
            output[rows] = tile_attention.attend(
                query[0, :, rows], gathered[0, :, :tile_end], gathered[1, :, :tile_end], mask, context.scratch
            )
    return output.unsqueeze(0), None


def _cut_rows(span: SequenceSpan, *, heads: int) -> Iterator[tuple[int, int]]:
    """Cut a span's positions into [first, last) ranges, none across the tile grid, none with too many scores."""
    first = span.start
    while first < span.end:
        tile_end = (first // TILE + 1) * TILE
        rows_max = max(HEAD_ROWS, SCORES_ELEMENTS_MAX // (heads * tile_end))
        last = min(span.end, tile_end, first + rows_max)
        yield first, last
        first = last


@dataclass(frozen=True, slots=True)
class _TileAttention:
    """The arithmetic of one layer: how queries of one tile attend to the keys up to the tile's end."""

    scale: float
    group: int  # query heads for each KV head
    window: int | None
    softcap: float | None
    sinks: torch.Tensor | None  # [heads]

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scratch: Scratch
    ) -> torch.Tensor:
        """query [heads, rows, head_dim]; keys, values [kv_heads, keys, head_dim]; mask [packed rows, keys].

        Returns [rows, heads, head_dim].
        """
        heads, num_rows, head_dim = query.shape
        kv_heads = keys.shape[0]
        # [kv_heads, group * rows, head_dim], then padded
        packed = query.reshape(kv_heads, self.group * num_rows, head_dim)
        packed = pad(packed, (0, 0, 0, mask.shape[0] - packed.shape[1]))
        shape = (kv_heads, mask.shape[0], keys.shape[1])
        scores = scratch.take("scores", shape, query)
        if self.softcap is None:
            torch.baddbmm(mask, packed, keys.transpose(1, 2), alpha=self.scale, out=scores)
        else:
            torch.bmm(packed, keys.transpose(1, 2), out=scores)
            scores.mul_(self.scale / self.softcap).tanh_().mul_(self.softcap).add_(mask)
        weights = scratch.take("weights", shape, query)
        if self.sinks is None:
            torch.softmax(scores, dim=-1, out=weights)
        else:
            sink = self.sinks.to(scores.dtype).view(kv_heads, self.group, 1).expand(-1, -1, num_rows)
            sink = pad(sink.reshape(kv_heads, -1, 1), (0, 0, 0, shape[1] - self.group * num_rows))
            weights.copy_(torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[..., :-1])
        attended = torch.bmm(weights, values)[:, : self.group * num_rows]
        return attended.reshape(heads, num_rows, head_dim).transpose(0, 1)

    def mask(self, context: StepContext, span_index: int, first: int, last: int) -> torch.Tensor:
        """[packed rows, keys] of 0 and -inf, added to the scores; made once a step for all layers of one window."""
        key = (span_index, first, self.window)
        made = context.masks.get(key)
        if made is None:
            device = context.slots.device
            queries = torch.arange(first, last, device=device).unsqueeze(1)
            keys = torch.arange((first // TILE + 1) * TILE, device=device).unsqueeze(0)
            hidden = keys > queries
            if self.window is not None:
                hidden |= keys <= queries - self.window
            hidden = hidden.repeat(self.group, 1)
            hidden = pad(hidden, (0, 0, 0, -hidden.shape[0] % HEAD_ROWS))
            made = torch.zeros(hidden.shape, dtype=context.kv.pool.dtype, device=device).masked_fill_(
                hidden, -torch.inf
            )
            context.masks[key] = made
        return made
