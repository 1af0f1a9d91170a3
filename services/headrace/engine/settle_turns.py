"""The order in which an engine's runs are computed, and the charge for what was: between `turns.py` and the steps.

Both functions belong to the step thread.
"""

from collections.abc import Iterable, Sequence

from headrace.engine.run import Run
from headrace.engine.schedule_step import PlannedRows
from headrace.engine.turns import Turns


def settle_turns(runs: Iterable[Run], turns: Turns) -> None:
    """Number the runs whose prompts are not computed yet, first to be computed first; all others have turn 0."""
    waiting = []
    for run in runs:
        run.turn = 0
        if run.num_missing > 1:
            waiting.append(run)
    parts = [(run.admission.claim, *run.part) for run in waiting]
    for turn, place in enumerate(turns.in_order(parts)):
        waiting[place].turn = turn


def count_served(runs: Sequence[Run], plan_rows: Sequence[PlannedRows], turns: Turns) -> None:
    """Charge what a step has computed, before the runs hear of it: `runs[i]` had `plan_rows[i]`.

    Who lacks no more than its next token from then on waits for nothing.
    """
    for run, rows in zip(runs, plan_rows, strict=True):
        claim, num_rows = run.admission.claim, rows.stop - rows.start
        if num_rows > 1:
            turns.computed(claim, num_rows)
        else:
            turns.generated(claim)
        if run.num_missing - num_rows <= 1:
            turns.leave(claim)
