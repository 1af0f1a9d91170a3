"""Attention over pages where they lie, by torch's FlexAttention. Made for CUDA; promises no bits.

This file owns how a step becomes calls of FlexAttention. Sequences with few rows each go together, those with many one
by one; a group is one call a layer, whose keys are the whole pool. Its block mask, made once a step for the layers of
one window, lists the pages that each sequence reads, and tells the position that a slot has in that sequence.

- A compiled kernel is of one shape. So sequences and rows are padded to a few numbers, which `call_shapes` lists:
  `choose_attention.py` has all of them compiled before a worker serves. What is padded is computed and not looked at.
- Pages that no mask lists are not read. Of a sequence's last page the kernel also reads the slots behind its end, with
  a weight of 0; since 0 x NaN is NaN, those are zeroed in the pool first, whatever the block held before.
- Without a compiler torch multiplies with every key that it is given. So there the group's pages are copied together
  first, and what is not finite in one sequence reaches the others of its group. That is how a CPU shows what comes out;
  it is slower than `attention.py`.
- A sink is one more logit in the softmax of a head: what comes without it, times sigmoid(log of the sum - sink).

It knows nothing of models, of who owns a block, or of when this attention is chosen.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import torch
from torch.nn.attention import flex_attention as flex
from torch.nn.attention.flex_attention import AuxRequest, BlockMask

from headrace.engine.attention import LayerRule, SequenceSpan, StepContext, first_visible
from headrace.engine.send_numbers import Numbers, send_numbers

# Rows of one tile of a block mask: torch's own choice, which the blocks of its kernels divide.
TILE_ROWS = 128

# Sequences of 2 to so many rows (drafts, short rests of prompts) go together, padded to so many: a kernel's products
# have at least 16 rows anyway. One row each is a case of its own, for which torch has another kernel.
FEW_ROWS = 16

# Sequences of one call, at most: 64 x 16 rows fill any device, and their tables of positions stay small.
GROUP_SEQUENCES_MAX = 64

# Most kernels that are ever compiled: 12 shapes by default, for each kind of layer. Torch would stop at 8.
KERNELS_MAX = 256

# The position of what is not of a sequence: behind everything.
NOWHERE = 1 << 30


Pages = np.ndarray[Any, np.dtype[np.int64]]


@dataclass(frozen=True, slots=True)
class MaskShape:
    """What a kernel is compiled for, as far as the mask goes."""

    sequences: int
    num_rows: int  # of each
    num_pages: int  # that there are, whoever reads them
    block_tokens: int

    @property
    def num_tiles(self) -> int:
        """Of the rows of a sequence."""
        return -(-self.num_rows // TILE_ROWS)


@dataclass(frozen=True, slots=True)
class Group:
    """Sequences of one call. Made once a step for each window."""

    rows: slice  # of the flattened batch
    sequences: int  # with padding
    taken: torch.Tensor  # [sequences * rows of each]: which row of the flattened batch; 0 for padding
    places: torch.Tensor  # [real rows]: where those are among them
    pages: torch.Tensor | None  # ids of the blocks that are copied together; None: all where they lie
    mask: BlockMask
    kernel: Any  # torch's FlexKernelOptions


@dataclass(frozen=True, slots=True)
class FlexPlan:
    """A step as the layers of one window see it."""

    groups: tuple[Group, ...]
    blank: torch.Tensor  # slots behind the sequences' ends, in their last blocks
    output: torch.Tensor  # [rows, heads * head_dim], zero in rows that are padding; each layer overwrites it


class FlexAttention:
    """An `Attention` over raw pools."""

    def __init__(self, *, compiled: bool, compiler: str = "inductor") -> None:
        """compiled: torch.compile makes a kernel of each shape, when it comes first, by its backend `compiler`. Else
        plain operators."""
        self.compiled = compiled
        self._call: Any = flex.flex_attention
        if compiled:
            # Not by torch's configuration: that is each thread's own, and a step's thread is none that loads models.
            compile_call: Any = torch.compile  # whose types do not know of limits
            self._call = compile_call(
                flex.flex_attention, backend=compiler, dynamic=False, fullgraph=True, recompile_limit=KERNELS_MAX
            )
        else:
            # Plain operators at once: else torch traces each call anew, to the same end.
            flex._FLEX_ATTENTION_DISABLE_COMPILE_DEBUG = True

    def __call__(self, context: StepContext, layer: int, query: torch.Tensor, rule: LayerRule) -> torch.Tensor:
        """As `Attention` says."""
        plan: FlexPlan | None = context.plans.get(rule.window)
        if plan is None:
            plan = context.plans[rule.window] = _plan_step(context, query, rule.window, in_place=self.compiled)
        context.kv.blank_slots(layer, plan.blank)
        for group in plan.groups:
            attended = self._attend(context, layer, group, query, rule)  # [sequences, heads, rows, head_dim]
            by_row = attended.transpose(1, 2).flatten(0, 1).flatten(1)
            torch.index_select(by_row, 0, group.places, out=plan.output[group.rows])
        return plan.output

    def _attend(
        self, context: StepContext, layer: int, group: Group, query: torch.Tensor, rule: LayerRule
    ) -> torch.Tensor:
        keys, values = context.kv.in_place(layer)
        if group.pages is not None:
            keys, values = (_together(each, group.pages, context.kv.num_blocks) for each in (keys, values))
        attended = self._call(
            query.index_select(0, group.taken).unflatten(0, (group.sequences, -1)).transpose(1, 2),
            keys,
            values,
            score_mod=None if rule.softcap is None else _capped(rule.softcap),
            block_mask=group.mask,
            scale=rule.scale,
            enable_gqa=True,
            kernel_options=group.kernel,
            return_aux=None if rule.sinks is None else AuxRequest(lse=True),
        )
        if rule.sinks is None:
            return attended
        attended, aux = attended
        share = torch.sigmoid(aux.lse - rule.sinks.float().view(1, -1, 1)).unsqueeze(-1)
        return (attended * share).to(query.dtype)


def call_shapes(sequences_max: int, rows_max: int) -> list[tuple[int, int]]:
    """(sequences, rows of each) of every call, for steps of so many sequences with so many rows each, at most."""
    shapes = []
    for num_rows in sorted({padded_rows(num_rows) for num_rows in range(1, rows_max + 1)}):
        most = min(sequences_max, GROUP_SEQUENCES_MAX) if num_rows <= FEW_ROWS else 1
        shapes += [(count, num_rows) for count in sorted({_power_of_two(each) for each in range(1, most + 1)})]
    return shapes


def padded_rows(num_rows: int) -> int:
    """Rows of a sequence's part of a call, with padding."""
    if num_rows <= FEW_ROWS:
        return 1 if num_rows == 1 else FEW_ROWS
    return TILE_ROWS * _power_of_two(-(-num_rows // TILE_ROWS))


def _power_of_two(count: int) -> int:
    """The first that is not less."""
    return 1 << (count - 1).bit_length()


def _plan_step(context: StepContext, query: torch.Tensor, window: int | None, *, in_place: bool) -> FlexPlan:
    block_tokens = context.kv.layout.block_tokens
    behind: list[int] = []
    for span in context.spans:
        page, used = divmod(span.end, block_tokens)
        if used:
            behind += range(span.pages[page] * block_tokens + used, (span.pages[page] + 1) * block_tokens)
    (blank,) = send_numbers([behind], context.slots.device)
    return FlexPlan(
        groups=tuple(_plan_group(context, query, spans, window, in_place=in_place) for spans in _groups(context.spans)),
        blank=blank,
        output=query.new_zeros((query.shape[0], query.shape[1] * query.shape[2])),
    )


def _groups(spans: Sequence[SequenceSpan]) -> Iterator[list[SequenceSpan]]:
    """The spans in order: neighbours with the same padded number of few rows together."""
    group: list[SequenceSpan] = []
    for span in spans:
        num_rows = padded_rows(span.num_rows)
        full = len(group) == (GROUP_SEQUENCES_MAX if num_rows <= FEW_ROWS else 1)
        if group and (full or padded_rows(group[0].num_rows) != num_rows):
            yield group
            group = []
        group.append(span)
    yield group


def _plan_group(
    context: StepContext, query: torch.Tensor, spans: Sequence[SequenceSpan], window: int | None, *, in_place: bool
) -> Group:
    sequences, num_rows = _power_of_two(len(spans)), padded_rows(spans[0].num_rows)
    first_row, device = spans[0].row, context.slots.device
    taken = np.zeros((sequences, num_rows), dtype=np.int64)
    for which, span in enumerate(spans):
        taken[which, : span.num_rows] = range(span.row, span.row + span.num_rows)
    places = [which * num_rows + row for which, span in enumerate(spans) for row in range(span.num_rows)]
    tables = [_pages(context, span, window) for span in spans]
    pages, num_pages = np.arange(0), context.kv.num_blocks
    if not in_place:
        pages = np.unique(np.concatenate(tables))
        num_pages, tables = len(pages), [np.searchsorted(pages, table) for table in tables]
    shape = MaskShape(sequences, num_rows, num_pages, context.kv.layout.block_tokens)
    taken_there, places_there, pages_there, *listed_there = send_numbers(
        [taken.ravel(), places, pages, *_list_pages(spans, tables, window, shape)], device
    )
    return Group(
        rows=slice(first_row, first_row + len(places)),
        sequences=sequences,
        taken=taken_there,
        places=places_there,
        pages=None if in_place else pages_there,
        mask=_mask(listed_there, window, shape),
        kernel=_kernel_options(context, query, num_rows) if device.type == "cuda" else None,
    )


def _kernel_options(context: StepContext, query: torch.Tensor, num_rows: int) -> dict[str, Any]:
    """Sizes of what a kernel multiplies at once, which must divide a page and a tile: torch's own, which are chosen by
    device, need not. Its kernel for few rows takes all query heads of a KV head as one tile."""
    layout, heads = context.kv.layout, query.shape[1]
    side = 64 if layout.head_dim * query.element_size() <= 256 else 32  # for 100 KiB of memory on the chip
    options: dict[str, Any] = {"BLOCK_N": min(side, layout.block_tokens)}
    group = heads // layout.num_kv_heads
    if group != _power_of_two(group) or num_rows * group > TILE_ROWS:
        options |= {"BACKEND": "TRITON", "BLOCK_M": side}
    return options


def _list_pages(
    spans: Sequence[SequenceSpan], tables: Sequence[Pages], window: int | None, shape: MaskShape
) -> list[Numbers]:
    """Which pages each sequence reads, tile by tile of its rows, as `_mask` wants them. tables: places of the pages
    that the sequences read, in order of position, among all that there are."""
    starts = np.zeros(shape.sequences, dtype=np.int64)
    counts = np.zeros(shape.sequences * shape.num_tiles, dtype=np.int64)
    known_at, known, listed_at, listed = (list[Pages]() for _ in range(4))
    for which, (span, table) in enumerate(zip(spans, tables, strict=True)):
        assert span.first_key <= first_visible(span.start, window), "a key that this layer sees is not there"
        first_page = first_visible(span.start, window) // shape.block_tokens
        starts[which] = span.start
        known_at.append(which * shape.num_pages + table)
        known.append(np.arange(first_page, first_page + len(table)) * shape.block_tokens)
        for tile, start in enumerate(range(span.start, span.end, TILE_ROWS), start=which * shape.num_tiles):
            end = min(start + TILE_ROWS, span.end)
            first_seen = first_visible(start, window) // shape.block_tokens
            seen = table[first_seen - first_page : -(-end // shape.block_tokens) - first_page]
            counts[tile] = len(seen)
            listed_at.append(tile * shape.num_pages + np.arange(len(seen)))
            listed.append(seen)
    return [starts, counts, *(np.concatenate(each) for each in (known_at, known, listed_at, listed))]


def _mask(numbers: Sequence[torch.Tensor], window: int | None, shape: MaskShape) -> BlockMask:
    """Made on the device out of what `_list_pages` lists: with every page of a large pool, it would be megabytes."""
    starts, counts, known_at, known, listed_at, listed = numbers
    tiles = shape.sequences * shape.num_tiles
    # Of each page's first slot, in each sequence.
    positions = torch.full((shape.sequences * shape.num_pages,), NOWHERE, dtype=torch.int32, device=starts.device)
    pages = torch.zeros(tiles * shape.num_pages, dtype=torch.int32, device=starts.device)
    return BlockMask.from_kv_blocks(
        counts.int().view(shape.sequences, 1, shape.num_tiles),
        pages.index_copy_(0, listed_at, listed.int()).view(shape.sequences, 1, shape.num_tiles, shape.num_pages),
        BLOCK_SIZE=(TILE_ROWS, shape.block_tokens),
        mask_mod=_visible(
            positions.index_copy_(0, known_at, known.int()).view(shape.sequences, shape.num_pages),
            starts.int(),
            block_tokens=shape.block_tokens,
            window=window,
        ),
        seq_lengths=(shape.num_rows, shape.num_pages * shape.block_tokens),
        compute_q_blocks=False,  # for gradients
    )


def _pages(context: StepContext, span: SequenceSpan, window: int | None) -> Pages:
    """Ids of the blocks that a sequence's rows read in layers of this window, in order of position."""
    block_tokens = context.kv.layout.block_tokens
    first_page = first_visible(span.start, window) // block_tokens
    return np.asarray(span.pages[first_page : -(-span.end // block_tokens)], dtype=np.int64)


def _visible(positions: torch.Tensor, starts: torch.Tensor, *, block_tokens: int, window: int | None) -> Any:
    """A mask_mod: whether a row of a sequence sees a slot of the pages."""

    def visible(sequence: torch.Tensor, head: torch.Tensor, row: torch.Tensor, slot: torch.Tensor) -> torch.Tensor:
        key = positions[sequence, slot // block_tokens] + slot % block_tokens
        query = starts[sequence] + row
        return key <= query if window is None else (key <= query) & (key > query - window)

    return visible


@cache
def _capped(softcap: float) -> Any:
    """A score_mod. One for all calls, so that compiled code knows it."""

    def capped(
        score: torch.Tensor, sequence: torch.Tensor, head: torch.Tensor, row: torch.Tensor, slot: torch.Tensor
    ) -> torch.Tensor:
        return softcap * torch.tanh(score / softcap)

    return capped


def _together(all_blocks: torch.Tensor, pages: torch.Tensor, num_blocks: int) -> torch.Tensor:
    """Some of the blocks, copied side by side: [1, kv_heads, slots, head_dim] again."""
    return all_blocks.unflatten(2, (num_blocks, -1)).index_select(2, pages).flatten(2, 3)
