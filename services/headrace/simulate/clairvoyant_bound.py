"""What a cache that knows the future would have hit: the yardstick of every eviction policy."""

import heapq

from headrace.simulate.read_trace import Trace

# Use of a block that is never used again: behind every request.
NEVER = 1 << 60


def clairvoyant_bound(trace: Trace, *, capacity_blocks: int) -> list[int]:
    """Leading blocks that each request finds with Belady's rule, for a cache of `capacity_blocks`.

    After each request the cache keeps, of what it held and what the request brought, the blocks that are used again
    soonest; a new block need not be kept at all. A use of a block is a use of every block before it, so a block's next
    use is never before its parent's: with ties broken tail first, what is kept is closed under prefixes without being
    told to, and the rule is Belady's own.

    It bounds the number of *block* hits of every policy of that capacity, for equal blocks: no policy finds more, with
    or without prefix-closed residency, admitting what it likes. Tokens and seconds follow the same blocks: for them it
    is the yardstick, not a proven bound, since blocks differ a little in seconds (attention) and the last block of a
    prompt may be partial.
    """
    next_uses = _next_uses(trace)
    held: dict[int, int] = {}
    order: list[tuple[int, int, int]] = []  # (-next use, -position, block): what goes first comes first
    hits = []
    for request, uses in zip(trace.requests, next_uses, strict=True):
        found = 0
        for block in request.block_ids:
            if block not in held:
                break
            found += 1
        hits.append(found)
        for position, (block, use) in enumerate(zip(request.block_ids, uses, strict=True)):
            if use == NEVER:
                held.pop(block, None)
            else:
                held[block] = use
                heapq.heappush(order, (-use, -position, block))
        while len(held) > capacity_blocks:
            use, _, block = heapq.heappop(order)
            if held.get(block) == -use:
                del held[block]
    return hits


def _next_uses(trace: Trace) -> list[list[int]]:
    """For each block of each request, the next request that uses it."""
    upcoming = [NEVER] * trace.num_blocks
    found: list[list[int]] = [[]] * len(trace.requests)
    for index in range(len(trace.requests) - 1, -1, -1):
        blocks = trace.requests[index].block_ids
        found[index] = [upcoming[block] for block in blocks]
        for block in blocks:
            upcoming[block] = index
    return found
