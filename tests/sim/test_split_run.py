"""Who delivers what: however holders come, go, lack blocks, are stopped or find wrong bytes, the books balance."""

import asyncio
import random
from types import SimpleNamespace

import pytest
from simulated_engine import NAMESPACE
from simulated_nodes import FaultRates, SimulatedNodes
from virtual_loop import run_virtual

from headrace.core.block import BlockHeader, CacheSource, KvLayout, hash_prompt, payload_digest
from headrace.core.clock import Deadline
from headrace.core.generation import ALL_SOURCES
from headrace.core.limits import LOAD_AHEAD_BYTES_MAX, LOAD_STALL_MS
from headrace.core.ports import Lease
from headrace.transfer.load_prefix import LoadPlan, load_prefix
from headrace.transfer.split_run import Holder, SplitRun

NUM_BLOCKS = 40


def make_holder(name: str, *, piece_blocks: int, holds_until: int = NUM_BLOCKS) -> Holder:
    return Holder(CacheSource.GRPC, name, SimpleNamespace(), piece_blocks, holds_until)  # never asked for anything


async def deliver(run: SplitRun, holder: Holder, *, holds: int, rng: random.Random, doubts: set[int]) -> None:
    """One holder that has `holds` blocks, at a random pace; it may fail at any block, or hang."""
    try:
        while (piece := await run.claim(holder)) is not None:
            run.check_integrity()
            try:
                await asyncio.sleep(rng.uniform(0, 0.01))
                run.leased(piece, max(0, min(piece.end_block, holds) - piece.first_block))
                while piece.next_block < piece.end_block:
                    await asyncio.sleep(3_600 if rng.random() < 0.01 else rng.uniform(0, 0.02))
                    if rng.random() < 0.03:
                        return
                    if piece.next_block in doubts:
                        run.end_at(piece.next_block)
                        return
                    if piece.next_block < piece.end_block:
                        run.delivered(piece)
                    run.check_integrity()
            finally:
                run.give_back(piece)
                run.check_integrity()
    finally:
        run.leave(holder)
        run.check_integrity()


