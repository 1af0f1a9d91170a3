"""The first half of every call on a worker: a prompt is admitted, and what is held of it elsewhere is loaded.

Owns how long the prompt's blocks are held, what loading may cost, and which of the reused blocks are to be offered to
the worker's store node. What a call then computes is `prefill/`'s or `decode/`'s.
"""

import math
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from dataclasses import dataclass, replace

from headrace.core.block import CacheSource
from headrace.core.clock import Clock, Deadline
from headrace.core.generation import GenerateRequest, HandOff, MeasuredWork
from headrace.core.learned_costs import PRIOR_GRPC, PRIOR_PREFILL
from headrace.core.transfer_budget import TransferBudget
from headrace.engine.engine import Admission
from headrace.engine.event_stream import FilledBlock
from headrace.engine.pool_values import Short
from headrace.transfer.follow_prefill import await_first_block
from headrace.transfer.load_admitted import load_admitted
from headrace.transfer.load_prefix import LoadPlan, asked_ways, load_prefix
from headrace.transfer.load_window import window_budget
from headrace.transfer.worker import Worker


@dataclass(frozen=True, slots=True)
class HeldPrefix:
    """An admitted prompt: its leading `len(sources)` blocks are valid in the pool, each with where it came from."""

    admission: Admission
    sources: tuple[CacheSource, ...]
    sink_is_local: bool  # what is computed is published to the node that shared memory was read from
    load_s: float  # what loading took
    since_s: float  # when it was done
    home_node: str = ""  # has the prefix, of which this host's node could not have all: what stands on it goes there

    @property
    def num_blocks(self) -> int:
        """Leading blocks that need not be computed."""
        return len(self.sources)

    def work(self, clock: Clock) -> MeasuredWork:
        """What the prompt took, when the last of it has been computed just now."""
        return MeasuredWork(load_s=self.load_s, compute_s=clock.now_s() - self.since_s)

    @property
    def is_stored_here(self) -> bool:
        """Whether the reused blocks are all in the node to which the others are published: the last one was read there
        just now, and a node keeps no block without its parent."""
        return self.sink_is_local and all(source is CacheSource.SHARED_MEMORY for source in self.sources[-1:])


@asynccontextmanager
async def hold_prefix(
    worker: Worker,
    request: GenerateRequest,
    *,
    num_blocks: int,
    reusable_blocks: int,
    hint_nodes: tuple[str, ...],
    deadline: Deadline,
    hand_off: HandOff | None = None,
) -> AsyncIterator[HeldPrefix]:
    """Admit a prompt with room for `num_blocks`, and load up to `reusable_blocks` leading ones from where they are.

    hand_off: the prompt's blocks are loaded as they appear. Pool blocks are taken before the first one is there
    only if they can be had at once and no more than HAND_OFF_POOL_SHARE of the pool waits in this way; else after
    it. Thus prompts that this very worker is to prefill never wait for those that wait for somebody's prefill.
    The blocks are held for the length of the scope and given back on every way out of it. Raises Overloaded,
    InvalidRequest (can never fit), DeadlineExceeded; never a CacheFault.
    """
    engine, clock, nodes = worker.engine, worker.clock, worker.nodes
    ttl_s = request.cache.retention.ttl_s
    with ExitStack() as waiting:
        if hand_off is not None:
            await _await_turn(worker, waiting, request, num_blocks, hand_off, deadline=deadline)
        admission = await engine.admit(
            request.prompt,
            num_blocks=num_blocks,
            use_device=CacheSource.DEVICE in request.cache.sources,
            deadline=deadline,
            ttl_s=math.inf if ttl_s is None else ttl_s,
            account=request.trust_group,
            priority=request.priority,
        )
        try:
            num_device = min(admission.num_device_blocks, reusable_blocks)
            plan = LoadPlan(
                first_block=num_device,
                end_block=reusable_blocks,
                sources=request.cache.sources,
                hint_nodes=hint_nodes,
                retention=request.cache.retention,
                budget=_budget(worker, request, range(num_device, reusable_blocks), hint_nodes),
            )
            admitted_s = clock.now_s()
            loaded = await load_admitted(
                admission,
                engine,
                plan=plan,
                budget=lambda blocks: _budget(worker, request, blocks, hint_nodes),
                hand_off=hand_off,
                layout=worker.layout,
                nodes=worker.timed_nodes,
                pool=worker.pool,
                deadline=deadline,
            )
            for fault in loaded.faults:
                worker.report_fault(fault)
            waiting.close()
            held = HeldPrefix(
                admission,
                (CacheSource.DEVICE,) * num_device + loaded.sources,
                sink_is_local=nodes.sink_node_id() == nodes.local_node_id(),
                load_s=clock.now_s() - admitted_s,
                since_s=clock.now_s(),
                home_node=worker.home_nodes.find(request, loaded, num_device=num_device, hint_nodes=hint_nodes),
            )
            if request.cache.publish:
                engine.mark_loaded(admission, held.num_blocks)
            yield held
        finally:
            engine.release(admission)


