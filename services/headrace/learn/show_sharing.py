"""Sharing: requests that begin alike compute and hold their common beginning once."""

import asyncio

from headrace.config import Config
from headrace.core.generation import SamplingParams
from headrace.learn.lesson import Lesson, Report, fitting, load_for_lesson, text_tokens
from headrace.verify.run_requests import Ran, run_requests

REQUESTS, SHARED_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 8, 512, 24, 8
GREEDY = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)


def show_sharing(config: Config, *, report: Report) -> Lesson:
    """Run prompts with one long common beginning, each alone and then with sharing; count tokens and blocks."""
    room = REQUESTS * (SHARED_TOKENS + OWN_TOKENS + OUTPUT_TOKENS + config.engine.block_tokens)
    model = load_for_lesson(config, pool_tokens=2 * room, report=report)
    length = fitting(model, SHARED_TOKENS + OWN_TOKENS, least=2 * OWN_TOKENS + OUTPUT_TOKENS) - OUTPUT_TOKENS
    text = text_tokens(model, length + REQUESTS * OWN_TOKENS)
    shared = text[: length - OWN_TOKENS]
    prompts = [shared + text[length + n * OWN_TOKENS :][:OWN_TOKENS] for n in range(REQUESTS)]
    prompt_tokens = sum(map(len, prompts))

    async def both() -> tuple[Ran, Ran]:
        report(f"{REQUESTS} requests of {length} tokens, each on its own")
        apart = await run_requests(model, config.engine, prompts, sampling=GREEDY, reuse=False, one_by_one=True)
        report("the same with sharing")
        shared = await run_requests(model, config.engine, prompts, sampling=GREEDY, reuse=True, one_by_one=True)
        return apart, shared

    apart, together = asyncio.run(both())
    equal = [answer.token_ids for answer in apart.answers] == [answer.token_ids for answer in together.answers]
    return Lesson(
        tables=(
            (
                f"{REQUESTS} prompts of {length} tokens, the first {len(shared)} alike, one after another",
                ["way ", "prompt tokens", "computed", "time"],
                [
                    ["each on its own", f"{prompt_tokens:,}", f"{prompt_tokens:,}", f"{apart.seconds:.2f} s"],
                    [
                        "shared",
                        f"{prompt_tokens:,}",
                        f"{prompt_tokens - together.cached_tokens:,}",
                        f"{together.seconds:.2f} s",
                    ],
                ],
            ),
        ),
        facts={
            "prompt_tokens": prompt_tokens,
            "computed_alone": prompt_tokens - apart.cached_tokens,
            "computed_shared": prompt_tokens - together.cached_tokens,
            "apart_s": apart.seconds,
            "shared_s": together.seconds,
            "same_answers": equal,
        },
        conclusion=(
            f"The answers are {'the same' if equal else 'NOT the same'}. Full blocks are never written again, so any "
            "number of sequences can point to one; only what follows the last full common block is computed by each."
        ),
    )
