"""Replay a trace through one store's eviction policy at several capacities, beside the clairvoyant bound.

Uses the policy objects that the store node runs. A request finds the leading blocks that are held, and leaves the rest
of its blocks for the next one; they are there when the next request arrives. Deterministic.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.core.eviction import DEFAULT_POLICY, EvictionPolicy, PolicyName, make_policy
from headrace.core.limits import CHAIN_SHARE_MAX
from headrace.core.recompute_cost import recompute_seconds
from headrace.simulate.clairvoyant_bound import clairvoyant_bound
from headrace.simulate.read_trace import Report, Trace

CAPACITY_SHARES = (0.01, 0.02, 0.05, 0.10, 0.20)
BOUND = "bound"

# Bytes of one token's KV (8B model, grouped heads, 16 bit). All blocks are alike, so it only scales ranks.
BYTES_PER_TOKEN = 131_072


@dataclass(frozen=True, slots=True)
class EvictionRow:
    """What one policy saves at one capacity. `default`: whether the store uses this policy unless told otherwise."""

    capacity_share: float
    policy: str
    default: bool
    token_hit_rate: float
    saved_prefill_seconds: float


def replay_eviction(
    trace: Trace,
    *,
    report: Report,
    shares: Sequence[float] = CAPACITY_SHARES,
    policies: Sequence[PolicyName] = tuple(PolicyName),
) -> list[EvictionRow]:
    """A row for each capacity and policy, and one for the bound; a capacity is a share of the trace's unique blocks."""
    rows = []
    for share in shares:
        capacity_blocks = max(1, int(share * trace.num_blocks))
        for name in policies:
            report(f"{share:.0%} of {trace.num_blocks:,} blocks: {name}")
            hits = replay_policy(trace, make_policy(name), capacity_blocks=capacity_blocks)
            rows.append(_row(trace, hits, share=share, policy=name, default=name is DEFAULT_POLICY))
        hits = clairvoyant_bound(trace, capacity_blocks=capacity_blocks)
        rows.append(_row(trace, hits, share=share, policy=BOUND, default=False))
    return rows


def replay_policy(trace: Trace, policy: EvictionPolicy[int], *, capacity_blocks: int) -> list[int]:
    """Leading blocks that each request finds in a store of that many blocks which starts empty.

    As in the store, a chain takes at most CHAIN_SHARE_MAX of the room, and a block is stored only behind its parent.
    """
    costs = _BlockCosts(trace)
    chain_max = max(1, int(CHAIN_SHARE_MAX * capacity_blocks))
    hits = []
    for request in trace.requests:
        blocks = request.block_ids
        found = 0
        for block in blocks:
            if block not in policy:
                break
            found += 1
        hits.append(found)
        if found:
            policy.used(blocks[:found])
        parent = blocks[found - 1] if found else None
        for position in range(found, min(len(blocks), chain_max)):
            if len(policy) >= capacity_blocks:
                victim = policy.victim(parent)
                if victim is None:
                    break
                policy.removed(victim)
            seconds = costs.seconds(position, request.input_tokens)
            policy.added(blocks[position], parent, size_bytes=costs.block_bytes, recompute_s=seconds)
            parent = blocks[position]
    return hits


class _BlockCosts:
    """Recompute seconds of a block by position, worked out once; a partial last block has its own."""

    def __init__(self, trace: Trace) -> None:
        size = trace.block_tokens
        longest = max((len(request.block_ids) for request in trace.requests), default=0)
        self._block_tokens = size
        self._whole = [recompute_seconds(size, context_tokens=i * size) for i in range(longest)]
        self.block_bytes = size * BYTES_PER_TOKEN

    def seconds(self, position: int, input_tokens: int) -> float:
        """Seconds that the block at a position of a prompt of `input_tokens` costs."""
        start = position * self._block_tokens
        if start + self._block_tokens <= input_tokens:
            return self._whole[position]
        return recompute_seconds(max(1, input_tokens - start), context_tokens=start)


def _row(trace: Trace, hits: Iterable[int], *, share: float, policy: str, default: bool) -> EvictionRow:
    hit_tokens, saved_s, tokens = 0, 0.0, 0
    for request, found in zip(trace.requests, hits, strict=True):
        read = min(request.input_tokens, found * trace.block_tokens)
        hit_tokens += read
        saved_s += recompute_seconds(read, context_tokens=0)
        tokens += request.input_tokens
    return EvictionRow(
        capacity_share=share,
        policy=str(policy),
        default=default,
        token_hit_rate=round(hit_tokens / tokens, 6) if tokens else 0.0,
        saved_prefill_seconds=round(saved_s, 3),
    )
