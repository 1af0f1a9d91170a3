"""Should a node keep a copy of what its workers fetched from a peer? Replays a trace over several nodes both ways.

    python benchmarks/host_copies.py TRACE [--nodes 4] [--policy lru] [--json]

`copy`: a worker publishes to its own node, and that takes the fetched prefix too, since a node keeps no block without
its parent. `home`: what is computed behind a fetched prefix is published to the node that the prefix came from.
`longer`: the same, where more was fetched than computed. A share of the requests (`near`) runs where the longest run of
its blocks is, the others anywhere. Prints the token hit rate over all nodes and which share of the found tokens had to
cross the network; judges nothing. Deterministic.
"""

import argparse
import json
import random
from pathlib import Path

from headrace.core.eviction import EvictionPolicy, PolicyName, make_policy
from headrace.core.recompute_cost import recompute_seconds
from headrace.simulate.read_trace import Trace, TracedRequest, read_trace

CAPACITY_SHARES = (0.05, 0.2)  # of the trace's unique blocks, over all nodes together
NEAR_SHARES = (0.0, 0.7)
MANNERS = ("copy", "home", "longer")
BLOCK_BYTES = 1 << 20  # all blocks are alike, so it only scales ranks


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("trace", type=Path)
    parser.add_argument("--nodes", type=int, default=4)
    parser.add_argument("--policy", choices=list(PolicyName), default=PolicyName.LRU)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    trace = read_trace(arguments.trace, report=lambda line: None)
    rows = []
    for share in CAPACITY_SHARES:
        for near in NEAR_SHARES:
            for keeps in MANNERS:
                nodes = [make_policy(PolicyName(arguments.policy)) for _ in range(arguments.nodes)]
                capacity = max(2, int(share * trace.num_blocks / arguments.nodes))
                hit, remote = replay(trace, nodes, capacity=capacity, near=near, keeps=keeps)
                row = {"capacity_share": share, "near": near, "keeps": keeps, "hit": hit, "crossed": remote}
                rows.append(row)
                if not arguments.json:
                    print(
                        f"{share:>5.0%} {near:>5.0%} {keeps}: hit {hit:.3f}, crossed the network {remote:.3f}",
                        flush=True,
                    )
    if arguments.json:
        print(json.dumps({"rows": rows}))


def replay(
    trace: Trace, nodes: list[EvictionPolicy[int]], *, capacity: int, near: float, keeps: str
) -> tuple[float, float]:
    """Token hit rate, and the share of hit tokens that were read on another node than the worker's."""
    draw = random.Random(1)
    asked = found_tokens = crossed = 0
    for request in trace.requests:
        runs = [_run(node, request) for node in nodes]
        best = max(range(len(nodes)), key=lambda index: (runs[index], draw.random()))
        own = best if draw.random() < near else draw.randrange(len(nodes))
        source = own if runs[own] == runs[best] else best
        tokens = min(request.input_tokens, runs[source] * trace.block_tokens)
        asked += request.input_tokens
        found_tokens += tokens
        crossed += tokens if source != own else 0
        if runs[source]:
            nodes[source].used(request.block_ids[: runs[source]])
        to_source = keeps == "home" or (keeps == "longer" and 2 * runs[source] > len(request.block_ids))
        _store(nodes[source if runs[source] and to_source else own], request, trace, capacity)
    return round(found_tokens / asked, 4), round(crossed / max(1, found_tokens), 4)


def _run(node: EvictionPolicy[int], request: TracedRequest) -> int:
    for position, block in enumerate(request.block_ids):
        if block not in node:
            return position
    return len(request.block_ids)


def _store(node: EvictionPolicy[int], request: TracedRequest, trace: Trace, capacity: int) -> None:
    """Keep what the node lacks of a request's blocks, making room leaf by leaf; as far as it goes."""
    parent: int | None = None
    for position, block in enumerate(request.block_ids):
        if block not in node:
            while len(node) >= capacity:
                victim = node.victim(parent)
                if victim is None or victim == parent:
                    return
                node.removed(victim)
            seconds = recompute_seconds(trace.block_tokens, context_tokens=position * trace.block_tokens)
            node.added(block, parent, size_bytes=BLOCK_BYTES, recompute_s=seconds)
        parent = block


if __name__ == "__main__":
    main()
