"""Make a trace up: shared prefixes, conversations, agents or bursts, with every size and rate a named number.

Owns the four shapes and what their numbers mean. The same arguments give the same trace. Blocks are full ones only.
"""

import heapq
import json
import random
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace
from enum import StrEnum
from itertools import count, islice
from pathlib import Path
from typing import Any

from headrace.core.errors import InvalidRequest
from headrace.simulate.read_trace import Trace, TracedRequest

BLOCK_TOKENS_DEFAULT = 512

# Parallel requests of an agent that asks sub-agents, each with the context so far.
AGENT_BRANCHES = 3


class Workload(StrEnum):
    """What `--generate` takes."""

    SHARED_PREFIX = "shared-prefix"  # few long prefixes, many short questions; popular ones more often (1/rank)
    MULTI_TURN = "multi-turn"  # conversations: each prompt is the one before, its answer, and a message
    AGENTS = "agents"  # conversations in quick steps that sometimes ask several sub-agents at once
    BURSTS = "bursts"  # shared prefixes, and again and again many requests for one of them at once


@dataclass(frozen=True, slots=True)
class WorkloadShape:
    """Sizes are means of exponential draws except `prefix_tokens`, which is exact; rates are those of all clients."""

    requests_per_s: float = 4.0
    prefixes: int = 20  # system prompts, documents or tool lists
    prefix_tokens: int = 4_096
    turn_tokens: int = 512  # new in each prompt: a question, a message, a tool's result
    output_tokens: int = 256
    turns: int = 6  # prompts of one conversation or task, at most
    gap_s: float = 30.0  # between the prompts of one conversation; an agent takes a tenth
    branch_share: float = 0.2  # steps of an agent that ask sub-agents
    burst_every_s: float = 60.0
    burst_requests: int = 50  # ... within a second, for one prefix


class _Context:
    """A prompt as far as it has come; copies share what they have in common and nothing after."""

    def __init__(self, numbers: Iterator[int], block_tokens: int) -> None:
        self._numbers, self._block_tokens = numbers, block_tokens
        self.blocks: tuple[int, ...] = ()
        self.tokens = 0
        self.conversation = -1

    def extended(self, tokens: int) -> "_Context":
        """This and so many tokens that nobody else has."""
        longer = _Context(self._numbers, self._block_tokens)
        longer.tokens, longer.conversation = self.tokens + tokens, self.conversation
        new = longer.tokens // self._block_tokens - len(self.blocks)
        longer.blocks = self.blocks + tuple(islice(self._numbers, new))
        return longer


def generate_trace(
    workload: Workload,
    *,
    requests: int,
    seed: int,
    shape: WorkloadShape | None = None,
    block_tokens: int = BLOCK_TOKENS_DEFAULT,
) -> Trace:
    """So many requests of that kind, in order of arrival."""
    made = _Generator(shape or WorkloadShape(), seed=seed, block_tokens=block_tokens)
    kinds = {
        Workload.SHARED_PREFIX: made.shared_prefix,
        Workload.MULTI_TURN: made.conversations,
        Workload.AGENTS: made.agents,
        Workload.BURSTS: made.bursts,
    }
    traced = tuple(islice(kinds[workload](), requests))
    return Trace(traced, block_tokens, num_blocks=1 + max((max(r.block_ids, default=-1) for r in traced), default=-1))


def parse_shape(settings: tuple[str, ...]) -> WorkloadShape:
    """`name=value` settings over the defaults. Raises InvalidRequest naming the one that is wrong."""
    shape = WorkloadShape()
    kinds: dict[str, Any] = {field.name: type(getattr(shape, field.name)) for field in fields(shape)}
    for setting in settings:
        name, _, value = setting.partition("=")
        if name not in kinds:
            raise InvalidRequest(f"no workload setting {name!r:.40}; there are: {', '.join(kinds)}", param="set")
        try:
            number = kinds[name](value)
        except (TypeError, ValueError):
            raise InvalidRequest(f"{name} must be a number, not {value!r:.40}", param="set") from None
        least = 0 if name == "branch_share" else 1e-6
        if not least <= number < 1e9:
            raise InvalidRequest(f"{name} must be above 0 and not huge", param="set")
        shape = replace(shape, **{name: number})
    return shape


