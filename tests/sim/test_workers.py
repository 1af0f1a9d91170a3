"""prefill_prompt and decode_tokens on real workers over simulated nodes: what is reused, counted, stored, released."""

import asyncio
from contextlib import aclosing

import pytest
from simulated_engine import LAYOUT, make_prompt
from simulated_nodes import FaultRates
from simulated_world import EVERYTHING, World, answer_of, check_answer
from virtual_loop import run_virtual

from headrace.core.block import CacheSource
from headrace.core.errors import DeadlineExceeded, WorkerUnavailable
from headrace.core.generation import CacheControl, CachedTokens, EvictSelector
from headrace.core.limits import MEMBER_TTL_MS
from headrace.core.members import WorkerRole
from headrace.decode.decode_tokens import decode_tokens
from headrace.prefill.prefill_prompt import prefill_prompt

B = LAYOUT.block_tokens
TOKENS = [7, 1, 4, 9, 2, 2, 8, 5, 3, 3, 1, 6, 9]  # three blocks and one token
COLD = CacheControl(sources=frozenset())


def virtually(test):
    """Run an async test on virtual time with a fresh world; everything must be at rest when it ends."""

    def run():
        async def main(clock):
            world = World(clock)
            await test(world)
            await world.stop()
            await asyncio.sleep(60)
            world.check_at_rest()

        run_virtual(main, seed=1)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def decode(world: World, worker, token_ids=TOKENS, *, max_tokens=4, cache=EVERYTHING, **fields):
    request = world.request(token_ids, max_tokens=max_tokens, cache=cache)
    answer = await answer_of(decode_tokens(world.decode_call(worker, request, **fields), worker))
    check_answer(answer, request)
    return answer.finished.usage.cached


async def settled(worker) -> None:
    """Wait until background publication has nothing left to do."""
    await asyncio.sleep(1)
    assert not worker.publisher._queue


def readable(world: World, host: str, token_ids=TOKENS) -> int:
    prompt = make_prompt(token_ids)
    return world.nodes[host].node.lookup(prompt.namespace, prompt.chain)


@virtually
async def test_prefill_answers_when_every_full_block_is_readable(world: World):
    """Fails when the decode worker could be sent off before the blocks can be read."""
    worker = await world.add_worker("prefill-a", WorkerRole.PREFILL)
    result = await prefill_prompt(world.prefill_call(worker, world.request(TOKENS)), worker)
    assert (result.reused_blocks, result.published_blocks, result.store_node) == (0, 3, "a")
    assert readable(world, "a") == 3
    again = await prefill_prompt(world.prefill_call(worker, world.request(TOKENS)), worker)
    assert (again.reused_blocks, again.published_blocks) == (3, 3)


@virtually
async def test_a_prompt_without_a_full_block_has_nothing_to_prefill(world: World):
    """Fails when a short prompt reserves anything or is an error."""
    worker = await world.add_worker("prefill-a", WorkerRole.PREFILL)
    result = await prefill_prompt(world.prefill_call(worker, world.request([1, 2, 3])), worker)
    assert (result.reused_blocks, result.published_blocks) == (0, 0)


@virtually
async def test_what_was_computed_for_this_request_is_not_called_cached(world: World):
    """Fails when the decode worker counts blocks that its prefill worker has just computed."""
    prefill = await world.add_worker("prefill-a", WorkerRole.PREFILL)
    worker = await world.add_worker("decode-a", WorkerRole.DECODE)
    result = await prefill_prompt(world.prefill_call(prefill, world.request(TOKENS)), prefill)
    assert await decode(world, worker, computed_from=result.reused_blocks) == CachedTokens()
    assert worker.engine.computed_tokens == 1
    assert await decode(world, worker) == CachedTokens(device=3 * B)


@virtually
async def test_cached_tokens_name_the_way_that_the_prefix_came(world: World):
    """Fails when a source is confused with another, or sums differ from the work that was saved."""
    first = await world.add_worker("decode-a", WorkerRole.DECODE)
    assert await decode(world, first) == CachedTokens()
    await settled(first)
    assert await decode(world, first) == CachedTokens(device=3 * B)
    for worker_id, expected in (("second-a", CachedTokens(shared_memory=3 * B)), ("third-b", CachedTokens(grpc=3 * B))):
        worker = await world.add_worker(worker_id, WorkerRole.DECODE)
        cached = await decode(world, worker, hint_nodes=("a",))
        assert cached == expected
        assert worker.engine.computed_tokens == len(TOKENS) - cached.total


