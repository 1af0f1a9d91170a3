"""An engine's steps with fixed prices on a clock of their own, which may be made to wait.

What workers measure of themselves decides where requests go and what is read back instead of being computed. Here each
step takes what its rows cost by the prior, so what is learned is the same in every run, however busy the machine is.
"""

import threading
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch

from headrace.core.clock import SystemClock
from headrace.core.learned_costs import PRIOR_DECODE, PRIOR_PREFILL
from headrace.engine.load_model import LoadedModel
from headrace.engine.model_runner import ModelRunner, SequenceStep

STEP_WAITS_S = 120


class PricedSteps:
    """The clock of one engine, and when its steps may go. `time_s` moves by steps alone."""

    def __init__(self, *, price: float = 1.0) -> None:
        """price: how many times as dear as the prior says."""
        self.time_s = 1.0
        self.price = price
        self.may_go = threading.Event()
        self.may_go.set()
        self.hold_after: Callable[[Sequence[SequenceStep]], bool] = lambda steps: False  # then the next step waits

    def now_s(self) -> float:
        return self.time_s

    def unix_ms(self) -> int:
        return SystemClock().unix_ms()

    def of(self, model: LoadedModel) -> LoadedModel:
        """The model, with these steps."""
        return replace(model, runner=_PricedRunner(model.runner, self))  # type: ignore[arg-type]


class _PricedRunner:
    def __init__(self, runner: ModelRunner, steps: PricedSteps) -> None:
        self._runner = runner
        self._steps = steps
        self.row_multiple = runner.row_multiple

    def run_step(self, steps: Sequence[SequenceStep]) -> torch.Tensor:
        assert self._steps.may_go.wait(STEP_WAITS_S), "the test never let the steps go"
        logits = self._runner.run_step(steps)
        self._steps.time_s += self._steps.price * _seconds(steps)
        if self._steps.hold_after(steps):
            self._steps.may_go.clear()
        return logits


def _seconds(steps: Sequence[SequenceStep]) -> float:
    stretches = [(step.start, step.start + len(step.token_ids)) for step in steps if len(step.token_ids) > 1]
    single = [step.start + 1 for step in steps if len(step.token_ids) == 1]
    seconds = sum(float(PRIOR_PREFILL.seconds(start, stop)) - PRIOR_PREFILL.base_s for start, stop in stretches)
    if stretches:
        seconds += PRIOR_PREFILL.base_s + PRIOR_DECODE.sequence_s * len(single) + PRIOR_DECODE.kv_token_s * sum(single)
    else:
        seconds += PRIOR_DECODE.step_seconds(len(single), sum(single))
    return seconds
