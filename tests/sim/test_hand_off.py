"""A prefill and the decode that takes its blocks as they appear: who may fail when, and at what cost. Virtual time."""

import asyncio
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace

import pytest
from simulated_engine import LAYOUT
from simulated_gateway import SimulatedGateway
from simulated_nodes import FaultRates
from simulated_world import World, check_answer
from test_request_path import cause_chaos, rates_of
from virtual_loop import run_virtual

from headrace.core.block import CacheSource
from headrace.core.clock import SystemClock
from headrace.core.errors import DeadlineExceeded, Overloaded, WorkerUnavailable
from headrace.core.generation import CacheControl, CachedTokens
from headrace.core.key_window import EVERYTHING, KeyWindow
from headrace.core.limits import HAND_OFF_GRACE_MS, HAND_OFF_PATIENCE_MS_MIN, LEASE_TTL_MS
from headrace.core.members import WorkerRole
from headrace.core.step_costs import PrefillCost
from headrace.engine.engine import EngineLoad
from headrace.engine.layered_pool import LayeredPool
from headrace.transfer.early_blocks import EarlyBlocks

B = LAYOUT.block_tokens
PROMPT = [token % 50 for token in range(10 * B + 2)]  # ten blocks and two tokens
STEP_S = 0.02  # the longest step of a simulated engine
PATIENCE_S = HAND_OFF_PATIENCE_MS_MIN / 1000


def handing_off(test):
    """Run on virtual time with a prefill worker on host b and decode workers on a; all at rest in the end."""

    def run(**parameters):
        async def main(clock):
            world = World(clock)
            for worker_id, role in (
                ("prefill-b", WorkerRole.PREFILL),
                ("decode-a", WorkerRole.DECODE),
                ("other-a", WorkerRole.DECODE),
            ):
                await world.add_worker(worker_id, role)
            gateway = SimulatedGateway(world)
            gateway.plans.prefillers = ["prefill-b"]
            await test(world, gateway, **parameters)
            await rest(world, gateway)

        run_virtual(main, seed=1)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def rest(world: World, gateway: SimulatedGateway) -> None:
    await world.stop()
    await asyncio.sleep(LEASE_TTL_MS / 1000 + 1)
    world.check_at_rest()
    gateway.check_at_rest()


async def asked(gateway: SimulatedGateway, token_ids=PROMPT, *, max_tokens=4, cache=None) -> CachedTokens:
    request = gateway.world.request(token_ids, max_tokens=max_tokens, cache=cache or CacheControl())
    answer = await gateway.ask(request)
    check_answer(answer, request)
    assert gateway.observer.usages[-1] == answer.finished.usage
    return answer.finished.usage.cached


async def until(condition) -> None:
    """Wait, for ten seconds at most, for what others do."""
    async with asyncio.timeout(10):
        while not condition():  # noqa: ASYNC110 (nobody tells)
            await asyncio.sleep(0.005)


def is_idle(world: World) -> bool:
    """Whether no call runs on a worker, and none waits at a node."""
    running = sum(worker.attempts_running for worker in world.workers.values())
    return running + sum(node.node.waiters.num_waiting for node in world.nodes.values()) == 0


@handing_off
async def test_the_decode_worker_computes_only_what_follows_the_last_full_block(world, gateway):
    """Fails when it gives up too early, or when blocks of this very request are called cached."""
    assert await asked(gateway) == CachedTokens()
    assert world.workers["prefill-b"].engine.computed_tokens >= 10 * B
    assert world.workers["decode-a"].engine.computed_tokens == 2
    assert not world.faults


@handing_off
async def test_a_hand_off_costs_little_more_than_the_last_block(world, gateway):
    """Fails when the decode worker starts to load after the last block instead of with the first."""
    delay_s = 0.1  # up to so long for a call, and for each block: 30 of them in a row are 1.5 s
    world.workers["decode-a"].nodes.remote("b")._rates = FaultRates(delay_s=delay_s)
    world.workers["prefill-b"].engine._step = lambda: asyncio.sleep(delay_s)
    started_s = world.clock.now_s()
    await asked(gateway, [token % 50 for token in range(30 * B + 2)])
    assert world.workers["decode-a"].engine.computed_tokens == 2
    after_prefill_s = started_s + gateway.first_token_s - gateway.calls.prefill_ended_s
    assert after_prefill_s < 8 * delay_s  # two rounds of asking, where the slowest takes half of that


