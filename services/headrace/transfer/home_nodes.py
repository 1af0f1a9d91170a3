"""Which store node has a prefix that this worker's own node lacks, so that what stands on it can be kept.

A model with windows loads no more of a prefix than it reads. Where that came over the network, or a store has dropped
what the pool still has the window of, the node of this host has nothing before it, and keeps no block without its
parent. The pool may have such a window long afterwards, when nobody says any more where it came from: so that is
remembered.
"""

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace

from headrace.core.block import BlockHash, CacheSource
from headrace.core.clock import Deadline
from headrace.core.errors import CacheFault
from headrace.core.generation import GenerateRequest
from headrace.core.ports import StoreNodes
from headrace.engine.engine import Engine
from headrace.transfer.find_reach import find_reach
from headrace.transfer.load_prefix import LoadedPrefix, LoadPlan


class HomeNodes:
    """Of one worker, on its event loop. Of a model without windows a pool has whole prefixes, and nothing is known."""

    def __init__(self, engine: Engine, nodes: StoreNodes, *, report_fault: Callable[[CacheFault], None]) -> None:
        self._pool = engine.pool
        self._window = engine.window if engine.window.bounded else engine.near_window
        self._nodes = nodes
        self._report_fault = report_fault
        # The last block of a prefix to the node that has it. No more of them are in use than the pool has blocks.
        self._homes: OrderedDict[BlockHash, str] = OrderedDict()

    def find(
        self, request: GenerateRequest, loaded: LoadedPrefix, *, num_device: int, hint_nodes: tuple[str, ...]
    ) -> str:
        """The node that has the prefix of a prompt, where this worker's own is not known to: the pool had `num_device`
        blocks of it, and the rest was loaded just now. "": nobody, or its own. What was known of a prefix that the own
        node has, or is about to be given from its beginning, is forgotten."""
        if not self._window.bounded:
            return ""
        prompt, node_id, end = request.prompt, "", num_device + loaded.num_blocks
        if loaded.sources[-1:] == (CacheSource.GRPC,):
            node_id = next((each for each in hint_nodes if self._nodes.sink_at(each) is not None), "")
        elif loaded.sources or (num_device == 0 and request.cache.publish):
            for block_hash in prompt.chain:
                self._homes.pop(block_hash, None)
        else:
            known = (self._homes.get(block_hash, "") for block_hash in reversed(prompt.chain[:num_device]))
            node_id = next((each for each in known if each and self._nodes.sink_at(each) is not None), "")
        if node_id:
            self._homes[prompt.chain[end - 1]] = node_id
            self._homes.move_to_end(prompt.chain[end - 1])
            if len(self._homes) > self._pool.num_blocks:
                self._homes.popitem(last=False)
        return node_id

    async def storable(self, request: GenerateRequest, *, deadline: Deadline) -> GenerateRequest:
        """The request, so that the worker's sink can keep what is computed for it. Where the pool has the window of a
        prefix and the sink not what is before it, the pool's blocks are not reused: all is computed from where the
        sink's prefix ends. Asks the sink, if the pool has a window; one round trip. Where nobody takes blocks, or the
        sink does not answer, nothing is known to be gained by computing more. Raises nothing of the cache."""
        sources, sink_id = request.cache.sources, self._nodes.sink_node_id()
        if not self._window.bounded or CacheSource.DEVICE not in sources or not sink_id:
            return request
        first = self._window.first_of_prefix(self._pool.resident_blocks(request.prompt))
        if not first:
            return request
        # The sink alone, whatever way its blocks would come: the host's own node is another one while that drains.
        plan = LoadPlan(first_block=0, end_block=first, sources=frozenset({CacheSource.GRPC}), hint_nodes=(sink_id,))
        reach, faults = await find_reach(request.prompt, plan=plan, nodes=self._nodes, deadline=deadline)
        for fault in faults:
            self._report_fault(fault)
        if faults or reach == first:
            return request
        return replace(request, cache=replace(request.cache, sources=sources - {CacheSource.DEVICE}))
