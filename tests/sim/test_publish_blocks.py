"""publish_blocks and BlockPublisher on virtual time: what becomes readable, and that every reference comes back."""

import asyncio
from collections import Counter

import pytest
from simulated_engine import LAYOUT, SimulatedKV, cold_kv, make_prompt
from simulated_nodes import DirectStore, FaultRates, SimulatedNodes
from simulated_world import World
from virtual_loop import run_virtual

from headrace.core.clock import Deadline
from headrace.core.errors import BlockCorrupt, LeaseExpired, StoreFull, StoreUnavailable
from headrace.core.generation import WorkerId
from headrace.core.limits import PUBLISH_QUEUE_BLOCKS, RESERVATION_TTL_MS
from headrace.engine.event_stream import FilledBlock
from headrace.transfer.publish_blocks import BlockPublisher, Producer, Publication, publish_blocks

TOKENS = list(range(24))  # six blocks
PROMPT = make_prompt(TOKENS)
NO_FAULTS = FaultRates()


def make_filled(num_blocks: int = 6, prompt=PROMPT) -> list[FilledBlock]:
    return [
        FilledBlock(i, i, prompt.chain[i], prompt.parent_of(i), prompt.block_token_ids(i), prompt.namespace)
        for i in range(num_blocks)
    ]