@pytest.mark.parametrize("seed", range(60))
def test_every_wanted_block_is_delivered_by_one_holder_or_the_run_ends_before_it(seed: int):
    """Fails when a block is given to two holders, is lost when a holder fails, or a load waits for nobody."""

    async def main(clock):
        rng = random.Random(seed)
        piece_blocks = rng.choice([1, 3, 8])
        run = SplitRun(2, NUM_BLOCKS, piece_blocks=piece_blocks, clock=clock)
        holds = {name: rng.choice([0, 5, NUM_BLOCKS // 2, NUM_BLOCKS]) for name in ("a", "b", "c")}
        doubts = {rng.randrange(2, 4 * NUM_BLOCKS)}
        holders = [make_holder(name, piece_blocks=rng.choice([piece_blocks, NUM_BLOCKS])) for name in holds]
        try:
            async with asyncio.timeout(120), asyncio.TaskGroup() as tasks:
                for holder in holders:
                    run.join(holder)
                for holder in holders:
                    tasks.create_task(deliver(run, holder, holds=holds[holder.node_id], rng=rng, doubts=doubts))
        except TimeoutError:
            pass  # the last holder hung, with nobody to step in
        num_blocks = len(run.unbroken_sources())
        assert 2 + num_blocks <= max(2, min([*doubts, max(holds.values())]))
        assert run.end_block <= 2 + num_blocks

    run_virtual(main, seed=seed)


def test_an_idle_holder_leaves_those_alone_that_come_at_a_fair_pace():
    """Fails when a node that works well is stopped because another one has nothing to do."""

    async def main(clock):
        piece_blocks = 10
        run = SplitRun(0, 30, piece_blocks=piece_blocks, clock=clock)
        busy, idle = make_holder("busy", piece_blocks=30), make_holder("idle", piece_blocks=30)
        fair_s = 0.9 * LOAD_STALL_MS / 1000 / piece_blocks

        async def work() -> bool:
            piece = await run.claim(busy)
            run.leased(piece, 30)
            while piece.next_block < piece.end_block:
                await asyncio.sleep(fair_s)
                run.delivered(piece)
            run.give_back(piece)
            return piece.is_taken

        run.join(busy)
        run.join(idle)
        working = asyncio.create_task(work())
        await asyncio.sleep(0)
        assert await run.claim(idle) is None
        assert await working is False

    run_virtual(main, seed=1)


BIG = KvLayout("float32", num_layers=1, num_kv_heads=1, head_dim=64 * 1024, block_tokens=8)  # 4 MiB a block
assert BIG.block_bytes == 4 * 1024 * 1024


class FastSource:
    """Has every block at once, as a mapped arena has."""

    def __init__(self, prompt, payload: bytes) -> None:
        self._prompt = prompt
        self._payload = memoryview(payload)
        self._digest = payload_digest(payload)
        self.sent = 0

    async def lease_prefix(self, namespace, chain, *, first_block, deadline, terms=None) -> Lease:
        headers = tuple(self._header(index) for index in range(first_block, len(chain)))
        return Lease("lease", 1, headers, tuple(range(len(headers))), 1_000)

    def _header(self, index: int) -> BlockHeader:
        prompt = self._prompt
        return BlockHeader(
            namespace=prompt.namespace,
            block_hash=prompt.chain[index],
            parent_hash=prompt.parent_of(index),
            position=index,
            token_ids=prompt.block_token_ids(index),
            layout=BIG,
            payload_bytes=BIG.block_bytes,
            payload_xxh3=self._digest,
            producer="test",
            created_unix_ms=0,
        )

    async def fetch_blocks(self, lease, *, deadline):
        for _ in lease.headers:
            self.sent += 1
            yield self._payload

    async def release(self, lease, *, suspects=()) -> None:
        pass


class CountingPool:
    """Notes how far receiving is ahead of copying."""

    def __init__(self, sources: list[FastSource]) -> None:
        self._sources = sources
        self.written = 0
        self.ahead_max = 0

    def write_block(self, block_id: int, payload: memoryview) -> int:
        self.ahead_max = max(self.ahead_max, sum(source.sent for source in self._sources) - self.written)
        self.written += 1
        return payload_digest(payload)


def load_big(clock, sources: list[FastSource], pool, prompt):
    nodes = SimulatedNodes("(none)", {}, FaultRates())
    nodes._remote = {f"n{number}": source for number, source in enumerate(sources)}
    return load_prefix(
        prompt,
        range(48),
        plan=LoadPlan(0, 48, ALL_SOURCES, tuple(nodes._remote)),
        layout=BIG,
        nodes=nodes,
        pool=pool,
        deadline=Deadline.after(60, clock),
    )


BIG_PROMPT = hash_prompt(NAMESPACE.id, range(8 * 48), block_tokens=8, algorithm=NAMESPACE.hash_algorithm)


@pytest.mark.parametrize("num_sources", [1, 3])
def test_what_all_holders_together_have_delivered_ahead_of_the_copies_is_bounded(num_sources: int):
    """Fails when each holder may fill the memory by itself."""

    async def main(clock):
        sources = [FastSource(BIG_PROMPT, bytes(BIG.block_bytes)) for _ in range(num_sources)]
        pool = CountingPool(sources)
        assert (await load_big(clock, sources, pool, BIG_PROMPT)).num_blocks == 48
        assert pool.ahead_max * BIG.block_bytes <= LOAD_AHEAD_BYTES_MAX + num_sources * BIG.block_bytes

    run_virtual(main, seed=1)


@pytest.mark.parametrize("broken", [0, 7, 8, 9, 10, 47])
def test_equal_blocks_behind_a_broken_one_do_not_stand_in_for_it(broken: int):
    """Fails when copies that follow a mismatch are compared with the header of the block that did not match."""

    class BreakingPool(CountingPool):
        def write_block(self, block_id: int, payload: memoryview) -> int:
            return super().write_block(block_id, payload) ^ (block_id == broken)

    async def main(clock):
        source = FastSource(BIG_PROMPT, bytes(BIG.block_bytes))
        loaded = await load_big(clock, [source], BreakingPool([source]), BIG_PROMPT)
        assert loaded.num_blocks == broken

    run_virtual(main, seed=1)
