"""What a gateway knows beyond records when it places requests: its own plans, and what predictions lately lacked."""

import asyncio
from dataclasses import replace

import pytest
from hand_clock import HandClock
from tiny_gateway import BLOCK_TOKENS, MODEL, make_namespace, make_worker_record, tiny_gateway
from virtual_loop import VirtualClock, run_virtual

from headrace.core.block import CacheSource, hash_prompt
from headrace.core.choose_workers import RoutingRule
from headrace.core.errors import WorkerUnavailable
from headrace.core.generation import CacheControl, GenerateRequest, MeasuredWork, RequestId, SamplingParams, WorkerId
from headrace.core.members import NO_MATCH, LearnedCosts, WorkerRole
from headrace.core.tenants import EVERYBODY
from headrace.gateway.accepted import Accepted
from headrace.gateway.planner import RoutePlanner
from headrace.gateway.worker_table import RECORD_AGE_MAX_S, WorkerTable
from headrace.wire.client_request import ClientRequest, SamplingOptions, TokenPrompt

SLOW = LearnedCosts(0.05, 100.0, 0.0, 0.02, 0.005, 0.0)  # 30 tokens take 350 ms
DECODERS = (make_worker_record("d0", costs=SLOW), make_worker_record("d1", costs=SLOW))


def ask(first_token: int, **options) -> ClientRequest:
    prompt = TokenPrompt(tuple(range(first_token, first_token + 30)))
    return ClientRequest(model="tiny", prompt=prompt, sampling=SamplingOptions(max_tokens=2), **options)


async def answered(gateway, request) -> str:
    """The request's id, after its answer."""
    request_id = ""
    async for event in gateway.service.generate(request, EVERYBODY):
        if isinstance(event, Accepted):
            request_id = event.request_id
    return request_id


def queue_of(table, worker_id="d0") -> float:
    columns = table.columns(table.served("tiny"))
    return float(table.queue_s(columns)[columns.row_of[WorkerId(worker_id)]])


@pytest.fixture
def clock() -> HandClock:
    return HandClock()


@pytest.fixture
def table(clock) -> WorkerTable:
    table = WorkerTable(clock)
    table.replace([make_worker_record("d0", queue_s=2.0, unix_ms=clock.unix_ms())])
    return table


def test_a_queue_drains_while_its_record_stands(table, clock):
    """Fails when a record of two seconds ago is taken for the present."""
    assert queue_of(table) == 2.0
    clock.seconds += 0.5
    assert queue_of(table) == pytest.approx(1.5)
    clock.seconds += 5
    assert queue_of(table) == 0


def test_own_plans_count_until_the_record_can_know_of_them(table, clock):
    """Fails when a burst within one refresh goes to one worker, or when a plan counts twice after it."""
    clock.seconds += 1
    table.plan_work(RequestId("r"), WorkerId("d0"), 3.0)
    assert queue_of(table) == pytest.approx(4.0)
    clock.seconds += 1
    assert queue_of(table) == pytest.approx(3.0)
    table.replace([make_worker_record("d0", queue_s=3.1, unix_ms=clock.unix_ms())])
    assert queue_of(table) == pytest.approx(3.1)


def test_plans_that_the_record_knows_of_count_once_and_are_remembered(table, clock):
    """Fails when work counts in the record and in the gateway, or when the table forgets a prompt that waits yet."""
    table.plan_work(RequestId("known"), WorkerId("d0"), 3.0)
    clock.seconds += 1
    table.replace([make_worker_record("d0", queue_s=2.0, unix_ms=clock.unix_ms())])
    table.plan_work(RequestId("new"), WorkerId("d0"), 1.0)
    table.replace([make_worker_record("d0", queue_s=2.0, unix_ms=clock.unix_ms())])
    assert queue_of(table) == pytest.approx(3.0)
    waiting = table.waiting(table.columns(table.served("")))
    assert waiting is not None
    assert waiting.work_s.tolist() == [3.0, 1.0]
    table.end_work(RequestId("known"))
    table.check_integrity()


