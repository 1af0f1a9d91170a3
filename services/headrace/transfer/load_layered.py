"""Loading what a model of mixed layers reads of a prefix: wide parts of all its blocks, near parts of the last window.

      0 ......... n ............................ reach ......... end      blocks of the prompt
       pool's own |=========== wide ============|   not stored
                                 |==== near ====|

Where the prefix ends says which near parts are worth loading, so that is asked first. When loading ends early, the
window before that place lacks near parts: its blocks are loaded once more, whole, or everything behind the pool's own
prefix is computed.

Owns which blocks are asked for whole and where near parts are put; how they come is `load_prefix.py`'s and
`follow_prefill.py`'s.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from headrace.core.block import CacheSource, HashedPrompt, KvLayout
from headrace.core.clock import Deadline
from headrace.core.errors import CacheFault, StoreUnavailable
from headrace.core.generation import HandOff
from headrace.core.key_window import KeyWindow
from headrace.core.limits import LOAD_PREFIX_TIMEOUT_MS, LOAD_WINDOW_ATTEMPTS
from headrace.core.part_ids import PartIds
from headrace.core.ports import PrefixPool, StoreNodes
from headrace.core.transfer_budget import TransferBudget
from headrace.transfer.find_reach import find_reach
from headrace.transfer.follow_prefill import follow_prefill
from headrace.transfer.load_prefix import LoadedPrefix, LoadPlan, load_prefix
from headrace.transfer.load_window import window_budget


@dataclass(frozen=True, slots=True)
class NearTable:
    """The pool's blocks for a prompt, near parts on blocks [first_near, end_near), and what is read of near parts."""

    block_ids: Sequence[int]
    first_near: int
    end_near: int
    parts: PartIds
    window: KeyWindow


async def load_layered(
    prompt: HashedPrompt,
    table: NearTable,
    *,
    plan: LoadPlan,
    budget: Callable[[range], TransferBudget | None],
    hand_off: HandOff | None,
    layout: KvLayout,
    nodes: StoreNodes,
    pool: PrefixPool,
    deadline: Deadline,
) -> tuple[LoadedPrefix, NearTable]:
    """Load the longest prefix that is stored, up to block `plan.end_block`.

    plan:     its `first_block` is the length of the pool's own prefix, whose window has the first near parts of the
              table; `budget` unused.
    table:    near parts behind the pool's own prefix are written to, on whichever blocks they are wanted.
    budget:   what loading may cost that saves computing these blocks.
    hand_off: a prefill elsewhere computes the blocks up to the end just now; they are loaded as they appear.
    Returns what need not be computed behind the pool's own prefix, and the table with near parts where they are read
    and where they are needed next. Raises nothing of the cache; cancellation passes through. No thread writes to the
    pool after this returns.
    """
    if plan.first_block >= plan.end_block:  # the pool's own may be longer than what may be reused: it stays as it is
        return LoadedPrefix(0, ()), table
    load = _LayeredLoad(prompt, table, plan, budget, layout, nodes, pool)
    limit = deadline.capped(LOAD_PREFIX_TIMEOUT_MS / 1000)
    reach = plan.end_block
    if hand_off is None:
        reach, faults = await find_reach(prompt, plan=plan, nodes=nodes, deadline=limit)
        load.faults += faults
    if reach > plan.first_block:
        await load.load(plan.first_block, reach, hand_off=hand_off, deadline=deadline if hand_off else limit)
    if hand_off is not None:  # following may have taken any time
        limit = deadline.capped(LOAD_PREFIX_TIMEOUT_MS / 1000)
    attempts_left = LOAD_WINDOW_ATTEMPTS
    while attempts_left and not load.gave_up and not load.is_whole:
        await load.fill(deadline=limit)
        attempts_left -= 1
    if not load.is_whole:
        load.end_at(plan.first_block)
    return load.result()