@virtually
async def test_a_prefix_may_come_from_three_places_at_once(world: World):
    """Fails when the run is not continued from one source to the next."""
    remote = await world.add_worker("remote-b", WorkerRole.DECODE)
    await decode(world, remote)
    await settled(remote)
    near = await world.add_worker("near-a", WorkerRole.DECODE)
    await decode(world, near, TOKENS[: 2 * B + 1], hint_nodes=())
    await settled(near)
    worker = await world.add_worker("decode-a", WorkerRole.DECODE)
    await decode(world, worker, TOKENS[: B + 1], cache=CacheControl(publish=True), hint_nodes=())
    cached = await decode(world, worker, hint_nodes=("b",))
    assert cached == CachedTokens(device=B, shared_memory=B, grpc=B)


@virtually
async def test_a_cold_request_takes_nothing_even_from_the_device(world: World):
    """Fails when bypassing the cache still shares blocks."""
    worker = await world.add_worker("decode-a", WorkerRole.DECODE)
    await decode(world, worker)
    await settled(worker)
    before = worker.engine.computed_tokens
    assert await decode(world, worker, cache=COLD, hint_nodes=("a",)) == CachedTokens()
    assert worker.engine.computed_tokens - before == len(TOKENS)


@virtually
async def test_without_the_device_a_prefix_is_loaded_though_the_pool_has_it(world: World):
    """Fails when the pool's blocks are shared though the request excluded them."""
    worker = await world.add_worker("decode-a", WorkerRole.DECODE)
    await decode(world, worker)
    await settled(worker)
    memory_only = CacheControl(sources=frozenset({CacheSource.SHARED_MEMORY}))
    assert await decode(world, worker, cache=memory_only) == CachedTokens(shared_memory=3 * B)
    grpc_only = CacheControl(sources=frozenset({CacheSource.GRPC}))
    assert await decode(world, worker, cache=grpc_only, hint_nodes=("a",)) == CachedTokens(grpc=3 * B)


@virtually
async def test_a_request_that_may_not_publish_leaves_nothing_behind(world: World):
    """Fails when its blocks can be found in the pool or in a node."""
    worker = await world.add_worker("decode-a", WorkerRole.DECODE)
    await decode(world, worker, max_tokens=9, cache=CacheControl(publish=False))
    await settled(worker)
    assert worker.engine.pool.resident_blocks(make_prompt(TOKENS)) == 0
    assert readable(world, "a") == 0


@virtually
async def test_loaded_without_publishing_stays_private(world: World):
    """Fails when loaded blocks are shared by a request that may not leave anything."""
    maker = await world.add_worker("maker-a", WorkerRole.DECODE)
    await decode(world, maker)
    await settled(maker)
    worker = await world.add_worker("decode-a", WorkerRole.DECODE)
    assert (await decode(world, worker, cache=CacheControl(publish=False))).shared_memory == 3 * B
    assert worker.engine.pool.resident_blocks(make_prompt(TOKENS)) == 0


@virtually
async def test_the_next_turn_starts_from_what_this_one_generated(world: World):
    """Fails when blocks of generated tokens are not published."""
    worker = await world.add_worker("decode-a", WorkerRole.DECODE)
    request = world.request(TOKENS, max_tokens=8)
    answer = await answer_of(decode_tokens(world.decode_call(worker, request), worker))
    await settled(worker)
    other = await world.add_worker("other-a", WorkerRole.DECODE)
    next_turn = TOKENS + answer.token_ids + [1, 2]
    assert (await decode(world, other, next_turn)).shared_memory == 5 * B


