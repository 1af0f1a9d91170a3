"""Loading what a model with a window reads of a prefix: its last blocks, all of them or none.

      0 ......... n ......... first =======> reach ......... end       blocks of the prompt
       pool's own   not moved   |  window  |   not stored

A prefix is worth its whole length, for the price of one window; but half a window is worth nothing, unless it begins
where the pool's own prefix ends. So the end of what is stored is looked for first, and when loading ends early, what
is missing of the window before that place is loaded, or everything behind the pool's own prefix is computed.

Owns which blocks are asked for and where they go; how they come is `load_prefix.py`'s and `follow_prefill.py`'s.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from headrace.core.block import CacheSource, HashedPrompt, KvLayout
from headrace.core.clock import Deadline
from headrace.core.errors import CacheFault, StoreUnavailable
from headrace.core.generation import HandOff
from headrace.core.key_window import KeyWindow
from headrace.core.limits import LOAD_PREFIX_TIMEOUT_MS, LOAD_WINDOW_ATTEMPTS
from headrace.core.ports import PrefixPool, StoreNodes
from headrace.core.transfer_budget import TransferBudget
from headrace.transfer.find_reach import find_reach
from headrace.transfer.follow_prefill import await_block, follow_prefill
from headrace.transfer.load_prefix import LoadedPrefix, LoadPlan, load_prefix


@dataclass(frozen=True, slots=True)
class WindowTable:
    """The pool's blocks for a prompt, from its block `first_block` on, and what its model reads of them."""

    block_ids: Sequence[int]
    first_block: int
    window: KeyWindow


@dataclass(frozen=True, slots=True)
class WindowBudget:
    """A TransferBudget of a window: loaded, it saves what its whole prefix takes to compute; half of it counts as half
    of that. In tokens that are moved."""

    whole: TransferBudget  # of the prefix
    moved_tokens: int

    def left_s(self, *, seconds: float, loaded_tokens: int) -> float:
        """As TransferBudget.left_s."""
        return self.whole.left_s(seconds=seconds, loaded_tokens=self._saved(loaded_tokens))

    def is_over(self, *, seconds: float, loaded_tokens: int, arrived_tokens: int) -> bool:
        """As TransferBudget.is_over."""
        loaded, arrived = self._saved(loaded_tokens), self._saved(arrived_tokens)
        return self.whole.is_over(seconds=seconds, loaded_tokens=loaded, arrived_tokens=arrived)

    def _saved(self, moved_tokens: int) -> int:
        return (self.whole.end_token - self.whole.first_token) * moved_tokens // self.moved_tokens


async def load_window(
    prompt: HashedPrompt,
    table: WindowTable,
    *,
    plan: LoadPlan,
    budget: Callable[[range], TransferBudget | None],
    hand_off: HandOff | None,
    layout: KvLayout,
    nodes: StoreNodes,
    pool: PrefixPool,
    deadline: Deadline,
) -> tuple[LoadedPrefix, WindowTable]:
    """Load the window of the longest prefix that is stored, up to block `plan.end_block`.

    plan:     its `first_block` is the length of the pool's own prefix, whose window begins the table; `budget` unused.
    table:    has room for one more window; its blocks behind the pool's own prefix are written to.
    budget:   what loading may cost that saves computing these blocks.
    hand_off: a prefill elsewhere computes the blocks up to the end just now, and its window is waited for first.
    Returns the prefix that need not be computed, as far as it is longer than the pool's own, and the table with its
    window: blocks that were not moved count by where the window behind them came from. Raises nothing of the cache;
    cancellation passes through. No thread writes to the pool after this returns.
    """
    num_shared = plan.first_block - table.first_block
    load = _WindowLoad(
        prompt=prompt,
        plan=plan,
        window=table.window,
        spare=list(table.block_ids[num_shared:]),
        budget=budget,
        layout=layout,
        nodes=nodes,
        pool=pool,
        deadline=deadline,
    )
    if plan.first_block >= plan.end_block or (hand_off is not None and await load.follow(hand_off)):
        return load.result(table)
    limit = deadline.capped(LOAD_PREFIX_TIMEOUT_MS / 1000)
    end, faults = await find_reach(prompt, plan=load.plan, nodes=nodes, deadline=limit)
    load.faults += faults
    attempts_left = LOAD_WINDOW_ATTEMPTS
    while attempts_left and not load.gave_up and not load.is_whole(end):
        end = await load.fill(end, deadline=limit)
        attempts_left -= 1
    if not load.is_whole(end):
        load.drop_from(plan.first_block)
    return load.result(table)


def window_budget(whole: TransferBudget | None, moved: range, saved: range, block_tokens: int) -> WindowBudget | None:
    """What moving some blocks may cost that saves computing others; `whole` is of those that are saved."""
    if whole is None:
        return None
    share = len(moved) / len(saved)
    return WindowBudget(replace(whole, predicted_s=whole.predicted_s * share), len(moved) * block_tokens)


