"""Which attention a model runs with: the one that gathers (`attention.py`) or FlexAttention (`flex_attention.py`).

This file owns the choice, what each refusal says, and what is done before: on a device the model as it was loaded, with
its own attention, should give the logits that pages give; before FlexAttention serves, it and the other attend to the
same prompts over the model's own pool, and the logits must agree; and on CUDA every kernel that steps will call is
compiled. It knows nothing of kernels.
"""

import time
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch
from transformers import PreTrainedModel

from headrace.config import EngineSettings, ModelSettings
from headrace.core.errors import ConfigInvalid
from headrace.engine.attention import ATTENTION_NAME, attend_gathered
from headrace.engine.flex_attention import FlexAttention, call_shapes
from headrace.engine.layered_kv import LayeredKV, PoolKV
from headrace.engine.model_runner import ModelRunner, SequenceStep

# Largest difference of a logit between two ways, relative to the largest logit (docs/engine.md has what was measured).
# Wrong masks or positions lie far above.
FLEX_TOLERANCE = {"float32": 1e-4, "float16": 1e-2, "bfloat16": 1e-1}

CHECK_TOKENS = 184  # a whole tile of a block mask and a part of one
CHECK_CUTS = (0, 140, 141, 157, 184)  # many rows, one, few, many


def choose_attention(
    runner: ModelRunner,
    settings: ModelSettings,
    engine: EngineSettings,
    *,
    name: str,
    report: Callable[[str], None],
    plain: torch.Tensor | None = None,
) -> bool:
    """Have the runner attend as the settings say; returns whether that is FlexAttention. Writes to the pool's blocks.

    Raises ConfigInvalid where it was asked for and cannot be had; where it was not, `report` gets why.
    plain: what `plain_logits` gave, for `report` to be told when the runner's are others. That is no refusal: of a
    mixture of experts rounding may choose another expert.
    """
    on_cuda = runner.kv.device.type == "cuda"
    if plain is not None and runner.kv.layout.codec == "raw":
        wanted = plain[
            [row for number, (_, last) in enumerate(_pieces(_prompt_of(runner))) for row in (last - 1, number)]
        ]
        if (difference := _difference(runner, _check_logits(runner), wanted)) is not None:
            report(f"{name}: on this device {difference} from those by its own attention: its answers may be wrong")
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


@torch.inference_mode()
def plain_logits(model: PreTrainedModel) -> torch.Tensor:
    """Of every token of the check's prompt, by the model as it was loaded and its own attention. [tokens, vocab]"""
    prompt = torch.tensor([_check_prompt(model)], device=model.device)
    model.set_attn_implementation("eager")
    try:
        return model(input_ids=prompt, use_cache=False).logits[0].float().cpu()
    finally:
        model.set_attn_implementation(ATTENTION_NAME)


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
    difference = _difference(runner, found, wanted)
    return None if difference is None else f"{difference} from those of the other"


def _difference(runner: ModelRunner, found: torch.Tensor, wanted: torch.Tensor) -> str | None:
    difference = float((found - wanted).abs().max()) / max(1.0, float(wanted.abs().max()))
    allowed = FLEX_TOLERANCE[runner.kv.layout.dtype]
    if difference <= allowed:
        return None
    return f"its logits differ by {difference:.2g} of the largest (allowed: {allowed:g})"


def _check_logits(runner: ModelRunner) -> torch.Tensor:
    """Logits of a prompt in pieces, beside one that gets one row at a time. [logits, vocab]"""
    prompt, blocks = _prompt_of(runner), _some_blocks(runner.kv)
    table = blocks[: -(-len(prompt) // runner.kv.layout.block_tokens)][::-1]
    rows = []
    for number, (first, last) in enumerate(_pieces(prompt)):
        beside = SequenceStep(prompt[number : number + 1], number, blocks[-1:], 1)
        rows.append(runner.run_step([SequenceStep(prompt[first:last], first, table, 1), beside]))
    return torch.cat(rows)


def _prompt_of(runner: ModelRunner) -> tuple[int, ...]:
    """As much of the check's prompt as all blocks but one have room for."""
    room = (len(_some_blocks(runner.kv)) - 1) * runner.kv.layout.block_tokens
    return _check_prompt(runner.model)[:room]


def _check_prompt(model: PreTrainedModel) -> tuple[int, ...]:
    vocab_size, num_tokens = model.config.vocab_size, min(CHECK_TOKENS, _positions(model))
    return tuple((7_919 * (index + 1) + index * index) % vocab_size for index in range(num_tokens))


def _pieces(prompt: Sequence[int]) -> list[tuple[int, int]]:
    return list(pairwise(sorted({min(cut, len(prompt)) for cut in CHECK_CUTS})))


def _warm_up(runner: ModelRunner, engine: EngineSettings) -> None:
    """Compile what steps will call. Sequences share blocks here, since nobody looks at what comes out."""
    blocks, block_tokens = _some_blocks(runner.kv), runner.kv.layout.block_tokens
    rows_max = min(engine.prefill_chunk_tokens, len(blocks) * block_tokens, _positions(runner.model))
    for num_sequences, num_rows in call_shapes(engine.batch_sequences_max, rows_max):
        num_rows = min(num_rows, rows_max)
        step = SequenceStep((0,) * num_rows, 0, blocks[: -(-num_rows // block_tokens)], 0)
        runner.run_step([step] * num_sequences)


def _positions(model: PreTrainedModel) -> int:
    """How many the model has: one behind a table of them is an error that a CUDA device does not survive."""
    return int(model.config.max_position_embeddings)


def _some_blocks(kv: PoolKV) -> list[int]:
    """All blocks, as a block table has them."""
    return kv.whole_blocks(min(kv.num_blocks, kv.num_near)) if isinstance(kv, LayeredKV) else list(range(kv.num_blocks))
