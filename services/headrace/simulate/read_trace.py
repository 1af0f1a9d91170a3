"""Read a request trace with block ids, plain or gzipped, into prompts as chains of small integers.

Owns the public shapes: one request per line with `input_length` and `hash_ids` (Mooncake and what is derived from it);
one conversation per line with `requests` that have `hash_runs` (callanjfox/kv-cache-tester, run-length coded); one
request per line with its texts, `input` and `output` (LMCache's agent traces); and tables of lengths without any prefix
(Azure's `TIMESTAMP,ContextTokens,GeneratedTokens`), whose requests share nothing.
Knows nothing of caches. Equal ids mean equal prefixes; a file in which they do not is refused, with the request.
"""

import csv
import gzip
import heapq
import json
import math
import zlib
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import datetime
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from headrace.core.errors import InvalidRequest

# Block sizes that a trace without one is tried with.
BLOCK_TOKENS_TRIED = (16, 32, 64, 128, 256, 512, 1_024)

# Conversations of a file of conversations that are replayed at the same time.
USERS_DEFAULT = 32

# Longest time that a user of such a file waits between two requests; recorded gaps reach hours.
GAP_S_MAX = 60.0

# A block of a text trace, whose tokens nobody counted: so many characters for so many tokens.
TEXT_BLOCK_CHARACTERS, TEXT_BLOCK_TOKENS = 64, 16

# Blocks of one prompt of a conversation, whose ids are counted and not listed in the file: 16 M tokens in blocks of 16.
BLOCKS_MAX = 1 << 20

# What reading a line raises whose fields are not there, of other kinds, or numbers that are none.
_NOT_AS_IT_SHOULD_BE = (LookupError, TypeError, ValueError, AttributeError, ArithmeticError)

# Requests between two reports of progress.
REPORT_EVERY = 5_000

Report = Callable[[str], None]


@dataclass(frozen=True, slots=True)
class TracedRequest:
    """One prompt: its length and the ids of its blocks, first to last. The last block may be partial."""

    input_tokens: int
    block_ids: tuple[int, ...]
    arrival_s: float = 0.0  # from the trace's start
    output_tokens: int = 1
    conversation: int = -1  # -1: not known, or it belongs to none


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival. Ids are 0..num_blocks-1; a block always follows the same block."""

    requests: tuple[TracedRequest, ...]
    block_tokens: int
    num_blocks: int


def read_trace(
    path: Path,
    *,
    report: Report,
    block_tokens: int | None = None,
    merge_blocks: int = 1,
    users: int = USERS_DEFAULT,
    requests_max: int | None = None,
) -> Trace:
    """Read a trace file. Raises InvalidRequest for a file that is not one, naming the line.

    `block_tokens` None: the size that fits all lengths. `merge_blocks` N makes one block of N (what is left over at the
    end of a prompt is not cached): long contexts in small blocks replay N times faster. `users` is for files of
    conversations: so many run at the same time, in the order of the file. `requests_max`: the first so many only. Times
    are Mooncake's milliseconds.
    """
    if ".csv" in path.suffixes:
        return _read_table(path, requests_max)
    first = next(_lines(path), None)
    if first is None:
        raise InvalidRequest(f"{path}: the file has no requests", param="trace")
    if "hash_ids" in first[1]:
        raw = [_prompt_of(path, number, line) for number, line in _lines(path)]
        size = block_tokens or _fitting_block_tokens(path, raw)
        prompts: Iterable[_Prompt] = raw
    elif "requests" in first[1]:
        size = block_tokens or _block_size(path, first[1])
        prompts = _interleave(path, users)
    elif "input" in first[1]:
        size, prompts = TEXT_BLOCK_TOKENS, (_prompt_of_text(path, number, line) for number, line in _lines(path))
    else:
        raise InvalidRequest(f"{path}: line 1 has neither hash_ids nor requests nor input", param="trace")
    prompts = islice(prompts, requests_max)
    return _number_blocks(path, prompts, block_tokens=size * merge_blocks, merge_blocks=merge_blocks, report=report)


def with_copies(trace: Trace, copies: int) -> Trace:
    """So many populations that behave like the trace's, side by side: the same times, and block ids of their own."""
    requests = [
        replace(request, block_ids=tuple(block + copy * trace.num_blocks for block in request.block_ids))
        for request in trace.requests
        for copy in range(copies)
    ]
    return Trace(tuple(requests), trace.block_tokens, trace.num_blocks * copies)