def test_work_that_is_done_or_given_up_counts_no_more(table):
    """Fails when a request's end leaves its work in the queue."""
    table.plan_work(RequestId("r"), WorkerId("d0"), 3.0)
    table.end_work(RequestId("r"))
    table.end_work(RequestId("r"))
    assert queue_of(table) == 2.0
    table.check_integrity()


@pytest.mark.parametrize("skew_s", [-3_600, 3_600])
def test_a_wrong_clock_on_a_workers_host_does_no_harm(clock, skew_s):
    """Fails when a record from the future never drains, or one from the past is drained at once."""
    table = WorkerTable(clock)
    table.replace([make_worker_record("d0", queue_s=10.0, unix_ms=clock.unix_ms() + skew_s * 1000)])
    assert 10.0 - RECORD_AGE_MAX_S <= queue_of(table) <= 10.0
    clock.seconds += 1
    assert queue_of(table) <= 9.0


async def test_requests_of_one_moment_spread_over_workers_by_their_work(model_path):
    """Fails when all of them go to the worker that the last refresh called idle."""
    async with tiny_gateway(
        *DECODERS, model_path=model_path, clock=HandClock()
    ) as gateway:  # nothing is done meanwhile
        for worker in gateway.calls.workers.values():
            worker.token_seconds = 0.3
        await asyncio.gather(*(answered(gateway, ask(40 * number + 1)) for number in range(4)))
        assert [len(worker.calls) for worker in gateway.calls.workers.values()] == [2, 2]
        gateway.assert_at_rest()


async def test_equal_prompts_of_one_moment_meet_on_one_worker(model_path):
    """Fails when a placement does not count until the index hears of it: each worker would compute the prompt."""
    # Waiting for 30 tokens costs as much as computing them; the tiny workers' common store must not be read.
    costs = LearnedCosts(0.001, 200.0, 0.0, 0.02, 0.0001, 0.0)
    workers = [make_worker_record(name, costs=costs) for name in ("d0", "d1")]
    own_pool = CacheControl(sources=frozenset({CacheSource.DEVICE}))
    async with tiny_gateway(*workers, model_path=model_path, clock=HandClock()) as gateway:
        for worker in gateway.calls.workers.values():
            worker.token_seconds = 0.3
        await asyncio.gather(*(answered(gateway, ask(1, cache=own_pool)) for _ in range(2)))
        assert sorted(len(worker.calls) for worker in gateway.calls.workers.values()) == [0, 2]


def test_what_predictions_lacked_lately_is_added_to_the_next(model_path):
    """Fails when the way through gateway and worker is forgotten in every prediction."""

    async def ask_twice(clock: VirtualClock) -> None:
        record = make_worker_record("d0", costs=SLOW)
        async with tiny_gateway(record, model_path=model_path, clock=clock) as gateway:
            gateway.worker("d0").token_seconds = 0.6  # 250 ms more than the costs say
            decisions = gateway.service.planner.decisions
            first, second = [decisions.find(await answered(gateway, ask(40 * n + 1))) for n in range(2)]
            assert (first.overhead_s, first.attempts) == (0.0, 1)
            assert second.overhead_s == pytest.approx(first.ttft_s - first.decision.chosen.ttft_s)
            assert second.predicted_ttft_s == pytest.approx(second.ttft_s, rel=0.1)
            assert second.finished.worker_id == "d0"

    run_virtual(ask_twice, seed=1)


async def test_decisions_are_bounded_and_the_oldest_goes_first(model_path):
    """Fails when a gateway remembers every request for ever."""
    async with tiny_gateway(make_worker_record("d0"), model_path=model_path) as gateway:
        decisions = gateway.service.planner.decisions
        decisions.requests_max = 2
        ids = [await answered(gateway, ask(n + 1)) for n in range(3)]
        assert [decisions.find(each) is not None for each in ids] == [False, True, True]
        assert len(decisions) == 2
        decisions.measured(ids[0], MeasuredWork(0.1, 0.2))  # of a request that is forgotten
        assert decisions.find(ids[0]) is None