@dataclass(slots=True)
class _WindowLoad:
    """One load under way. `have`: what is verified and in its place, without a gap, by block index."""

    prompt: HashedPrompt
    plan: LoadPlan
    window: KeyWindow
    spare: list[int]
    budget: Callable[[range], TransferBudget | None]
    layout: KvLayout
    nodes: StoreNodes
    pool: PrefixPool
    deadline: Deadline
    have: dict[int, tuple[int, CacheSource]] = field(default_factory=dict)
    faults: list[CacheFault] = field(default_factory=list)
    gave_up: bool = False  # for a reason that more asking does not change

    @property
    def end(self) -> int:
        """Where what is there ends."""
        return max(self.have, default=self.plan.first_block - 1) + 1

    def is_whole(self, end: int) -> bool:
        """Whether all is there that is read of a prefix which ends there."""
        return all(index in self.have for index in range(self.first_wanted(end), end))

    def first_wanted(self, end: int) -> int:
        """First block to be loaded of a prefix that ends there: the pool's own are there."""
        return max(self.plan.first_block, self.window.first_of_prefix(end))

    async def follow(self, hand_off: HandOff) -> bool:
        """Wait for the prefill to come to the last window, then load it as it appears; whether that is whole."""
        first, end = self.first_wanted(self.plan.end_block), self.plan.end_block
        self.plan = replace(self.plan, hint_nodes=(hand_off.store_node, *self.plan.hint_nodes))
        if first == end:
            return False
        try:
            # Block by block, though none of these is loaded: the prefill's patience is for one block.
            for index in range(max(self.plan.first_block, hand_off.first_block), first):
                if not await await_block(
                    self.prompt,
                    index,
                    hand_off,
                    sources=self.plan.sources,
                    nodes=self.nodes,
                    deadline=self.deadline,
                ):
                    return False
        except CacheFault as fault:
            self.faults.append(fault)
            return False
        block_ids = self._place(first, end)
        loaded = await follow_prefill(
            self.prompt,
            block_ids,
            plan=replace(self.plan, first_block=first, end_block=end, budget=None),
            hand_off=hand_off,
            layout=self.layout,
            nodes=self.nodes,
            pool=self.pool,
            deadline=self.deadline,
        )
        self._keep(loaded, range(first, end), block_ids)
        if self.end < end:
            self.drop_from(self.plan.first_block)
        return self.end == end

    async def fill(self, end: int, *, deadline: Deadline) -> int:
        """Load what is missing of the window before `end`. Where the prefix ends then: its window may not be whole."""
        assert not self.have or self.end == end
        first, stop = self.first_wanted(end), min(self.have, default=end)
        block_ids = self._place(first, stop)
        loaded = await load_prefix(
            self.prompt,
            block_ids,
            plan=replace(self.plan, first_block=first, end_block=stop, budget=self._budget(first, stop, end)),
            layout=self.layout,
            nodes=self.nodes,
            pool=self.pool,
            deadline=deadline,
        )
        self.gave_up = any(isinstance(fault, StoreUnavailable) for fault in loaded.faults)
        if loaded.num_blocks < stop - first:
            end = first + loaded.num_blocks
            self.drop_from(end)
        self._keep(loaded, range(first, stop), block_ids)
        return end

    def drop_from(self, end: int) -> None:
        """Blocks from `end` on are of no use any more."""
        for index in [index for index in self.have if index >= end]:
            self.spare.append(self.have.pop(index)[0])

    def result(self, table: WindowTable) -> tuple[LoadedPrefix, WindowTable]:
        """The table with what is there now, from the first block that is read on."""
        num_shared = self.plan.first_block - table.first_block
        first, sources = self.plan.first_block, [self.have[index][1] for index in sorted(self.have)]
        block_ids = [self.have[index][0] for index in sorted(self.have)] + self.spare
        if self.have and min(self.have) > first:
            first = min(self.have)
            sources = [sources[0]] * (first - self.plan.first_block) + sources
        else:
            first = table.first_block
            block_ids = [*table.block_ids[:num_shared], *block_ids]
        passed = max(0, self.window.first_of_prefix(self.end) - first)
        loaded = LoadedPrefix(num_blocks=len(sources), sources=tuple(sources), faults=tuple(self.faults))
        return loaded, WindowTable(tuple(block_ids[passed:]), first + passed, self.window)

    def _place(self, first: int, stop: int) -> list[int]:
        """Pool blocks for blocks [first, stop), by block index; what is before is not looked at."""
        assert stop - first <= len(self.spare), "a table has room for two windows"
        assert stop > first
        return [self.spare[0]] * first + self.spare[: stop - first]

    def _keep(self, loaded: LoadedPrefix, wanted: range, block_ids: Sequence[int]) -> None:
        """Take over what was loaded of the wanted blocks; the others' places are spare again."""
        self.faults += loaded.faults
        for index, source in zip(wanted, loaded.sources, strict=False):
            self.have[index] = (block_ids[index], source)
            self.spare.remove(block_ids[index])

    def _budget(self, first: int, stop: int, end: int) -> WindowBudget | None:
        saved = range(self.plan.first_block, end)
        return window_budget(self.budget(saved), range(first, stop), saved, self.layout.block_tokens)