@handing_off
async def test_what_was_held_before_counts_as_cached_and_nothing_else_does(world, gateway):
    """Fails when the gateway takes the figure of the decode worker, which cannot know what the prefill reused."""
    head = PROMPT[: 4 * B]
    await asked(gateway, [*head, 1, 1])
    await asyncio.sleep(1)
    world.workers["decode-a"].evict_device(None, dry_run=False)
    gateway.plans.decoders = ["other-a"]
    assert (await asked(gateway)).total == 4 * B
    assert world.workers["other-a"].engine.computed_tokens == 2


@handing_off
async def test_a_prefill_that_fails_at_once_costs_a_round_trip(world, gateway):
    """Fails when the decode worker waits out its patience for blocks that will never come."""
    for error in (WorkerUnavailable("prefill-b", "died"), Overloaded("full", retry_after_ms=5)):
        gateway.calls.refusing["prefill-b"] = error
        await asked(gateway, [*PROMPT, error is None, len(str(error)) % 50])
        assert gateway.first_token_s < 14 * STEP_S + 0.2
    assert gateway.observer.recoveries == ["prefill_failed", "prefill_failed"]
    first, second = gateway.decode_calls()[:2]
    assert first.hand_off is not None
    assert second.hand_off is None
    assert (first.worker_id, first.attempt_id != second.attempt_id) == (second.worker_id, True)


@handing_off
async def test_a_prefill_worker_that_is_killed_half_way_is_not_waited_for(world, gateway):
    """Fails when its death is fatal, or what it left is not used."""
    world.workers["prefill-b"].engine._step = lambda: asyncio.sleep(0.1)
    task = asyncio.create_task(asked(gateway))
    await until(lambda: world.nodes["b"].node.counters.committed_blocks >= 4)
    gateway.calls.kill("prefill-b")
    died_s = world.clock.now_s()
    assert (await task).total == 0
    assert world.clock.now_s() - died_s < 1
    assert world.workers["decode-a"].engine.computed_tokens <= 7 * B


@handing_off
async def test_a_prefill_that_stalls_is_overtaken_when_the_patience_is_over(world, gateway):
    """Fails when a stalled process holds its request for longer than the patience."""
    gateway.calls.stalled.add("prefill-b")
    await asked(gateway, max_tokens=200)
    assert PATIENCE_S <= gateway.first_token_s < PATIENCE_S + 1
    assert world.workers["decode-a"].engine.computed_tokens == len(PROMPT)


@handing_off
async def test_blocks_that_come_slower_than_they_are_computed_are_waited_for_no_longer_than_the_patience(
    world, gateway
):
    """Fails when a prefill behind a slow link holds its request until the load's own time is over, 20 s."""
    decode = world.workers["decode-a"]
    decode.nodes.remote("b")._rates = FaultRates(delay_s=2.0)  # 20 blocks of a second each
    load, prefill = decode.engine.load(), PrefillCost(base_s=0.01, tokens_per_s=1_000.0, attention_s=0.0)
    decode.engine.load = lambda: replace(load, ahead=replace(load.ahead, prefill=prefill))
    await asked(gateway, [token % 50 for token in range(20 * B + 2)])
    assert gateway.first_token_s < PATIENCE_S + 3 * 2.0 + 2  # and up to three calls
    assert decode.engine.computed_tokens > 2


@handing_off
async def test_a_prefill_that_computes_for_long_costs_no_budget(world, gateway):
    """Fails when the time in which blocks are being computed counts as if they had been under way."""
    decode = world.workers["decode-a"]
    load, prefill = decode.engine.load(), PrefillCost(base_s=0.01, tokens_per_s=1_000.0, attention_s=0.0)
    decode.engine.load = lambda: replace(load, ahead=replace(load.ahead, prefill=prefill))
    world.workers["prefill-b"].engine._step = lambda: asyncio.sleep(0.9 * PATIENCE_S)
    await asked(gateway)
    assert gateway.first_token_s > 2 * PATIENCE_S
    assert decode.engine.computed_tokens == 2


@handing_off
async def test_an_overtaken_prefill_is_given_up_and_holds_the_end_of_the_stream_for_no_longer_than_the_grace(
    world, gateway
):
    """Fails when the answer of a prefill that hangs is waited for after the answer of the request."""
    gateway.calls.stalled.add("prefill-b")
    started_s = world.clock.now_s()
    await asked(gateway, max_tokens=1)
    assert world.clock.now_s() - started_s < gateway.first_token_s + HAND_OFF_GRACE_MS / 1000 + 0.1


