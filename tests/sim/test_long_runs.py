"""Long runs in virtual time: churn over far more than the store holds, and long silence."""

import asyncio
import random
from contextlib import suppress

from simulated_engine import LAYOUT
from simulated_nodes import FaultRates, SimulatedNode
from simulated_world import World, answer_of, check_answer
from test_load_prefix import PROMPT, store_blocks
from virtual_loop import run_virtual

from headrace.core.errors import HeadraceError
from headrace.core.limits import MEMBER_TTL_MS
from headrace.core.members import StoreNodeRecord, WorkerRole
from headrace.decode.decode_tokens import decode_tokens
from headrace.index.memory_index import MemoryIndex, MemoryMembership
from headrace.store.announce_node import announce_node
from headrace.store.register_blocks import PendingChanges, register_blocks

B = LAYOUT.block_tokens
SLOTS = 16
BLOCKS = 2  # of one prompt
PROMPTS = 3 * SLOTS // BLOCKS
REQUESTS_OF_A_QUARTER = 500


def test_two_thousand_requests_over_three_times_the_store_hit_to_the_end_as_in_the_beginning():
    """Fails when claims, references or policy state add up, so that the store slowly fills with what nobody can evict.
    Every quarter asks for the same prompts in the same order; one request in ten is cancelled on its way, calls are
    lost and their replies too, and what that leaves behind is the node's to end."""

    async def main(clock):
        world = World(clock, seed=3, rates=FaultRates(lost=0.002, reply_lost=0.002), num_slots=SLOTS)
        workers = [
            await world.add_worker("one-a", WorkerRole.DECODE, pool_blocks=2 * BLOCKS),
            await world.add_worker("two-a", WorkerRole.DECODE, pool_blocks=2 * BLOCKS),
        ]
        prompts = [[n // 50, n % 50, *range(BLOCKS * B - 1)] for n in range(PROMPTS)]
        chosen = random.Random(5)
        quarter = [
            (chosen.choice(prompts), chosen.choice(workers), chosen.random() < 0.1)
            for _ in range(REQUESTS_OF_A_QUARTER)
        ]

        async def ask(token_ids, worker) -> tuple[int, int]:
            request = world.request(token_ids, max_tokens=1)
            answer = await answer_of(decode_tokens(world.decode_call(worker, request), worker))
            check_answer(answer, request)
            return answer.finished.usage.cached.total, len(token_ids)

        shares = []
        for _ in range(4):
            cached = asked = 0
            for token_ids, worker, is_cancelled in quarter:
                task = asyncio.ensure_future(ask(token_ids, worker))
                if is_cancelled:
                    await asyncio.sleep(world.rng.uniform(0, 0.1))
                    task.cancel()
                with suppress(asyncio.CancelledError, HeadraceError):
                    one_cached, one_asked = await task
                    cached, asked = cached + one_cached, asked + one_asked
            shares.append(cached / asked)
        assert shares[1] > 0.1, shares
        assert shares[3] > shares[1] - 0.05, shares
        await world.stop()
        await asyncio.sleep(60)
        world.check_at_rest()

    run_virtual(main, seed=3)


def test_a_node_and_a_worker_without_traffic_stay_members_and_the_blocks_are_found():
    """Fails when liveness is judged by traffic: nothing happens for fifty times the life of a record."""

    async def main(clock):
        world = World(clock)
        await store_blocks(world, "a", 3)
        node: SimulatedNode = world.nodes["a"]
        membership = MemoryMembership(clock)
        index, changes = MemoryIndex(membership), PendingChanges()
        record = StoreNodeRecord("a", node.node.incarnation, "a", "127.0.0.1:1", "", pid=1)
        changes.want_restart()
        tasks = [
            asyncio.ensure_future(
                register_blocks(
                    node.node,
                    changes,
                    index,
                    announce=lambda: membership.announce(record, ttl_ms=MEMBER_TTL_MS),
                )
            ),
            asyncio.ensure_future(announce_node(lambda: record, changes, membership, clock=clock)),
        ]
        worker = await world.add_worker("decode-a", WorkerRole.DECODE)
        await asyncio.sleep(50 * MEMBER_TTL_MS / 1000)
        assert list(await membership.store_nodes()) == [record]
        assert (await index.longest_prefix(PROMPT.namespace, PROMPT.chain)).num_blocks == 3
        assert [w.worker_id for w in await world._membership.workers()] == ["decode-a"]
        assert worker.healthy()
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
        await world.stop()

    run_virtual(main, seed=1)
