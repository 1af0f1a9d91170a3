"""The same prompts alone and in the thick of it: does company change an answer?

Alone: one at a time on an idle engine with room, nothing reused, no drafts. Together: all at once, prompts with equal
beginnings among them, on a pool that is too small for all, in small chunks and with drafts of tokens. Both must give
the same tokens and the same log-probabilities, bit for bit. The drafts come from the answers given alone, right for
some tokens and then wrong, so that both are tried. Each of the five (batches, chunks, preemption, sharing, drafts) is
counted: what did not happen was not tried. What happens does not depend on how busy the machine is: the first step
waits until all prompts are there, and drafts are as long as they pay by assumed costs, since the engine's clock stands.
"""

import asyncio
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import cast

import torch

from headrace.config import EngineSettings
from headrace.core.generation import SamplingParams
from headrace.engine.drafter import Draft, DraftWish
from headrace.engine.load_model import LoadedModel
from headrace.engine.make_pool import with_pool
from headrace.engine.model_runner import ModelRunner, SequenceStep
from headrace.verify.run_requests import RUN_TIMEOUT_S, Ran, run_requests

OUTPUT_TOKENS = 40
LOGPROBS = 20  # of the best tokens at each place: what is compared stands for the whole row of logits
CHUNK_TOKENS = 48
DRAFT_TOKENS, RIGHT_TOKENS = 4, 3  # of each draft


@dataclass(frozen=True, slots=True)
class Together:
    """What came of it. The counts say whether the engine did do what was to be tried."""

    requests: int
    token_equal: bool
    bit_equal: bool
    num_batched_steps: int  # of several sequences at once
    num_cut_pieces: int  # of prompts computed in several steps: each piece but the last, none that is computed again
    num_preemptions: int
    num_shared_blocks: int
    num_drafted_tokens: int
    num_accepted_tokens: int

    @property
    def as_meant(self) -> bool:
        """Whether sequences were computed side by side and in pieces, preempted, blocks shared, and drafts accepted as
        well as refused: else equality shows nothing of these."""
        num_refused = self.num_drafted_tokens - self.num_accepted_tokens
        company = (self.num_batched_steps, self.num_cut_pieces, self.num_preemptions, self.num_shared_blocks)
        return min(*company, self.num_accepted_tokens, num_refused) > 0


def verify_together(
    model: LoadedModel, settings: EngineSettings, tokens: list[int], *, report: Callable[[str], None]
) -> Together:
    """tokens: any text; the prompts are pieces of it. Overwrites the model's pool; blocks."""
    block_tokens = model.kv.layout.block_tokens
    prompts = _prompts(tokens, block_tokens, model.context_tokens_max - OUTPUT_TOKENS)
    sampling = SamplingParams(max_tokens=OUTPUT_TOKENS, logprobs=LOGPROBS, ignore_eos=True)
    report(f"answering {len(prompts)} prompts alone, and then together in a small pool, with drafts")
    alone = asyncio.run(run_requests(model, settings, prompts, sampling=sampling, reuse=False, one_by_one=True))
    longest = -(-(max(map(len, prompts)) + OUTPUT_TOKENS) // block_tokens)
    num_blocks = 2 * longest + 1  # and as short of near parts as of blocks
    tight = with_pool(
        model, num_blocks=num_blocks, num_near=min(num_blocks, 2 * model.near_window.held_blocks(num_blocks))
    )
    crowded = replace(settings, prefill_chunk_tokens=CHUNK_TOKENS, draft_tokens=DRAFT_TOKENS)
    drafter = _AnswersKnown({tuple(p): a.token_ids for p, a in zip(prompts, alone.answers, strict=True)})
    watched = _WatchedRunner(tight.runner)
    tight = replace(tight, runner=cast(ModelRunner, watched))
    together = asyncio.run(
        run_requests(
            tight,
            crowded,
            prompts,
            sampling=sampling,
            reuse=True,
            drafter=drafter,
            clock=_StandingClock(),
            when_met=watched.let_go,
        )
    )
    return _compare(alone, together, watched)


class _WatchedRunner:
    """Has ModelRunner's `run_step`, which waits until `let_go`; counts what its steps are made of."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.num_batched_steps = 0
        self.num_cut_pieces = 0
        self._computed: set[tuple[int, int]] = set()  # (position, token id)
        self._may_go = threading.Event()

    def let_go(self) -> None:
        """Steps may go from now on."""
        self._may_go.set()

    @property
    def row_multiple(self) -> int:
        """As ModelRunner."""
        return self._runner.row_multiple

    def run_step(self, steps: Sequence[SequenceStep]) -> torch.Tensor:
        """As ModelRunner.run_step."""
        self._may_go.wait(RUN_TIMEOUT_S)
        self.num_batched_steps += len(steps) > 1
        for step in steps:
            tokens = set(enumerate(step.token_ids, step.start))
            # What was preempted is computed again, in pieces too: those show nothing of how prompts are cut.
            self.num_cut_pieces += step.num_logits == 0 and not tokens <= self._computed
            self._computed |= tokens
        return self._runner.run_step(steps)


class _StandingClock:
    """No time passes: nobody's turn comes by waiting, and steps cost what is assumed before any was measured."""

    def now_s(self) -> float:
        return 1.0

    def unix_ms(self) -> int:
        return 1_000


class _AnswersKnown:
    """A drafter that has seen the answers, and spoils the end of each draft."""

    costs_steps = False

    def __init__(self, prompt_to_answer: dict[tuple[int, ...], tuple[int, ...]]) -> None:
        self._prompt_to_answer = prompt_to_answer

    def token_s(self) -> float:
        return 0.0

    def draft(self, wishes: Sequence[DraftWish]) -> list[Draft]:
        return [self._one(wish) for wish in wishes]

    def leave(self, key: int) -> None:
        """Nothing is kept of any sequence."""

    def _one(self, wish: DraftWish) -> Draft:
        answer = self._prompt_to_answer[tuple(wish.token_ids[: wish.num_prompt])]
        num_known = len(wish.token_ids) - wish.num_prompt
        right = list(answer[num_known:][: wish.most])
        return Draft(tuple(right[:RIGHT_TOKENS] + [token ^ 1 for token in right[RIGHT_TOKENS:]]))


def _prompts(tokens: list[int], block_tokens: int, tokens_max: int) -> list[list[int]]:
    """Two families with a common beginning each, one prompt twice, and a short one."""
    head = max(block_tokens, min(2 * block_tokens, tokens_max - block_tokens))
    tail = min(block_tokens // 2 + 1, tokens_max - head)
    first, second = tokens[:head], tokens[head : 2 * head]

    def ending(number: int) -> list[int]:
        return tokens[2 * head + number * tail :][:tail]

    return [
        first + ending(0),
        first + ending(0),
        first + ending(1),
        second + ending(2),
        second + ending(3),
        tokens[5:12],
    ]


def _compare(alone: Ran, together: Ran, watched: _WatchedRunner) -> Together:
    pairs = list(zip(alone.answers, together.answers, strict=True))
    return Together(
        requests=len(pairs),
        token_equal=all(one.token_ids == other.token_ids for one, other in pairs),
        bit_equal=all(one.deltas == other.deltas for one, other in pairs),
        num_batched_steps=watched.num_batched_steps,
        num_cut_pieces=watched.num_cut_pieces,
        num_preemptions=together.num_preemptions,
        num_shared_blocks=together.num_shared_blocks,
        num_drafted_tokens=together.num_drafted_tokens,
        num_accepted_tokens=together.num_accepted_tokens,
    )