async def load_back(
    worker: Worker,
    request: GenerateRequest,
    block_ids: Sequence[int],
    saved: range,
    *,
    plan: LoadPlan,
    deadline: Deadline,
) -> int:
    """Load the plan's blocks, which a run had once, its answer's among them: how many leading ones are there now.

    request: with the run's tokens so far as its prompt. saved: what need not be computed then. Raises only
    cancellation.
    """
    moved = range(plan.first_block, plan.end_block)
    budget = _budget(worker, request, saved, plan.hint_nodes)
    loaded = await load_prefix(
        request.prompt,
        block_ids,
        plan=replace(plan, budget=window_budget(budget, moved, saved, request.prompt.block_tokens)),
        layout=worker.layout,
        nodes=worker.timed_nodes,
        pool=worker.pool,
        deadline=deadline,
    )
    for fault in loaded.faults:
        worker.report_fault(fault)
    return loaded.num_blocks


def take_reused(worker: Worker, held: HeldPrefix, request: GenerateRequest) -> list[FilledBlock]:
    """The reused blocks with a pool reference each, to be offered to the worker's sink before what is computed
    behind them: a node keeps no block without its parent. Empty when all of them came from that node just now.

    Taken by hash, not from the block table, which is the engine's once the run has started. May be fewer than
    were reused, when the pool has evicted some since. Of a model with a window, only that window: a node that has
    what is before it takes that.
    """
    if held.is_stored_here:
        return []
    prompt, pool = request.prompt, worker.engine.pool
    num_wanted = min(held.num_blocks, pool.resident_blocks(prompt))
    taken = pool.take(num_wanted, prompt=prompt, shared_max=num_wanted, ttl_s=held.admission.ttl_s)
    if isinstance(taken, Short):
        return []
    first = taken.first_whole
    whole_at, fresh_at = first - taken.first_block, taken.num_shared - taken.first_block
    reused = taken.block_ids[whole_at:fresh_at]
    pool.unref_all(taken.block_ids[:whole_at] + taken.block_ids[fresh_at:])
    return [
        FilledBlock(
            position=position,
            block_id=block_id,
            block_hash=prompt.chain[position],
            parent_hash=prompt.parent_of(position),
            token_ids=prompt.block_token_ids(position),
            namespace=prompt.namespace,
            narrowed_from=prompt.narrowed_from,
        )
        for position, block_id in enumerate(reused, start=first)
    ]


async def _await_turn(
    worker: Worker,
    waiting: ExitStack,
    request: GenerateRequest,
    num_blocks: int,
    hand_off: HandOff,
    *,
    deadline: Deadline,
) -> None:
    """Return when pool blocks may be taken for a hand-off; `waiting` is open as long as they wait for it."""
    if worker.early_blocks.may_take(num_blocks):
        waiting.enter_context(worker.early_blocks.taken(num_blocks))
    elif worker.engine.pool.resident_blocks(request.prompt) <= hand_off.first_block:
        fault = await await_first_block(
            request.prompt, hand_off, sources=request.cache.sources, nodes=worker.nodes, deadline=deadline
        )
        if fault is not None:
            worker.report_fault(fault)


def _budget(
    worker: Worker, request: GenerateRequest, blocks: range, hint_nodes: tuple[str, ...]
) -> TransferBudget | None:
    """What loading these blocks may cost; None until it is known how fast this worker computes."""
    prefill, block_tokens = worker.engine.load().ahead.prefill, request.prompt.block_tokens
    if prefill == PRIOR_PREFILL or not blocks:
        return None
    ways = asked_ways(worker.nodes, request.cache.sources, hint_nodes)
    times, num_bytes = worker.timed_nodes.times, len(blocks) * worker.layout.block_bytes
    rates = [link.bytes_per_s for link in times.links() if (link.node_id, link.via) in ways]
    return TransferBudget(
        prefill=prefill,
        first_token=blocks.start * block_tokens,
        end_token=blocks.stop * block_tokens,
        prompt_tokens=len(request.prompt.token_ids),
        predicted_s=num_bytes / min(rates, default=PRIOR_GRPC.bytes_per_s),
        round_trip_s=times.round_trip_s(ways),
    )
