"""What the index is told follows what the node holds: in order, bounded, and anew after the index lost it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from store_kit import HandClock, StoreKit, make_prompt

from headrace.blocks.host_arena import HostArena
from headrace.core.block import HashedPrompt, HolderId
from headrace.core.errors import IndexUnavailable
from headrace.core.generation import EvictSelector
from headrace.core.members import StoreNodeRecord
from headrace.index.memory_index import MemoryIndex, MemoryMembership
from headrace.store.register_blocks import PendingChanges, register_blocks
from headrace.store.store_node import StoreNode

HOLDER = HolderId("node:n1")


class CuttableIndex(MemoryIndex):
    """The in-memory index behind a line that can be cut."""

    cut = False
    calls = 0

    async def register(self, **entry) -> None:
        self._check()
        await super().register(**entry)

    async def deregister(self, **entry) -> None:
        self._check()
        await super().deregister(**entry)

    def _check(self) -> None:
        self.calls += 1
        if self.cut:
            raise IndexUnavailable("the line is cut")


class World:
    """A node, an index, and the registration between them, running."""

    def __init__(self, *, changes_max: int = 1_000) -> None:
        self.clock = HandClock()
        self.membership = MemoryMembership(self.clock)
        self.index = CuttableIndex(self.membership)
        self.changes = PendingChanges(changes_max=changes_max)
        arena = HostArena.in_memory(66 * 4_096)
        node = StoreNode(arena, node_id="n1", clock=self.clock, changes=self.changes)
        self.kit = StoreKit(self.clock, arena, self.changes, node)  # type: ignore[arg-type]

    async def announce(self) -> None:
        record = StoreNodeRecord("n1", self.kit.node.incarnation, "h", "a", "p", 1)
        await self.membership.announce(record, ttl_ms=10**9)

    async def indexed(self, prompt: HashedPrompt) -> int:
        return (await self.index.longest_prefix(prompt.namespace, prompt.chain)).of(HOLDER)

    async def until(self, holds: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not holds():  # noqa: ASYNC110 (the queue has no event for "empty")
                await asyncio.sleep(0.005)


@asynccontextmanager
async def running(world: World) -> AsyncIterator[World]:
    world.changes.want_restart()
    task = asyncio.create_task(register_blocks(world.kit.node, world.changes, world.index, announce=world.announce))
    try:
        yield world
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def test_the_index_follows_commits_and_evictions() -> None:
    async with running(World()) as world:
        prompt = make_prompt(1, 4)
        world.kit.store(prompt, range(4))
        await world.until(lambda: not len(world.changes))
        assert await world.indexed(prompt) == 4
        world.kit.node.evict(EvictSelector(block_hashes=(prompt.chain[2],)), dry_run=False)
        await world.until(lambda: not len(world.changes))
        assert await world.indexed(prompt) == 2


async def test_a_removal_and_a_new_addition_of_the_same_block_keep_their_order() -> None:
    async with running(World()) as world:
        prompt = make_prompt(1, 2)
        world.kit.store(prompt, range(2))
        world.kit.node.evict(EvictSelector(), dry_run=False)
        world.kit.store(prompt, range(2))
        await world.until(lambda: not len(world.changes))
        assert await world.indexed(prompt) == 2


async def test_what_an_earlier_process_left_is_registered_at_start() -> None:
    world, prompt = World(), make_prompt(1, 3)
    world.kit.store(prompt, range(3))
    async with running(world):
        await world.until(lambda: not len(world.changes))
        assert await world.indexed(prompt) == 3


async def test_changes_wait_while_the_index_is_away() -> None:
    async with running(World()) as world:
        prompt = make_prompt(1, 3)
        world.index.cut = True
        world.kit.store(prompt, range(3))
        await world.until(lambda: world.index.calls >= 2)
        assert await world.indexed(prompt) == 0
        world.index.cut = False
        await world.until(lambda: not len(world.changes))
        assert await world.indexed(prompt) == 3


async def test_more_changes_than_the_queue_holds_void_all_entries_and_register_anew() -> None:
    """Without the new incarnation the index would name the evicted chain for ever."""
    async with running(World(changes_max=8)) as world:
        gone, kept = make_prompt(1, 4), make_prompt(2, 6)
        world.kit.store(gone, range(4))
        await world.until(lambda: not len(world.changes))
        before = world.kit.node.incarnation
        world.index.cut = True
        world.kit.node.evict(EvictSelector(), dry_run=False)
        world.kit.store(kept, range(6))
        assert world.changes.overflowed
        assert len(world.changes) <= 8
        world.index.cut = False
        await world.until(lambda: not world.changes.restart_wanted and not len(world.changes))
        assert world.kit.node.incarnation > before
        assert (await world.indexed(gone), await world.indexed(kept)) == (0, 6)


async def test_an_index_that_came_back_empty_is_told_everything_again() -> None:
    async with running(World()) as world:
        prompt = make_prompt(1, 3)
        world.kit.store(prompt, range(3))
        await world.until(lambda: not len(world.changes))
        incarnation = world.kit.node.incarnation
        world.index._entries.clear()
        world.changes.want_restart()
        await world.until(lambda: not world.changes.restart_wanted and not len(world.changes))
        assert await world.indexed(prompt) == 3
        assert world.kit.node.incarnation == incarnation


async def test_removals_queued_before_a_restart_are_not_forgotten() -> None:
    async with running(World()) as world:
        prompt = make_prompt(1, 3)
        world.kit.store(prompt, range(3))
        await world.until(lambda: not len(world.changes))
        world.kit.node.evict(EvictSelector(), dry_run=False)
        world.changes.want_restart()
        await world.until(lambda: not world.changes.restart_wanted and not len(world.changes))
        assert await world.indexed(prompt) == 0