def _read_table(path: Path, requests_max: int | None) -> Trace:
    """Arrivals and lengths only. No block is named, so nothing is ever found."""
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            rows = list(islice(csv.DictReader(lines), requests_max))
        times = [datetime.fromisoformat(row["TIMESTAMP"].strip()[:26]).timestamp() for row in rows]
        requests = tuple(
            TracedRequest(int(row["ContextTokens"]), (), at_s - times[0], max(1, int(row["GeneratedTokens"])))
            for at_s, row in zip(times, rows, strict=True)
        )
    except (OSError, EOFError, zlib.error, csv.Error, *_NOT_AS_IT_SHOULD_BE) as error:
        message = f"{path} is not a table of TIMESTAMP, ContextTokens and GeneratedTokens: {error}"
        raise InvalidRequest(message, param="trace") from error
    if not requests:
        raise InvalidRequest(f"{path}: the file has no requests", param="trace")
    return Trace(requests, block_tokens=BLOCK_TOKENS_TRIED[0], num_blocks=0)


def _lines(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
            for number, text in enumerate(lines, start=1):
                line = json.loads(text)
                if not isinstance(line, dict):
                    raise InvalidRequest(f"{path}: line {number} is not a JSON object", param="trace")
                yield number, line
    except (OSError, EOFError, ValueError, RecursionError, zlib.error) as error:
        raise InvalidRequest(f"{path} is not a trace of JSON lines: {error}", param="trace") from error


def _block_size(path: Path, line: dict[str, Any]) -> int:
    size = line.get("block_size", 64)
    if not isinstance(size, int) or not 0 < size <= BLOCKS_MAX:
        raise InvalidRequest(f"{path}: block_size must be a number of tokens, not {size!r:.40}", param="trace")
    return size


class _Prompt(NamedTuple):
    """One request as a file has it."""

    tokens: int
    ids: Iterable[Any]
    arrival_s: float
    output_tokens: int


def _prompt_of(path: Path, number: int, line: dict[str, Any]) -> _Prompt:
    try:
        return _Prompt(
            int(line["input_length"]),
            [int(block) for block in line["hash_ids"]],
            _finite(line.get("timestamp", 0.0)) / 1_000,
            max(1, int(line.get("output_length", 1))),
        )
    except _NOT_AS_IT_SHOULD_BE as error:
        raise InvalidRequest(f"{path}: line {number} lacks input_length or hash_ids", param="trace") from error


def _prompt_of_text(path: Path, number: int, line: dict[str, Any]) -> _Prompt:
    """A block is named by the text up to its end; tokens are guessed from characters."""
    try:
        text, answer, at_us = str(line["input"]), str(line.get("output", "")), _finite(line.get("timestamp", 0))
    except _NOT_AS_IT_SHOULD_BE as error:
        raise InvalidRequest(f"{path}: line {number} lacks input", param="trace") from error
    names, name = [], 0
    for end in range(TEXT_BLOCK_CHARACTERS, len(text) + 1, TEXT_BLOCK_CHARACTERS):
        name = hash((name, text[end - TEXT_BLOCK_CHARACTERS : end]))
        names.append(name)
    per_token = TEXT_BLOCK_CHARACTERS // TEXT_BLOCK_TOKENS
    return _Prompt(max(1, len(text) // per_token), names, at_us / 1e6, max(1, len(answer) // per_token))


def _fitting_block_tokens(path: Path, prompts: list[_Prompt]) -> int:
    """The block size with which every prompt has as many ids as blocks, its partial last one counted or not."""
    for size in BLOCK_TOKENS_TRIED:
        if all(len(list(p.ids)) in (p.tokens // size, -(-p.tokens // size)) for p in prompts):
            return size
    raise InvalidRequest(f"{path}: no usual block size fits the lengths; name one", param="block_tokens")


def _number_blocks(
    path: Path, prompts: Iterable[_Prompt], *, block_tokens: int, merge_blocks: int, report: Report
) -> Trace:
    """Give ids small numbers, merge blocks, and check that a block always follows the same block."""
    numbers: dict[Any, int] = {}
    parents: list[int] = []
    requests = []
    for count, prompt in enumerate(prompts, start=1):
        chain = []
        parent = -1
        for name in list(prompt.ids)[merge_blocks - 1 :: merge_blocks]:
            block = numbers.setdefault(name, len(numbers))
            if block == len(parents):
                parents.append(parent)
            elif parents[block] != parent:
                raise InvalidRequest(f"{path}: request {count} has block {name!r} behind another block", param="trace")
            chain.append(block)
            parent = block
        requests.append(TracedRequest(prompt.tokens, tuple(chain), prompt.arrival_s, prompt.output_tokens))
        if count % REPORT_EVERY == 0:
            report(f"read {count:,} requests, {len(numbers):,} different blocks")
    return Trace(requests=tuple(requests), block_tokens=block_tokens, num_blocks=len(numbers))


def _interleave(path: Path, users: int) -> Iterator[_Prompt]:
    """Requests of conversations as `users` people would send them, each taking the next conversation of the file."""
    conversations = _lines(path)
    waiting: list[tuple[float, int, Iterator[tuple[float, _Step]], int, _Step]] = []

    def take_next(user: int, now_s: float) -> None:
        for number, line in conversations:
            try:
                steps = _paced(sorted(_flatten(line["requests"], 0.0), key=lambda step: step.at_s))
            except (RecursionError, *_NOT_AS_IT_SHOULD_BE) as error:
                raise InvalidRequest(f"{path}: line {number} is no conversation: {error!r}", param="trace") from error
            for gap_s, step in steps:
                heapq.heappush(waiting, (now_s + gap_s, user, steps, number, step))
                return

    for user in range(users):
        take_next(user, 0.0)
    while waiting:
        now_s, user, steps, number, step = heapq.heappop(waiting)
        # Ids are local to a conversation: the line number makes them global.
        ids = [(number, first + i) for first, count in step.runs for i in range(count)]
        yield _Prompt(step.tokens, ids, now_s, step.output_tokens)
        following = next(steps, None)
        if following is None:
            take_next(user, now_s)
        else:
            heapq.heappush(waiting, (now_s + following[0], user, steps, number, following[1]))


class _Step(NamedTuple):
    """One request of a conversation. runs: (first id, how many) of its blocks."""

    at_s: float
    tokens: int
    runs: tuple[tuple[int, int], ...]
    output_tokens: int


def _flatten(requests: list[dict[str, Any]], start_s: float) -> Iterator[_Step]:
    for request in requests:
        at_s = start_s + _finite(request["t"])
        if "requests" in request:
            yield from _flatten(request["requests"], at_s)
        elif request.get("hash_runs"):
            runs = tuple((int(first), int(count)) for first, count in request["hash_runs"])
            if sum(max(0, count) for _, count in runs) > BLOCKS_MAX:
                raise ValueError(f"a prompt of more than {BLOCKS_MAX:,} blocks")
            yield _Step(at_s, int(request["in"]), runs, max(1, int(request.get("out", 1))))


def _finite(value: Any) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"{number} is no time")
    return number


def _paced(steps: list[_Step]) -> Iterator[tuple[float, _Step]]:
    """Each request with the seconds to wait before it, the recorded gap cut at GAP_S_MAX."""
    before_s = None
    for step in steps:
        yield (0.0 if before_s is None else min(GAP_S_MAX, step.at_s - before_s)), step
        before_s = step.at_s
