"""What dead holders left in the index goes, however much it is, and nobody works at it who finds nothing."""

import asyncio
from itertools import pairwise

from virtual_loop import VirtualClock, run_virtual

from headrace.core.block import BlockHash, HolderId, NamespaceId, Tier
from headrace.core.errors import IndexUnavailable
from headrace.core.index_limits import INDEX_SWEEP_ENTRIES, INDEX_SWEEP_MS, INDEX_SWEEP_REST, INDEX_SWEEPERS_MAX
from headrace.core.members import StoreNodeRecord
from headrace.index.memory_index import MemoryIndex, MemoryMembership
from headrace.store.sweep_index import sweep_index

NAMESPACE = NamespaceId("0123456789abcdef" * 2)
LIVE, DEAD = HolderId("node:live"), HolderId("node:dead")
STEP_S = 0.5


class WatchedIndex(MemoryIndex):
    """The index in memory, whose steps take their time and are noted; it may be away."""

    def __init__(self, membership: MemoryMembership, clock: VirtualClock) -> None:
        super().__init__(membership)
        self._clock = clock
        self.steps: list[tuple[float, int]] = []  # when, and how many entries went
        self.is_away = False

    async def sweep(self, live: dict[HolderId, int], *, limit: int) -> int:
        began_s = self._clock.now_s()
        await asyncio.sleep(STEP_S)
        if self.is_away:
            raise IndexUnavailable("the line is cut")
        removed = await super().sweep(live, limit=limit)
        self.steps.append((began_s, removed))
        return removed

    async def hold(self, holder: HolderId, num_blocks: int) -> None:
        blocks = [BlockHash(number.to_bytes(16, "big")) for number in range(num_blocks)]
        await self.register(holder=holder, incarnation=1, tier=Tier.HOST, namespace=NAMESPACE, blocks=blocks)

    def entries(self, holder: HolderId) -> int:
        return sum(holder in holders for holders in self._entries.values())


async def watched(clock: VirtualClock, *, nodes: int = 1) -> tuple[WatchedIndex, "asyncio.Task[None]"]:
    """An index that one of so many live nodes sweeps."""
    membership = MemoryMembership(clock)
    for node_id in ("live", *map(str, range(1, nodes))):
        await membership.announce(StoreNodeRecord(node_id, 1, "h", "a", "p", 1), ttl_ms=10**9)
    index = WatchedIndex(membership, clock)
    return index, asyncio.ensure_future(sweep_index(index, membership, clock=clock))


async def ended(sweeping: "asyncio.Task[None]") -> None:
    sweeping.cancel()
    await asyncio.wait([sweeping])
    assert sweeping.cancelled(), "the sweep ended by itself"


def test_what_a_dead_node_left_goes_in_one_run_of_bounded_steps() -> None:
    """Fails when only so many entries go in each period, and a large node's are there for hours."""

    async def main(clock: VirtualClock) -> None:
        index, sweeping = await watched(clock)
        await index.hold(LIVE, 50)
        await index.hold(DEAD, 3 * INDEX_SWEEP_ENTRIES + 5)
        began_s = clock.now_s()
        await asyncio.sleep(2 * INDEX_SWEEP_MS / 1_000 - 1)  # the second period has not begun
        assert (index.entries(DEAD), index.entries(LIVE)) == (0, 50)
        assert [removed for _, removed in index.steps] == [*[INDEX_SWEEP_ENTRIES] * 3, 5, 0]
        rests = [later - earlier - STEP_S for (earlier, _), (later, _) in pairwise(index.steps)]
        assert {round(rest, 6) for rest in rests} == {STEP_S * INDEX_SWEEP_REST}
        assert round(index.steps[0][0] - began_s, 6) == INDEX_SWEEP_MS / 1_000
        await ended(sweeping)

    run_virtual(main, seed=1, stalls=0.0)


def test_nodes_of_a_large_fleet_rest_longer() -> None:
    """Fails when a hundred nodes that sweep at the same time keep Redis from all else."""

    async def main(clock: VirtualClock) -> None:
        index, sweeping = await watched(clock, nodes=3 * INDEX_SWEEPERS_MAX)
        await index.hold(DEAD, INDEX_SWEEP_ENTRIES + 5)
        await asyncio.sleep(2 * INDEX_SWEEP_MS / 1_000 - 1)
        rests = [later - earlier - STEP_S for (earlier, _), (later, _) in pairwise(index.steps)]
        assert {round(rest, 6) for rest in rests} == {STEP_S * INDEX_SWEEP_REST * 3}
        assert index.entries(DEAD) == 0
        await ended(sweeping)

    run_virtual(main, seed=1, stalls=0.0)


def test_a_step_that_finds_nothing_is_followed_by_a_whole_period_of_rest() -> None:
    """Fails when every node passes over all keys all the time."""

    async def main(clock: VirtualClock) -> None:
        index, sweeping = await watched(clock)
        await index.hold(LIVE, 50)
        await asyncio.sleep(10 * (INDEX_SWEEP_MS / 1_000 + STEP_S) + 1)
        assert [removed for _, removed in index.steps] == [0] * 10
        await ended(sweeping)

    run_virtual(main, seed=1, stalls=0.0)


def test_an_index_that_is_away_is_swept_when_it_is_back() -> None:
    """Fails when an outage ends the sweeping, and with it the node's background work."""

    async def main(clock: VirtualClock) -> None:
        index, sweeping = await watched(clock)
        await index.hold(DEAD, 5)
        index.is_away = True
        await asyncio.sleep(3 * INDEX_SWEEP_MS / 1_000)
        assert index.entries(DEAD) == 5
        index.is_away = False
        await asyncio.sleep(2 * INDEX_SWEEP_MS / 1_000)
        assert index.entries(DEAD) == 0
        await ended(sweeping)

    run_virtual(main, seed=1, stalls=0.0)