async def test_a_prefill_workers_work_is_planned_for_it_and_not_for_the_decode_worker(model_path):
    """Fails when a hand-over makes the decode worker look as busy as the one that computes."""
    workers = (make_worker_record("d0", costs=SLOW), make_worker_record("p0", WorkerRole.PREFILL, costs=SLOW))
    async with tiny_gateway(*workers, model_path=model_path, clock=HandClock()) as gateway:
        gateway.worker("p0").hangs = gateway.worker("d0").hangs = True
        task = asyncio.create_task(answered(gateway, ask(1)))
        async with asyncio.timeout(60):
            while not gateway.worker("p0").open_calls:  # noqa: ASYNC110 - the worker under test tells nobody
                await asyncio.sleep(0.01)
        table = gateway.service.table
        assert queue_of(table, "p0") > 0.2
        assert queue_of(table, "d0") < 0.15
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        assert queue_of(table, "p0") == 0
        gateway.assert_at_rest()


def planned_work(table) -> dict[str, float]:
    """Seconds of this gateway's prompts that wait, by worker."""
    columns, found = table.columns(table.served("tiny")), {}
    waiting = table.waiting(columns)
    for row, work_s in zip(waiting.rows, waiting.work_s, strict=True) if waiting is not None else ():
        worker_id = columns.records[row].worker_id
        found[worker_id] = found.get(worker_id, 0.0) + float(work_s)
    return found


def make_request(request_id: str = "r", **changes) -> GenerateRequest:
    """Of a prompt of which nobody is taken to have anything meanwhile: nothing is published."""
    namespace = make_namespace()
    prompt = hash_prompt(namespace.id, range(30), block_tokens=BLOCK_TOKENS, algorithm=namespace.hash_algorithm)
    sampling, cache = SamplingParams(max_tokens=2), CacheControl(publish=False)
    return replace(GenerateRequest(RequestId(request_id), MODEL, prompt, sampling, cache=cache), **changes)


@pytest.fixture
def planner(table, clock) -> RoutePlanner:
    table.replace(DECODERS)
    return RoutePlanner(table, RoutingRule(local_prefill_tokens=64), clock=clock)


def test_a_new_plan_of_one_choice_leaves_the_others_planned(table, planner):
    """Fails when a choice whose worker failed takes back what the request's other choices are computing elsewhere."""
    request = make_request()
    on_d0, on_d1 = (replace(request, decode_worker=WorkerId(worker_id)) for worker_id in ("d0", "d1"))
    first = planner.plan(on_d0, NO_MATCH, failed=frozenset())
    second, third = (planner.plan(on_d1, NO_MATCH, failed=frozenset()) for _ in range(2))
    each_s = first.work_s(WorkerId("d0"))
    assert planned_work(table) == pytest.approx({"d0": each_s, "d1": 2 * each_s})
    planner.plan(request, NO_MATCH, failed=frozenset({WorkerId("d1")}), instead_of=second)
    assert planned_work(table) == pytest.approx({"d0": 2 * each_s, "d1": each_s})
    with pytest.raises(WorkerUnavailable):
        planner.plan(request, NO_MATCH, failed=frozenset({WorkerId("d0"), WorkerId("d1")}), instead_of=third)
    assert planned_work(table) == pytest.approx({"d0": 2 * each_s})
    planner.first_token(request.request_id, 0.1)
    assert planned_work(table) == {}
    table.check_integrity()


def test_the_end_of_one_request_leaves_another_ones_plan_for_the_same_prefix(table, planner):
    requests = [make_request(name, decode_worker=WorkerId("d0")) for name in ("one", "other")]
    plans = [planner.plan(each, NO_MATCH, failed=frozenset()) for each in requests]
    planner.ended(requests[0].request_id)
    assert planned_work(table) == pytest.approx({"d0": plans[1].work_s(WorkerId("d0"))})
