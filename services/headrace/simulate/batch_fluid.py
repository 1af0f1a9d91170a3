"""One worker's decode batch as a fluid: a token for every sequence a step, steps as long as batch and KV make them.

Between two changes of the batch (a sequence joins or ends, a prefill begins or ends beside it) all steps last alike, so
a run of thousands of tokens costs a few events. Sequences wait, first come first served, until memory has room.
"""

import heapq
from collections import deque
from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.core.step_costs import DecodeCost
from headrace.simulate.worker_memory import DeviceMemory

if TYPE_CHECKING:
    from headrace.simulate.simulated_fleet import Outcome, SimulatedFleet


@dataclass(slots=True)
class _Sequence:
    outcome: "Outcome"
    held: tuple[int, ...]
    first_token_s: float = 0.0


class DecodeBatch:
    """The sequences of one worker."""

    def __init__(self, fleet: "SimulatedFleet", worker: int, cost: DecodeCost, memory: DeviceMemory) -> None:
        self._fleet = fleet
        self._worker = worker
        self._cost = cost
        self._memory = memory
        self._waiting: deque[tuple[Outcome, float | None]] = deque()  # with the time of the first token, if it has one
        self._ends: list[tuple[float, int, _Sequence]] = []  # (step at which it has all its tokens, serial, sequence)
        self._steps = 0.0  # since the start
        self._changed_s = 0.0
        self._kv_tokens = 0.0
        self._version = 0
        self._prefilling = False

    @property
    def num_sequences(self) -> int:
        """Sequences that run."""
        return len(self._ends)

    @property
    def step_s(self) -> float:
        """How long a step lasts now."""
        step_s = float(self._cost.step_seconds(self.num_sequences, self._kv_tokens))
        if self._prefilling:
            model = self._fleet.model
            step_s += model.prefill_chunk_tokens / float(model.prefill.tokens_per_s)
        return step_s

    def prefill_runs(self, running: bool) -> None:
        """A prefill begins or ends on the same worker."""
        self._advance()
        self._prefilling = running
        self._plan_next_end()

    def join(self, outcome: "Outcome", *, computed_here: bool) -> None:
        """A prompt's KV is here: its sequence runs as soon as memory has room for all that it will have.

        computed_here: the last step of the prompt may have given the first token (`ClusterModel.first_token_steps`).
        """
        has_first = computed_here and self._fleet.model.first_token_steps == 0
        self._waiting.append((outcome, self._fleet.now_s if has_first else None))
        self._admit()

    def _admit(self) -> None:
        self._advance()
        while self._waiting:
            request = self._waiting[0][0].request
            if not self._memory.fits(request.input_tokens + request.output_tokens) and self._ends:
                break
            outcome, first_token_s = self._waiting.popleft()
            held = request.chain[: self._memory.add(request.chain)]
            self._memory.begin(held, request.input_tokens + request.output_tokens)
            sequence = _Sequence(outcome, held)
            steps = request.output_tokens - (first_token_s is not None)
            heapq.heappush(self._ends, (self._steps + steps, self._fleet.next_serial(), sequence))
            self._kv_tokens += request.input_tokens
            sequence.first_token_s = self._fleet.now_s + self.step_s if first_token_s is None else first_token_s
            outcome.ttft_s = sequence.first_token_s - request.arrival_s + self._fleet.model.request_s
        self._plan_next_end()

    def _advance(self) -> None:
        """Account for the steps since the last change."""
        now_s = self._fleet.now_s
        if self._ends and now_s > self._changed_s:
            steps = (now_s - self._changed_s) / self.step_s
            self._steps += steps
            self._kv_tokens += steps * self.num_sequences
        self._changed_s = now_s

    def _plan_next_end(self) -> None:
        self._version += 1
        if not self._ends:
            return
        version = self._version
        left_s = max(0.0, self._ends[0][0] - self._steps) * self.step_s
        self._fleet.at(self._fleet.now_s + left_s, lambda: self._end(version))

    def _end(self, version: int) -> None:
        if version != self._version:
            return  # the batch has changed since
        self._advance()
        _, _, sequence = heapq.heappop(self._ends)
        request = sequence.outcome.request
        self._memory.end(sequence.held, request.input_tokens + request.output_tokens)
        self._kv_tokens = max(0.0, self._kv_tokens - request.input_tokens - request.output_tokens)
        if request.output_tokens > 1:
            sequence.outcome.itl_s = (self._fleet.now_s - sequence.first_token_s) / (request.output_tokens - 1)
        self._fleet.ended(sequence.outcome)
        self._admit()
