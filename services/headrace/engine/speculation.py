"""Speculative decoding in one engine: who gets a draft, what became of it, and whether that pays.

A step computes a sequence's newest token and its draft behind it; the model's own choice at each place decides
(`step_loop.py`), so drafts change nothing but how many tokens a step brings. This file owns how often drafts were
right, by sequence and over all, and what follows from it: drafts are as long as they pay by measured times, and a
sequence whose drafts do not pay has none, but for a try now and then. A drafter that fails is not asked again. It
belongs to the step thread; `stats` may be read in any.

It knows nothing of how drafts are made or of how rows are computed.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from headrace.core.clock import Clock
from headrace.core.draft_limits import DRAFT_RETRY_STEPS, DRAFT_RETRY_TOKENS
from headrace.core.speculation_stats import SpeculationStats
from headrace.engine.choose_draft_lengths import DraftCandidate, DraftPrices, choose_draft_lengths
from headrace.engine.drafter import Draft, DraftCheck, Drafter, DraftWish
from headrace.engine.run import Run
from headrace.engine.step_times import StepTimes

# What is kept of a count of right and wrong tokens when a draft has been settled: a sequence's own last ten drafts
# count, of the engine's the last hundred.
RUN_MEMORY = 0.9
ENGINE_MEMORY = 0.99

# What is known of all sequences counts for a single one as much as so many tokens of its own drafts.
PRIOR_TOKENS = 4.0

# Before anything was drafted: half of a draft's tokens are expected to be right, as if two had been seen.
FIRST_RIGHT, FIRST_TESTED = 1.0, 2.0


@dataclass(slots=True)
class _Tally:
    """How often a draft's next token was right, given that those before were."""

    right: float = 0.0
    tested: float = 0.0

    def add(self, *, right: int, tested: int, memory: float) -> None:
        self.right = memory * self.right + right
        self.tested = memory * self.tested + tested


@dataclass(slots=True)
class _DraftedRun:
    by_kind: dict[int, _Tally] = field(default_factory=dict)
    steps_without: int = 0  # in a row, although a draft could have been computed


