"""Why caching is valid: what is computed for a token depends on the tokens before it, and on none after it."""

import time

import torch

from headrace.config import Config
from headrace.learn.lesson import Lesson, Report, compute_kv, fitting, load_for_lesson, read_kv, text_tokens

PROMPT_TOKENS, MORE_TOKENS, TIMED_STEPS = 256, 64, 5


def show_validity(config: Config, *, report: Report) -> Lesson:
    """Compare the KV of one prompt with that of a longer text, and of a text with one other token; time both ways."""
    model = load_for_lesson(config, pool_tokens=4 * (PROMPT_TOKENS + MORE_TOKENS), report=report)
    num_all = fitting(model, PROMPT_TOKENS + MORE_TOKENS, least=32)
    num_prompt = num_all * PROMPT_TOKENS // (PROMPT_TOKENS + MORE_TOKENS)
    tokens = text_tokens(model, num_all)
    other_block = -(-num_all // model.kv.layout.block_tokens)
    report(f"computing {num_prompt} tokens, then the same with more behind them, then with one token changed")
    compute_kv(model, tokens[:num_prompt])
    alone = read_kv(model, num_prompt)
    compute_kv(model, tokens, first_block=other_block)
    followed = read_kv(model, num_prompt, first_block=other_block)
    changed_at = num_prompt * 2 // 5
    changed_tokens = tokens[:num_prompt]
    changed_tokens[changed_at] = (changed_tokens[changed_at] + 1) % model.runner.model.config.vocab_size
    compute_kv(model, changed_tokens, first_block=other_block)
    changed = read_kv(model, num_prompt, first_block=other_block)

    by_followed, by_changed = _differing(alone, followed), _differing(alone, changed)
    before, after = int(by_changed[:changed_at].sum()), int(by_changed[changed_at:].sum())
    compute_kv(model, tokens[:num_prompt])
    cached_s = min(
        _seconds(lambda: compute_kv(model, tokens[: num_prompt + 1], start=num_prompt)) for _ in range(TIMED_STEPS)
    )
    anew_s = min(_seconds(lambda: compute_kv(model, tokens[: num_prompt + 1])) for _ in range(TIMED_STEPS))
    rows = [
        ["more text behind it", "all", str(num_prompt), str(int(by_followed.sum()))],
        [f"token {changed_at} is another", "before it", str(changed_at), str(before)],
        [f"token {changed_at} is another", "from it on", str(num_prompt - changed_at), str(after)],
    ]
    return Lesson(
        tables=(
            (
                "Positions whose K or V differ in any bit",
                ["what is changed ", "positions ", "compared", "differ"],
                rows,
            ),
            (
                f"The next token behind {num_prompt}",
                ["way ", "time"],
                [["from the KV cache", f"{cached_s * 1e3:.1f} ms"], ["all computed again", f"{anew_s * 1e3:.1f} ms"]],
            ),
        ),
        facts={
            "prompt_tokens": num_prompt,
            "differ_with_more_text": int(by_followed.sum()),
            "differ_before_change": before,
            "differ_from_change_on": after,
            "compared_from_change_on": num_prompt - changed_at,
            "cached_ms": cached_s * 1e3,
            "recomputed_ms": anew_s * 1e3,
        },
        conclusion=(
            "Later tokens change nothing that was computed before them, so it can be kept; a changed token changes "
            "everything from itself on, so only an equal beginning can be reused."
        ),
    )


def _differing(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """[tokens] bool: positions at which any layer's K or V differ."""
    return (left != right).any(dim=4).any(dim=2).any(dim=1).any(dim=0)


def _seconds(act: object) -> float:
    started_s = time.perf_counter()
    act()  # type: ignore[operator]
    return time.perf_counter() - started_s
