"""A model runner that notes what it computed: the digest of every row of logits that a token was chosen by."""

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

    @property
    def row_multiple(self) -> int:
        """As ModelRunner."""
        return self._runner.row_multiple

    def run_step(self, steps: Sequence[SequenceStep]) -> torch.Tensor:
        """As ModelRunner.run_step."""
        logits = self._runner.run_step(steps)  # [sum of num_logits, vocab] float32
        first = 0
        for step in steps:
            rows, first = logits[first : first + step.num_logits], first + step.num_logits
            kept = rows[: _num_kept(rows, step)]
            self._digest.update(kept.numpy().tobytes())
            self._num_rows += len(kept)
        return logits

    def take_digest(self) -> str:
        """Rows seen since the last call and the digest of all their bits, as text to be compared; starts anew."""
        taken = f"{self._num_rows}:{self._digest.hexdigest()}"
        self._digest, self._num_rows = xxhash.xxh3_128(), 0
        return taken


def _num_kept(rows: torch.Tensor, step: SequenceStep) -> int:
    """Of [num_logits, vocab] rows, those that stand behind tokens of a greedy answer: all up to the first draft that is
    not the likeliest token in its place."""
    draft = step.token_ids[len(step.token_ids) - max(0, len(rows) - 1) :]
    kept = min(1, len(rows))
    for token_id, chosen in zip(draft, rows.argmax(-1).tolist(), strict=False):
        if token_id != chosen:
            break
        kept += 1
    return kept
