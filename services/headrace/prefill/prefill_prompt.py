"""The prefill worker's step: have a prompt's full blocks in the store node, computing only what nobody holds.

Owns the order: load, compute block by block, publish each as it completes, and answer only when what can be published
is readable. Knows nothing of the decode worker that comes next; it finds the blocks in the store.
"""

from contextlib import aclosing

from headrace.core.block import CacheSource
from headrace.core.clock import Deadline
from headrace.core.generation import MeasuredWork, PrefillCall, PrefillResult
from headrace.engine.event_stream import FilledBlock, RunFinished
from headrace.transfer.hold_prefix import HeldPrefix, hold_prefix, take_reused
from headrace.transfer.publish_blocks import Publication
from headrace.transfer.stored_run import StoredRun
from headrace.transfer.worker import Worker


async def prefill_prompt(call: PrefillCall, worker: Worker) -> PrefillResult:
    """Have blocks [0, published_blocks) of the prompt readable in the worker's store node.

    Blocks [0, reused_blocks) were held somewhere and were not computed. `published_blocks` may be anything up to the
    length of the chain: a full or failed store costs the decode worker a recompute, never the request.
    Raises Overloaded, InvalidRequest, WorkerUnavailable, DeadlineExceeded. Cancelling it stops the engine at its next
    step and gives every block back.
    """
    deadline = Deadline.after(call.timeout_ms / 1000, worker.clock)
    num_blocks = len(call.request.prompt.chain)
    with worker.attempt(call):
        reused_blocks = published_blocks = 0
        work: MeasuredWork | None = None
        store_node = worker.nodes.sink_node_id()
        if num_blocks > 0:
            async with deadline.scope("prefill"):
                request = await worker.home_nodes.storable(call.request, deadline=deadline)
            async with (
                deadline.scope("prefill"),
                hold_prefix(
                    worker,
                    request,
                    num_blocks=num_blocks,
                    reusable_blocks=num_blocks,
                    hint_nodes=call.hint_nodes,
                    deadline=deadline,
                ) as held,
            ):
                reused_blocks, published_blocks = await _compute_and_publish(call, worker, held, deadline)
                work = held.work(worker.clock)
        return PrefillResult(
            attempt_id=call.attempt_id,
            worker_id=worker.worker_id,
            reused_blocks=reused_blocks,
            published_blocks=published_blocks,
            store_node=store_node,
            work=work,
        )


async def _compute_and_publish(
    call: PrefillCall, worker: Worker, held: HeldPrefix, deadline: Deadline
) -> tuple[int, int]:
    """Run the engine over what is missing; returns how many leading blocks were not computed, and are readable."""
    request, num_reused = call.request, held.num_blocks
    came_far = held.sources[-1:] == (CacheSource.GRPC,)
    is_elsewhere = came_far and held.home_node not in ("", worker.nodes.sink_node_id())
    if not request.cache.publish or is_elsewhere:  # a node keeps no block without its parent
        return num_reused, 0  # computing would be for nobody
    publication = Publication(request.cache.retention)
    num_readable = held.num_blocks if held.is_stored_here else 0
    reused = take_reused(worker, held, request)
    await _offer_all(worker, publication, reused)
    first_offered = reused[0].position if reused else num_readable
    if first_offered + len(reused) < held.num_blocks:
        publication.closed = True  # what is computed next would have no parent in the store
    cached_tokens = held.num_blocks * request.prompt.block_tokens
    if held.num_blocks < len(request.prompt.chain):
        backup = StoredRun(worker, held, request, hint_nodes=call.hint_nodes, deadline=deadline)
        backup.publishes(publication, first_block=first_offered if reused else held.num_blocks)
        run = worker.engine.run(
            held.admission,
            cached_tokens=cached_tokens,
            sampling=None,
            backup=backup if backup.keeps_numbers else None,
        )
        async with aclosing(run) as events:
            async for event in events:
                if isinstance(event, FilledBlock):
                    await _offer(worker, publication, event)
                elif isinstance(event, RunFinished):
                    num_reused = event.num_reused_blocks
    num_stored = await publication.finished()
    return num_reused, first_offered + num_stored if num_stored else num_readable


async def _offer(worker: Worker, publication: Publication, block: FilledBlock) -> None:
    """Offer a block once there is room. Its reference is given away on every path, cancellation included."""
    try:
        await worker.publisher.room()
    finally:
        worker.publisher.offer(publication, block)


async def _offer_all(worker: Worker, publication: Publication, blocks: list[FilledBlock]) -> None:
    num_offered = 0
    try:
        for block in blocks:
            num_offered += 1
            await _offer(worker, publication, block)
    finally:
        for block in blocks[num_offered:]:
            worker.engine.pool.unref(block.block_id)
