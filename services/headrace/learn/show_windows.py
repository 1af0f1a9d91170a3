"""Windows: layers that see the last tokens only, and what a sequence then holds however long it grows."""

import asyncio
import tempfile
from dataclasses import replace
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from transformers.utils import logging

from headrace.config import Config
from headrace.core.generation import SamplingParams
from headrace.engine.load_weights import load_weights
from headrace.learn.lesson import Lesson, Report, fitting, load_for_lesson, text_tokens
from headrace.verify.run_requests import run_requests

LAYERS, WINDOW_BLOCKS, WINDOWS, OUTPUT_TOKENS, SEED = 4, 2, 6, 16, 3
GREEDY = SamplingParams(max_tokens=OUTPUT_TOKENS, ignore_eos=True)


def show_windows(config: Config, *, report: Report) -> Lesson:
    """Make a small model at random, with a window in no layer, in three of four and in each, on the configured model's
    words; answer a prompt of six windows with all of them, and with transformers' own model."""
    base = load_for_lesson(config, pool_tokens=0, report=report)
    window = WINDOW_BLOCKS * config.engine.block_tokens
    length = fitting(base, WINDOWS * window + OUTPUT_TOKENS, least=3 * window) - OUTPUT_TOKENS
    tokens = text_tokens(base, length)
    report(f"a random model of {LAYERS} layers, with and without a window of {window} tokens")
    rows = []
    with tempfile.TemporaryDirectory(prefix="headrace-learn-") as folder:
        for name, windowed in (
            ("every layer sees all", 0),
            (f"{LAYERS - 1} of {LAYERS} layers see {window}", LAYERS - 1),
            (f"every layer sees {window}", LAYERS),
        ):
            path = _make_model(
                Path(folder) / f"windowed-{windowed}",
                base.path,
                window,
                windowed=windowed,
                vocab=base.runner.model.config.vocab_size,
            )
            settings = replace(config, model=replace(config.model, model=str(path), dtype="float32"))
            model = load_for_lesson(settings, pool_tokens=length + 4 * window, report=lambda line: None)
            ran = asyncio.run(run_requests(model, settings.engine, [tokens], sampling=GREEDY, reuse=False))
            rows.append((name, ran.held_bytes_max, ran.answers[0].token_ids == _plain_answer(path, tokens)))
    held_full, held_mixed, held_window = (held for _, held, _ in rows)
    return Lesson(
        tables=(
            (
                f"A prompt of {length:,} tokens and {OUTPUT_TOKENS} new ones, blocks of {config.engine.block_tokens}",
                ["model ", "KV held between steps", "same answer as transformers"],
                [[name, f"{held / 2**10:,.0f} KiB", "yes" if equal else "NO"] for name, held, equal in rows],
            ),
        ),
        facts={
            "window_tokens": window,
            "prompt_tokens": length,
            "held_bytes_full": held_full,
            "held_bytes_mixed": held_mixed,
            "held_bytes_window": held_window,
            "same_answers": all(equal for _, _, equal in rows),
        },
        conclusion=(
            "What no layer will look at again is given back: of a layer with a window a sequence holds the last window "
            "(and within a step that computes another one, two), however long it grows, and a hit loads one. A layer "
            "that sees all needs all."
        ),
    )


def _make_model(path: Path, words_of: Path, window: int, *, windowed: int, vocab: int) -> Path:
    """A random Qwen2 whose first `windowed` layers have the window, always of the same weights, with another model's
    tokenizer."""
    torch.manual_seed(SEED)
    shape = Qwen2Config(
        vocab_size=vocab, hidden_size=128, intermediate_size=256, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, use_sliding_window=windowed > 0, sliding_window=window,
        layer_types=["sliding_attention"] * windowed + ["full_attention"] * (LAYERS - windowed),
        max_position_embeddings=8_192, initializer_range=0.2, eos_token_id=None, bos_token_id=None,
    )  # fmt: skip
    logging.disable_progress_bar()
    Qwen2ForCausalLM(shape).save_pretrained(path)
    (path / "tokenizer.json").write_bytes((words_of / "tokenizer.json").read_bytes())
    return path


def _plain_answer(path: Path, tokens: list[int]) -> tuple[int, ...]:
    """Greedy tokens by transformers' own attention and cache, masks and all."""
    plain = load_weights(path, dtype=torch.float32, attn_implementation="sdpa")
    prompt = torch.tensor([tokens])
    with torch.inference_mode():
        text = plain.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=OUTPUT_TOKENS,
            do_sample=False,
            pad_token_id=0,
        )
    return tuple(text[0, len(tokens) :].tolist())
