"""What share of a workload's prompt tokens a store finds, at every size from small to endless.

One store under least-recently-used order, leaves first, replayed at each size. The stores' own policy finds a little
more at small sizes (docs/eviction.md).
"""

from dataclasses import dataclass

from headrace.core.prefix_map import PrefixMap
from headrace.simulate.read_trace import Trace
from headrace.simulate.worker_memory import DeviceMemory

# Sizes as shares of the trace's different blocks; above, a store holds all there ever is.
SIZE_SHARES = (0.02, 0.05, 0.10, 0.20, 0.40, 0.70, 1.0)


@dataclass(frozen=True, slots=True)
class ReuseRow:
    """A store of so many tokens finds this share of the prompt tokens."""

    store_tokens: int
    hit_rate: float


def reuse_by_size(trace: Trace, sizes_tokens: tuple[int, ...] | None = None) -> list[ReuseRow]:
    """A row for each size, smallest first; the default ones are shares of the trace's different blocks."""
    different = trace.num_blocks * trace.block_tokens
    sizes = sizes_tokens or tuple(sorted({max(trace.block_tokens, int(share * different)) for share in SIZE_SHARES}))
    return [ReuseRow(size, found_share(trace, size)) for size in sizes]


def found_share(trace: Trace, store_tokens: int) -> float:
    """Share of all prompt tokens that a store of that size finds; the last token of a prompt is always computed."""
    store = DeviceMemory(store_tokens, block_tokens=trace.block_tokens, holder=0, held=PrefixMap[int]())
    found_tokens, tokens = 0, 0
    for request in trace.requests:
        chain = request.block_ids[: request.input_tokens // trace.block_tokens]
        found_tokens += min(store.num_leading(chain) * trace.block_tokens, request.input_tokens - 1)
        tokens += request.input_tokens
        store.add(chain)
    return found_tokens / tokens if tokens else 0.0