class Speculation:
    """Drafts for the runs of one engine."""

    def __init__(self, drafter: Drafter, *, draft_tokens: int, times: StepTimes, clock: Clock) -> None:
        """draft_tokens: of one draft, at most."""
        assert draft_tokens >= 1
        self._drafter = drafter
        self._draft_tokens = draft_tokens
        self._times = times
        self._clock = clock
        self._runs: dict[int, _DraftedRun] = {}
        self._by_kind: dict[int, _Tally] = {}
        self._steps_without = 0  # of any run that was tried again
        self._prices = DraftPrices(token_s=0.0, row_s=0.0, draft_token_s=0.0, row_multiple=1, num_rows=1)
        self.stats = SpeculationStats()

    def propose(self, runs: Iterable[Run]) -> None:
        """Give every run that decodes the draft that is to be computed in the next step, maybe an empty one."""
        wishes: dict[int, DraftWish] = {}
        decoding: list[Run] = []
        for run in runs:
            run.draft = Draft()
            if run.decodes:
                decoding.append(run)
                wish = run.draft_wish(self._draft_tokens)
                if wish is not None:
                    wishes[run.key] = wish
        if not wishes or self.stats.failure:
            return
        self._prices = self._prices_of(decoding)
        try:
            drafts = self._draft(list(wishes.values()))
        except Exception as error:  # whatever a draft model's code raises: all that is lost is what it would spare
            self.stats = replace(self.stats, failure=f"{type(error).__name__}: {error}")
            return
        for run in decoding:
            run.draft = drafts.get(run.key, run.draft)

    def settle(self, run: Run, check: DraftCheck) -> None:
        """What became of the run's draft. The run may have ended meanwhile."""
        assert check.accepted <= check.tested <= len(check.token_ids)
        own = self._runs.get(run.key)
        for by_kind, memory in ((self._by_kind, ENGINE_MEMORY), (own.by_kind if own else {}, RUN_MEMORY)):
            by_kind.setdefault(check.kind, _Tally()).add(right=check.accepted, tested=check.tested, memory=memory)
        stats = self.stats
        self.stats = replace(
            stats,
            drafted_tokens=stats.drafted_tokens + len(check.token_ids),
            accepted_tokens=stats.accepted_tokens + check.accepted,
            gain_s=stats.gain_s + check.accepted * self._prices.token_s,
        )

    def count_rows(self, padded_rows: int) -> None:
        """A step had so many rows more for the sake of drafts."""
        if padded_rows:
            self.stats = replace(self.stats, cost_s=self.stats.cost_s + padded_rows * self._prices.row_s)

    def leave(self, run: Run) -> None:
        """The run has ended. Idempotent."""
        self._runs.pop(run.key, None)
        self._drafter.leave(run.key)

    def _prices_of(self, decoding: list[Run]) -> DraftPrices:
        cost = self._times.decode_cost()
        step_s = cost.step_seconds(len(decoding), sum(run.num_computed + 1 for run in decoding))
        return DraftPrices(
            token_s=step_s / len(decoding),
            row_s=self._times.draft_row_s(),
            draft_token_s=self._drafter.token_s(),
            row_multiple=self._times.row_multiple,
            num_rows=len(decoding),
        )

    def _draft(self, wishes: list[DraftWish]) -> dict[int, Draft]:
        """Drafts by key, as long as they pay. What costs no time is drafted first: then its kind is known."""
        if not self._drafter.costs_steps:
            drafts = self._drafter.draft(wishes)
            lengths = self._lengths(
                [(wish.key, draft.kind, len(draft.token_ids)) for wish, draft in zip(wishes, drafts, strict=True)]
            )
            return {
                wish.key: Draft(draft.token_ids[:length], draft.kind)
                for wish, draft, length in zip(wishes, drafts, lengths, strict=True)
            }
        lengths = self._lengths([(wish.key, 0, wish.most) for wish in wishes])
        wanted = [wish.up_to(length) for wish, length in zip(wishes, lengths, strict=True) if length]
        if not wanted:
            return {}
        started_s = self._clock.now_s()
        drafts = self._drafter.draft(wanted)
        self.stats = replace(self.stats, cost_s=self.stats.cost_s + self._clock.now_s() - started_s)
        return {wish.key: draft for wish, draft in zip(wanted, drafts, strict=True)}

    def _lengths(self, drafts: list[tuple[int, int, int]]) -> list[int]:
        """How much of each draft, given by (key, kind, tokens), to compute."""
        candidates = []
        for key, kind, most in drafts:
            drafted_run = self._runs.setdefault(key, _DraftedRun())
            candidates.append(DraftCandidate(self._probability(drafted_run, kind), most))
        lengths = choose_draft_lengths(candidates, self._prices)
        self._steps_without += 1
        for number, (key, _, most) in enumerate(drafts):
            drafted_run = self._runs[key]
            if lengths[number] == 0 < most and self._is_due(drafted_run):
                lengths[number] = min(most, DRAFT_RETRY_TOKENS)
                self._steps_without = 0
            if most:
                drafted_run.steps_without = 0 if lengths[number] else drafted_run.steps_without + 1
        return lengths

    def _is_due(self, drafted_run: _DraftedRun) -> bool:
        """Whether a run whose drafts do not pay is tried again now: what was so may have changed. Where a draft costs
        time (and the sequence must be read first), only one run in so many steps."""
        steps = drafted_run.steps_without
        return min(steps, self._steps_without if self._drafter.costs_steps else steps) >= DRAFT_RETRY_STEPS

    def _probability(self, drafted_run: _DraftedRun, kind: int) -> float:
        """That a draft's next token is right: the run's own experience, and everybody's where it has little."""
        everybody, own = self._by_kind.get(kind, _Tally()), drafted_run.by_kind.get(kind, _Tally())
        prior = (everybody.right + FIRST_RIGHT) / (everybody.tested + FIRST_TESTED)
        return (own.right + PRIOR_TOKENS * prior) / (own.tested + PRIOR_TOKENS)