def make_kv(token_ids=TOKENS) -> SimulatedKV:
    kv = SimulatedKV(256)
    kv.blocks[: len(token_ids) // LAYOUT.block_tokens] = cold_kv(token_ids)
    return kv


def publish(world: World, *, host="a", filled=None, kv=None, mapped=True, rates=NO_FAULTS):
    return publish_blocks(
        make_filled() if filled is None else filled,
        sink=DirectStore(world.nodes[host], mapped=mapped, rates=rates),
        pool=kv or make_kv(),
        producer=Producer(WorkerId("w"), LAYOUT, world.clock),
        deadline=Deadline.after(RESERVATION_TTL_MS / 1000, world.clock),
    )


def readable(world: World, host="a", prompt=PROMPT) -> int:
    return world.nodes[host].node.lookup(prompt.namespace, prompt.chain)


def reserved(world: World, host="a") -> int:
    return world.nodes[host].node.stat().reserved_blocks


def test_published_blocks_are_readable_and_publishing_them_again_is_success():
    """Fails when AlreadyStored counts as failure, or published bytes are not the pool's."""

    async def main(clock):
        world = World(clock)
        first, second = await publish(world), await publish(world, mapped=False)
        assert (first.num_blocks, first.fault) == (6, None)
        assert (second.num_blocks, second.fault) == (6, None)
        assert readable(world) == 6
        held = world.nodes["a"].node._blocks.get(PROMPT.namespace, PROMPT.chain[5])
        assert bytes(world.nodes["a"].arena.payload(held.slot, LAYOUT.block_bytes)) == cold_kv(TOKENS)[5]

    run_virtual(main, seed=1)


def test_a_publisher_cancelled_at_any_moment_leaves_whole_blocks_or_none():
    """Fails when a half-written block is readable, or a reservation outlives its writer."""

    async def main(clock):
        seen = Counter()
        for cancel_after_ms in range(0, 250, 2):
            world = World(clock)
            task = asyncio.create_task(publish(world, mapped=False, rates=FaultRates(delay_s=0.02)))
            await asyncio.sleep(cancel_after_ms / 1000)
            task.cancel()
            await asyncio.wait([task])
            seen[readable(world)] += 1
            for position in range(readable(world)):
                node = world.nodes["a"]
                held = node.node._blocks.get(PROMPT.namespace, PROMPT.chain[position])
                assert bytes(node.arena.payload(held.slot, LAYOUT.block_bytes)) == cold_kv(TOKENS)[position]
            if readable(world):  # it had heard of its reservations, so it gave back those it did not commit
                assert reserved(world) == 0
        assert len(seen) > 4, seen

    run_virtual(main, seed=1)


def test_a_node_without_room_ends_the_chain_and_nothing_stays_reserved():
    """Fails when blocks behind a refused one are committed: they could never be found."""

    async def main(clock):
        world = World(clock, num_slots=4)
        published = await publish(world)
        assert 0 < published.num_blocks < 6
        assert isinstance(published.fault, StoreFull)
        assert readable(world) == published.num_blocks
        assert reserved(world) == 0

    run_virtual(main, seed=1)


def test_a_writer_that_slept_through_its_reservation_publishes_nothing():
    """Fails when a late commit makes a slot readable that somebody else may own."""

    class SleepingKV(SimulatedKV):
        clock = None

        def read_block(self, block_id, out):
            self.clock.advance(RESERVATION_TTL_MS / 1000 + 1)
            return super().read_block(block_id, out)

    async def main(clock):
        world, kv = World(clock), SleepingKV(16)
        kv.blocks[:6], kv.clock = cold_kv(TOKENS), clock
        published = await publish(world, kv=kv)
        assert published.num_blocks == 0
        assert isinstance(published.fault, LeaseExpired | StoreUnavailable)
        assert (readable(world), reserved(world)) == (0, 0)

    run_virtual(main, seed=1)


def test_a_block_that_the_codec_cannot_keep_ends_the_chain_before_it():
    """Fails when such a block is committed, those before it are given up, or its reservation stays."""

    class CodingKV(SimulatedKV):
        def read_block(self, block_id, out):
            if block_id == 3:
                raise BlockCorrupt(b"", "it holds numbers that are not finite")
            return super().read_block(block_id, out)

    async def main(clock):
        world, kv = World(clock), CodingKV(16)
        kv.blocks[:6] = cold_kv(TOKENS)
        published = await publish(world, kv=kv)
        assert published.num_blocks == 3
        assert isinstance(published.fault, BlockCorrupt)
        assert published.fault.block_hash == PROMPT.chain[3]
        assert (readable(world), reserved(world)) == (3, 0)

    run_virtual(main, seed=1)


class Publishing:
    """A running BlockPublisher and the references that it gave back."""

    def __init__(self, world: World, *, kv=None, rates=NO_FAULTS) -> None:
        self.given_back = Counter()
        self.faults = []
        self.publisher = BlockPublisher(
            nodes=SimulatedNodes("a", world.nodes, rates),
            pool=kv or make_kv(),
            producer=Producer(WorkerId("w"), LAYOUT, world.clock),
            drop_reference=lambda block_id: self.given_back.update([block_id]),
            report=self.faults.append,
        )
        self.publisher.start()


def test_offered_blocks_are_stored_in_order_and_each_reference_comes_back_once():
    """Fails when a reference is kept or given back twice, or `finished` does not wait."""

    async def main(clock):
        world = World(clock)
        publishing, publication = Publishing(world), Publication()
        for block in make_filled():
            assert publishing.publisher.offer(publication, block)
        assert await publication.finished() == 6
        assert publishing.given_back == Counter(range(6))
        assert readable(world) == 6
        await publishing.publisher.stop()

    run_virtual(main, seed=1)


def test_a_full_queue_drops_what_is_offered_and_never_waits():
    """Fails when offering blocks behind a stalled node, or what is dropped keeps its reference."""

    async def main(clock):
        token_ids = [i % 50 for i in range(4 * (PUBLISH_QUEUE_BLOCKS + 20))]
        prompt = make_prompt(token_ids)
        world = World(clock, num_slots=2 * len(prompt.chain))
        publishing, publication = Publishing(world, kv=make_kv(token_ids)), Publication()
        before_s = clock.now_s()
        accepted = [publishing.publisher.offer(publication, b) for b in make_filled(len(prompt.chain), prompt)]
        assert clock.now_s() == before_s
        assert accepted == [True] * PUBLISH_QUEUE_BLOCKS + [False] * 20
        assert publishing.publisher.dropped_blocks == 1  # the others had lost their parent already
        assert await publication.finished() == PUBLISH_QUEUE_BLOCKS
        assert publishing.given_back == Counter(range(len(prompt.chain)))
        await publishing.publisher.stop()

    run_virtual(main, seed=1)


def test_blocks_behind_one_that_failed_are_not_sent():
    """Fails when a chain goes on behind a gap."""

    async def main(clock):
        world = World(clock)
        publishing, publication = Publishing(world, rates=FaultRates(lost=1.0)), Publication()
        for block in make_filled():
            publishing.publisher.offer(publication, block)
        assert await publication.finished() == 0
        assert not publishing.publisher.offer(publication, make_filled()[0])
        assert isinstance(publishing.faults[0], StoreUnavailable)
        assert publishing.given_back[1] == 1
        assert publishing.given_back[0] == 2
        await publishing.publisher.stop()

    run_virtual(main, seed=1)


def test_stopping_at_any_moment_gives_all_references_back_and_ends_all_waiting():
    """Fails when a queued block, or the batch under way, keeps its reference when the worker stops."""

    async def main(clock):
        for stop_after_ms in range(0, 200, 7):
            world = World(clock)
            publishing = Publishing(world, rates=FaultRates(delay_s=0.02))
            publications = [Publication() for _ in range(3)]
            for publication in publications:
                for block in make_filled():
                    publishing.publisher.offer(publication, block)
            await asyncio.sleep(stop_after_ms / 1000)
            await publishing.publisher.stop()
            assert publishing.given_back == Counter(list(range(6)) * 3)
            for publication in publications:
                assert 0 <= await publication.finished() <= 6

    run_virtual(main, seed=1)


def test_a_publisher_that_died_of_a_bug_is_seen_and_keeps_no_reference():
    """Fails when a dead task leaves blocks queued for ever, or the worker goes on looking healthy."""

    class BrokenKV(SimulatedKV):
        def read_block(self, block_id, out):
            raise AssertionError("a bug")

    async def main(clock):
        world = World(clock)
        publishing = Publishing(world, kv=BrokenKV(16))
        publications = [Publication(), Publication()]
        for publication in publications:
            for block in make_filled():
                publishing.publisher.offer(publication, block)
        for publication in publications:
            assert await publication.finished() == 0
        await asyncio.sleep(1)
        assert not publishing.publisher.running
        assert not publishing.publisher.offer(Publication(), make_filled()[0])
        assert publishing.given_back == Counter([*range(6), *range(6), 0])
        with pytest.raises(AssertionError, match="a bug"):
            await publishing.publisher.stop()

    run_virtual(main, seed=1)