@handing_off
async def test_a_store_that_takes_only_a_part_of_the_prompt_costs_computing_the_rest(world, gateway):
    """Fails when the decode worker waits for blocks that no store has room for."""
    node = world.nodes["b"].node
    reserve, taken = node.reserve, []

    def reserve_four(headers, **fields):
        if len(taken) + len(headers) > 4:
            node.draining = True
        outcomes = reserve(headers, **fields)
        node.draining = False
        taken.extend(headers)
        return outcomes

    node.reserve = reserve_four
    await asked(gateway)
    assert gateway.first_token_s < 25 * STEP_S + 0.5
    assert [call.hand_off is None for call in gateway.decode_calls()] == [False, True]


@handing_off
async def test_the_answer_of_another_attempt_is_not_believed(world, gateway):
    """Fails when a completion that nobody waits for decides what was cached, or is fatal."""
    gateway.calls.wrong_answers = True
    assert (await asked(gateway)).total == 0
    assert gateway.observer.recoveries == ["prefill_failed"]


@handing_off
async def test_a_decode_worker_that_dies_is_replaced_and_the_prefill_goes_on(world, gateway):
    """Fails when the new attempt starts from nothing, prefills again, or waits for what is there already."""
    gateway.plans.decoders = ["decode-a", "other-a"]
    task = asyncio.create_task(asked(gateway))
    await until(lambda: world.nodes["b"].node.counters.committed_blocks >= 4)
    gateway.calls.kill(gateway.decode_calls()[0].worker_id)
    assert (await task).total == 0
    first, second = gateway.decode_calls()
    assert {first.worker_id, second.worker_id} == {"decode-a", "other-a"}
    assert world.workers[second.worker_id].engine.computed_tokens == 2
    assert len(gateway.calls.calls) == 3


@handing_off
async def test_the_store_node_of_the_prefill_dies_and_the_decode_worker_goes_on_alone(world, gateway):
    """Fails when a node that is gone is waited for."""
    task = asyncio.create_task(asked(gateway))
    await until(lambda: world.nodes["b"].node.counters.committed_blocks >= 3)
    world.nodes["b"].crash()
    died_s = world.clock.now_s()
    assert (await task).total == 0
    assert world.clock.now_s() - died_s < PATIENCE_S + 1
    world.nodes["b"].restart()


