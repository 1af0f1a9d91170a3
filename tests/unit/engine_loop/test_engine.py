"""The engine on a real tiny model: equality of answers whatever the company, and the life of runs and blocks."""

import asyncio
import random
from collections.abc import Callable

import pytest

from headrace.core.generation import SamplingParams
from headrace.engine.engine import Engine

from .conftest import BLOCK_TOKENS, VOCAB, generate


def make_tokens(length: int, *, seed: int) -> list[int]:
    return random.Random(seed).choices(range(1, VOCAB), k=length)


async def test_a_request_gets_the_same_bits_alone_and_among_strangers(make_engine: Callable[..., Engine]) -> None:
    """Fails if a row's logits depend on the batch, on the chunks of a prompt, or on somebody else's blocks."""
    prompts = [make_tokens(length, seed=length) for length in (1, 7, 8, 9, 40, 64, 100)]
    alone = make_engine(chunk=512)
    expected = [await generate(alone, prompt) for prompt in prompts]
    crowded = make_engine(chunk=13, batch=3)
    strangers = [make_tokens(20 + 3 * seed, seed=100 + seed) for seed in range(4)]
    replies = await asyncio.gather(*(generate(crowded, prompt) for prompt in (*strangers, *prompts)))
    for got, want in zip(replies[len(strangers) :], expected, strict=True):
        assert got.token_ids == want.token_ids
        assert got.logprobs == want.logprobs
        assert got.finished == want.finished
