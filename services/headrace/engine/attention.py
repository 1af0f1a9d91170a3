"""Attention over the paged KV pool, as one function that transformers' model code calls in place of its own.

This file owns the arithmetic of attention and the rules that make its bits independent of chunking and batch:

- one sequence per matrix product; its queries are cut on an absolute grid of `TILE` positions, and the keys of a tile
  always reach to the end of that tile, the tail masked. (The number of keys changes the bits of a row even under a
  mask, so a row must see the same number whoever computes it.)
- the query heads that share a KV head are the rows of one matrix, padded to a multiple of `HEAD_ROWS`.
- keys and values behind the sequence's end are zeroed in the gathered copy: whatever a block held before (also a
  payload that failed its checksum) must not reach a product, since 0 x NaN is NaN.

It knows nothing of models, schedulers or who owns a block. The step's context travels by a contextvar, because some
models drop unknown keyword arguments on the way to the attention function.
"""

from collections.abc import Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import AttentionInterface

from headrace.engine.paged_kv import PagedKV

TILE = 128  # positions; the grid of the exactness rule
HEAD_ROWS = 4  # rows of a query matrix are padded to a multiple of this

ATTENTION_NAME = "headrace_paged"


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """One sequence's part of a step: rows [row, row + num_rows) of the flattened batch are its positions from `start`."""

    row: int
    num_rows: int
    start: int
    block_table: torch.Tensor  # [blocks] int64, covers at least the end of the last tile (padded with any block id)

    @property
    def end(self) -> int:
        """First position behind the sequence."""
        return self.start + self.num_rows


@dataclass(slots=True)
class StepContext:
    """What one forward pass needs to find its KV: valid for that pass only."""

    kv: PagedKV
    spans: Sequence[SequenceSpan]
    slots: torch.Tensor  # [real rows] int64: block_id * block_tokens + offset of each row
    masks: dict[tuple[int, int, int | None], torch.Tensor] = field(default_factory=dict)


@dataclass(slots=True)
class ShapeProbe:
    """Collects, in place of attention, what each layer's K and V look like."""

    shapes: dict[int, tuple[int, int, int]] = field(default_factory=dict)  # layer -> (kv heads, key dim, value dim)
    windows: dict[int, int | None] = field(default_factory=dict)
    causal: bool = True


step_context: ContextVar[StepContext | ShapeProbe] = ContextVar("headrace_step_context")


def register_attention() -> None:
    """Make `attn_implementation="headrace_paged"` known to transformers. Idempotent.

    The name is in no mask registry on purpose: models then build no mask and this function owns causality.
    """
    AttentionInterface.register(ATTENTION_NAME, paged_attention)


def paged_attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Store the rows' K and V in the pool, then attend over each sequence's blocks.

    query [1, heads, rows, head_dim], key and value [1, kv_heads, rows, head_dim]; rows beyond the context's real ones
    are padding: they are stored nowhere and come out zero. Returns ([1, rows, heads, head_dim], None).
    softcap: scores become softcap * tanh(scores / softcap). s_aux: one sink logit for each head.
    """
    context = step_context.get()
    layer = module.layer_idx
    if isinstance(context, ShapeProbe):
        context.shapes[layer] = (key.shape[1], key.shape[3], value.shape[3])
        context.windows[layer] = sliding_window
        context.causal &= getattr(module, "is_causal", True)
        return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3])), None
    keys, values = context.kv.pool[layer]  # each [kv_heads, blocks, block_tokens, head_dim]
    num_rows = len(context.slots)
    keys.flatten(1, 2)[:, context.slots] = key[0, :, :num_rows]
    values.flatten(1, 2)[:, context.slots] = value[0, :, :num_rows]
    scale = scaling if scaling is not None else query.shape[3] ** -0.5
    kv_heads, head_dim = keys.shape[0], keys.shape[3]
    group = query.shape[1] // kv_heads
    output = query.new_zeros((query.shape[2], query.shape[1], head_dim))
    for index, span in enumerate(context.spans):
        gathered = [t.index_select(1, span.block_table).flatten(1, 2) for t in (keys, values)]
        for t in gathered:
            t[:, span.end :] = 0
        for tile_start in range(span.start // TILE * TILE, span.end, TILE):
            first, last = max(span.start, tile_start), min(span.end, tile_start + TILE)
            rows = slice(span.row + first - span.start, span.row + last - span.start)
            tile_end = tile_start + TILE
            # [kv_heads, group * tile rows, head_dim]
            packed = query[0, :, rows].reshape(kv_heads, group * (last - first), head_dim)
            padding = -packed.shape[1] % HEAD_ROWS
            if padding:
                packed = torch.nn.functional.pad(packed, (0, 0, 0, padding))
            scores = torch.matmul(packed, gathered[0][:, :tile_end].transpose(1, 2)) * scale
            if softcap is not None:
                scores = torch.tanh(scores / softcap) * softcap
            mask_key = (index, tile_start, sliding_window)
            mask = context.masks.get(mask_key)
            if mask is None:
                mask = _tile_mask(first, last, tile_end, sliding_window, device=scores.device)
                mask = mask.repeat(group, 1)
                mask = torch.nn.functional.pad(mask, (0, 0, 0, padding))
                context.masks[mask_key] = mask
            scores = scores.masked_fill(mask, -torch.inf)
            if s_aux is not None:
                sinks = s_aux.reshape(kv_heads, group, 1, 1).expand(-1, -1, last - first, 1).reshape(kv_heads, -1, 1)
                sinks = torch.nn.functional.pad(sinks, (0, 0, 0, padding))
                combined = torch.cat([scores, sinks.to(scores.dtype)], dim=-1)
                weights = torch.softmax(combined, dim=-1, dtype=torch.float32)[..., :-1].to(query.dtype)
            else:
                weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(query.dtype)
            attended = torch.matmul(weights, gathered[1][:, :tile_end])
            # [kv_heads, group, tile rows, head_dim] -> [tile rows, heads, head_dim]
            attended = attended[:, : group * (last - first)].reshape(-1, last - first, head_dim)
            output[rows] = attended.transpose(0, 1)
    return output.unsqueeze(0), None


def _tile_mask(
    first: int, last: int, tile_end: int, sliding_window: int | None, *, device: torch.device
) -> torch.Tensor:
    """[last - first, tile_end] bool: True where the query at a position must not see the key."""
    queries = torch.arange(first, last, device=device).unsqueeze(1)
    keys = torch.arange(tile_end, device=device).unsqueeze(0)
    hidden = keys > queries
    if sliding_window is not None:
        hidden |= keys <= queries - sliding_window
    return hidden
