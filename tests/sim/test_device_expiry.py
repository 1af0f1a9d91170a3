"""A worker's pool and the clock, on virtual time: what a request or an operator bounds is not found after its time."""

import asyncio
from dataclasses import replace

import pytest
from simulated_engine import LAYOUT, NAMESPACE, make_prompt
from simulated_world import EVERYTHING, World, answer_of
from virtual_loop import run_virtual

from headrace.core.generation import CacheControl, ControlOutcome, EvictSelector
from headrace.core.limits import DEVICE_ORDER_TOKENS_MAX, DEVICE_ORDERS_PER_NAMESPACE_MAX
from headrace.core.members import WorkerRole
from headrace.core.retention import Retention
from headrace.decode.decode_tokens import decode_tokens
from headrace.gateway.prepare_request import hash_for
from headrace.transfer.device_expiry import DeviceExpiry

B = LAYOUT.block_tokens
TOKENS = [7, 1, 4, 9, 2, 2, 8, 5, 3, 3, 1, 6, 9]  # three blocks and one token
FOR_A_MINUTE = replace(EVERYTHING, retention=Retention(ttl_s=60))
HEAD = EvictSelector(namespace=NAMESPACE.id, prefix_token_ids=tuple(TOKENS[: 2 * B]))


def with_worker(test):
    """Run `test(worker, ask)` on virtual time; `ask` has the worker decode TOKENS."""

    def run():
        async def main(clock):
            world = World(clock)
            worker = await world.add_worker("w-0", WorkerRole.BOTH)

            async def ask(cache: CacheControl = EVERYTHING, max_tokens: int = 2):
                request = world.request(TOKENS, max_tokens=max_tokens, cache=cache)
                return await answer_of(decode_tokens(world.decode_call(worker, request), worker))

            await test(worker, ask)
            await world.stop()
            await asyncio.sleep(60)
            world.check_at_rest()

        run_virtual(main, seed=1)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


class CountedPool:
    """A pool that counts how often it is asked for a selection."""

    def __init__(self, pool) -> None:
        self._pool = pool
        self.asked = 0

    def describe(self, selection):
        self.asked += 1
        return self._pool.describe(selection)


def held(worker) -> int:
    return worker.engine.pool.resident_blocks(make_prompt(TOKENS))


@with_worker
async def test_what_a_request_bounds_goes_from_the_pool_unless_it_is_used(worker, ask):
    """Fails when the device tier keeps blocks over their time, or a use does not start it anew."""
    await ask(FOR_A_MINUTE)
    await asyncio.sleep(50)
    await ask(FOR_A_MINUTE, max_tokens=6)  # fills a block, so that what was reused is published before it
    await asyncio.sleep(50)
    assert held(worker) == 3
    await asyncio.sleep(12)
    assert held(worker) == 0
    assert worker.healthy()


@with_worker
async def test_a_request_without_a_bound_keeps_what_another_bounded(worker, ask):
    """Fails when the shorter time holds, or a read does not count."""
    await ask(FOR_A_MINUTE)
    await ask()
    await asyncio.sleep(10_000)
    assert held(worker) == 3


@with_worker
async def test_an_order_takes_a_prefix_at_its_moment_however_much_it_is_used(worker, ask):
    """Fails when use moves the moment, a prefix that came after the order is spared, or others go too."""
    report = worker.set_device_ttl(HEAD, ttl_s=30)
    assert (report.holder, report.outcome, report.blocks) == ("worker:w-0", ControlOutcome.NOT_HELD, 0)
    await ask()
    report = worker.set_device_ttl(HEAD, ttl_s=30)
    assert (report.outcome, report.blocks, report.tokens) == (ControlOutcome.DONE, 2, 2 * B)
    for _ in range(5):
        await asyncio.sleep(5)
        await ask()
    assert held(worker) == 3
    await asyncio.sleep(4)
    running = asyncio.create_task(ask(max_tokens=230))  # more than two seconds, across the moment
    async with asyncio.timeout(2):
        while held(worker) == 3:  # noqa: ASYNC110 (a pool has no event for this)
            await asyncio.sleep(0.05)
    assert held(worker) == 1
    await asyncio.sleep(0.3)  # it fills more blocks, and shares them with nobody: what they stand on was ordered away
    assert held(worker) == 1
    assert not running.done()
    await ask()
    assert held(worker) == 3
    await running


