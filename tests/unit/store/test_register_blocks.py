"""What the index is told follows what the node holds: in order, bounded, and anew after the index lost it."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from store_kit import BLOCK_TOKENS, NAMESPACE, HandClock, StoreKit, make_prompt

from headrace.blocks.host_arena import HostArena
from headrace.core.block import HashAlgorithm, HashedPrompt, HolderId, NamespaceId, hash_prompt, shard_of
from headrace.core.errors import IndexUnavailable
from headrace.core.generation import EvictSelector
from headrace.core.members import StoreNodeRecord
from headrace.index.memory_index import MemoryIndex, MemoryMembership
from headrace.store.register_blocks import PendingChanges, register_blocks
from headrace.store.store_node import StoreNode

HOLDER = HolderId("node:n1")
ELSEWHERE = next(
    name for name in (NamespaceId(f"{number:032x}") for number in range(100)) if shard_of(name) != shard_of(NAMESPACE)
)


def prompt_elsewhere(num_blocks: int) -> HashedPrompt:
    """One whose blocks lie in another shard than those of `make_prompt`."""
    tokens = range(num_blocks * BLOCK_TOKENS)
    return hash_prompt(ELSEWHERE, tokens, block_tokens=BLOCK_TOKENS, algorithm=HashAlgorithm.XXH3_128)


class CuttableIndex(MemoryIndex):
    """The in-memory index behind a line that can be cut, or that to one shard."""

    cut = False
    cut_shard = -1
    calls = 0

    async def register(self, **entry) -> None:
        self._check(entry["namespace"])
        await super().register(**entry)

    async def deregister(self, **entry) -> None:
        self._check(entry["namespace"])
        await super().deregister(**entry)

    def _check(self, namespace: NamespaceId) -> None:
        self.calls += 1
        if self.cut or shard_of(namespace) == self.cut_shard:
            raise IndexUnavailable("the line is cut")


class World:
    """A node, an index, and the registration between them, running."""

    def __init__(self, *, changes_max: int = 1_000) -> None:
        self.announcements = 0  # tried
        self.announced = asyncio.Event()  # cleared: the record is on its way for as long as a test wants
        self.announced.set()
        self.clock = HandClock()
        self.membership = MemoryMembership(self.clock)
        self.index = CuttableIndex(self.membership)
        self.changes = PendingChanges(changes_max=changes_max)
        arena = HostArena.in_memory(66 * 4_096)
        node = StoreNode(arena, node_id="n1", clock=self.clock, changes=self.changes)
        self.kit = StoreKit(self.clock, arena, self.changes, node)  # type: ignore[arg-type]

    async def announce(self) -> None:
        self.announcements += 1
        if self.index.cut:
            raise IndexUnavailable("the line is cut")
        record = StoreNodeRecord("n1", self.kit.node.incarnation, "h", "a", "p", 1)
        await self.announced.wait()
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


async def test_a_shard_that_is_away_keeps_no_other_waiting() -> None:
    """Fails when one queue has the changes of all shards: of a cluster that lost one primary, nothing new is found."""
    async with running(World()) as world:
        away, there = make_prompt(1, 3), prompt_elsewhere(3)
        await world.until(lambda: not world.changes.restart_wanted)
        world.index.cut_shard = shard_of(NAMESPACE)
        world.kit.store(away, range(3))
        await world.until(lambda: world.index.calls >= 2)
        world.kit.store(there, range(3))
        await world.until(lambda: len(world.changes) == 3)
        world.changes.want_restart()
        await world.until(lambda: not world.changes.restart_wanted and len(world.changes) == 3)
        assert (await world.indexed(away), await world.indexed(there)) == (0, 3)
        world.kit.node.evict(EvictSelector(namespace=ELSEWHERE), dry_run=False)
        await world.until(lambda: len(world.changes) == 3)
        assert await world.indexed(there) == 0
        world.index.cut_shard = -1
        await world.until(lambda: not len(world.changes))
        assert await world.indexed(away) == 3


async def test_a_shard_that_stays_away_gathers_no_removals_without_end() -> None:
    """Fails when registering all again, which is done every half minute, takes removals out of the count."""
    async with running(World(changes_max=8)) as world:
        await world.until(lambda: not world.changes.restart_wanted)
        world.index.cut_shard = shard_of(NAMESPACE)
        before = world.kit.node.incarnation
        for token in range(1, 10):
            world.kit.store(make_prompt(token, 2), range(2))
            world.kit.node.evict(EvictSelector(), dry_run=False)
            world.changes.want_restart()
            await world.until(lambda: not world.changes.restart_wanted)
            assert len(world.changes) <= 8
        assert world.kit.node.incarnation > before, "what the bound dropped must count no more"


async def test_an_outage_that_outlasts_the_queue_costs_one_new_incarnation() -> None:
    """Fails when each try to announce takes another one: workers map the arena by it, and drop what they read."""
    async with running(World(changes_max=8)) as world:
        await world.until(lambda: not world.changes.restart_wanted)
        before, tried = world.kit.node.incarnation, world.announcements
        world.index.cut = True
        world.kit.store(make_prompt(1, 9), range(9))
        await world.until(lambda: world.announcements >= tried + 3)
        assert world.kit.node.incarnation == before + 1
        world.index.cut = False
        await world.until(lambda: not world.changes.restart_wanted and not len(world.changes))
        assert world.kit.node.incarnation == before + 1
        assert await world.indexed(make_prompt(1, 9)) == 9


async def test_what_overflows_while_the_record_is_on_its_way_voids_all_entries_too() -> None:
    """Fails when the restart under way counts for it: its incarnation lives, and the index names the evicted chain."""
    async with running(World(changes_max=8)) as world:
        gone, kept = make_prompt(1, 4), make_prompt(2, 6)
        world.kit.store(gone, range(4))
        await world.until(lambda: not world.changes.restart_wanted and not len(world.changes))
        before, tried = world.kit.node.incarnation, world.announcements
        world.announced.clear()
        world.changes.want_restart()
        await world.until(lambda: world.announcements > tried)
        world.kit.node.evict(EvictSelector(), dry_run=False)
        world.kit.store(kept, range(6))
        assert world.changes.overflowed
        world.announced.set()
        await world.until(lambda: not world.changes.restart_wanted and not len(world.changes))
        assert world.kit.node.incarnation == before + 1
        assert (await world.indexed(gone), await world.indexed(kept)) == (0, 6)
