"""The copies that one call's blocks have in store nodes, for its run in case it has to give its blocks up.

Owns what is known of them: the blocks that were loaded when the call began, and those that were published since. It
decides nothing: the engine compares the seconds.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

from headrace.core.block import CacheSource, HashedPrompt
from headrace.core.clock import Deadline
from headrace.core.generation import GenerateRequest
from headrace.core.learned_costs import PRIOR_GRPC, PRIOR_SHARED_MEMORY
from headrace.core.step_costs import LinkCost
from headrace.engine.event_stream import FilledBlock
from headrace.transfer.hold_prefix import HeldPrefix, load_back
from headrace.transfer.load_prefix import LoadPlan
from headrace.transfer.publish_blocks import Publication
from headrace.transfer.worker import Worker


class StoredRun:
    """A `PrefixBackup` of one call. Numbers are read in any thread; the rest belongs to the event loop."""

    def __init__(
        self,
        worker: Worker,
        held: HeldPrefix,
        request: GenerateRequest,
        *,
        hint_nodes: tuple[str, ...],
        deadline: Deadline,
        node_id: str = "",
    ) -> None:
        """hint_nodes: those that the prefix was looked for at. node_id: the one that the run's blocks are offered to;
        "": the worker's sink."""
        self._worker = worker
        self._request = request
        self._deadline = deadline
        self._node_id = node_id
        first_asked = (node_id, worker.nodes.sink_node_id())
        self._hint_nodes = tuple(dict.fromkeys(node for node in (*first_asked, *hint_nodes) if node))
        loaded = (source is not CacheSource.DEVICE for source in held.sources)
        self._num_loaded = held.num_blocks if all(loaded) else 0  # what only this pool is known to have is not stored
        self._publications: list[tuple[int, Publication]] = []  # each with the position of the first block it is given
        # As known when the call begins; the links' books are the event loop's, and a step may not wait for them.
        self._link = _fastest_link(worker, self._hint_nodes, request)

    @property
    def keeps_numbers(self) -> bool:
        """Whether what is read back is what was computed: not from a store whose codec loses something."""
        return self._worker.layout == self._worker.engine.kv.layout

    def publishes(self, publication: Publication, *, first_block: int) -> None:
        """The run's blocks from `first_block` on are offered there, in order."""
        self._publications.append((first_block, publication))

    def num_stored(self) -> int:
        """As PrefixBackup.num_stored."""
        return self._end_of((first, each.num_stored) for first, each in self._publications)

    def num_kept(self) -> int:
        """As PrefixBackup.num_kept."""
        return self._end_of((first, each.num_stored + each.num_pending) for first, each in self._publications)

    def _end_of(self, stored: Iterable[tuple[int, int]]) -> int:
        """Where what is stored ends. A block is stored behind all before it, whoever stored those; where none of a
        publication is, nothing is known of what it stands on."""
        return max([self._num_loaded, *(first + count for first, count in stored if count)])

    def reload_s(self, num_blocks: int) -> float:
        """As PrefixBackup.reload_s."""
        if self._link is None:
            return float("inf")
        layout, engine = self._worker.layout, self._worker.engine
        if engine.window.bounded:
            num_blocks = min(num_blocks, engine.window.prefix_blocks)
        num_whole = min(num_blocks, engine.near_window.prefix_blocks) if engine.near_window.bounded else num_blocks
        num_bytes = num_whole * layout.block_bytes + (num_blocks - num_whole) * layout.wide_bytes
        return float(self._link.seconds(num_bytes))

    def save(self, blocks: Sequence[FilledBlock]) -> None:
        """As PrefixBackup.save: what was dropped because the publisher had no room is offered once more."""
        fresh = [block for block in blocks if block.position >= self.num_kept()]
        publication = Publication(self._request.cache.retention, node_id=self._node_id)
        if fresh:
            self.publishes(publication, first_block=fresh[0].position)
        for block in blocks[: len(blocks) - len(fresh)]:
            self._worker.engine.pool.unref(block.block_id)
        for block in fresh:
            self._worker.publisher.offer(publication, block)

    async def reload(self, prompt: HashedPrompt, block_ids: Sequence[int], blocks: range, *, saved_from: int) -> int:
        """As PrefixBackup.reload."""
        parts = self._worker.engine.pool.parts
        plan = LoadPlan(
            whole_from=next((i for i in blocks if parts.near_of(block_ids[i]) is not None), blocks.stop),
            first_block=blocks.start,
            end_block=blocks.stop,
            sources=self._request.cache.sources,
            hint_nodes=self._hint_nodes,
            retention=self._request.cache.retention,
        )
        request = replace(self._request, prompt=prompt)
        saved = range(saved_from, blocks.stop)
        return await load_back(self._worker, request, block_ids, saved, plan=plan, deadline=self._deadline)


def _fastest_link(worker: Worker, hint_nodes: Collection[str], request: GenerateRequest) -> LinkCost | None:
    """What reading from the fastest of the nodes takes, as measured or assumed; None where nothing may be read."""
    local, sources = worker.nodes.local_node_id(), request.cache.sources
    near = {local: (CacheSource.SHARED_MEMORY, PRIOR_SHARED_MEMORY)} if local else {}
    ways = dict.fromkeys(hint_nodes, (CacheSource.GRPC, PRIOR_GRPC)) | near
    links = {node: prior for node, (via, prior) in ways.items() if via in sources}
    for link in worker.timed_nodes.times.links():
        if link.node_id in links and link.via is ways[link.node_id][0]:
            links[link.node_id] = LinkCost(link.bytes_per_s, link.round_trip_s)
    return max(links.values(), key=lambda link: link.bytes_per_s, default=None)
