"""How long a lookup of the longest prefix takes in Redis, by chain length and number of holders.

    python benchmarks/index_lookup.py [--redis-url URL] [--lookups N] [--json]

Without a URL an embedded Valkey server is started. With one, use a server that may be written to: the entries stand
under a namespace of their own and are removed at the end. Prints a table; judges nothing.
"""

import argparse
import asyncio
import json
import statistics
import time
from contextlib import ExitStack

from headrace.core.block import Chain, HashAlgorithm, NamespaceId, Tier, hash_prompt
from headrace.core.limits import CHAIN_BLOCKS_MAX
from headrace.core.members import StoreNodeRecord
from headrace.index.embedded_valkey import EmbeddedValkey
from headrace.index.redis_index import RedisIndex
from headrace.index.redis_membership import RedisMembership

NAMESPACE = NamespaceId("be" * 16)
CHAIN_LENGTHS = (64, 1_024, CHAIN_BLOCKS_MAX)
HOLDER_COUNTS = (1, 8, 64)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--redis-url", default="")
    parser.add_argument("--lookups", type=int, default=200)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with ExitStack() as stack:
        url = arguments.redis_url or stack.enter_context(EmbeddedValkey()).url
        rows = asyncio.run(measure(url, lookups=arguments.lookups))
    if arguments.json:
        print(json.dumps({"rows": rows}))
        return
    print(f"{'blocks':>8} {'holders':>8} {'p50 ms':>8} {'p99 ms':>8}")
    for row in rows:
        print(f"{row['blocks']:>8} {row['holders']:>8} {row['p50_ms']:>8.3f} {row['p99_ms']:>8.3f}")


async def measure(url: str, *, lookups: int) -> list[dict[str, float]]:
    """One row for each number of holders and chain length; holders keep runs of different lengths."""
    index, membership = RedisIndex(url), RedisMembership(url)
    chain = hash_prompt(NAMESPACE, range(CHAIN_BLOCKS_MAX), block_tokens=1, algorithm=HashAlgorithm.XXH3_128).chain
    nodes = [make_node(number) for number in range(max(HOLDER_COUNTS))]
    rows = []
    for number, node in enumerate(nodes, start=1):
        await membership.announce(node, ttl_ms=600_000)
        await index.register(
            holder=node.holder_id,
            incarnation=node.incarnation,
            tier=Tier.HOST,
            namespace=NAMESPACE,
            blocks=chain[: 1 + len(chain) * number // len(nodes) - 1],
        )
        if number in HOLDER_COUNTS:
            rows += [
                await measure_chain(index, chain[:length], holders=number, lookups=lookups) for length in CHAIN_LENGTHS
            ]
    for node in nodes:
        await index.deregister(
            holder=node.holder_id, incarnation=node.incarnation, namespace=NAMESPACE, blocks=chain[::-1]
        )
        await membership.withdraw(node)
    await index.close()
    await membership.close()
    return rows


async def measure_chain(index: RedisIndex, chain: Chain, *, holders: int, lookups: int) -> dict[str, float]:
    """Milliseconds of one lookup after another from one caller."""
    times_ms = []
    for _ in range(lookups):
        started_s = time.perf_counter()
        match = await index.longest_prefix(NAMESPACE, chain)
        times_ms.append((time.perf_counter() - started_s) * 1000)
        assert len(match.num_blocks_by_holder) == holders
    quantiles = statistics.quantiles(times_ms, n=100)
    return {"blocks": len(chain), "holders": holders, "p50_ms": quantiles[49], "p99_ms": quantiles[98]}


def make_node(number: int) -> StoreNodeRecord:
    return StoreNodeRecord(
        node_id=f"bench-{number}",
        incarnation=time.time_ns(),
        host="bench",
        address="127.0.0.1:1",
        arena_path="/dev/shm/none",
        pid=1,
    )


if __name__ == "__main__":
    main()
