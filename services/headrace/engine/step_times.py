"""How long this engine's steps take, and what the prompts ahead of a new one will take by that.

A step computes parts of prompts, gives running sequences their next token, or both. Steps of one kind teach that kind's
cost. Of a mixed step the sequences' part, as known from pure decode steps, is taken off, and the rest is the prompts':
a step reads the weights once, whatever it computes. Written by the step thread, read by the event loop.
"""

import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from headrace.core.block import HashedPrompt
from headrace.core.learned_costs import PRIOR_DECODE, PRIOR_DRAFT_ROW_S, PRIOR_PREFILL, DecodeFit, PrefillFit
from headrace.core.step_costs import DecodeCost, PrefillCost
from headrace.engine.admission_queue import Admission
from headrace.engine.run import Run
from headrace.engine.schedule_step import PlannedRows

# Of a mixed step's time, at least this share is the prompts': a decode cost learned under load could claim all of it.
PREFILL_SHARE_MIN = 0.25


# A prompt that lacks no more than its last token is a decoding sequence.
Part = tuple[int, int]  # [computed, wanted) of one sequence


@dataclass(frozen=True, slots=True)
class WorkAhead:
    """What an engine has before it, and what work costs there."""

    queue_s: float  # predicted, until all prompts that are here now are computed
    prefill: PrefillCost
    decode: DecodeCost


NOTHING_AHEAD = WorkAhead(0.0, PRIOR_PREFILL, PRIOR_DECODE)


@dataclass(frozen=True, slots=True)
class EngineLoad:
    """How busy the engine is: sequences in the batch, sequences not in it yet, blocks that could be had now, how many
    of those hold a block for reuse, and the prompts' work in seconds."""

    running: int
    waiting: int
    free_blocks: int
    kept_blocks: int = 0
    ahead: WorkAhead = NOTHING_AHEAD


class StepTimes:
    """The two fits of one engine, and the parts of prompts that it has yet to compute."""

    def __init__(self, *, chunk_tokens: int, drafts: bool = False, row_multiple: int = 1) -> None:
        """chunk_tokens: of prompts, in one step. drafts: whether rows of drafts are expected, too. row_multiple: a
        step's rows are padded to a multiple of this."""
        self.row_multiple = row_multiple
        self._chunk_tokens = chunk_tokens
        self._lock = threading.Lock()  # of the fits
        self._prefill = PrefillFit()
        self._decode = DecodeFit(prior_draft_row_s=PRIOR_DRAFT_ROW_S if drafts else 0.0)
        self._running: tuple[Part, ...] = ()  # replaced by the step thread
        self._coming: dict[object, Part] = {}  # waiting for blocks, or loaded and not run yet; the event loop's

    def add(self, rows: Sequence[PlannedRows], seconds: float) -> None:
        """One step that computed these rows. A single row counts as a decoding sequence: it costs what one costs. So
        does one with a draft behind it, whose rows cost extra."""
        stretches = [(row.stop - row.start, row.start) for row in rows if row.stop - row.num_drafts - row.start > 1]
        sequences = len(rows) - len(stretches)
        kv_tokens = sum(row.stop - row.num_drafts for row in rows if row.stop - row.num_drafts - row.start == 1)
        draft_rows = self.draft_rows(rows)
        with self._lock:
            if not stretches:
                self._decode.add(sequences, kv_tokens, seconds, draft_rows=draft_rows)
                return
            if sequences:
                decode = self._decode.cost()
                beside_s = decode.sequence_s * sequences + decode.kv_token_s * kv_tokens
                beside_s += self._decode.draft_row_s() * draft_rows
                seconds = max(seconds - beside_s, PREFILL_SHARE_MIN * seconds)
            self._prefill.add(stretches, seconds)

    def draft_rows(self, rows: Sequence[PlannedRows]) -> int:
        """How many rows more such a step has for its drafts: only what goes beyond the padding is more."""
        drafts = sum(row.num_drafts for row in rows)
        num_rows = sum(row.stop - row.start for row in rows) - drafts
        return drafts + -(num_rows + drafts) % self.row_multiple - -num_rows % self.row_multiple

    @contextmanager
    def waiting(self, prompt: HashedPrompt) -> Iterator[None]:
        """The prompt waits for blocks as long as the scope lasts."""
        waiter = object()
        self._coming[waiter] = (0, len(prompt.token_ids))
        try:
            yield
        finally:
            del self._coming[waiter]

    def loaded(self, admission: Admission) -> None:
        """The prompt has its blocks, so many of them valid, and will run. Until then nobody knows what is left to
        compute: it may all be on its way from elsewhere."""
        num_valid = admission.num_valid_blocks * admission.prompt.block_tokens
        self._coming[admission.key] = (num_valid, len(admission.prompt.token_ids))

    def drop(self, admission: Admission) -> None:
        """It runs now, or never will. Idempotent."""
        self._coming.pop(admission.key, None)

    def running(self, runs: Iterable[Run]) -> None:
        """These run now. The step thread's to call."""
        self._running = tuple(run.part for run in runs)

    def prefill_cost(self) -> PrefillCost:
        """What prompts cost, as known now. In any thread."""
        with self._lock:
            return self._prefill.cost()

    def compute_s(self, start: int, end: int) -> float:
        """Predicted seconds to compute positions [start, end) of one sequence, chunk by chunk. In any thread."""
        return _chunked_s(self.prefill_cost(), start, end, self._chunk_tokens)

    def decode_cost(self) -> DecodeCost:
        """What decode steps cost, as known now, without drafts. In any thread."""
        with self._lock:
            return self._decode.cost()

    def draft_row_s(self) -> float:
        """What a row of a draft makes a step longer, as known now. In any thread."""
        with self._lock:
            return self._decode.draft_row_s()

    def read(self, submitted: Iterable[Run] = ()) -> WorkAhead:
        """As known now. submitted: runs that the step thread has not looked at yet."""
        with self._lock:
            prefill, decode = self._prefill.cost(), self._decode.cost()
        queue_s = 0.0
        for start, end in (*self._running, *(run.part for run in submitted), *self._coming.values()):
            if end > start + 1:
                queue_s += _chunked_s(prefill, start, end, self._chunk_tokens)
        return WorkAhead(queue_s, prefill, decode)


def _chunked_s(prefill: PrefillCost, start: int, end: int, chunk_tokens: int) -> float:
    chunks = -(-(end - start) // chunk_tokens)
    return float(prefill.seconds(start, end)) + max(0, chunks - 1) * prefill.base_s
