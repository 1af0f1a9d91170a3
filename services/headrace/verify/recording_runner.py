"""A model runner that notes what it computed: the digest of every row of logits that somebody asked for."""

from collections.abc import Sequence

import torch
import xxhash

from headrace.engine.model_runner import ModelRunner, SequenceStep


class RecordingRunner:
    """Has ModelRunner's `run_step`. One request at a time: the rows of several would mix in one digest."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._digest = xxhash.xxh3_128()
        self._num_rows = 0

    def run_step(self, steps: Sequence[SequenceStep]) -> torch.Tensor:
        """As ModelRunner.run_step."""
        logits = self._runner.run_step(steps)  # [sum of num_logits, vocab] float32
        self._digest.update(logits.numpy().tobytes())
        self._num_rows += len(logits)
        return logits

    def take_digest(self) -> str:
        """Rows seen since the last call and the digest of all their bits, as text to be compared; starts anew."""
        taken = f"{self._num_rows}:{self._digest.hexdigest()}"
        self._digest, self._num_rows = xxhash.xxh3_128(), 0
        return taken
