"""What drafts bring on this machine: tokens a second with and without, on text that quotes and on text that does not.

Owns the prompts and the order of runs. Engines with a drafter and without, over the same weights and pool, answer the
same prompts in turn; each has the prompts' KV already, so that decoding is what is timed. There is one at a time: with
the step threads of two, torch's threads of both would sleep between any two operators (`load_model.py`), as no user's
do. Answers are compared token by token.
"""

import asyncio
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from tokenizers import Tokenizer

import headrace
from headrace.config import Config, EngineSettings
from headrace.core.block import HashAlgorithm, HashedPrompt, hash_prompt
from headrace.core.clock import Clock, Deadline, SystemClock
from headrace.core.errors import InvalidRequest
from headrace.core.generation import SamplingParams
from headrace.engine.drafter import NGRAM, OFF, Drafter
from headrace.engine.engine import Engine
from headrace.engine.load_drafter import load_drafter
from headrace.engine.load_model import LoadedModel, load_model
from headrace.verify.run_requests import answer_prompt

Report = Callable[[str], None]

PASSAGE_TOKENS = 320  # of code, which the answer is to repeat; 24 of them are the beginning of the answer
BEGUN_TOKENS = 24
RUN_TIMEOUT_S = 600.0

QUESTIONS = (
    "Write a short story about a lighthouse keeper who finds a letter.",
    "Explain to a child why the sky is blue.",
    "What should one think of before moving to another country?",
    "Describe a market on a rainy morning.",
    "How does bread rise, and what can go wrong?",
    "Give advice to somebody who begins to learn the violin.",
    "Why do cities grow along rivers?",
    "Tell what a winter evening in the mountains is like.",
)


@dataclass(frozen=True, slots=True)
class SpeculationRow:
    """One workload at one batch. Rates are tokens a second of the whole batch, medians over the rounds."""

    what: str  # copy, free (greedy) or sampled (temperature 0.8)
    batch: int
    plain_tokens_per_s: float
    drafted_tokens_per_s: float
    drafted_tokens: int
    accepted_tokens: int
    plain_steps: int
    drafted_steps: int
    equal: bool  # every token of every answer

    @property
    def speedup(self) -> float:
        """With drafts over without."""
        return self.drafted_tokens_per_s / self.plain_tokens_per_s

    @property
    def acceptance(self) -> float:
        """Accepted of drafted tokens; 0 where nothing was drafted."""
        return self.accepted_tokens / max(1, self.drafted_tokens)


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    """All rows of one run."""

    model: str
    speculation: str
    draft_tokens: int
    tokens: int  # of each answer
    rounds: int
    rows: tuple[SpeculationRow, ...]

    def as_json(self) -> dict[str, Any]:
        """The report for scripts."""
        rows = [
            asdict(row) | {"speedup": round(row.speedup, 3), "acceptance": round(row.acceptance, 3)}
            for row in self.rows
        ]
        return asdict(self) | {"rows": rows}

    def tables(self) -> list[tuple[str, list[str], list[list[str]]]]:
        """Title, columns and rows of each table."""
        columns = "text,batch,tokens/s without,with drafts,speed,accepted,steps without,with,equal".split(",")
        rows = [
            [
                row.what,
                str(row.batch),
                f"{row.plain_tokens_per_s:,.1f}",
                f"{row.drafted_tokens_per_s:,.1f}",
                f"{row.speedup:.2f}x",
                f"{row.accepted_tokens:,} of {row.drafted_tokens:,} ({row.acceptance:.0%})",
                str(row.plain_steps),
                str(row.drafted_steps),
                "yes" if row.equal else "NO",
            ]
            for row in self.rows
        ]
        title = (
            f"{self.model}, {self.speculation}, drafts of up to {self.draft_tokens} tokens, answers of {self.tokens}"
        )
        return [(title, columns, rows)]


def measure_speculation(
    config: Config, *, tokens: int, batches: Sequence[int], rounds: int, report: Report
) -> SpeculationReport:
    """Measure the configured model with its drafter (`ngram` where speculation is off). Blocks; minutes on CPU.

    tokens: of each answer. rounds: each workload is timed so often with drafts and without, in turn.
    Raises ModelRefused, ConfigInvalid, InvalidRequest (no room in the model's context).
    """
    speculation = NGRAM if config.engine.speculation == OFF else config.engine.speculation
    needed = max(batches) * (PASSAGE_TOKENS + BEGUN_TOKENS + tokens + 2 * config.engine.block_tokens)
    engine = replace(config.engine, speculation=speculation, pool_tokens=max(needed, 2 * config.engine.block_tokens))
    model = load_model(
        config.model,
        engine,
        trust_group=config.gateway.trust_group,
        hash_algorithm=HashAlgorithm(config.gateway.hash_algorithm),
        report=report,
    )
    if PASSAGE_TOKENS + BEGUN_TOKENS + tokens > model.context_tokens_max:
        raise InvalidRequest(f"a context of {model.context_tokens_max} has no room for {tokens} tokens", param="tokens")
    clock = SystemClock()
    drafter = load_drafter(model, config.model, engine, clock=clock, report=report)
    plain, drafted = _Side(model, replace(engine, speculation=OFF), clock), _Side(model, engine, clock, drafter)
    rows = [
        asyncio.run(_measure_row(what, batch, plain, drafted, tokens=tokens, rounds=rounds, report=report))
        for what in ("copy", "free", "sampled")
        for batch in batches
    ]
    return SpeculationReport(model.name, speculation, engine.draft_tokens, tokens, rounds, tuple(rows))


