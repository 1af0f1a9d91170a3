"""Attention over the paged KV pool, as one function that transformers' model code calls in place of its own.

This file owns the arithmetic of attention and the rules that make a row's bits independent of chunking and batch:

- Each sequence has matrix products of its own. Its queries are cut on an absolute grid of `TILE` positions, and the
  keys of a tile always reach to the end of that tile, the tail masked: the number of keys changes the bits of a row
  even under a mask, so a row must see the same number whoever computes it. Sequences that have equally many rows of
  the same tile (those that decode, mostly) go as one batch of products, which changes no bits.
- Where a layer has a window, the keys of a tile begin at the grid at or before the first one that the tile's first
  position sees. That too is the tile's, not the row's: the same keys whoever computes a row.
- The query heads that share a KV head are the rows of one matrix, padded to a multiple of `HEAD_ROWS`. How many such
  rows one product takes is then free, since each row's bits do not depend on the others.
- Keys and values behind the sequence's end, and before the first that is there, are zeroed in the gathered copy.
  Whatever a block held before (a payload that failed its checksum, say) must not reach a product, since 0 x NaN is NaN.

Most of a small step's time is the cost of calling operators. So what does not depend on the layer (masks, indices,
buffers and the views of them) is made once a step, in a plan, and a layer is a few operators over it.

A step's context says who attends once its rows are stored: `attend_gathered`, which is this file's arithmetic, or
`flex_attention.py`, which promises no bits.

It knows nothing of models, schedulers or who owns a block. The step's context travels by a contextvar, because some
models drop unknown keyword arguments on the way to the attention function.
"""

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.nn.functional import pad
from transformers import AttentionInterface

from headrace.engine.pad_rows import pad_rows
from headrace.engine.paged_kv import PagedKV

ATTENTION_NAME = "headrace_paged"

TILE = 128  # positions; changing it changes bits, so the numerics probe keeps old and new workers apart

# Scores of one product, all heads together: 4 M elements are 8 MiB in bfloat16, which a large cache holds and which
# keeps a tile of a 9-head model whole up to a context of 3,600.
SCORES_ELEMENTS_MAX = 4 * 1024 * 1024

# K and V that are gathered for one batch of sequences: 2 M elements are 4 MiB in bfloat16. They are read again at once,
# so they should stay in a cache; more sequences in a batch are fewer operators.
GATHERED_ELEMENTS_MAX = 2 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SequenceSpan:
    """One sequence's part of a step: `num_rows` rows of the batch from `row` on are its positions from `start` on."""

    row: int
    num_rows: int
    start: int
    pages: Sequence[int]  # ids of its blocks; covers the last tile's end, filled up with any valid id
    block_table: torch.Tensor  # the same where the pool is, [blocks] int64
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
        numel = math.prod(shape)
        buffer = self._buffers.get(name)
        if buffer is None or buffer.numel() < numel or buffer.dtype != like.dtype:
            buffer = self._buffers[name] = torch.empty(numel, dtype=like.dtype, device=like.device)
        return buffer[:numel].view(shape)


@dataclass(frozen=True, slots=True)
class LayerRule:
    """How one layer attends. softcap: scores become softcap * tanh(scores / softcap). sinks: one logit a head."""

    scale: float
    window: int | None = None
    softcap: float | None = None
    sinks: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class GatheredKeys:
    """Where K and V of a batch of sequences of one layer are copied to. Made once a step, filled once a layer.

    K and V are copied one after the other, since an operator gives each of its threads one stretch of its rows: the
    thread that copies a head's keys is then the one that multiplies them. Copied at once, one thread would copy all
    keys and the other all values, and every product would wait for the other core's cache; where two cores share
    none, that took as long as the rest of the step.
    """

    rows: torch.Tensor  # [2, n] of the pool, as `PagedKV.gather` wants them
    copied: torch.Tensor  # scratch, [2, n, block_tokens * head_dim]
    blanks: tuple[torch.Tensor, ...]  # views of it: behind a sequence's end, and before the first key that is there
    # Views of it to be copied once more, where the grid is no multiple of the block: alignment may change bits.
    realigned: tuple[torch.Tensor, torch.Tensor] | None
    keys: torch.Tensor  # [2, sequences * kv_heads, keys, head_dim], from the grid on

    def fill(self, kv: PagedKV, layer: int) -> None:
        """Copy from the pool."""
        for rows, copied in zip(self.rows, self.copied, strict=True):
            kv.gather(layer, rows, copied)
        for blank in self.blanks:
            blank.zero_()
        if self.realigned is not None:
            self.realigned[0].copy_(self.realigned[1])


