"""Codecs: KV in half the bytes, what that does to the next tokens, and that repeating it changes nothing more."""

from dataclasses import dataclass, replace

import torch

from headrace.config import Config
from headrace.core.block import KvCodec
from headrace.engine.load_model import LoadedModel
from headrace.engine.model_runner import SequenceStep
from headrace.learn.lesson import (
    Lesson,
    Report,
    block_table,
    compute_kv,
    fitting,
    load_for_lesson,
    read_kv,
    text_tokens,
)
from headrace.transfer.coded_pool import stored_pool

PREFIX_TOKENS, SCORED_TOKENS, REPEATS = 256, 64, 20
CODECS = (KvCodec.RAW, KvCodec.FP8, KvCodec.INT8)


@dataclass(frozen=True, slots=True)
class _Loss:
    codec: str
    block_bytes: int
    kv_error: float  # of K and V, root of the mean square, as a share of theirs
    logit_error: float  # mean distance of the logits
    same_choice: int  # of SCORED_TOKENS greedy choices
    drifts: bool


def show_codecs(config: Config, *, report: Report) -> Lesson:
    """Store one prefix in each codec, load it again and again, and score the tokens behind it on what came back."""
    model = load_for_lesson(config, pool_tokens=2 * (PREFIX_TOKENS + SCORED_TOKENS), report=report)
    block_tokens = model.kv.layout.block_tokens
    num_prefix = fitting(model, PREFIX_TOKENS + SCORED_TOKENS, least=SCORED_TOKENS + block_tokens) - SCORED_TOKENS
    num_prefix -= num_prefix % block_tokens
    tokens = text_tokens(model, num_prefix + SCORED_TOKENS)
    losses = []
    for codec in CODECS:
        report(f"storing {num_prefix} tokens as {codec}, and loading them {REPEATS} times")
        losses.append(_measure(model, tokens, num_prefix, codec))
    raw_bytes = losses[0].block_bytes
    drifted = sum(loss.drifts for loss in losses) or "none"
    return Lesson(
        tables=(
            (
                f"A prefix of {num_prefix} tokens stored and loaded, and the {SCORED_TOKENS} tokens behind it",
                ["codec ", "bytes of a block", "of raw", "error of KV", "mean error of logits", "same choice"],
                [
                    [
                        loss.codec,
                        f"{loss.block_bytes:,}",
                        f"{loss.block_bytes / raw_bytes:.3f}",
                        f"{loss.kv_error:.2%}",
                        f"{loss.logit_error:.3f}",
                        f"{loss.same_choice} of {SCORED_TOKENS}",
                    ]
                    for loss in losses
                ],
            ),
        ),
        facts={
            "rows": [
                {
                    "codec": loss.codec,
                    "bytes_ratio": loss.block_bytes / raw_bytes,
                    "kv_error": loss.kv_error,
                    "logit_error_mean": loss.logit_error,
                    "same_choice": loss.same_choice,
                    "drifts": loss.drifts,
                }
                for loss in losses
            ],
            "scored_tokens": SCORED_TOKENS,
        },
        conclusion=(
            f"Stored and loaded {REPEATS} times over, the bytes of {drifted} of them changed again: the loss is taken "
            "once. Raw loses nothing; the others trade nearness for memory, and a namespace of their own keeps their "
            "blocks apart."
        ),
        notes=("Error of KV: how far all keys and values together moved, as a share of their length.",),
    )


def _measure(model: LoadedModel, tokens: list[int], num_prefix: int, codec: str) -> _Loss:
    """In the pool's first blocks. The KV is computed anew for each codec."""
    layout = replace(model.kv.layout, codec=codec)
    pool, num_blocks = stored_pool(model.kv, layout), num_prefix // layout.block_tokens
    compute_kv(model, tokens[:num_prefix])
    exact_kv, exact = read_kv(model, num_prefix).float(), _score(model, tokens, num_prefix)
    first, last = [bytearray(layout.block_bytes) for _ in range(num_blocks)], list[bytes]()
    for block_id, payload in zip(block_table(model, num_prefix), first, strict=True):
        pool.read_block(block_id, memoryview(payload))
        for _ in range(REPEATS):
            again = bytearray(payload)
            pool.write_block(block_id, memoryview(again))
            pool.read_block(block_id, memoryview(again))
        last.append(bytes(again))
    loaded_kv, loaded = read_kv(model, num_prefix).float(), _score(model, tokens, num_prefix)
    return _Loss(
        codec=str(codec),
        block_bytes=layout.block_bytes,
        kv_error=float((loaded_kv - exact_kv).norm() / exact_kv.norm()),
        logit_error=float((loaded - exact).abs().mean()),
        same_choice=int((loaded.argmax(dim=1) == exact.argmax(dim=1)).sum()),
        drifts=any(bytes(payload) != again for payload, again in zip(first, last, strict=True)),
    )


def _score(model: LoadedModel, tokens: list[int], num_prefix: int) -> torch.Tensor:
    """Logits of the tokens behind the prefix, `[SCORED_TOKENS, vocab]`; their own KV goes behind the prefix's."""
    table = block_table(model, len(tokens))
    return model.runner.run_step([SequenceStep(tuple(tokens[num_prefix:]), num_prefix, table, SCORED_TOKENS)])
