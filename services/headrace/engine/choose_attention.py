"""Which attention a model runs with: the one that gathers (`attention.py`) or FlexAttention (`flex_attention.py`).

This file owns the choice, what each refusal says, and what is done before FlexAttention serves: both attend to the same
prompts over the model's own pool, and the logits must agree; and on CUDA every kernel that steps will call is compiled.
It knows nothing of kernels.
"""

import time
from collections.abc import Callable
from itertools import pairwise

import torch

from headrace.config import EngineSettings, ModelSettings
from headrace.core.errors import ConfigInvalid
from headrace.engine.attention import attend_gathered
from headrace.engine.flex_attention import FlexAttention, call_shapes
from headrace.engine.layered_kv import LayeredKV, PoolKV
from headrace.engine.model_runner import ModelRunner, SequenceStep

# Largest difference of a logit between the two, relative to the largest logit (docs/engine.md has what was measured).
# Wrong masks or positions lie far above.
FLEX_TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-1}

CHECK_TOKENS = 184  # a whole tile of a block mask and a part of one
CHECK_CUTS = (0, 140, 141, 157, 184)  # many rows, one, few, many


def choose_attention(
    runner: ModelRunner, settings: ModelSettings, engine: EngineSettings, *, name: str, report: Callable[[str], None]
) -> bool:
    """Have the runner attend as the settings say; returns whether that is FlexAttention. Writes to the pool's blocks.

    Raises ConfigInvalid where it was asked for and cannot be had; where it was not, `report` gets why.
    """
    on_cuda = runner.kv.device.type == "cuda"
    asked = settings.attention_backend == "flex"
    assert not (asked and settings.exact), "settings are checked before"
    if not asked and (settings.attention_backend == "gather" or settings.exact or not on_cuda):
        return False
    started_s = time.perf_counter()
    if (why_not := _why_not(runner.kv) or _try_flex(runner, engine)) is not None:
        runner.attention = attend_gathered
        if asked:
            raise ConfigInvalid("attention_backend", f"flex cannot be had: {why_not}; choose auto or gather")
        report(f"{name}: keys and values are gathered for attention, since FlexAttention cannot be had: {why_not}")
        return False
    took_s = time.perf_counter() - started_s
    how = f"its kernels were compiled and checked in {took_s:.0f} s" if on_cuda else "on a CPU that is slow"
    report(f"{name}: FlexAttention reads keys and values where they lie; {how}")
    return True


def _why_not(kv: PoolKV) -> str | None:
    """What of the pool's layout FlexAttention cannot do; None for nothing."""
    if kv.layout.codec != "raw":
        return f"a pool in {kv.layout.codec} is no pool of numbers"
    block_tokens = kv.layout.block_tokens
    if kv.device.type == "cuda" and (block_tokens < 16 or block_tokens & (block_tokens - 1)):
        return f"its kernels need block_tokens to be a power of two from 16 on, and it is {block_tokens}"
    return None


def _try_flex(runner: ModelRunner, engine: EngineSettings) -> str | None:
    """Switch over, compare and compile; what went wrong, or None."""
    wanted = _check_logits(runner)
    runner.attention = FlexAttention(compiled=runner.kv.device.type == "cuda")
    try:
        found = _check_logits(runner)
        if runner.kv.device.type == "cuda":
            _warm_up(runner, engine)
    except Exception as error:  # whatever a compiler raises
        return f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"
    difference = float((found - wanted).abs().max()) / max(1.0, float(wanted.abs().max()))
    allowed = FLEX_TOLERANCE[runner.kv.layout.dtype]
    if not difference <= allowed:
        return f"its logits differ from those of the other by {difference:.2g} of the largest (allowed: {allowed:g})"
    return None


def _check_logits(runner: ModelRunner) -> torch.Tensor:
    """Logits of a prompt in pieces, beside one that gets one row at a time. [logits, vocab]"""
    block_tokens, blocks = runner.kv.layout.block_tokens, _some_blocks(runner.kv)
    num_tokens = min(CHECK_TOKENS, (len(blocks) - 1) * block_tokens, _positions(runner))
    vocab_size = runner.model.config.vocab_size
    prompt = tuple((7_919 * (index + 1) + index * index) % vocab_size for index in range(num_tokens))
    table = blocks[: -(-num_tokens // block_tokens)][::-1]
    rows = []
    for number, (first, last) in enumerate(pairwise(sorted({min(cut, num_tokens) for cut in CHECK_CUTS}))):
        beside = SequenceStep(prompt[number : number + 1], number, blocks[-1:], 1)
        rows.append(runner.run_step([SequenceStep(prompt[first:last], first, table, 1), beside]))
    return torch.cat(rows)


def _warm_up(runner: ModelRunner, engine: EngineSettings) -> None:
    """Compile what steps will call. Sequences share blocks here, since nobody looks at what comes out."""
    blocks, block_tokens = _some_blocks(runner.kv), runner.kv.layout.block_tokens
    rows_max = min(engine.prefill_chunk_tokens, len(blocks) * block_tokens, _positions(runner))
    for num_sequences, num_rows in call_shapes(engine.batch_sequences_max, rows_max):
        num_rows = min(num_rows, rows_max)
        step = SequenceStep((0,) * num_rows, 0, blocks[: -(-num_rows // block_tokens)], 0)
        runner.run_step([step] * num_sequences)


def _positions(runner: ModelRunner) -> int:
    """How many the model has: one behind a table of them is an error that a CUDA device does not survive."""
    return int(runner.model.config.max_position_embeddings)


def _some_blocks(kv: PoolKV) -> list[int]:
    """All blocks, as a block table has them."""
    return kv.whole_blocks(min(kv.num_blocks, kv.num_near)) if isinstance(kv, LayeredKV) else list(range(kv.num_blocks))
