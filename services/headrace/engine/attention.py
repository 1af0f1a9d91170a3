"""Attention over the paged KV pool, as one function that transformers' model code calls in place of its own.

This file owns the arithmetic of attention and the rules that make a row's bits independent of chunking and batch:

- One sequence per matrix product. Its queries are cut on an absolute grid of `TILE` positions, and the keys of a tile
  always reach to the end of that tile, the tail masked: the number of keys changes the bits of a row even under a
  mask, so a row must see the same number whoever computes it.
- Where a layer has a window, the keys of a tile begin at the grid at or before the first one that the tile's first
  position sees. That too is the tile's, not the row's: the same keys whoever computes a row.
- The query heads that share a KV head are the rows of one matrix, padded to a multiple of `HEAD_ROWS`. How many such
  rows one product takes is then free, since each row's bits do not depend on the others.
- Keys and values behind the sequence's end, and before the first that is there, are zeroed in the gathered copy.
  Whatever a block held before (a payload that failed its checksum, say) must not reach a product, since 0 x NaN is NaN.

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
    """One sequence's part of a step: `num_rows` rows of the batch from `row` on are its positions from `start` on."""

    row: int
    num_rows: int
    start: int
    block_table: torch.Tensor  # [blocks] int64; covers the end of the last tile, filled up with any valid block id
    first_key: int = 0  # KV of earlier positions is not there (any valid block id is): no layer of the model sees it

    @property
    def end(self) -> int:
        """First position behind the sequence."""
        return self.start + self.num_rows


class Scratch:
    """Buffers that live from step to step: fresh ones of this size are mapped and zeroed by the kernel each time."""

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


@dataclass(frozen=True, slots=True)
class Piece:
    """Some rows of one span inside one tile: one set of matrix products a layer. Made once a step, for all layers."""

    span_index: int
    rows: slice  # of the flattened batch
    keys: slice  # of the sequence: from the grid on, to the end of the tile
    mask: torch.Tensor  # [packed rows, keys] of 0 and -inf, added to the scores
    scores: torch.Tensor  # scratch, [kv_heads, packed rows, keys]
    weights: torch.Tensor  # scratch, same shape


@dataclass(slots=True)
class StepContext:
    """What one forward pass needs to find its KV; valid for that pass only."""

    kv: PagedKV
    spans: Sequence[SequenceSpan]
    slots: torch.Tensor  # [real rows] int64: block_id * block_tokens + offset of each row
    scratch: Scratch
    pieces: dict[int | None, list[Piece]] = field(default_factory=dict)  # by window


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

    num_rows, kv_heads = context.slots.shape[0], key.shape[1]
    context.kv.write_rows(layer, context.slots, key[0, :, :num_rows], value[0, :, :num_rows])
    scale = scaling if scaling is not None else query.shape[3] ** -0.5
    pieces = context.pieces.get(sliding_window)
    if pieces is None:
        pieces = context.pieces[sliding_window] = _plan_pieces(context, query.shape[1], sliding_window)
    # [rows, kv_heads, group, head_dim]: the query heads of one KV head, side by side
    grouped = query[0].transpose(0, 1).unflatten(1, (kv_heads, -1))
    output = torch.zeros(grouped.shape, dtype=query.dtype, device=query.device)
    gathered_index = -1
    for piece in pieces:
        if piece.span_index != gathered_index:
            gathered_index = piece.span_index
            gathered = _gather(context.kv, layer, context.spans[gathered_index], piece.keys.start)
            first_key = piece.keys.start
        keys, values = gathered[:, :, piece.keys.start - first_key : piece.keys.stop - first_key]
        # [kv_heads, rows * group, head_dim], then padded to the mask's rows
        packed = grouped[piece.rows].transpose(0, 1).flatten(1, 2)
        num_packed = packed.shape[1]
        packed = pad(packed, (0, 0, 0, piece.mask.shape[0] - num_packed))
        _score(packed, keys, piece, scale=scale, softcap=softcap)
        _weigh(piece, sinks=s_aux, num_packed=num_packed)
        attended = torch.bmm(piece.weights, values)[:, :num_packed]
        output[piece.rows] = attended.unflatten(1, (-1, grouped.shape[2])).transpose(0, 1)
    return output.flatten(1, 2).unsqueeze(0), None


