"""What counts as computed: the rows that a token was chosen by, with drafts and without."""

import torch

from headrace.engine.model_runner import ModelRunner, SequenceStep
from headrace.verify.recording_runner import RecordingRunner


class FixedRows(ModelRunner):
    """Gives the rows that it was told to."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows
        self.row_multiple = 4

    def run_step(self, steps) -> torch.Tensor:
        return self.rows


def step(*token_ids: int, num_logits: int) -> SequenceStep:
    return SequenceStep(token_ids=token_ids, start=5, block_ids=(0, 1), num_logits=num_logits)


def test_rows_behind_a_wrong_draft_are_not_part_of_the_answer():
    """The likeliest tokens are 3, 1, 2 in turn. Fails when an answer with drafts digests other rows than one without,
    where each of its rows was a step of its own."""
    rows = torch.nn.functional.one_hot(torch.tensor([3, 1, 2]), 4).float()
    for draft, kept in (((3, 1), 3), ((3, 2), 2), ((0, 1), 1)):
        drafted = RecordingRunner(FixedRows(rows))
        assert drafted.run_step([step(9, *draft, num_logits=3)]) is rows
        one_by_one = RecordingRunner(FixedRows(rows[:1]))
        for row in rows[:kept]:
            one_by_one._runner = FixedRows(row[None])
            one_by_one.run_step([step(9, num_logits=1)])
        assert drafted.take_digest() == one_by_one.take_digest()


def test_a_prompt_that_only_its_last_row_is_wanted_of_counts_as_one_row():
    recorder = RecordingRunner(FixedRows(torch.ones((1, 4))))
    recorder.run_step([step(1, 2, 3, num_logits=1), step(4, 5, num_logits=0)])
    assert recorder.take_digest().startswith("1:")
    assert recorder.take_digest().startswith("0:")
