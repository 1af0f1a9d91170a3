"""The memory formula against a measured curve: what plain transformers' cache takes as the text grows."""

import torch
from transformers import DynamicCache

from headrace.config import Config
from headrace.engine.load_weights import load_weights
from headrace.learn.lesson import Lesson, Report, fitting, load_for_lesson, text_tokens

LENGTHS = (50, 100, 200, 400, 800)


def show_memory(config: Config, *, report: Report) -> Lesson:
    """Grow the cache of transformers' own model, count the bytes of its tensors, and compare with the formula."""
    model = load_for_lesson(config, pool_tokens=0, report=report)
    layout = model.kv.layout
    token_bytes = layout.num_layers * model.layer_token_bytes
    longest = fitting(model, LENGTHS[-1], least=LENGTHS[0])
    tokens = torch.tensor([text_tokens(model, longest)])
    report("growing the cache of transformers' own model")
    plain = load_weights(model.path, dtype=model.runner.model.dtype, attn_implementation="sdpa")
    rows, cache, done = [], DynamicCache(), 0
    for length in (length for length in LENGTHS if length <= longest):
        with torch.inference_mode():
            # By place: the parameter has another name in later versions. It grows in place.
            plain(tokens[:, done:length], None, None, cache, use_cache=True)
        done = length
        measured = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
        held = model.windows.held(length, block_tokens=layout.block_tokens) * model.layer_token_bytes
        rows.append((length, length * token_bytes, measured, held))
    formula = (
        f"2 x {layout.num_layers} layers x {layout.num_kv_heads} kv heads x {layout.head_dim} x "
        f"{token_bytes // (2 * layout.num_layers * layout.num_kv_heads * layout.head_dim)} bytes = "
        f"{token_bytes:,} bytes a token"
    )
    return Lesson(
        tables=(
            (
                f"KV in memory: {formula}",
                ["tokens", "by the formula", "transformers' cache", "in blocks here"],
                [[f"{length:,}", *(f"{size / 2**20:.2f} MiB" for size in sizes)] for length, *sizes in rows],
            ),
        ),
        facts={
            "token_bytes": token_bytes,
            "rows": [
                {"tokens": length, "formula_bytes": wanted, "measured_bytes": measured, "block_bytes": held}
                for length, wanted, measured, held in rows
            ],
        },
        conclusion=(
            "The cache grows by the same number of bytes with every token, in every sequence: memory is length times "
            f"concurrency. Blocks of {layout.block_tokens} tokens round each sequence up to the next block."
        ),
    )
