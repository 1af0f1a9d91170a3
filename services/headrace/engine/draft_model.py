"""Drafts by a small model: it runs ahead of the large one, and the large one checks.

The small model has a runner and a KV pool of its own, of which a sequence holds what its layers still read. It chooses
each token as the large one does, by its own logits: at a temperature of 0 that is its likeliest token; else the same
number of the sequence's seed decides for both, so that two models that agree about the probabilities choose alike.

Owns what the small model has computed of each sequence. A sequence that it has not read yet (or not for a while) is
read in chunks of a step's size, and drafted for when it has caught up. It knows nothing of what becomes of a draft.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from headrace.core.clock import Clock
from headrace.core.learned_costs import STEP_MEMORY
from headrace.engine.drafter import Draft, DraftWish
from headrace.engine.load_model import LoadedModel
from headrace.engine.lone_sequence import LonePool, LoneSequence
from headrace.engine.model_runner import SequenceStep
from headrace.engine.sample_token import Logits, sample_token


@dataclass(slots=True)
class _Read:
    """What the small model has of one sequence: KV of `token_ids`, drafts of its own among them, in `sequence`, which
    is sure as far as tokens are known to be the sequence's; what follows may have been drafted and found wrong."""

    sequence: LoneSequence
    token_ids: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _Drafting:
    """One sequence of a call: tokens to compute before the next one is known, and what was drafted."""

    wish: DraftWish
    read: _Read
    next_token_ids: list[int]
    drafted: list[int] = field(default_factory=list)
    most: int = 0


class ModelDrafter:
    """A small model that drafts for all sequences of an engine together."""

    costs_steps = True

    def __init__(self, model: LoadedModel, *, vocab_tokens: int, step_tokens: int, clock: Clock) -> None:
        """vocab_tokens: ids from here on are not the large model's. step_tokens: read in one step, at most."""
        self._runner = model.runner
        self._pool = LonePool(model)
        self._context_tokens_max = model.context_tokens_max
        self._vocab_tokens = vocab_tokens
        self._step_tokens = step_tokens
        self._reads: dict[int, _Read] = {}
        self._clock = clock
        self._steps_s = self._steps_tokens = 0.0  # of steps that gave each of their sequences a token, the last ones

    def token_s(self) -> float:
        """As Drafter."""
        return self._steps_s / self._steps_tokens if self._steps_tokens else 0.0

    def draft(self, wishes: Sequence[DraftWish]) -> list[Draft]:
        """As Drafter. Takes as many steps of the small model as the longest draft has tokens."""
        going = [drafting for wish in wishes if (drafting := self._begin(wish)) is not None]
        drafts = {drafting.wish.key: drafting for drafting in going}
        left = self._step_tokens
        while going:
            steps: list[SequenceStep] = []
            stepped: list[_Drafting] = []
            for drafting in going:
                num_tokens = self._pool.step_rows(min(left, len(drafting.next_token_ids)))
                if num_tokens:
                    left -= num_tokens
                    steps.append(self._step_of(drafting, num_tokens))
                    stepped.append(drafting)
            if not steps:
                break
            started_s = self._clock.now_s()
            logits = iter(self._runner.run_step(steps).numpy())
            if sum(len(step.token_ids) for step in steps) <= 2 * len(steps):  # none was read but what is new
                self._steps_s = STEP_MEMORY * self._steps_s + self._clock.now_s() - started_s
                self._steps_tokens = STEP_MEMORY * self._steps_tokens + len(steps)
            for drafting, step in zip(stepped, steps, strict=True):
                self._take(drafting, step, next(logits) if step.num_logits else None)
            going = [each for each in stepped if each.next_token_ids and each.drafted]
            left = len(going)  # prompts are read in the first step of a call only
        return [Draft(tuple(drafts[wish.key].drafted) if wish.key in drafts else ()) for wish in wishes]

    def leave(self, key: int) -> None:
        """As Drafter: the sequence's blocks are free again."""
        read = self._reads.pop(key, None)
        if read is not None:
            read.sequence.leave()

    def _begin(self, wish: DraftWish) -> _Drafting | None:
        """What is to be computed of a sequence; None when there is no room for it."""
        most = min(wish.most, self._context_tokens_max - len(wish.token_ids))
        if most < 1:
            return None
        read = self._reads.get(wish.key)
        if read is None:
            read = self._reads[wish.key] = _Read(LoneSequence(self._pool))
        # The newest token is always computed: its logits are what is wanted.
        num_kept = min(read.sequence.sure, len(wish.token_ids) - 1)
        limit = min(len(read.token_ids), len(wish.token_ids) - 1)
        while num_kept < limit and read.token_ids[num_kept] == wish.token_ids[num_kept]:
            num_kept += 1
        del read.token_ids[num_kept:]
        read.sequence.go_back(num_kept)
        read.sequence.sure = num_kept
        end = len(wish.token_ids)
        step_end = min(end, num_kept + self._pool.step_rows(self._step_tokens))
        if not read.sequence.grow(step_end + most * (step_end == end), whole_end=end + most):
            return None
        return _Drafting(wish, read, list(wish.token_ids[num_kept:]), most=most)

    def _step_of(self, drafting: _Drafting, num_tokens: int) -> SequenceStep:
        return drafting.read.sequence.step(
            drafting.next_token_ids[:num_tokens], num_logits=int(num_tokens == len(drafting.next_token_ids))
        )

    def _take(self, drafting: _Drafting, step: SequenceStep, logits: Logits | None) -> None:
        """Note what was computed and, where the sequence has been read to its end, the next token of its draft."""
        wish, read = drafting.wish, drafting.read
        read.token_ids += step.token_ids
        read.sequence.sure = min(len(read.token_ids), len(wish.token_ids) - 1)
        drafting.next_token_ids = drafting.next_token_ids[len(step.token_ids) :]
        if logits is None:
            return
        index = len(wish.token_ids) - wish.num_prompt + len(drafting.drafted)
        token_id = sample_token(
            logits[: self._vocab_tokens], replace(wish.sampling, logprobs=None), index=index
        ).token_id
        drafting.drafted.append(token_id)
        if len(drafting.drafted) < drafting.most:
            drafting.next_token_ids = [token_id]