@dataclass(frozen=True, slots=True)
class _Turn:
    """One workload's answers, all computed together, and what they took."""

    answers: list[list[int]]
    seconds: float
    num_steps: int
    drafted_tokens: int
    accepted_tokens: int

    @property
    def tokens_per_s(self) -> float:
        return sum(map(len, self.answers)) / self.seconds


class _Side:
    """One of the two ways to decode."""

    def __init__(
        self, model: LoadedModel, settings: EngineSettings, clock: Clock, drafter: Drafter | None = None
    ) -> None:
        self.model = model
        self._settings = settings
        self._clock = clock
        self._drafter = drafter

    async def take_turn(self, prompts: Sequence[HashedPrompt], sampling: SamplingParams) -> _Turn:
        """In an engine of its own, and there for the second time: then it has the prompts' KV, and knows what steps
        cost and how often drafts are right."""
        engine = Engine(self.model, self._settings, clock=self._clock, drafter=self._drafter)
        engine.start()
        try:
            await self._answer_all(engine, prompts, sampling)
            before, steps_before, started_s = engine.speculation(), engine.steps.num_steps, time.perf_counter()
            answers = await self._answer_all(engine, prompts, sampling)
            seconds, after = time.perf_counter() - started_s, engine.speculation()
            return _Turn(
                answers,
                seconds,
                num_steps=engine.steps.num_steps - steps_before,
                drafted_tokens=after.drafted_tokens - before.drafted_tokens,
                accepted_tokens=after.accepted_tokens - before.accepted_tokens,
            )
        finally:
            await engine.stop()

    async def _answer_all(
        self, engine: Engine, prompts: Sequence[HashedPrompt], sampling: SamplingParams
    ) -> list[list[int]]:
        deadline = Deadline.after(RUN_TIMEOUT_S, self._clock)
        answers = [
            answer_prompt(engine, prompt, sampling=sampling, reuse=True, deadline=deadline) for prompt in prompts
        ]
        return [list(answer.token_ids) for answer in await asyncio.gather(*answers)]


async def _measure_row(
    what: str, batch: int, plain: _Side, drafted: _Side, *, tokens: int, rounds: int, report: Report
) -> SpeculationRow:
    report(f"{what}, batch {batch}: {rounds} rounds of {tokens} tokens")
    prompts = _prompts(what, batch, plain.model)
    sampling = SamplingParams(
        max_tokens=tokens, temperature=0.8 if what == "sampled" else 0.0, seed=batch, ignore_eos=True
    )
    turns: dict[_Side, list[_Turn]] = {plain: [], drafted: []}
    for number in range(rounds):
        for side in (plain, drafted) if number % 2 == 0 else (drafted, plain):
            turns[side].append(await side.take_turn(prompts, sampling))
    return SpeculationRow(
        what=what,
        batch=batch,
        plain_tokens_per_s=median(turn.tokens_per_s for turn in turns[plain]),
        drafted_tokens_per_s=median(turn.tokens_per_s for turn in turns[drafted]),
        drafted_tokens=sum(turn.drafted_tokens for turn in turns[drafted]),
        accepted_tokens=sum(turn.accepted_tokens for turn in turns[drafted]),
        plain_steps=sum(turn.num_steps for turn in turns[plain]),
        drafted_steps=sum(turn.num_steps for turn in turns[drafted]),
        equal=all(with_drafts.answers == without.answers for without, with_drafts in zip(*turns.values(), strict=True)),
    )


def _prompts(what: str, batch: int, model: LoadedModel) -> list[HashedPrompt]:
    """Different ones for the sequences of a batch."""
    tokenizer = Tokenizer.from_file(str(model.path / "tokenizer.json"))
    if what == "copy":
        ids = _source_tokens(tokenizer, batch * PASSAGE_TOKENS)
        passages = [ids[start : start + PASSAGE_TOKENS] for start in range(0, batch * PASSAGE_TOKENS, PASSAGE_TOKENS)]
        texts = [[*passage, *passage[:BEGUN_TOKENS]] for passage in passages]
    else:
        asked = [QUESTIONS[number % len(QUESTIONS)] for number in range(batch)]
        texts = [tokenizer.encode(f"Question: {text}\nAnswer:", add_special_tokens=False).ids for text in asked]
    namespace, block_tokens = model.namespace, model.kv.layout.block_tokens
    return [
        hash_prompt(namespace.id, ids, block_tokens=block_tokens, algorithm=namespace.hash_algorithm) for ids in texts
    ]


def _source_tokens(tokenizer: Tokenizer, num_tokens: int) -> list[int]:
    """Code that is always there: the source of this library's core, again and again if need be."""
    folder = Path(headrace.__file__).parent / "core"
    text = "\n".join(path.read_text(encoding="utf-8") for path in sorted(folder.glob("*.py")))
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False).ids
    return (ids * (num_tokens // len(ids) + 1))[:num_tokens]