def write_trace(trace: Trace, path: Path) -> None:
    """One JSON object a line, with Mooncake's fields; `read_trace` reads it back."""
    with path.open("w", encoding="utf-8") as lines:
        for request in trace.requests:
            record = {
                "timestamp": round(request.arrival_s * 1_000),
                "input_length": request.input_tokens,
                "output_length": request.output_tokens,
                "hash_ids": request.block_ids,
            }
            lines.write(json.dumps(record) + "\n")


class _Generator:
    """The four kinds, endless, over one source of chance."""

    def __init__(self, shape: WorkloadShape, *, seed: int, block_tokens: int) -> None:
        self._shape = shape
        self._draw = random.Random(seed)
        self._empty = _Context(count(), block_tokens)
        self._prefixes = [self._empty.extended(shape.prefix_tokens) for _ in range(shape.prefixes)]
        self._weights = [1 / rank for rank in range(1, shape.prefixes + 1)]

    def shared_prefix(self) -> Iterator[TracedRequest]:
        """Independent arrivals."""
        now_s = 0.0
        while True:
            now_s += self._draw.expovariate(self._shape.requests_per_s)
            yield self._asked(self._popular().extended(self._about(self._shape.turn_tokens)), now_s)

    def bursts(self) -> Iterator[TracedRequest]:
        """Independent arrivals, and bursts for one prefix each."""
        calm, shape = self.shared_prefix(), self._shape
        upcoming = next(calm)
        for number in count(1):
            start_s = number * shape.burst_every_s
            while upcoming.arrival_s < start_s:
                yield upcoming
                upcoming = next(calm)
            hot = self._popular()
            times = sorted(start_s + self._draw.random() for _ in range(shape.burst_requests))
            burst = [self._asked(hot.extended(self._about(shape.turn_tokens)), at_s) for at_s in times]
            while burst:
                if upcoming.arrival_s < burst[0].arrival_s:
                    yield upcoming
                    upcoming = next(calm)
                else:
                    yield burst.pop(0)

    def conversations(self) -> Iterator[TracedRequest]:
        """Conversations that begin independently."""
        return self._in_turns(gap_s=self._shape.gap_s, branch_share=0.0, requests_each=self._shape.turns)

    def agents(self) -> Iterator[TracedRequest]:
        """Tasks in quick steps; a step may ask sub-agents, which answer once."""
        share = self._shape.branch_share
        each = self._shape.turns * (1 + share * AGENT_BRANCHES)
        return self._in_turns(gap_s=self._shape.gap_s / 10, branch_share=share, requests_each=each)

    def _in_turns(self, *, gap_s: float, branch_share: float, requests_each: float) -> Iterator[TracedRequest]:
        shape, draw, serial, begun = self._shape, self._draw, count(), count()
        starts_per_s = shape.requests_per_s / requests_each
        # (when, serial, context before the turn's own tokens, turns left; None: somebody begins)
        waiting: list[tuple[float, int, _Context | None, int]] = [(0.0, next(serial), None, shape.turns)]
        while True:
            now_s, _, context, left = heapq.heappop(waiting)
            if context is None:
                next_s = now_s + draw.expovariate(starts_per_s)
                heapq.heappush(waiting, (next_s, next(serial), None, shape.turns))
                context = self._popular().extended(0)
                context.conversation = next(begun)
            prompt = context.extended(self._about(shape.turn_tokens))
            request = self._asked(prompt, now_s)
            yield request
            answered = prompt.extended(request.output_tokens)
            if left > 1:
                later_s = now_s + draw.expovariate(1 / gap_s)
                heapq.heappush(waiting, (later_s, next(serial), answered, left - 1))
                if draw.random() < branch_share:
                    for _ in range(AGENT_BRANCHES):
                        heapq.heappush(waiting, (later_s, next(serial), answered, 1))

    def _popular(self) -> _Context:
        return self._draw.choices(self._prefixes, self._weights)[0]

    def _about(self, mean: int) -> int:
        return 1 + int(self._draw.expovariate(1 / mean))

    def _asked(self, context: _Context, arrival_s: float) -> TracedRequest:
        output_tokens = self._about(self._shape.output_tokens)
        return TracedRequest(context.tokens, context.blocks, arrival_s, output_tokens, context.conversation)
