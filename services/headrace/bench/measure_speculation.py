"""What drafts bring on this machine: tokens a second with and without, on text that quotes and on text that does not.

Owns the prompts and the order of runs. Two engines over the same weights, one with a drafter, answer the same prompts
in turn; each has the prompts' KV already, so that decoding is what is timed. Answers are compared token by token.
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
from headrace.config import Config
from headrace.core.block import HashAlgorithm, HashedPrompt, hash_prompt
from headrace.core.clock import Clock, Deadline, SystemClock
from headrace.core.errors import InvalidRequest
from headrace.core.generation import SamplingParams
from headrace.engine.drafter import NGRAM, OFF
from headrace.engine.engine import Engine
from headrace.engine.load_drafter import load_drafter
from headrace.engine.load_model import LoadedModel, load_model
from headrace.engine.make_pool import with_pool
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

    tokens: of each answer. rounds: each workload is run so often in both engines, in turn, after one that is not
    counted. Raises ModelRefused, ConfigInvalid, InvalidRequest (no room in the model's context).
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
    plain = Engine(model, replace(engine, speculation=OFF), clock=clock)
    drafted = Engine(with_pool(model, num_blocks=model.kv.num_blocks), engine, clock=clock, drafter=drafter)
    rows = asyncio.run(
        _measure(
            _Side(plain, clock), _Side(drafted, clock), tokens=tokens, batches=batches, rounds=rounds, report=report
        )
    )
    return SpeculationReport(model.name, speculation, engine.draft_tokens, tokens, rounds, tuple(rows))


class _Side:
    """One of the two engines, and what it took so far."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.engine = engine
        self._clock = clock

    async def answer(self, prompts: Sequence[HashedPrompt], sampling: SamplingParams) -> tuple[float, list[list[int]]]:
        """Seconds, and the tokens of all answers; all are computed together."""
        started_s = time.perf_counter()
        answers = await asyncio.gather(*(self._one(prompt, sampling) for prompt in prompts))
        return time.perf_counter() - started_s, answers

    async def _one(self, prompt: HashedPrompt, sampling: SamplingParams) -> list[int]:
        deadline = Deadline.after(RUN_TIMEOUT_S, self._clock)
        answer = await answer_prompt(self.engine, prompt, sampling=sampling, reuse=True, deadline=deadline)
        return list(answer.token_ids)


async def _measure(
    plain: _Side, drafted: _Side, *, tokens: int, batches: Sequence[int], rounds: int, report: Report
) -> list[SpeculationRow]:
    for side in (plain, drafted):
        side.engine.start()
    try:
        return [
            await _measure_row(what, batch, plain, drafted, tokens=tokens, rounds=rounds, report=report)
            for what in ("copy", "free", "sampled")
            for batch in batches
        ]
    finally:
        for side in (plain, drafted):
            await side.engine.stop()


async def _measure_row(
    what: str, batch: int, plain: _Side, drafted: _Side, *, tokens: int, rounds: int, report: Report
) -> SpeculationRow:
    report(f"{what}, batch {batch}: {rounds} rounds of {tokens} tokens")
    prompts = _prompts(what, batch, plain.engine.model)
    sampling = SamplingParams(
        max_tokens=tokens, temperature=0.8 if what == "sampled" else 0.0, seed=batch, ignore_eos=True
    )
    for side in (plain, drafted):  # once for the prompts' KV, and so that costs and acceptance are known
        await side.answer(prompts, sampling)
    rates: dict[_Side, list[float]] = {plain: [], drafted: []}
    before = drafted.engine.speculation()
    steps = {side: side.engine.steps.num_steps for side in rates}
    equal = True
    for number in range(rounds):
        answers = []
        for side in (plain, drafted) if number % 2 == 0 else (drafted, plain):
            seconds, tokens_of_all = await side.answer(prompts, sampling)
            rates[side].append(sum(map(len, tokens_of_all)) / seconds)
            answers.append(tokens_of_all)
        equal = equal and answers[0] == answers[1]
    after = drafted.engine.speculation()
    return SpeculationRow(
        what=what,
        batch=batch,
        plain_tokens_per_s=median(rates[plain]),
        drafted_tokens_per_s=median(rates[drafted]),
        drafted_tokens=after.drafted_tokens - before.drafted_tokens,
        accepted_tokens=after.accepted_tokens - before.accepted_tokens,
        plain_steps=plain.engine.steps.num_steps - steps[plain],
        drafted_steps=drafted.engine.steps.num_steps - steps[drafted],
        equal=equal,
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
