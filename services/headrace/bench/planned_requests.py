"""What is sent when: traces, read or made up, and files of text become requests with prompts, one after the other.

Prompts of a trace are made up from its block ids, so that equal ids are equal tokens: a prefix that two requests of the
trace share is shared by their prompts, and no other is. Everything is made as it is needed, by its seed alone.
"""

import hashlib
import json
import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import count
from pathlib import Path
from typing import Any

from headrace.core.errors import InvalidRequest
from headrace.simulate.read_trace import Trace, TracedRequest

# Made-up prompts use these token ids: every usual vocabulary has them, and special tokens come before them.
FIRST_TOKEN, TOKEN_KINDS = 32, 224
_BYTE_TO_TOKEN = bytes(FIRST_TOKEN + byte % TOKEN_KINDS for byte in range(256))

# A made-up word is two letters and a space. A tokenizer may need a token for each.
WORD_TOKENS_MAX = 3
_LETTERS = "abcdefghijklmnopqrstuvwxyz"
_WORDS = [_LETTERS[token // 26 % 26] + _LETTERS[token % 26] for token in range(256)]

# Tokens of a chat's own format, at most, beside the words.
CHAT_FORMAT_TOKENS = 64


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request: when, seconds from the start, and what. `conversation` -1: it belongs to none."""

    arrival_s: float
    prompt: str | tuple[int, ...]
    max_tokens: int
    conversation: int = -1


@dataclass(frozen=True, slots=True)
class PromptShape:
    """How a traced request becomes a prompt."""

    block_tokens: int  # of the trace
    scale: float  # lengths, prompts and outputs alike, are multiplied by it
    output_tokens_max: int
    seed: int
    as_words: bool  # text instead of token ids, where the API takes no ids


def shape_prompts(
    *,
    block_tokens: int,
    prompt_tokens_max: int,
    context_tokens_max: int,
    output_tokens_max: int,
    seed: int,
    as_words: bool,
) -> PromptShape:
    """The shape in which the longest prompt and its output fit into the model's context; never longer than the trace.

    Raises InvalidRequest where the outputs alone take the context.
    """
    room = context_tokens_max - output_tokens_max - (CHAT_FORMAT_TOKENS if as_words else 0)
    room //= WORD_TOKENS_MAX if as_words else 1
    if room < 1:
        raise InvalidRequest(
            f"the model's context of {context_tokens_max:,} tokens has no room for a prompt beside an output of"
            f" {output_tokens_max:,} tokens; ask for less",
            param="max_tokens",
        )
    scale = min(1.0, room / prompt_tokens_max)
    return PromptShape(
        block_tokens=block_tokens, scale=scale, output_tokens_max=output_tokens_max, seed=seed, as_words=as_words
    )


def plan_trace(requests: Iterable[TracedRequest], shape: PromptShape) -> Iterator[PlannedRequest]:
    """The requests of a trace with their prompts, in their order and at their times."""
    step = shape.block_tokens * shape.scale
    for number, request in enumerate(requests):
        tokens = max(1, int(request.input_tokens * shape.scale))
        # A block is always behind the same blocks, so its place, and by that its scaled length, is always the same.
        parts = (
            block_bytes(shape.seed, f"b{block}", int((place + 1) * step) - int(place * step))
            for place, block in enumerate(request.block_ids)
        )
        spelled = b"".join(parts)[:tokens]
        if len(spelled) < tokens:  # the trace names full blocks only: the end belongs to this request alone
            spelled += block_bytes(shape.seed, f"r{number}", tokens - len(spelled))
        token_ids = tuple(spelled.translate(_BYTE_TO_TOKEN))
        yield PlannedRequest(
            arrival_s=request.arrival_s,
            prompt=" ".join(_WORDS[token] for token in token_ids) if shape.as_words else token_ids,
            max_tokens=max(1, min(shape.output_tokens_max, round(request.output_tokens * shape.scale))),
            conversation=request.conversation,
        )


def block_bytes(seed: int, name: str, num_tokens: int) -> bytes:
    """A block's tokens as bytes: the same for the same seed and name, and a shorter block begins a longer one."""
    return hashlib.shake_128(f"{seed}/{name}".encode()).digest(num_tokens)


def at_rate(trace: Trace, rate: float | None, *, requests_max: int | None) -> list[TracedRequest]:
    """A trace's first requests from second 0 on; with a rate, their gaps all stretched or shrunk alike to reach it.

    Raises InvalidRequest for a trace without requests, or without gaps, which no stretching can bring to a rate.
    """
    chosen = trace.requests[:requests_max]
    if not chosen:
        raise InvalidRequest("the trace has no requests", param="trace")
    start_s = chosen[0].arrival_s
    span_s = chosen[-1].arrival_s - start_s
    if rate is not None and span_s <= 0 and len(chosen) > 1:
        raise InvalidRequest("all requests of the trace come at the same time: it has no rate", param="rate")
    factor = 1.0 if rate is None or span_s <= 0 else (len(chosen) - 1) / rate / span_s
    return [replace(request, arrival_s=(request.arrival_s - start_s) * factor) for request in chosen]


def plan_texts(texts: list[str], *, rate: float, max_tokens: int, seed: int) -> Iterator[PlannedRequest]:
    """The texts in order, again and again without end, as a Poisson process."""
    draw, now_s = random.Random(seed), 0.0
    for number in count():
        now_s += draw.expovariate(rate)
        yield PlannedRequest(arrival_s=now_s, prompt=texts[number % len(texts)], max_tokens=max_tokens)


def read_texts(path: Path) -> list[str]:
    """Prompts of a file: one a line, or for `.jsonl` the `prompt` of each object. Raises InvalidRequest without any."""
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
        texts = [_prompt_of(line) for line in lines] if path.suffix == ".jsonl" else lines
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"{path} is not a file of prompts: {error}", param="prompts") from error
    if not texts:
        raise InvalidRequest(f"{path} has no prompts", param="prompts")
    return texts


def _prompt_of(line: str) -> str:
    value: Any = json.loads(line)
    if not isinstance(value, dict) or not isinstance(value.get("prompt"), str):
        raise ValueError("a line is no object with a prompt")
    return str(value["prompt"])
