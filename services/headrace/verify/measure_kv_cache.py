"""Decoding with and without KV cache on the bare model runner: what the cache is for, measured on this machine.

Without: every new token recomputes prompt and answer so far, in the same chunks and through the same code as a prefill.
With: the prompt is computed once, then one row for each token. Both must give the same tokens and the same bits.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from headrace.engine.load_model import LoadedModel
from headrace.engine.lone_sequence import LonePool, LoneSequence
from headrace.verify.recording_runner import RecordingRunner

# The yardstick of the published figure: 200 new tokens, 13.7 s without and 2.8 s with KV cache at 124M parameters.
COMPARED_TOKENS = 200
# Lines of the growth table.
GROWTH_STEP_TOKENS = 25


@dataclass(frozen=True, slots=True)
class Growth:
    """The state of decoding after some new tokens. Rates are over the last GROWTH_STEP_TOKENS tokens."""

    text_tokens: int
    new_tokens: int
    with_cache_tokens_per_s: float
    without_cache_tokens_per_s: float
    kv_bytes: int  # of the text, in whole blocks, as the pool holds it at most


@dataclass(frozen=True, slots=True)
class KvCacheComparison:
    """Both ways over the same prompt. Times cover reading the prompt and all COMPARED_TOKENS new tokens."""

    prompt_tokens: int
    with_cache_s: float
    without_cache_s: float
    token_equal: bool
    bit_equal: bool
    growth: tuple[Growth, ...]

    @property
    def speedup(self) -> float:
        """Time without the cache / time with it."""
        return self.without_cache_s / self.with_cache_s


@dataclass(frozen=True, slots=True)
class _Pass:
    token_ids: list[int]
    token_s: list[float]  # time of each new token; the first includes reading the prompt
    digest: str


def measure_kv_cache(
    model: LoadedModel, prompt: Sequence[int], *, chunk_tokens: int, report: Callable[[str], None]
) -> KvCacheComparison:
    """Generate COMPARED_TOKENS tokens both ways, in the calling thread. No engine may run on the model meanwhile, and
    the pool's first blocks are overwritten."""
    run = _Runs(model, chunk_tokens)
    run.compute(RecordingRunner(model.runner), run.sequence(), prompt)  # warm-up: first-use work counts for neither
    report(f"decoding {COMPARED_TOKENS} tokens with KV cache")
    cached = run.generate(prompt, keeps_kv=True, report=report)
    report(f"decoding {COMPARED_TOKENS} tokens without KV cache: everything is recomputed for each token")
    recomputed = run.generate(prompt, keeps_kv=False, report=report)
    return KvCacheComparison(
        prompt_tokens=len(prompt),
        with_cache_s=sum(cached.token_s),
        without_cache_s=sum(recomputed.token_s),
        token_equal=cached.token_ids == recomputed.token_ids,
        bit_equal=cached.digest == recomputed.digest,
        growth=tuple(_growth(model, len(prompt), cached.token_s, recomputed.token_s)),
    )


@dataclass(frozen=True, slots=True)
class _Runs:
    model: LoadedModel
    chunk_tokens: int

    def sequence(self) -> LoneSequence:
        """One of nothing yet, over the whole pool."""
        return LoneSequence(LonePool(self.model))

    def generate(self, prompt: Sequence[int], *, keeps_kv: bool, report: Callable[[str], None]) -> _Pass:
        runner = RecordingRunner(self.model.runner)
        tokens, token_s, sequence = list(prompt), [], self.sequence()
        for new_tokens in range(COMPARED_TOKENS):
            started_s = time.perf_counter()
            if not keeps_kv:
                sequence.leave()
            tokens.append(self.compute(runner, sequence, tokens))
            token_s.append(time.perf_counter() - started_s)
            if (new_tokens + 1) % (2 * GROWTH_STEP_TOKENS) == 0:
                report(f"  {new_tokens + 1} tokens in {sum(token_s):.1f} s")
        return _Pass(tokens[len(prompt) :], token_s, runner.take_digest())

    def compute(self, runner: RecordingRunner, sequence: LoneSequence, tokens: Sequence[int]) -> int:
        """Compute what the sequence lacks of the tokens, in chunks; the next token, greedily."""
        for step in sequence.steps(tokens[sequence.end :], rows=self.chunk_tokens):
            logits = runner.run_step([step])  # [1 if it is the last step else 0, vocab]
        return int(logits[0].argmax())


def _growth(model: LoadedModel, prompt_tokens: int, cached_s: list[float], recomputed_s: list[float]) -> list[Growth]:
    block_tokens, rows = model.kv.layout.block_tokens, list[Growth]()
    for stop in range(GROWTH_STEP_TOKENS, COMPARED_TOKENS + 1, GROWTH_STEP_TOKENS):
        # The first token's time is mostly the prompt's: it would hide how fast decoding is.
        span = slice(max(1, stop - GROWTH_STEP_TOKENS), stop)
        text_tokens = prompt_tokens + stop
        rows.append(
            Growth(
                text_tokens=text_tokens,
                new_tokens=stop,
                with_cache_tokens_per_s=len(cached_s[span]) / sum(cached_s[span]),
                without_cache_tokens_per_s=len(recomputed_s[span]) / sum(recomputed_s[span]),
                kv_bytes=model.windows.held(text_tokens, block_tokens=block_tokens) * model.layer_token_bytes,
            )
        )
    return rows