@dataclass(frozen=True, slots=True)
class Piece:
    """As many rows of each of a batch of sequences, inside one tile: two matrix products a layer. Made once a step.

    `packed rows` are rows x query heads of one KV head, padded (`pad_rows.py`).
    """

    gathered: GatheredKeys
    rows: slice  # of the flattened batch, sequence by sequence
    queries: torch.Tensor  # view of `packed`: [sequences, rows, kv_heads, group, head_dim]
    packed: torch.Tensor  # [sequences * kv_heads, packed rows, head_dim], zero in the padding
    keys: torch.Tensor  # of the gathered: [sequences * kv_heads, head_dim, keys]
    values: torch.Tensor  # of the gathered: [sequences * kv_heads, keys, head_dim]
    scores: torch.Tensor  # scratch, [sequences * kv_heads, packed rows, keys]
    weights: torch.Tensor  # scratch, same shape
    hideable: torch.Tensor  # view of scores: [sequences, kv_heads, packed rows, those keys that a row may not see]
    mask: torch.Tensor  # [sequences, 1, packed rows, those keys] of 0 and -inf, added to them
    attended: torch.Tensor  # scratch, [sequences * kv_heads, packed rows, head_dim]
    results: torch.Tensor  # view of it, shaped as queries
    output: torch.Tensor  # view of the plan's output, shaped as queries


@dataclass(frozen=True, slots=True)
class Plan:
    """A step as the layers of one window see it."""

    pieces: tuple[Piece, ...]
    output: torch.Tensor  # [rows, heads * head_dim], zero in rows that are padding; each layer overwrites it


@dataclass(slots=True)
class StepContext:
    """What one forward pass needs to find its KV; valid for that pass only.

    Spans that have equally many rows of one tile, side by side, are computed as one batch.
    """

    kv: PagedKV
    spans: Sequence[SequenceSpan]
    slots: torch.Tensor  # [real rows] int64: block_id * block_tokens + offset of each row
    positions: torch.Tensor  # [rows] int64, padding among them: of each row in its sequence
    scratch: Scratch
    attention: "Attention"
    plans: dict[int | None, Any] = field(default_factory=dict)  # by window: what `attention` makes of the step
    # Where layers with a window have a pool of their own: the same rows over that one, and each layer's place in its.
    near: "StepContext | None" = None
    place_of: Mapping[int, int] = field(default_factory=dict)

    def of_layer(self, layer: int, rule: LayerRule) -> "tuple[StepContext, int]":
        """The context of the pool that has this layer of the model, and which of its layers it is."""
        if self.near is None:
            return self, layer
        return (self if rule.window is None else self.near), self.place_of[layer]


# Rows of a step over the pages of their sequences, once their K and V are in the pool: the context, which of the layers
# of its pool, query [rows, heads, head_dim] and the layer's rule. Gives what `attend` gives.
Attention = Callable[[StepContext, int, torch.Tensor, LayerRule], torch.Tensor]


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
    """`attend`, as transformers calls it.

    query [1, heads, rows, head_dim]; key, value [1, kv_heads, rows, head_dim]. Gives [1, rows, heads, head_dim], None.
    """
    scale = scaling if scaling is not None else query.shape[3] ** -0.5
    rule = LayerRule(scale=scale, window=sliding_window, softcap=softcap, sinks=s_aux)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    context = _context.get()
    if isinstance(context, ShapeProbe):
        context.causal &= bool(getattr(module, "is_causal", True))
        context.shapes[layer] = (key.shape[1], key.shape[3], value.shape[3])
        context.windows[layer] = rule.window
        return query.new_zeros((1, query.shape[2], query.shape[1], value.shape[3])), None
    keys_values = torch.cat((key[0], value[0])).transpose(0, 1)
    attended = attend(layer, query[0].transpose(0, 1), keys_values, rule)
    return attended.view(1, query.shape[2], query.shape[1], -1), None