def _gather(kv: PagedKV, layer: int, span: SequenceSpan, first_key: int) -> torch.Tensor:
    """A copy of one sequence's K and V of one layer from position `first_key` on, [2, kv_heads, keys, head_dim]; zero
    behind the sequence's end and before the first key that is there."""
    first_block, offset = divmod(first_key, kv.layout.block_tokens)
    gathered = kv.gather(layer, span.block_table[first_block:])
    if offset:  # a block size that the grid is no multiple of; copied, since alignment may change bits
        gathered = gathered[:, :, offset:].contiguous()
    if span.end - first_key < gathered.shape[2]:
        gathered[:, :, span.end - first_key :] = 0
    if span.first_key > first_key:
        gathered[:, :, : span.first_key - first_key] = 0
    return gathered


def _score(packed: torch.Tensor, keys: torch.Tensor, piece: Piece, *, scale: float, softcap: float | None) -> None:
    """piece.scores = scaled, capped and masked products of packed [kv_heads, packed rows, head_dim] with the keys."""
    if softcap is None:
        torch.baddbmm(piece.mask, packed, keys.transpose(1, 2), alpha=scale, out=piece.scores)
        return
    torch.bmm(packed, keys.transpose(1, 2), out=piece.scores)
    piece.scores.mul_(scale / softcap).tanh_().mul_(softcap).add_(piece.mask)


def _weigh(piece: Piece, *, sinks: torch.Tensor | None, num_packed: int) -> None:
    """piece.weights = softmax of the scores, with one more column for the sink where a head has one."""
    if sinks is None:
        torch.softmax(piece.scores, dim=-1, out=piece.weights)
        return
    kv_heads, padded_rows, _ = piece.scores.shape
    group = sinks.shape[0] // kv_heads
    sink = sinks.to(piece.scores.dtype).view(kv_heads, group).repeat(1, num_packed // group)
    sink = pad(sink, (0, padded_rows - num_packed)).unsqueeze(2)
    piece.weights.copy_(torch.softmax(torch.cat((piece.scores, sink), dim=-1), dim=-1)[..., :-1])


def _plan_pieces(context: StepContext, heads: int, window: int | None) -> list[Piece]:
    """Cut every span on the tile grid, and further where a product would have too many scores."""
    kv_heads = context.kv.layout.num_kv_heads
    pieces = []
    for span_index, span in enumerate(context.spans):
        assert span.first_key <= first_visible(span.start, window), "a key that this layer sees is not there"
        first = span.start
        while first < span.end:
            keys = tile_keys(first, window)
            num_keys = keys.stop - keys.start
            last = min(span.end, keys.stop, first + max(1, SCORES_ELEMENTS_MAX // (heads * num_keys)))
            mask = _mask(context, range(first, last), keys, group=heads // kv_heads, window=window)
            shape = (kv_heads, *mask.shape)
            pieces.append(
                Piece(
                    span_index=span_index,
                    rows=slice(span.row + first - span.start, span.row + last - span.start),
                    keys=keys,
                    mask=mask,
                    scores=context.scratch.take("scores", shape, mask),
                    weights=context.scratch.take("weights", shape, mask),
                )
            )
            first = last
    return pieces


def first_visible(position: int, window: int | None) -> int:
    """The first position whose key a query at `position` sees; a window counts the query's own position."""
    return 0 if window is None else max(0, position - window + 1)


def tile_keys(position: int, window: int | None) -> slice:
    """Which keys the product of a query at `position` has, seen or masked: those of its tile, on the grid."""
    tile_start = position // TILE * TILE
    return slice(first_visible(tile_start, window) // TILE * TILE, tile_start + TILE)


def _mask(context: StepContext, rows: range, keys: slice, *, group: int, window: int | None) -> torch.Tensor:
    """[rows * group, padded; keys]: 0 where a query may see a key, -inf where it may not."""
    device = context.slots.device
    queries = torch.arange(rows.start, rows.stop, device=device).repeat_interleave(group).unsqueeze(1)
    positions = torch.arange(keys.start, keys.stop, device=device).unsqueeze(0)
    hidden = positions > queries
    if window is not None:
        hidden |= positions <= queries - window
    hidden = pad(hidden, (0, 0, 0, -hidden.shape[0] % HEAD_ROWS))
    return torch.zeros(hidden.shape, dtype=context.kv.dtype, device=device).masked_fill_(hidden, -torch.inf)
