"""One forward pass over a mixed batch: prefill chunks and decode rows of several sequences, flattened.

This file owns how sequences become the rows of one call of the model, and the padding of those rows that exactness
asks for. It knows nothing of requests, sampling or who owns a block; the caller's block tables are trusted.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from statistics import median

import torch
from torch import nn
from transformers import PreTrainedModel

from headrace.engine.attention import (
    TILE,
    Attention,
    Scratch,
    SequenceSpan,
    StepContext,
    attend_gathered,
    attending,
)
from headrace.engine.layered_kv import LayeredKV, PoolKV
from headrace.engine.packed_linear import PackedLinear
from headrace.engine.paged_kv import PagedKV
from headrace.engine.thread_choice import ThreadChoice

# Multiplications in the middle-sized linear layer of a step from which all threads do the step, whoever else wants a
# core: 16 M take about 0.2 ms on one core, and waking a second thread and waiting for it takes 0.05 to 0.2 ms. Below,
# `thread_choice.py` tries which is faster.
PARALLEL_WORK_MIN = 16 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """Some consecutive tokens of one sequence, to be computed in this step."""

    token_ids: tuple[int, ...]
    start: int  # absolute position of the first token; all earlier ones that a layer sees hold valid KV
    block_ids: Sequence[int]  # block table, from block `first_block` to the one of the last token (`core/part_ids.py`)
    num_logits: int  # of so many of the last tokens, logits are wanted; 0 for none
    first_block: int = 0  # earlier blocks are not there, since every layer's window has passed them


class ModelRunner:
    """Runs a model over the pool. One thread at a time."""

    def __init__(
        self,
        model: PreTrainedModel,
        kv: PoolKV,
        *,
        row_multiple: int,
        threads: int,
        small_threads_max: int | None = None,
        attention: Attention = attend_gathered,
    ) -> None:
        """row_multiple: rows of every linear layer's input are padded to a multiple of this (1: not at all).

        threads: for torch's operators while a step runs, in whichever thread that is; 0 leaves the process's setting.
        small_threads_max: of steps of few rows; None for all.
        """
        assert row_multiple >= 1
        self.model = model
        self.kv = kv
        self.row_multiple = row_multiple
        self.threads = threads
        self.small_threads_max = max(1, threads if small_threads_max is None else small_threads_max)
        self.attention = attention
        self._scratch = Scratch()
        sizes = [
            module.in_features * module.out_features
            for module in model.modules()
            if isinstance(module, nn.Linear | PackedLinear)
        ]
        self._linear_weights = median(sizes) if sizes else PARALLEL_WORK_MIN
        self._choice = ThreadChoice(self.small_threads_max)
        if kv.device.type != "cpu":
            self.pin_threads(max(1, threads))  # nothing to try; and what torch has compiled is of one thread count

    @torch.inference_mode()
    def run_step(self, steps: Sequence[SequenceStep]) -> torch.Tensor:
        """Compute the steps' tokens: writes their KV into their blocks and returns the logits that are wanted.

        Returns [sum of num_logits, vocab] float32 on the CPU: step by step, token by token. No two steps
        of one call may be of the same sequence.
        """
        assert steps
        assert all(0 <= step.num_logits <= len(step.token_ids) > 0 for step in steps)
        order = sorted(range(len(steps)), key=lambda which: _company(steps[which]))
        ordered = [steps[which] for which in order]
        token_ids = [token for step in ordered for token in step.token_ids]
        positions = [p for step in ordered for p in range(step.start, step.start + len(step.token_ids))]
        context = self._lay_out(ordered)
        which_to_span = dict(zip(order, context.spans, strict=True))
        wanted: list[int] = []
        for which, step in enumerate(steps):
            end = which_to_span[which].row + len(step.token_ids)
            wanted += range(end - step.num_logits, end)
        started_s = time.perf_counter()
        self.use_threads(len(token_ids))
        device = self.kv.device
        with attending(context):
            # Padding rows are token 0 at position 0: finite, and nothing reads what comes of them.
            output = self.model(
                input_ids=torch.tensor([self._padded(token_ids)], device=device),
                position_ids=torch.tensor([self._padded(positions)], device=device),
                use_cache=False,
                logits_to_keep=torch.tensor(self._padded(wanted or [0]), device=device),
            )
        logits = output.logits[0, : len(wanted)].float().cpu()
        if not wanted and device.type == "cuda":
            # Nothing has waited for the device so far: this step would look short and the next one long to those who
            # learn from steps what computing costs.
            torch.cuda.current_stream(device).synchronize()
        if self._is_small(len(token_ids)):
            self._choice.took(len(token_ids), time.perf_counter() - started_s)
        return logits

    def use_threads(self, num_rows: int) -> None:
        """Set torch's thread count, which belongs to the calling thread, for a step of so many rows."""
        threads = self._choice.choose(num_rows) if self._is_small(num_rows) else self.threads
        if self.threads and torch.get_num_threads() != threads:
            torch.set_num_threads(threads)

    def pin_threads(self, threads: int) -> None:
        """From now on small steps run on so many threads, whatever is faster."""
        self._choice.pin(threads)

    def _is_small(self, num_rows: int) -> bool:
        return num_rows * self._linear_weights < PARALLEL_WORK_MIN

    def _padded(self, rows: list[int]) -> list[int]:
        return rows + [0] * (-len(rows) % self.row_multiple)

    def _lay_out(self, steps: Sequence[SequenceStep]) -> StepContext:
        """Give every token its row of the batch and its slot of the pool, of both its parts where it has two."""
        if not isinstance(self.kv, LayeredKV):
            return self._lay_out_on(self.kv, steps)
        parts, near = self.kv.parts, self.kv
        wide_steps, near_steps = [], []
        for step in steps:
            wide_steps.append(replace(step, block_ids=parts.split(step.block_ids)[0]))
            first_read = near.near_window.first_block(step.start)
            table = near.near_table(step.block_ids, first_needed=first_read)
            assert near.num_near not in table[first_read : _blocks(step, near.layout.block_tokens)], (
                "a near part that is read is not there"
            )
            near_steps.append(replace(step, block_ids=table))
        context = self._lay_out_on(near.wide, wide_steps)
        context.near = self._lay_out_on(near.near, near_steps)
        context.place_of = near.place_of
        return context

    def _lay_out_on(self, kv: PagedKV, steps: Sequence[SequenceStep]) -> StepContext:
        block_tokens, device = kv.layout.block_tokens, kv.device
        slots: list[int] = []
        spans: list[SequenceSpan] = []
        for step in steps:
            end = step.start + len(step.token_ids)
            assert step.first_block + len(step.block_ids) >= _blocks(step, block_tokens), (
                "block table too short for the tokens"
            )
            blocks_to_tile_end = -(-(-(-end // TILE) * TILE) // block_tokens)
            table = [step.block_ids[0]] * step.first_block
            table += step.block_ids[: blocks_to_tile_end - step.first_block]
            table += table[-1:] * (blocks_to_tile_end - len(table))
            spans.append(
                SequenceSpan(
                    row=len(slots),
                    num_rows=len(step.token_ids),
                    start=step.start,
                    block_table=torch.tensor(table, dtype=torch.int64),
                    first_key=step.first_block * block_tokens,
                )
            )
            slots += [table[p // block_tokens] * block_tokens + p % block_tokens for p in range(step.start, end)]
        return StepContext(
            kv=kv,
            spans=spans,
            slots=torch.tensor(slots, dtype=torch.int64, device=device),
            scratch=self._scratch,
            attention=self.attention,
        )


def _blocks(step: SequenceStep, block_tokens: int) -> int:
    """Blocks that the step's sequence has at its end."""
    return -(-(step.start + len(step.token_ids)) // block_tokens)


def _company(step: SequenceStep) -> tuple[int, int, int]:
    """Steps of which this is equal are computed as one batch of products, if their rows lie side by side."""
    return len(step.token_ids), step.start // TILE, step.first_block