def attend(layer: int, query: torch.Tensor, keys_values: torch.Tensor, rule: LayerRule) -> torch.Tensor:
    """Store the rows' K and V in the pool, then attend over each sequence's blocks.

    query [rows, heads, head_dim]; keys_values [rows, 2 * kv_heads, head_dim], all heads of K first. Returns
    [rows, heads * head_dim], valid until the next layer's call. Rows behind the context's real ones are padding: stored
    nowhere, and zero in the result.
    """
    context = _context.get()
    if isinstance(context, ShapeProbe):
        context.shapes[layer] = (keys_values.shape[1] // 2, keys_values.shape[2], keys_values.shape[2])
        context.windows[layer] = rule.window
        return query.new_zeros((query.shape[0], query.shape[1] * query.shape[2]))
    context, layer = context.of_layer(layer, rule)
    context.kv.write_rows(layer, context.slots, keys_values[: context.slots.shape[0]].transpose(0, 1))
    return context.attention(context, layer, query, rule)


def attend_gathered(context: StepContext, layer: int, query: torch.Tensor, rule: LayerRule) -> torch.Tensor:
    """An `Attention`: each sequence's K and V are gathered, and have matrix products of their own. The exact one."""
    plan: Plan | None = context.plans.get(rule.window)
    if plan is None:
        plan = context.plans[rule.window] = _plan_step(context, query, rule.window)
    gathered = None
    for piece in plan.pieces:
        if piece.gathered is not gathered:
            gathered = piece.gathered
            gathered.fill(context.kv, layer)
        torch.mul(query[piece.rows].view(piece.queries.shape), rule.scale, out=piece.queries)
        torch.bmm(piece.packed, piece.keys, out=piece.scores)
        if rule.softcap is not None:
            piece.scores.div_(rule.softcap).tanh_().mul_(rule.softcap)
        piece.hideable.add_(piece.mask)
        _weigh(piece, rule.sinks)
        torch.bmm(piece.weights, piece.values, out=piece.attended)
        piece.output.copy_(piece.results)
    return plan.output


def _weigh(piece: Piece, sinks: torch.Tensor | None) -> None:
    """piece.weights = softmax of the scores, with one more column for the sink where a head has one."""
    if sinks is None:
        torch.softmax(piece.scores, dim=-1, out=piece.weights)
        return
    sequences, num_rows, kv_heads, group, _ = piece.queries.shape
    sink = sinks.to(piece.scores.dtype).view(kv_heads, group).repeat(sequences, num_rows)
    sink = pad(sink, (0, piece.scores.shape[1] - sink.shape[1])).unsqueeze(2)
    piece.weights.copy_(torch.softmax(torch.cat((piece.scores, sink), dim=-1), dim=-1)[..., :-1])


def _plan_step(context: StepContext, query: torch.Tensor, window: int | None) -> Plan:
    """Cut every span on the tile grid, and further where a product would have too many scores."""
    heads, head_dim = query.shape[1:]
    layout = context.kv.layout
    output = torch.zeros((query.shape[0], heads * head_dim), dtype=query.dtype, device=query.device)
    by_head = output.view(-1, layout.num_kv_heads, heads // layout.num_kv_heads, head_dim)
    pieces = []
    for spans in _batches(context, heads, window):
        assert spans[0].first_key <= first_visible(spans[0].start, window), "a key that this layer sees is not there"
        gathered = _plan_gather(context, spans, window, like=output)
        done, num_rows = 0, spans[0].num_rows
        while done < num_rows:
            start = spans[0].start + done
            keys = tile_keys(start, window)
            rows_max = SCORES_ELEMENTS_MAX // (heads * (keys.stop - keys.start))
            now = min(num_rows - done, keys.stop - start, max(1, rows_max)) if len(spans) == 1 else num_rows
            pieces.append(_plan_piece(context, spans, range(done, done + now), gathered, window, by_head))
            done += now
    return Plan(tuple(pieces), output)


def _batches(context: StepContext, heads: int, window: int | None) -> Iterator[list[SequenceSpan]]:
    """The spans in order: neighbours with equally many rows of the same tile together, as many as are read at once."""
    batch: list[SequenceSpan] = []
    for span in context.spans:
        if batch and not (_alike(batch[0], span) and len(batch) < _sequences_max(context, span, heads, window)):
            yield batch
            batch = []
        batch.append(span)
    yield batch


def _alike(one: SequenceSpan, other: SequenceSpan) -> bool:
    tile = one.start // TILE
    in_tile = all(span.start // TILE == (span.end - 1) // TILE == tile for span in (one, other))
    return in_tile and one.num_rows == other.num_rows and one.first_key == other.first_key


def _sequences_max(context: StepContext, span: SequenceSpan, heads: int, window: int | None) -> int:
    keys, layout = tile_keys(span.start, window), context.kv.layout
    num_keys = keys.stop - keys.start
    return min(
        GATHERED_ELEMENTS_MAX // (2 * layout.num_kv_heads * layout.head_dim * num_keys),
        SCORES_ELEMENTS_MAX // (heads * span.num_rows * num_keys),
    )


def _plan_gather(
    context: StepContext, spans: Sequence[SequenceSpan], window: int | None, *, like: torch.Tensor
) -> GatheredKeys:
    """For all keys that the spans' pieces have. One batch's blocks lie side by side, K before V."""
    layout, kv = context.kv.layout, context.kv
    first_key = tile_keys(spans[0].start, window).start
    stop_key = tile_keys(spans[0].end - 1, window).stop
    first_block, offset = divmod(first_key, layout.block_tokens)
    tables = torch.stack([span.block_table[first_block:] for span in spans])  # [sequences, blocks]
    rows = kv.rows_of(tables)  # [2, sequences, kv_heads, blocks]
    copied = context.scratch.take("gathered", (2, rows[0].numel(), layout.block_tokens * layout.head_dim), like)
    # [2, sequences, kv_heads, keys from the first block on, head_dim]
    by_sequence = copied.view(*rows.shape[:3], -1, layout.head_dim)
    blanks = []
    for which, span in enumerate(spans):
        if span.end < first_block * layout.block_tokens + by_sequence.shape[3]:
            blanks.append(by_sequence[:, which, :, span.end - first_block * layout.block_tokens :])
        if span.first_key > first_key:
            blanks.append(by_sequence[:, which, :, : span.first_key - first_block * layout.block_tokens])
    keys = by_sequence[:, :, :, offset : offset + stop_key - first_key]
    realigned = None
    if offset:
        aligned = context.scratch.take("realigned", tuple(keys.shape), like)
        realigned = (aligned, keys)
        keys = aligned
    return GatheredKeys(rows.flatten(1), copied, tuple(blanks), realigned, keys.flatten(1, 2))


def _plan_piece(
    context: StepContext,
    spans: Sequence[SequenceSpan],
    part: range,
    gathered: GatheredKeys,
    window: int | None,
    output: torch.Tensor,
) -> Piece:
    """part: which rows of each span. output: [rows, kv_heads, group, head_dim]"""
    scratch = context.scratch
    _, kv_heads, group, head_dim = output.shape
    sequences, num_rows = len(spans), len(part)
    num_packed = pad_rows(num_rows * group)
    keys = tile_keys(spans[0].start + part.start, window)
    first = keys.start - tile_keys(spans[0].start, window).start
    found = gathered.keys[:, :, first : first + keys.stop - keys.start]
    packed = torch.zeros((sequences * kv_heads, num_packed, head_dim), dtype=output.dtype, device=output.device)
    scores = scratch.take("scores", (sequences * kv_heads, num_packed, keys.stop - keys.start), output)
    attended = scratch.take("attended", tuple(packed.shape), output)
    # Without a window every key before the tile is seen by all of its rows.
    hideable_from = keys.stop - TILE if window is None else keys.start
    mask = _mask(context, spans, part, range(hideable_from, keys.stop), group=group, window=window)
    rows = slice(spans[0].row + part.start, spans[0].row + part.start + sequences * num_rows)

    def by_row(padded: torch.Tensor) -> torch.Tensor:
        real = padded.view(sequences, kv_heads, num_packed, head_dim)[:, :, : num_rows * group]
        return real.unflatten(2, (num_rows, group)).transpose(1, 2)

    return Piece(
        gathered=gathered,
        rows=rows,
        queries=by_row(packed),
        packed=packed,
        keys=found[0].transpose(1, 2),
        values=found[1],
        scores=scores,
        weights=scratch.take("weights", tuple(scores.shape), output),
        hideable=scores.view(sequences, kv_heads, num_packed, -1)[..., hideable_from - keys.start :],
        mask=mask,
        attended=attended,
        results=by_row(attended),
        output=output[rows].unflatten(0, (sequences, num_rows)),
    )


def first_visible(position: int, window: int | None) -> int:
    """The first position whose key a query at `position` sees; a window counts the query's own position."""
    return 0 if window is None else max(0, position - window + 1)


def tile_keys(position: int, window: int | None) -> slice:
    """Which keys the product of a query at `position` has, seen or masked: those of its tile, on the grid."""
    tile_start = position // TILE * TILE
    return slice(first_visible(tile_start, window) // TILE * TILE, tile_start + TILE)


def _mask(
    context: StepContext,
    spans: Sequence[SequenceSpan],
    part: range,
    keys: range,
    *,
    group: int,
    window: int | None,
) -> torch.Tensor:
    """[sequences, 1, rows * group, padded; keys]: 0 where a query may see a key, -inf where it may not."""
    device, num_rows = context.slots.device, spans[0].num_rows
    # [sequences, rows of each]: the spans lie side by side.
    queries = context.positions[spans[0].row :][: len(spans) * num_rows].view(len(spans), num_rows)
    queries = queries[:, part.start : part.stop].repeat_interleave(group, dim=1).unsqueeze(2)
    positions = torch.arange(keys.start, keys.stop, device=device)
    hidden = positions > queries
    if window is not None:
        hidden |= positions <= queries - window
    hidden = pad(hidden, (0, 0, 0, pad_rows(hidden.shape[1]) - hidden.shape[1])).unsqueeze(1)
    return torch.zeros(hidden.shape, dtype=context.kv.dtype, device=device).masked_fill_(hidden, -torch.inf)
