"""Taking a prompt's blocks while another worker computes them: the decode worker's half of a hand-off.

    planned --> waiting --first block--> following --last block wanted--> whole
                  |                        |
                  '------- patience over, node gone, a block in doubt -------> cut: the rest is computed here

Nobody says when the prefill has failed or stopped early: each wait for the next block has an end (`patience_ms`, which
the gateway derives from how fast that worker computes), and there are no more waits than blocks. When the gateway
learns of a failure sooner, it closes the whole attempt. Blocks that come later than that are ignored: they are a
prefix in a store node like any other.

No block of the pool is needed before the first block has come: then the prefill has its own, and goes on. So two
workers that prefill for each other cannot wait for each other's pool. Knows ports only.
"""

from collections.abc import Sequence
from dataclasses import replace

from headrace.core.block import CacheSource, HashedPrompt, KvLayout
from headrace.core.clock import Deadline
from headrace.core.errors import BlockCorrupt, CacheFault
from headrace.core.generation import HandOff
from headrace.core.limits import LEASE_WAIT_MS_MAX
from headrace.core.ports import BlockSource, LeaseTerms, PrefixPool, StoreNodes
from headrace.core.transfer_budget import TransferBudget
from headrace.transfer.load_prefix import LoadedPrefix, LoadPlan, load_prefix, release_lease
from headrace.transfer.run_in_thread import finish


async def follow_prefill(
    prompt: HashedPrompt,
    block_ids: Sequence[int],
    *,
    plan: LoadPlan,
    hand_off: HandOff,
    layout: KvLayout,
    nodes: StoreNodes,
    pool: PrefixPool,
    deadline: Deadline,
) -> LoadedPrefix:
    """As `load_prefix`, and then each further block as it appears at the hand-off's node, up to `plan.end_block`.

    Ends with what was loaded until then when the next block is not there within the patience, when what is there takes
    so much longer to come than to be computed, the node fails or a block is in doubt. Raises nothing of the cache;
    cancellation passes through, and leaves nothing at the node.
    """
    loaded = await load_prefix(prompt, block_ids, plan=plan, layout=layout, nodes=nodes, pool=pool, deadline=deadline)
    way = _way_to(hand_off.store_node, plan.sources, nodes)
    if way is None or any(isinstance(fault, BlockCorrupt) for fault in loaded.faults):
        return loaded
    sources, faults, spent_s = loaded.sources, loaded.faults, 0.0
    patience_s, block_tokens = hand_off.patience_ms / 1000, layout.block_tokens
    budget = plan.budget
    assert budget is None or isinstance(budget, TransferBudget), (
        "a prefill is followed block by block, from the first on"
    )
    if budget is not None:
        budget = replace(budget, first_token=block_tokens * (plan.first_block + len(sources)))
    while (at := plan.first_block + len(sources)) < plan.end_block:
        coming = replace(
            plan,
            first_block=at,
            sources=frozenset({way}),
            hint_nodes=(hand_off.store_node,),
            budget=budget and budget.of_the_rest(at * block_tokens, spent_s=spent_s, patience_s=patience_s),
            wait_s=_patience_s(hand_off, deadline),
        )
        come = await load_prefix(
            prompt, block_ids, plan=coming, layout=layout, nodes=nodes, pool=pool, deadline=deadline
        )
        sources, faults, spent_s = sources + come.sources, faults + come.faults, spent_s + come.spent_s
        if not come.sources or come.faults:
            break
    return LoadedPrefix(num_blocks=len(sources), sources=sources, faults=faults)


async def await_first_block(
    prompt: HashedPrompt,
    hand_off: HandOff,
    *,
    sources: frozenset[CacheSource],
    nodes: StoreNodes,
    deadline: Deadline,
) -> CacheFault | None:
    """Until the first block of the prefill can be read, or its patience is over; holds nothing. What went wrong with
    the node, if anything."""
    try:
        await await_block(prompt, hand_off.first_block, hand_off, sources=sources, nodes=nodes, deadline=deadline)
    except CacheFault as fault:
        return fault
    return None


async def await_block(
    prompt: HashedPrompt,
    index: int,
    hand_off: HandOff,
    *,
    sources: frozenset[CacheSource],
    nodes: StoreNodes,
    deadline: Deadline,
) -> bool:
    """Until this block of the prefill can be read, or its patience is over; holds nothing. Whether it is there.
    Raises CacheFault."""
    way = _way_to(hand_off.store_node, sources, nodes)
    if way is None or index >= len(prompt.chain):
        return False
    source = _source(way, hand_off.store_node, nodes)
    if source is None:
        return False
    async with deadline.scope("waiting for a block of a prefill"):
        lease = await source.lease_prefix(
            prompt.namespace,
            prompt.chain[: index + 1],
            first_block=index,
            deadline=deadline,
            terms=LeaseTerms(wait_s=_patience_s(hand_off, deadline)),
        )
    await finish(release_lease(source, lease))
    return bool(lease.headers)


def _way_to(node_id: str, sources: frozenset[CacheSource], nodes: StoreNodes) -> CacheSource | None:
    """How the request may read from a node; None when it may not."""
    if node_id == nodes.local_node_id() and CacheSource.SHARED_MEMORY in sources:
        return CacheSource.SHARED_MEMORY
    # Over gRPC a request reads any node, its own host's too, if that is all that it may use.
    return CacheSource.GRPC if CacheSource.GRPC in sources and node_id else None


def _source(way: CacheSource, node_id: str, nodes: StoreNodes) -> BlockSource | None:
    return nodes.local() if way is CacheSource.SHARED_MEMORY else nodes.remote(node_id)


def _patience_s(hand_off: HandOff, deadline: Deadline) -> float:
    return min(hand_off.patience_ms / 1000, LEASE_WAIT_MS_MAX / 1000, deadline.left_s())