@with_worker
async def test_an_order_that_was_taken_back_takes_nothing(worker, ask):
    """Fails when an order cannot be undone."""
    await ask()
    worker.set_device_ttl(HEAD, ttl_s=30)
    assert worker.set_device_ttl(HEAD, ttl_s=None).outcome is ControlOutcome.DONE
    await asyncio.sleep(60)
    assert held(worker) == 3


@with_worker
async def test_a_later_order_on_the_same_replaces_the_earlier(worker, ask):
    """Fails when the first of two moments holds."""
    await ask()
    worker.set_device_ttl(HEAD, ttl_s=30)
    worker.set_device_ttl(HEAD, ttl_s=90)
    await asyncio.sleep(60)
    assert held(worker) == 3
    await asyncio.sleep(32)
    assert held(worker) == 1


@pytest.mark.parametrize("first_by", ["prefix", "hash"])
@pytest.mark.parametrize("later_s", [90, None])
def test_a_later_order_on_the_same_by_another_name_replaces_the_earlier_too(first_by, later_s):
    """Fails when a prefix and the hash of its last block are taken for two things: the first of two moments would hold,
    and one that was taken back by the other name would come."""
    by_prefix = replace(HEAD, prefix_token_ids=tuple(TOKENS[: 2 * B + 1]))  # the token behind the last full block: none
    by_hash = EvictSelector(block_hashes=(make_prompt(TOKENS).chain[1],))
    first, later = (by_prefix, by_hash) if first_by == "prefix" else (by_hash, HEAD)

    @with_worker
    async def order(worker, ask):
        worker.set_device_ttl(first, ttl_s=30)  # of what it does not hold yet
        await ask()
        assert worker.set_device_ttl(later, ttl_s=later_s).outcome is ControlOutcome.DONE
        await asyncio.sleep(60)
        assert held(worker) == 3
        await asyncio.sleep(32)
        assert held(worker) == (3 if later_s is None else 1)

    order()


@with_worker
async def test_an_order_by_prefix_holds_for_the_blocks_of_which_nothing_else_was_said(worker, ask):
    """Fails when an order about one salt's block takes back what was said of the same tokens under another."""
    await ask()
    pool, salted = worker.engine.pool, hash_for(NAMESPACE, tuple(TOKENS), cache_salt="s")
    taken = pool.take(len(salted.chain), prompt=salted, shared_max=0)
    pool.hash_blocks(salted, taken.block_ids)
    pool.unref_all(taken.block_ids)
    assert worker.set_device_ttl(HEAD, ttl_s=30).blocks == 4
    worker.set_device_ttl(EvictSelector(block_hashes=(salted.chain[1],)), ttl_s=None)
    await asyncio.sleep(60)
    assert (held(worker), pool.resident_blocks(salted)) == (1, 3)


@with_worker
async def test_orders_are_bounded_and_one_namespace_leaves_room_for_others(worker, ask):
    """Fails when a tenant can fill a worker with orders, or a refusal does not say so."""
    for token in range(DEVICE_ORDERS_PER_NAMESPACE_MAX):
        worker.set_device_ttl(replace(HEAD, prefix_token_ids=(token,) * B), ttl_s=30)
    refused = worker.set_device_ttl(HEAD, ttl_s=30)
    assert refused.outcome is ControlOutcome.REFUSED
    assert f"{DEVICE_ORDERS_PER_NAMESPACE_MAX} of this namespace" in refused.why
    other = replace(HEAD, namespace="0f" * 16)
    assert worker.set_device_ttl(other, ttl_s=30).outcome is ControlOutcome.NOT_HELD
    long = replace(other, prefix_token_ids=(1,) * DEVICE_ORDER_TOKENS_MAX)
    assert worker.set_device_ttl(long, ttl_s=30).outcome is ControlOutcome.REFUSED


