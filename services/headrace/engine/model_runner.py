"""One forward pass over a mixed batch: prefill chunks and decode rows of several sequences, flattened.

This file owns how sequences become the rows of one call of the model, and the padding of those rows that exactness
asks for. It knows nothing of requests, sampling or who owns a block; the caller's block tables are trusted.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from headrace.engine.attention import TILE, SequenceSpan, StepContext, step_context
from headrace.engine.paged_kv import PagedKV


@dataclass(frozen=True, slots=True)
class SequenceStep:
    """Some consecutive tokens of one sequence, to be computed in this step."""

    token_ids: tuple[int, ...]
    start: int  # absolute position of the first token; positions [0, start) hold valid KV
    block_ids: Sequence[int]  # block table covering positions [0, start + len(token_ids))
    wants_logits: bool  # logits of the last token


class ModelRunner:
    """Runs a model over the pool. One thread at a time; that thread is the step thread."""

    def __init__(self, model: PreTrainedModel, kv: PagedKV, *, row_multiple: int) -> None:
        assert row_multiple >= 1
        self.model = model
        self.kv = kv
        self.row_multiple = row_multiple

    @torch.inference_mode()
    def run_step(self, steps: Sequence[SequenceStep]) -> torch.Tensor:
        """Compute the steps' tokens: writes their KV into their blocks and returns the logits that are wanted.

        Returns [number of steps that want logits, vocab] float32 on the CPU, in the steps' order. Two steps of one
        call must not be of the same sequence.
        """
        assert steps
        block_tokens, device = self.kv.layout.block_tokens, self.kv.device
        token_ids: list[int] = []
        positions: list[int] = []
        slots: list[int] = []
        spans: list[SequenceSpan] = []
        wanted: list[int] = []
        for step in steps:
            assert step.token_ids
            end = step.start + len(step.token_ids)
            assert len(step.block_ids) * block_tokens >= end
            tile_end = -(-end // TILE) * TILE
            table = list(step.block_ids[: -(-tile_end // block_tokens)])
            table += [table[-1]] * (-(-tile_end // block_tokens) - len(table))
            row = len(token_ids)
            spans.append(
                SequenceSpan(
                    row=row,
                    num_rows=len(step.token_ids),
                    start=step.start,
                    block_table=torch.tensor(table, dtype=torch.int64, device=device),
                )
            )
            token_ids += step.token_ids
            positions += range(step.start, end)
            slots += [
                step.block_ids[p // block_tokens] * block_tokens + p % block_tokens for p in range(step.start, end)
            ]
            if step.wants_logits:
                wanted.append(len(token_ids) - 1)
        padding = -len(token_ids) % self.row_multiple
        context = StepContext(kv=self.kv, spans=spans, slots=torch.tensor(slots, dtype=torch.int64, device=device))
        keep = (wanted or [0]) + [0] * (-len(wanted or [0]) % self.row_multiple)
        reset = step_context.set(context)
        try:
            output = self.model(
                input_ids=torch.tensor([token_ids + [0] * padding], device=device),
                position_ids=torch.tensor([positions + [0] * padding], device=device),
                use_cache=False,
                logits_to_keep=torch.tensor(keep, device=device),
            )
        finally:
            step_context.reset(reset)
        return output.logits[0, : len(wanted)].float().cpu()
