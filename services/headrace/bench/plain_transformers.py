"""The same model as transformers runs it by itself: `generate` with its own cache and attention, to compare with.

Knows nothing of our engine. Uses what `generate` offers to everybody: one padded batch, a DynamicCache, SDPA attention.
"""

import copy
import inspect
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from headrace.engine.load_weights import load_weights


class PlainTransformers:
    """Methods return seconds. One thread at a time."""

    def __init__(self, path: Path, *, dtype: torch.dtype, device: torch.device, threads: int) -> None:
        """threads: each kind of work runs on one thread or on so many, whichever is faster when it is done first."""
        model: Any = load_weights(path, dtype=dtype, attn_implementation="sdpa")
        self._model = model.to(device)  # transformers' own types do not know what `to` and `generate` take
        self._device = device
        # Its name changed within the versions of transformers that are served.
        parameters = inspect.signature(self._model.forward).parameters
        self._cache_name = "cache" if "cache" in parameters else "past_key_values"
        self._thread_counts = sorted({1, threads})
        self._work_to_threads: dict[tuple[Any, ...], int] = {}

    @torch.inference_mode()
    def prefill(self, tokens: int) -> float:
        """One forward over a prompt of random tokens, its KV kept."""
        prompt = self._tokens(1, tokens)
        return self._timed(("prefill", tokens), lambda: self._model(input_ids=prompt, use_cache=True, logits_to_keep=1))

    @torch.inference_mode()
    def recompute(self, tokens: int) -> float:
        """The next token without any KV kept: one forward over the sequence so far, and nothing of it is kept."""
        prompt = self._tokens(1, tokens + 1)
        return self._timed(("again", tokens), lambda: self._model(input_ids=prompt, use_cache=False, logits_to_keep=1))

    @torch.inference_mode()
    def decoder(self, batch: int, context: int, steps: int) -> Callable[[], float]:
        """What decodes `steps` tokens greedily for `batch` sequences behind `context` tokens, each time from there;
        it returns seconds of one step. The context's KV is computed now."""
        prompt = self._tokens(1, context + 1)
        output = self._model(input_ids=prompt[:, :context], use_cache=True, logits_to_keep=1)
        cache = getattr(output, self._cache_name)
        cache.batch_repeat_interleave(batch)
        prompts = prompt.repeat(batch, 1)

        def generate() -> float:
            kept: list[Any] = [copy.deepcopy(cache) for _ in self._thread_counts]
            return (
                self._timed(
                    ("decode", batch, context),
                    lambda: self._model.generate(
                        prompts,
                        attention_mask=torch.ones_like(prompts),
                        max_new_tokens=steps,
                        min_new_tokens=steps,
                        do_sample=False,
                        pad_token_id=0,
                        **{self._cache_name: kept.pop()},
                    ),
                )
                / steps
            )

        return generate

    def _tokens(self, batch: int, tokens: int) -> torch.Tensor:
        """[batch, tokens] of random ids."""
        generator = torch.Generator().manual_seed(tokens)
        ids = torch.randint(0, self._model.config.vocab_size, (batch, tokens), generator=generator)
        return ids.to(self._device)

    def _timed(self, work: tuple[Any, ...], act: Callable[[], object]) -> float:
        """Seconds of `act`; the first time of a kind of work on each number of threads, and the best counts."""
        counts = [self._work_to_threads[work]] if work in self._work_to_threads else self._thread_counts
        times = {}
        for threads in counts:
            torch.set_num_threads(threads)
            started_s = time.perf_counter()
            act()
            if self._device.type == "cuda":
                torch.cuda.synchronize(self._device)
            times[threads] = time.perf_counter() - started_s
        self._work_to_threads[work] = min(times, key=times.__getitem__)
        return min(times.values())