@with_worker
async def test_an_order_by_prefix_is_hashed_once_however_many_are_kept(worker, ask):
    """Fails when it is hashed anew for each kept order by hash: with as many as there may be, and a long prefix, the
    event loop would stand still for seconds."""
    pool = CountedPool(worker.engine.pool)
    expiry = DeviceExpiry(pool, worker.record(), clock=worker.clock)
    for number in range(DEVICE_ORDERS_PER_NAMESPACE_MAX):
        named = EvictSelector(block_hashes=(number.to_bytes(16),))
        assert expiry.order(named, ttl_s=30).outcome is ControlOutcome.NOT_HELD
    pool.asked = 0
    expiry.order(HEAD, ttl_s=None)
    assert pool.asked == 2, "what it holds of the prefix, and its last block"


@pytest.mark.parametrize("tier", ["host", "disk"])
def test_an_order_for_another_tier_is_none_of_the_pools(tier):
    """Fails when an order that names a tier takes from another one."""

    @with_worker
    async def order(worker, ask):
        await ask()
        report = worker.set_device_ttl(replace(HEAD, tier=tier), ttl_s=30)
        assert report.outcome is ControlOutcome.NOT_HELD
        await asyncio.sleep(60)
        assert held(worker) == 3

    order()


@pytest.mark.parametrize(("worker_id", "hints"), [("late-a", ()), ("late-b", ("a",))])
def test_a_worker_that_starts_after_an_order_hears_of_it_with_the_blocks(worker_id, hints):
    """Fails when only those who lived when an operator ordered a prefix away let it go: what a later worker loads would
    stay in its pool for as long as there is room, though the node has dropped it at the moment."""

    async def main(clock):
        world = World(clock)

        async def ask(worker, **fields):
            call = world.decode_call(worker, world.request(TOKENS, max_tokens=2), **fields)
            return await answer_of(decode_tokens(call, worker))

        await ask(await world.add_worker("early-a", WorkerRole.BOTH))
        await asyncio.sleep(1)  # published
        node = world.nodes["a"].node
        assert node.set_ttl(HEAD, expires_unix_ms=clock.unix_ms() + 30_000).blocks == 2
        late = await world.add_worker(worker_id, WorkerRole.BOTH)
        await asyncio.sleep(10)
        answer = await ask(late, hint_nodes=hints)
        assert answer.finished.usage.cached.total == 3 * B
        assert held(late) == 3
        await asyncio.sleep(18)
        assert held(late) == 3
        await asyncio.sleep(4)
        assert held(late) == 1
        node.expire()
        assert node.lookup(NAMESPACE.id, make_prompt(TOKENS).chain) == 1
        await ask(late, hint_nodes=hints)  # computed anew, and no order is left that would take it
        await asyncio.sleep(60)
        assert held(late) == 3
        await world.stop()
        await asyncio.sleep(60)
        world.check_at_rest()

    run_virtual(main, seed=1)


@pytest.mark.parametrize("later_s", [None, 600], ids=["clear", "replace"])
def test_a_worker_that_heard_of_an_order_follows_when_it_is_taken_back_or_replaced(later_s):
    """Fails when what came with a lease outlives the order that it told of."""

    async def main(clock):
        world = World(clock)

        async def ask(worker):
            return await answer_of(decode_tokens(world.decode_call(worker, world.request(TOKENS)), worker))

        await ask(await world.add_worker("early-a", WorkerRole.BOTH))
        await asyncio.sleep(1)  # published
        node = world.nodes["a"].node
        node.set_ttl(HEAD, expires_unix_ms=clock.unix_ms() + 60_000)
        late = await world.add_worker("late-a", WorkerRole.BOTH)
        await asyncio.sleep(1)
        assert (await ask(late)).finished.usage.cached.total == 3 * B
        node.set_ttl(HEAD, expires_unix_ms=later_s and clock.unix_ms() + later_s * 1_000)
        assert late.set_device_ttl(HEAD, ttl_s=later_s).outcome is ControlOutcome.DONE
        await asyncio.sleep(100)
        assert held(late) == 3
        await asyncio.sleep(600)
        assert held(late) == (1 if later_s else 3)
        await world.stop()
        await asyncio.sleep(60)
        world.check_at_rest()

    run_virtual(main, seed=1)