@dataclass(slots=True)
class _LayeredLoad:
    """One load under way: `sources` of blocks whose wide parts are verified, without a gap from the plan's first one
    on, and near parts by block index, verified (`have`) or free to be written (`spare`)."""

    prompt: HashedPrompt
    table: NearTable
    plan: LoadPlan
    budget: Callable[[range], TransferBudget | None]
    layout: KvLayout
    nodes: StoreNodes
    pool: PrefixPool
    own: dict[int, int] = field(default_factory=dict)  # of the pool's own prefix, never written
    have: dict[int, int] = field(default_factory=dict)
    spare: list[int] = field(default_factory=list)
    sources: list[CacheSource] = field(default_factory=list)
    faults: list[CacheFault] = field(default_factory=list)
    gave_up: bool = False  # for a reason that more asking does not change

    def __post_init__(self) -> None:
        for index in range(self.table.first_near, self.table.end_near):
            near = self.table.parts.near_of(self.table.block_ids[index])
            assert near is not None
            if index < self.plan.first_block:
                self.own[index] = near
            else:
                self.spare.append(near)

    @property
    def end(self) -> int:
        """Where the verified wide parts end."""
        return self.plan.first_block + len(self.sources)

    @property
    def is_whole(self) -> bool:
        """Whether all near parts are there that are read of the prefix which ends there."""
        return all(index in self.have for index in self._wanted(self.end))

    def _wanted(self, end: int) -> range:
        """Near parts to be loaded of a prefix that ends there."""
        return range(max(self.plan.first_block, self.table.window.first_of_prefix(end)), end)

    async def load(self, first: int, end: int, *, hand_off: HandOff | None, deadline: Deadline) -> None:
        """Load blocks [first, end), those whole that are read of a prefix which ends there."""
        wanted = self._wanted(end)
        whole = range(max(first, wanted.start), end)
        block_ids = self._place(whole)
        plan = replace(self.plan, first_block=first, end_block=end, whole_from=whole.start)
        if hand_off is None:
            plan = replace(plan, budget=self._budget(range(first, end), whole))
            loaded = await load_prefix(
                self.prompt,
                block_ids,
                plan=plan,
                layout=self.layout,
                nodes=self.nodes,
                pool=self.pool,
                deadline=deadline,
            )
        else:
            loaded = await follow_prefill(
                self.prompt,
                block_ids,
                plan=replace(plan, budget=None),
                hand_off=hand_off,
                layout=self.layout,
                nodes=self.nodes,
                pool=self.pool,
                deadline=deadline,
            )
        self.faults += loaded.faults
        came = first + loaded.num_blocks
        for index in whole:
            near = self.table.parts.near_of(block_ids[index])
            assert near is not None
            if index < came:
                self.have[index] = near
                self.spare.remove(near)
        self.sources[first - self.plan.first_block : came - self.plan.first_block] = loaded.sources
        if came < end:
            self.end_at(came)

    async def fill(self, *, deadline: Deadline) -> None:
        """Load near parts that are missing of the window before the end. What is there may end earlier then."""
        first = self._wanted(self.end).start
        stop = min((index for index in self.have if index >= first), default=self.end)
        end, known_faults = self.end, len(self.faults)
        await self._load_missing(first, stop, end, deadline=deadline)
        new_faults = self.faults[known_faults:]
        self.gave_up = any(isinstance(fault, StoreUnavailable) for fault in new_faults)

    async def _load_missing(self, first: int, stop: int, end: int, *, deadline: Deadline) -> None:
        block_ids = self._place(range(first, stop))
        saved = range(self.plan.first_block, end)
        budget = window_budget(self.budget(saved), range(first, stop), saved, self.layout.block_tokens)
        loaded = await load_prefix(
            self.prompt,
            block_ids,
            plan=replace(self.plan, first_block=first, end_block=stop, whole_from=first, budget=budget),
            layout=self.layout,
            nodes=self.nodes,
            pool=self.pool,
            deadline=deadline,
        )
        self.faults += loaded.faults
        for index in range(first, first + loaded.num_blocks):
            near = self.table.parts.near_of(block_ids[index])
            assert near is not None
            self.have[index] = near
            self.spare.remove(near)
        if first + loaded.num_blocks < stop:
            self.end_at(first + loaded.num_blocks)

    def end_at(self, end: int) -> None:
        """Blocks from `end` on are of no use any more."""
        del self.sources[end - self.plan.first_block :]
        for index in [index for index in self.have if index >= end]:
            self.spare.append(self.have.pop(index))

    def result(self) -> tuple[LoadedPrefix, NearTable]:
        """What is there now, and near parts on the last window and, as many as there are, on the blocks behind it."""
        loaded = LoadedPrefix(num_blocks=len(self.sources), sources=tuple(self.sources), faults=tuple(self.faults))
        there = self.own | self.have
        first = self.table.window.first_of_prefix(self.end)
        near = [there[index] for index in range(first, self.end)] + self.spare
        near = near[: len(self.table.block_ids) - first]
        block_ids = self.table.parts.place(self.table.block_ids, near, first=first)
        return loaded, replace(self.table, block_ids=tuple(block_ids), first_near=first, end_near=first + len(near))

    def _place(self, blocks: range) -> list[int]:
        """The table with spare near parts on these blocks."""
        assert len(blocks) <= len(self.spare), "a table has near parts for two windows"
        return self.table.parts.place(self.table.block_ids, self.spare[: len(blocks)], first=blocks.start)

    def _budget(self, blocks: range, whole: range) -> TransferBudget | None:
        budget = self.budget(blocks)
        if budget is None:
            return None
        moved = len(whole) * self.layout.block_bytes + (len(blocks) - len(whole)) * self.layout.wide_bytes
        share = moved / (len(blocks) * self.layout.block_bytes)
        return replace(budget, predicted_s=budget.predicted_s * share)
