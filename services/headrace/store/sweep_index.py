"""Clear away what dead holders left in the index: each store node does so, a bounded step at a time."""

import asyncio

from headrace.core.clock import Clock
from headrace.core.errors import IndexUnavailable
from headrace.core.index_limits import INDEX_SWEEP_ENTRIES, INDEX_SWEEP_MS, INDEX_SWEEP_REST, INDEX_SWEEPERS_MAX
from headrace.core.members import StoreNodeRecord, WorkerRecord
from headrace.core.ports import BlockIndex, Membership


async def sweep_index(index: BlockIndex, membership: Membership, *, clock: Clock) -> None:
    """Sweep until cancelled: a step every INDEX_SWEEP_MS, and one after the other for as long as they find something.

    What a dead holder left lies among all keys alike, so where one step found some the next one will. Between two of
    them this node rests INDEX_SWEEP_REST times as long as a step took, and longer where more than INDEX_SWEEPERS_MAX
    nodes may be at it: a Redis that is busy is asked less. Where another node has swept before, a step finds nothing,
    and that ends the run.
    """
    rest_s = INDEX_SWEEP_MS / 1_000
    while True:
        await asyncio.sleep(rest_s)
        rest_s = INDEX_SWEEP_MS / 1_000
        began_s = clock.now_s()
        try:
            nodes = await membership.store_nodes()
            holders: list[StoreNodeRecord | WorkerRecord] = [*nodes, *await membership.workers()]
            live = {record.holder_id: record.incarnation for record in holders}
            if await index.sweep(live, limit=INDEX_SWEEP_ENTRIES):
                rest_s = INDEX_SWEEP_REST * (clock.now_s() - began_s) * max(1.0, len(nodes) / INDEX_SWEEPERS_MAX)
        except IndexUnavailable:
            continue  # the index itself reports that it is away