@virtually
async def test_blocks_loaded_from_afar_are_stored_here_before_what_follows_them(world: World):
    """Fails when a node is offered blocks whose parents it never got: it refuses them, and nothing is reused later."""
    far = await world.add_worker("far-b", WorkerRole.DECODE)
    await decode(world, far)
    await settled(far)
    near = await world.add_worker("prefill-a", WorkerRole.PREFILL)
    longer = [*TOKENS, 5, 5, 5, 5, 5, 5]
    result = await prefill_prompt(world.prefill_call(near, world.request(longer), hint_nodes=("b",)), near)
    assert (result.reused_blocks, result.published_blocks, result.store_node) == (3, 4, "a")
    assert readable(world, "a", longer) == 4
    decoder = await world.add_worker("decode-a", WorkerRole.DECODE)
    longest = [*longer, 6, 6, 6, 6, 6, 6]
    world.nodes["a"].evict_all()
    assert (await decode(world, decoder, longest, hint_nodes=("b",))).grpc == 3 * B
    await settled(decoder)
    assert readable(world, "a", longest) == 6


@virtually
async def test_every_prompt_length_around_block_edges_is_answered_and_reused(world: World):
    """Fails at a length of exactly k blocks, one more or one less, or when the last token is not computed."""
    worker = await world.add_worker("decode-a", WorkerRole.DECODE)
    other = await world.add_worker("decode-b", WorkerRole.DECODE)
    for length in range(1, 3 * B + 3):
        token_ids = [length] + [length + i for i in range(length - 1)]
        assert (await decode(world, worker, token_ids)).total == 0
        await settled(worker)
        expected = (length - 1) // B * B
        assert (await decode(world, worker, token_ids)).device == expected
        assert (await decode(world, worker, [*token_ids, 0])).device == length // B * B
        assert (await decode(world, other, token_ids, hint_nodes=("a",))).grpc == expected


@virtually
async def test_an_attempt_that_comes_twice_is_refused(world: World):
    """Fails when a duplicated call runs a second time, at once or after the first has ended."""
    worker = await world.add_worker("decode-a", WorkerRole.DECODE)
    call = world.decode_call(worker, world.request(TOKENS))
    first = asyncio.create_task(answer_of(decode_tokens(call, worker)))
    await asyncio.sleep(0.01)
    for _ in range(2):
        with pytest.raises(WorkerUnavailable):
            await answer_of(decode_tokens(call, worker))
        await asyncio.wait([first])
    assert len(first.result().token_ids) == 4


@virtually
async def test_calls_for_another_worker_or_another_namespace_are_refused(world: World):
    """Fails when a prompt that was hashed under other settings is looked up here."""
    worker = await world.add_worker("decode-a", WorkerRole.DECODE)
    other = await world.add_worker("decode-b", WorkerRole.DECODE)
    with pytest.raises(WorkerUnavailable):
        await answer_of(decode_tokens(world.decode_call(other, world.request(TOKENS)), worker))
    call = world.decode_call(worker, world.request(TOKENS))
    object.__setattr__(call.request.prompt, "namespace", "0" * 32)
    with pytest.raises(WorkerUnavailable):
        await answer_of(decode_tokens(call, worker))


@virtually
async def test_closing_a_stream_at_any_moment_gives_everything_back(world: World):
    """Fails when a consumer that leaves keeps blocks, leases or the count of running attempts."""
    maker = await world.add_worker("maker-a", WorkerRole.DECODE)
    await decode(world, maker)
    worker = await world.add_worker("decode-a", WorkerRole.DECODE)
    for num_events in range(6):
        async with aclosing(
            decode_tokens(world.decode_call(worker, world.request(TOKENS, max_tokens=6)), worker)
        ) as events:
            for _ in range(num_events):
                await anext(events)
        assert worker.attempts_running == 0
    for cancel_after_ms in range(0, 200, 5):
        task = asyncio.create_task(decode(world, worker, [*TOKENS, cancel_after_ms % 50], max_tokens=6))
        await asyncio.sleep(cancel_after_ms / 1000)
        task.cancel()
        await asyncio.wait([task])
        assert worker.attempts_running == 0
    await settled(worker)
    assert worker.engine.pool.available_blocks == worker.engine.pool.num_blocks


@virtually
async def test_a_call_waits_for_blocks_no_longer_than_its_deadline(world: World):
    """Fails when a call waits in the pool's queue past its time, or holds something after it."""
    worker = await world.add_worker("decode-a", WorkerRole.DECODE, pool_blocks=4)
    long_call = asyncio.create_task(decode(world, worker, TOKENS[: 3 * B], max_tokens=B, cache=COLD))
    await asyncio.sleep(0.001)
    started_s = world.clock.now_s()
    with pytest.raises(DeadlineExceeded):
        await decode(world, worker, TOKENS, timeout_ms=20)
    assert world.clock.now_s() - started_s < 0.1
    await long_call


