"""One forward pass over a mixed batch: prefill chunks and decode rows of several sequences, flattened.

This file owns the call of the model, on how many threads it runs, and when it is done: the device has been waited for.
It knows nothing of requests, sampling or who owns a block.
"""

import time
from collections.abc import Sequence
from statistics import median

import torch
from torch import nn
from transformers import PreTrainedModel

from headrace.engine.attention import Attention, Scratch, attend_gathered, attending
from headrace.engine.copy_streams import finish_stream
from headrace.engine.lay_out_step import SequenceStep, lay_out_step
from headrace.engine.layered_kv import PoolKV
from headrace.engine.packed_linear import PackedLinear
from headrace.engine.thread_choice import ThreadChoice

__all__ = ["ModelRunner", "SequenceStep"]

# Multiplications in the middle-sized linear layer of a step from which all threads do the step, whoever else wants a
# core: 16 M take about 0.2 ms on one core, and waking a second thread and waiting for it takes 0.05 to 0.2 ms. Below,
# `thread_choice.py` tries which is faster.
PARALLEL_WORK_MIN = 16 * 1024 * 1024


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
        rows = lay_out_step(
            steps, self.kv, row_multiple=self.row_multiple, scratch=self._scratch, attention=self.attention
        )
        num_rows = sum(len(step.token_ids) for step in steps)
        started_s = time.perf_counter()
        self.use_threads(num_rows)
        try:
            with attending(rows.context):
                output = self.model(
                    input_ids=rows.token_ids,
                    position_ids=rows.positions,
                    use_cache=False,
                    logits_to_keep=rows.kept,
                )
            logits = output.logits[0, : rows.num_logits].float().to("cpu", non_blocking=True)  # into pinned memory
        finally:
            # Whatever has become of the step: its blocks may be read, given back and written by others from here on.
            finish_stream(self.kv.device)
        if self._is_small(num_rows):
            self._choice.took(num_rows, time.perf_counter() - started_s)
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
