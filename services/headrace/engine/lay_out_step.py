"""From the sequences of a step to the numbers that one call of the model takes: rows, positions, slots, block tables.

This file owns the order of the rows and the padding that exactness asks for. Everything that the device needs of a
step goes there in one copy. It knows nothing of models; the caller's block tables are trusted.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import torch

from headrace.engine.attention import TILE, Attention, Scratch, SequenceSpan, StepContext
from headrace.engine.layered_kv import LayeredKV, PoolKV
from headrace.engine.paged_kv import PagedKV
from headrace.engine.send_numbers import send_numbers


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """Some consecutive tokens of one sequence, to be computed in this step."""

    token_ids: tuple[int, ...]
    start: int  # absolute position of the first token; all earlier ones that a layer sees hold valid KV
    block_ids: Sequence[int]  # block table, from block `first_block` to the one of the last token (`core/part_ids.py`)
    num_logits: int  # of so many of the last tokens, logits are wanted; 0 for none
    first_block: int = 0  # earlier blocks are not there, since every layer's window has passed them

    @property
    def end(self) -> int:
        """First position behind the tokens."""
        return self.start + len(self.token_ids)


@dataclass(frozen=True, slots=True)
class StepRows:
    """One call of the model. Tensors are on the pool's device, and of int64."""

    token_ids: torch.Tensor  # [1, rows]; rows that are padding are token 0 at position 0, which is finite
    positions: torch.Tensor  # [1, rows]
    kept: torch.Tensor  # [logits' rows, with padding]: which rows; the first `num_logits` are the wanted ones, in order
    num_logits: int
    context: StepContext


def lay_out_step(
    steps: Sequence[SequenceStep], kv: PoolKV, *, row_multiple: int, scratch: Scratch, attention: Attention
) -> StepRows:
    """Give every token its row of the batch and its slot of the pool, of both its parts where it has two."""
    order = sorted(range(len(steps)), key=lambda which: _company(steps[which]))
    ordered = [steps[which] for which in order]
    first_rows = [0, *accumulate(len(step.token_ids) for step in ordered[:-1])]
    which_to_row = dict(zip(order, first_rows, strict=True))
    kept: list[int] = []
    for which, step in enumerate(steps):
        end = which_to_row[which] + len(step.token_ids)
        kept += range(end - step.num_logits, end)

    def padded(rows: list[int]) -> list[int]:
        return rows + [0] * (-len(rows) % row_multiple)

    pools = _tables(ordered, kv)
    token_ids, positions, kept_there, *there = send_numbers(
        [
            padded([token for step in ordered for token in step.token_ids]),
            padded([position for step in ordered for position in range(step.start, step.end)]),
            padded(kept or [0]),
            *(numbers for pool in pools for numbers in (pool.slots, *pool.tables)),
        ],
        kv.device,
    )

    def context_of(pool: _PoolTables, slots: torch.Tensor, tables: Sequence[torch.Tensor]) -> StepContext:
        spans = [
            SequenceSpan(
                row=row,
                num_rows=len(step.token_ids),
                start=step.start,
                pages=pages,
                block_table=table,
                first_key=step.first_block * pool.kv.layout.block_tokens,
            )
            for step, row, pages, table in zip(ordered, first_rows, pool.tables, tables, strict=True)
        ]
        return StepContext(
            kv=pool.kv, spans=spans, slots=slots, positions=positions, scratch=scratch, attention=attention
        )

    each = 1 + len(steps)  # slots and tables of one pool
    context = context_of(pools[0], there[0], there[1:each])
    if isinstance(kv, LayeredKV):
        context.near, context.place_of = context_of(pools[1], there[each], there[each + 1 :]), kv.place_of
    return StepRows(token_ids.unsqueeze(0), positions.unsqueeze(0), kept_there, len(kept), context)


def _company(step: SequenceStep) -> tuple[int, int, int]:
    """Steps of which this is equal are computed as one batch of products, if their rows lie side by side."""
    return len(step.token_ids), step.start // TILE, step.first_block


@dataclass(frozen=True, slots=True)
class _PoolTables:
    kv: PagedKV
    slots: list[int]  # of each row: block_id * block_tokens + offset
    tables: list[list[int]]  # of each sequence, from its beginning to the end of its last tile


def _tables(steps: Sequence[SequenceStep], kv: PoolKV) -> list[_PoolTables]:
    """Where rows and sequences are in each of the model's pools, the one of wide parts first."""
    if not isinstance(kv, LayeredKV):
        return [_pool_tables(steps, kv)]
    wide_steps, near_steps = [], []
    for step in steps:
        wide_steps.append(replace(step, block_ids=kv.parts.split(step.block_ids)[0]))
        first_read = kv.near_window.first_block(step.start)
        table = kv.near_table(step.block_ids, first_needed=first_read)
        assert kv.num_near not in table[first_read : -(-step.end // kv.layout.block_tokens)], (
            "a near part that is read is not there"
        )
        near_steps.append(replace(step, block_ids=table))
    return [_pool_tables(wide_steps, kv.wide), _pool_tables(near_steps, kv.near)]


def _pool_tables(steps: Sequence[SequenceStep], kv: PagedKV) -> _PoolTables:
    block_tokens = kv.layout.block_tokens
    slots: list[int] = []
    tables: list[list[int]] = []
    for step in steps:
        assert step.first_block + len(step.block_ids) >= -(-step.end // block_tokens), (
            "block table too short for the tokens"
        )
        blocks_to_tile_end = -(-(-(-step.end // TILE) * TILE) // block_tokens)
        # Filled up with any valid id where nothing is.
        table = [step.block_ids[0]] * step.first_block
        table += step.block_ids[: blocks_to_tile_end - step.first_block]
        table += table[-1:] * (blocks_to_tile_end - len(table))
        tables.append(table)
        slots += [table[p // block_tokens] * block_tokens + p % block_tokens for p in range(step.start, step.end)]
    return _PoolTables(kv, slots, tables)
