"""A worker whose own node drains: it reads there, publishes elsewhere, and what it publishes hangs together there."""

import os

from headrace.config import StoreSettings
from headrace.core.block import CacheSource
from headrace.core.clock import SystemClock
from headrace.core.generation import EvictSelector
from headrace.index.memory_index import MemoryIndex
from headrace.store.service import StoreNodeService

B = 8
NODE_2 = f"drained-host-{os.getpid()}"  # its arena is in /dev/shm, which is another "host" than the tests' directory


async def test_a_turn_behind_a_prefix_of_a_draining_node_is_kept_whole_on_another(
    store_node, membership, make_worker, prompts
):
    """Fails when blocks are offered to a node that has not their parents, and so are kept by nobody."""
    elsewhere = StoreNodeService(
        StoreSettings(node_id=NODE_2, arena_mb=8),
        index=MemoryIndex(membership),
        membership=membership,
        clock=SystemClock(),
    )
    try:
        await membership.announce(await elsewhere.start(), ttl_ms=60_000)
        worker = await make_worker("w1")
        first = prompts(6 * B)
        await worker.prefill(first)
        assert (store_node.node.stat().committed_blocks, elsewhere.node.stat().committed_blocks) == (6, 0)
        store_node.node.draining = True
        await membership.announce(store_node.record, ttl_ms=60_000)
        await worker.worker.nodes.refresh()
        worker.worker.evict_device(EvictSelector(), dry_run=False)
        longer = [*first, *prompts(4 * B, salt=3)]
        result = await worker.prefill(longer)
        assert (result.reused_blocks, result.published_blocks, result.store_node) == (6, 10, NODE_2)
        assert (store_node.node.stat().committed_blocks, elsewhere.node.stat().committed_blocks) == (6, 10)
        worker.worker.evict_device(EvictSelector(), dry_run=False)
        reply = await worker.decode([*longer, 7], hint_nodes=(NODE_2,))
        assert reply.cached.by_source()[CacheSource.SHARED_MEMORY] == 6 * B
        assert reply.cached.total == 10 * B
        assert reply.same_answer_as(await worker.cold([*longer, 7]))
    finally:
        elsewhere.node.check_integrity()
        await elsewhere.stop(remove_arena=True)