@virtually
async def test_one_worker_serves_both_roles_and_is_started_and_stopped_once(world: World):
    """Fails when both kinds of call on one worker disturb each other, or it cannot be started or stopped twice."""
    worker = await world.add_worker("both-a", WorkerRole.BOTH)
    await worker.start()
    assert worker.healthy()
    result = await prefill_prompt(world.prefill_call(worker, world.request(TOKENS)), worker)
    assert result.published_blocks == 3
    request = world.request(TOKENS)
    answer = await answer_of(decode_tokens(world.decode_call(worker, request, computed_from=0), worker))
    check_answer(answer, request)
    assert answer.finished.usage.cached.total == 0
    await settled(worker)
    report = worker.evict_device(EvictSelector(), dry_run=False)
    assert (report.holder, report.blocks) == ("worker:both-a", 4)
    await worker.stop()
    await worker.stop()
    assert not worker.healthy()


@virtually
async def test_a_worker_is_a_member_while_it_serves_and_refuses_calls_after(world: World):
    """Fails when the record is not refreshed, or a stopped worker is still chosen or takes calls."""
    worker = await world.add_worker("decode-a", WorkerRole.DECODE)
    await asyncio.sleep(3 * MEMBER_TTL_MS / 1000)
    (record,) = await world._membership.workers()
    assert (record.worker_id, record.store_node, record.running) == ("decode-a", "a", 0)
    assert worker.healthy()
    await worker.stop()
    assert await world._membership.workers() == ()
    assert not worker.healthy()
    with pytest.raises(WorkerUnavailable):
        await decode(world, worker)


@virtually
async def test_stopping_lets_running_calls_finish(world: World):
    """Fails when a stop ends streams that could have finished in time."""
    worker = await world.add_worker("decode-a", WorkerRole.DECODE)
    running = asyncio.create_task(decode(world, worker))
    await asyncio.sleep(0.01)
    await worker.stop()
    assert (await running).total == 0


def test_a_store_node_that_is_away_costs_hits_only():
    """Fails when a call fails because its cache does."""

    async def main(clock):
        world = World(clock, rates=FaultRates(lost=1.0))
        prefill = await world.add_worker("prefill-a", WorkerRole.PREFILL)
        worker = await world.add_worker("decode-a", WorkerRole.DECODE)
        result = await prefill_prompt(world.prefill_call(prefill, world.request(TOKENS)), prefill)
        assert (result.reused_blocks, result.published_blocks) == (0, 0)
        assert (await decode(world, worker, hint_nodes=("a", "b"), computed_from=0)).total == 0
        await world.stop()
        await asyncio.sleep(60)
        world.check_at_rest()

    run_virtual(main, seed=1)


@virtually
async def test_what_was_computed_while_the_store_node_was_away_is_stored_with_its_next_use(world: World):
    """Fails when a node's death keeps blocks that a worker has out of the store for as long as the worker lives."""
    prefill = await world.add_worker("prefill-a", WorkerRole.PREFILL)
    decoder = await world.add_worker("decode-a", WorkerRole.DECODE)
    own = [*reversed(TOKENS), 5, 5, 5]  # four blocks
    world.nodes["a"].crash()
    result = await prefill_prompt(world.prefill_call(prefill, world.request(TOKENS)), prefill)
    assert result.published_blocks == 0
    await decode(world, decoder, own)
    await settled(decoder)
    world.nodes["a"].restart()
    await asyncio.sleep(10)
    assert (readable(world, "a"), readable(world, "a", own)) == (0, 0)
    result = await prefill_prompt(world.prefill_call(prefill, world.request(TOKENS)), prefill)
    assert (result.reused_blocks, result.published_blocks) == (3, 3)
    longer = [*own, 6, 6, 6, 6]
    assert (await decode(world, decoder, longer)).device == 4 * B
    await settled(decoder)
    assert (readable(world, "a"), readable(world, "a", longer)) == (3, 5)
