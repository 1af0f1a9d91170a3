"""How far store nodes hold a prompt, without moving a byte of it.

Only models with a window ask: where the prefix ends says which blocks are worth loading. Knows ports only.
"""

import asyncio
from collections.abc import Sequence

from headrace.core.block import CacheSource, HashedPrompt
from headrace.core.clock import Deadline
from headrace.core.errors import CacheFault, DeadlineExceeded, StoreUnavailable
from headrace.core.limits import LOAD_NODES_MAX
from headrace.core.ports import BlockSource, StoreNodes
from headrace.transfer.load_prefix import LoadPlan


async def find_reach(
    prompt: HashedPrompt, *, plan: LoadPlan, nodes: StoreNodes, deadline: Deadline
) -> tuple[int, tuple[CacheFault, ...]]:
    """The end of the longest prefix that one of the plan's nodes holds, between its first and its end block.

    A hint, in one round trip. Raises nothing of the cache; what went wrong comes back with the answer.
    """
    faults: list[CacheFault] = []

    async def ask(source: BlockSource) -> int:
        try:
            async with deadline.scope("asking a store node how far it holds a prompt"):
                return await source.held_blocks(prompt.namespace, prompt.chain[: plan.end_block], deadline=deadline)
        except CacheFault as fault:
            faults.append(fault)
        except DeadlineExceeded as late:
            faults.append(StoreUnavailable("(any)", late.what))
        return 0

    async with asyncio.TaskGroup() as tasks:
        asking = [tasks.create_task(ask(source)) for source in _sources(plan, nodes)]
    return max((plan.first_block, *(task.result() for task in asking))), tuple(faults)


def _sources(plan: LoadPlan, nodes: StoreNodes) -> Sequence[BlockSource]:
    """Those that a load by this plan would ask: the host's own node and the hinted ones."""
    sources: list[BlockSource] = []
    asked = ""
    if CacheSource.SHARED_MEMORY in plan.sources and (local := nodes.local()) is not None:
        sources.append(local)
        asked = nodes.local_node_id()
    if CacheSource.GRPC in plan.sources:
        hinted = dict.fromkeys(node_id for node_id in plan.hint_nodes[:LOAD_NODES_MAX] if node_id != asked)
        sources += [remote for node_id in hinted if (remote := nodes.remote(node_id)) is not None]
    return sources
