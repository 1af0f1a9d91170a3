"""Seconds that a worker needs: for a stretch of a prompt, for one decode step, for bytes over a link. Pure numbers.

The shapes are fixed here (prefill is linear in tokens plus attention over the context; a decode step is the weights,
the sequences and the KV that it reads); the constants are a worker's own, assumed in a simulation and learned in
service. All functions take scalars or numpy arrays alike.
"""

from dataclasses import dataclass
from typing import Any

Seconds = Any  # a float, or an array of floats of the shape that the arguments broadcast to


@dataclass(frozen=True, slots=True)
class PrefillCost:
    """`base_s + n / tokens_per_s + attention_s * n * (context + n / 2)` for n tokens behind `context` others."""

    base_s: Any
    tokens_per_s: Any
    attention_s: Any  # per pair of tokens

    def seconds(self, start: Any, end: Any) -> Seconds:
        """To compute positions [start, end) when those before are there; 0 for an empty stretch."""
        tokens = end - start
        work = self.base_s + tokens / self.tokens_per_s + self.attention_s * tokens * (start + tokens / 2)
        return work * (tokens > 0)


@dataclass(frozen=True, slots=True)
class DecodeCost:
    """`base_s + sequence_s * sequences + kv_token_s * KV tokens read` for one step of a batch."""

    base_s: float
    sequence_s: float
    kv_token_s: float

    def step_seconds(self, sequences: Any, kv_tokens: Any) -> Seconds:
        """One step: every sequence of the batch gets one token."""
        return self.base_s + self.sequence_s * sequences + self.kv_token_s * kv_tokens


@dataclass(frozen=True, slots=True)
class LinkCost:
    """One host's way to another: bytes over bandwidth, and a round trip to begin with."""

    bytes_per_s: float
    round_trip_s: float

    def seconds(self, num_bytes: Any) -> Seconds:
        """To move bytes over an idle link; 0 for none."""
        return (self.round_trip_s + num_bytes / self.bytes_per_s) * (num_bytes > 0)


# An 8B model on one H100-class GPU: the constants of the published studies that the simulator is compared with.
H100_8B_PREFILL = PrefillCost(base_s=0.005, tokens_per_s=12_000.0, attention_s=1.3e-9)
