"""Batching: one step for many sequences reads the weights once, and memory grows with how many there are."""

import asyncio
from dataclasses import replace

from headrace.config import Config
from headrace.core.generation import SamplingParams
from headrace.learn.lesson import Lesson, Report, fitting, load_for_lesson, text_tokens
from headrace.verify.run_requests import run_requests

REQUESTS, PROMPT_TOKENS, OUTPUT_TOKENS = 8, 64, 24
GREEDY = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)
BATCHES = (1, 2, 4, 8)


def show_batching(config: Config, *, report: Report) -> Lesson:
    """The same requests at once, on engines that may decode 1, 2, 4 and 8 sequences together."""
    room = REQUESTS * (PROMPT_TOKENS + OUTPUT_TOKENS + 2 * config.engine.block_tokens)
    model = load_for_lesson(config, pool_tokens=room, report=report)
    length = fitting(model, PROMPT_TOKENS + OUTPUT_TOKENS, least=2 * OUTPUT_TOKENS) - OUTPUT_TOKENS
    text = text_tokens(model, length + REQUESTS)
    prompts = [text[n : n + length] for n in range(REQUESTS)]
    held = model.windows.held(length + OUTPUT_TOKENS, block_tokens=model.kv.layout.block_tokens)
    rows, answers = [], []
    for batch in BATCHES:
        report(f"{REQUESTS} requests, at most {batch} decoded together")
        settings = replace(config.engine, batch_sequences_max=batch)
        ran = asyncio.run(run_requests(model, settings, prompts, sampling=GREEDY, reuse=False))
        answers.append([answer.token_ids for answer in ran.answers])
        kv_bytes = batch * held * model.layer_token_bytes
        rows.append((batch, REQUESTS * OUTPUT_TOKENS / ran.seconds, ran.seconds, kv_bytes))
    equal = all(answer == answers[0] for answer in answers)
    return Lesson(
        tables=(
            (
                f"{REQUESTS} requests of {length} tokens, {OUTPUT_TOKENS} new ones each",
                ["decoded together", "output tokens/s", "time", "KV in use"],
                [[str(b), f"{rate:.1f}", f"{s:.2f} s", f"{kv / 2**20:.1f} MiB"] for b, rate, s, kv in rows],
            ),
        ),
        facts={
            "rows": [
                {"batch": b, "output_tokens_per_s": rate, "seconds": s, "kv_bytes": kv} for b, rate, s, kv in rows
            ],
            "same_answers": equal,
        },
        conclusion=(
            f"The answers are {'the same, bit for bit as far as the model is exact,' if equal else 'NOT the same'} in "
            "every batch. Throughput is bought with KV memory: that is what limits how many run together."
        ),
    )