@handing_off
async def test_a_cancelled_request_is_over_at_every_hop_within_a_second_whenever_it_is_cancelled(world, gateway):
    """Fails when a call, a wait at a node, a lease or a pool block outlives the client by more than a second."""
    for number, cancel_after_ms in enumerate(range(0, 400, 3)):
        request = world.request([number % 50, number // 50, *PROMPT], max_tokens=3)
        task = asyncio.create_task(gateway.ask(request))
        await asyncio.sleep(cancel_after_ms / 1000)
        task.cancel()
        left_s = world.clock.now_s()
        await asyncio.wait([task])
        await until(lambda: is_idle(world))
        assert world.clock.now_s() - left_s < 1
        gateway.check_at_rest()
        for worker in world.workers.values():
            assert worker.early_blocks.num_wide == 0


def test_two_workers_that_prefill_for_each_other_do_not_wait_for_each_other():
    """Fails when pool blocks that wait for a prefill keep that prefill from starting: then only patience ends it."""

    async def main(clock):
        world = World(clock, num_slots=200)
        for worker_id in ("both-a", "both-b"):
            await world.add_worker(worker_id, WorkerRole.BOTH, pool_blocks=16)
        gateways = []
        for decode, prefill in (("both-a", "both-b"), ("both-b", "both-a")):
            gateway = SimulatedGateway(world)
            gateway.plans.decoders, gateway.plans.prefillers = [decode], [prefill]
            gateway.calls.prefill_delay_s = 0.05  # whoever waits is there first
            gateways.append(gateway)
        async with asyncio.TaskGroup() as tasks:
            for number in range(3):
                for which, gateway in enumerate(gateways):
                    tasks.create_task(asked(gateway, [number, which, *PROMPT]))
        computed = sum(worker.engine.computed_tokens for worker in world.workers.values())
        assert computed == 6 * (len(PROMPT) + 2) + 6 * B, "somebody has lost patience and computed it all again"
        assert not world.faults
        for gateway in gateways:
            await rest(world, gateway)

    run_virtual(main, seed=4)


def test_near_parts_that_wait_for_prefills_leave_room_for_others():
    """Of a model of mixed layers: fails when wide parts alone are counted, of which there are plenty."""
    window = KeyWindow(9, B)  # two blocks of a prefix, and so six near parts for each prompt
    pool = LayeredPool(200, num_near=30, near_window=window, clock=SystemClock())
    engine = SimpleNamespace(
        pool=pool, window=EVERYTHING, near_window=window, load=lambda: EngineLoad(0, 0, pool.available_blocks)
    )
    early = EarlyBlocks(engine)
    with early.taken(10):
        assert early.may_take(10)
        with early.taken(10):
            assert not early.may_take(10), "the third would make it 18 of 30"
    assert (early.num_wide, early.num_near) == (0, 0)
    others = pool.take_near(25)
    assert not early.may_take(10), "five are left, and six are held at once"
    pool.unref_all([pool.parts.near_alone(near) for near in others])
    assert early.may_take(10)


NUM_SEEDS = 200
SEEDS_PER_TEST = 50


@pytest.mark.parametrize("first_seed", range(0, NUM_SEEDS, SEEDS_PER_TEST))
def test_every_hand_off_ends_in_a_right_answer_or_a_typed_error_whatever_dies(first_seed: int):
    """Fails when a race lets a wrong block in, leaks a lease, a waiter or a block, or hangs; a note names the seed."""
    for seed in range(first_seed, first_seed + SEEDS_PER_TEST):
        run_seed(seed)


def run_seed(seed: int) -> None:
    try:
        run_virtual(lambda clock: one_run(World(clock, seed=seed, rates=rates_of(seed), num_slots=24)), seed=seed)
    except BaseException as error:
        error.add_note(f"simulation seed {seed}")
        raise


async def one_run(world: World) -> None:
    rng = world.rng
    for worker_id in ("prefill-b", "both-a", "decode-b"):
        role = {"prefill": WorkerRole.PREFILL, "both": WorkerRole.BOTH, "decode": WorkerRole.DECODE}
        await world.add_worker(worker_id, role[worker_id.split("-")[0]], pool_blocks=rng.choice([16, 40]))
    gateway = SimulatedGateway(world)
    gateway.plans.decoders, gateway.plans.prefillers = ["both-a", "decode-b"], ["prefill-b", "both-a", None]
    heads = [[rng.randrange(50) for _ in range(rng.randrange(8, 40))] for _ in range(2)]
    chaos = [asyncio.create_task(cause_chaos(world)), asyncio.create_task(kill_workers(gateway))]
    async with asyncio.TaskGroup() as group:
        for _ in range(3):
            group.create_task(one_client(gateway, heads))
    for task in chaos:
        task.cancel()
    await asyncio.wait(chaos)
    assert all(task.cancelled() or task.exception() is None for task in chaos)
    for node in world.nodes.values():
        assert node.node is None or node.node.waiters.num_waiting == 0
    await rest(world, gateway)


async def kill_workers(gateway: SimulatedGateway) -> None:
    rng = gateway.world.rng
    while True:
        await asyncio.sleep(rng.uniform(0.05, 1))
        worker_id = rng.choice(list(gateway.world.workers))
        match rng.choice(["kill", "stall", "refuse", "none"]):
            case "kill":
                gateway.calls.kill(worker_id)
            case "stall":
                gateway.calls.stalled.add(worker_id)
                await asyncio.sleep(rng.uniform(0, 0.5))
                gateway.calls.stalled.discard(worker_id)
            case "refuse":
                gateway.calls.refusing[worker_id] = rng.choice(
                    [WorkerUnavailable(worker_id, "died"), Overloaded("full", retry_after_ms=5)]
                )
                await asyncio.sleep(rng.uniform(0, 0.5))
                del gateway.calls.refusing[worker_id]


async def one_client(gateway: SimulatedGateway, heads: list[list[int]]) -> None:
    rng = gateway.world.rng
    for _ in range(5):
        await asyncio.sleep(rng.uniform(0, 0.3))
        head = rng.choice(heads)
        token_ids = head[: rng.randrange(1, len(head) + 1)] + [rng.randrange(50) for _ in range(rng.randrange(12))]
        sources = frozenset(source for source in CacheSource if rng.random() < 0.85)
        cache = CacheControl(sources=sources, publish=rng.random() < 0.9)
        request = gateway.world.request(token_ids, max_tokens=rng.randrange(1, 9), cache=cache)
        call = asyncio.create_task(gateway.ask(request, timeout_s=rng.choice([0.3, 60])))
        if rng.random() < 0.2:
            await asyncio.sleep(rng.uniform(0, 0.3))
            call.cancel()
        await asyncio.wait([call])
        if call.cancelled():
            continue
        with suppress(Overloaded, DeadlineExceeded, WorkerUnavailable):  # typed; a client is told
            check_answer(call.result(), request)
