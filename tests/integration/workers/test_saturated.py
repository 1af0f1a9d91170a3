"""A system with more to do than it can: bounds hold, every wait ends in time, and what is broken is not noisy."""

import asyncio
import gc
import logging
import time
from collections import Counter

import pytest
import torch

from headrace.core.errors import DeadlineExceeded, Overloaded, WorkerUnavailable
from headrace.core.limits import GATEWAY_INFLIGHT_MAX
from headrace.core.members import WorkerRole

from .gateway_kit import load_again, small_system

pytestmark = pytest.mark.alone
B = 8


async def test_a_thousand_requests_at_once_are_answered_or_refused_at_once(
    store_node, make_worker, membership, prompts
):
    """Fails when more than the bound are let in, a refusal waits or does not say when to come back, or tasks are left
    behind for those that were refused."""
    worker = await make_worker("worker")
    token_ids = prompts(3 * B, salt=400)
    expected = (await worker.cold(token_ids, max_tokens=2)).token_ids
    async with small_system(worker, index=store_node._index, membership=membership) as system:
        await system.listed("worker")
        tasks_before, most = len(asyncio.all_tasks()), 0
        outcomes: Counter[str] = Counter()
        retry_after_ms: list[int] = []

        async def call() -> None:
            nonlocal most
            try:
                answer = await system.ask(token_ids)
            except Overloaded as error:
                retry_after_ms.append(error.retry_after_ms)
            else:
                assert answer.token_ids == expected
                outcomes["answered"] += 1
            most = max(most, system.gateway.inflight)

        await asyncio.gather(*(call() for _ in range(1_000)))
        assert outcomes["answered"] + len(retry_after_ms) == 1_000
        assert min(retry_after_ms) > 0
        assert outcomes["answered"] >= 50
        assert most <= GATEWAY_INFLIGHT_MAX
        await worker.published()
        gc.collect()
        async with asyncio.timeout(60):
            while len(asyncio.all_tasks()) > tasks_before + 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        assert (await system.ask(token_ids)).token_ids == expected


async def test_whatever_a_request_waits_for_it_ends_by_its_time_limit(store_node, make_worker, membership, prompts):
    """Fails when some queue between the front door and the batch does not know the deadline."""
    worker = await make_worker("worker")
    async with small_system(worker, index=store_node._index, membership=membership) as system:
        await system.listed("worker")
        took_s: list[float] = []

        async def call(number: int) -> None:
            began_s = time.monotonic()
            try:
                await system.ask(prompts(50 * B, salt=410 + number), max_tokens=300, timeout_ms=1_000)
            except (DeadlineExceeded, Overloaded):
                took_s.append(time.monotonic() - began_s)

        await asyncio.gather(*(call(number) for number in range(40)))
    assert len(took_s) >= 20, "the system was not saturated"
    assert max(took_s) < 1 + 10  # the time limit, and a busy machine; all of them in turn take longer


async def test_twelve_prompts_at_once_in_a_decode_pool_for_three_are_all_answered_right(
    store_node, make_worker, membership, tiny_models, prompts
):
    """Fails when a decode worker short of blocks reads one that was let go, or a request that waits for room hangs."""
    prefill = await make_worker("prefill", role=WorkerRole.PREFILL)
    small = load_again(tiny_models[0], block_tokens=B, pool_blocks=40)
    decode = await make_worker("decode", role=WorkerRole.DECODE, model=small)
    asked = [prompts(10 * B + 3, salt=460 + number) for number in range(12)]
    expected = [(await decode.cold(token_ids, max_tokens=12)).token_ids for token_ids in asked]
    async with small_system(prefill, decode, index=store_node._index, membership=membership) as system:
        await system.listed("prefill", "decode")
        answers = await asyncio.gather(
            *(system.ask(token_ids, max_tokens=12, prefill_worker="prefill") for token_ids in asked)
        )
    assert [answer.token_ids for answer in answers] == expected
    assert len(system.calls.prefills) == 12


async def test_an_engine_that_fails_each_step_says_why_and_costs_few_lines_for_each_request(
    store_node, make_worker, membership, tiny_models, prompts, caplog: pytest.LogCaptureFixture
):
    """Fails when the cause is not told, every request prints a traceback, or the worker counts as healthy and is never
    replaced."""
    broken = load_again(tiny_models[0], block_tokens=B, pool_blocks=40)
    worker = await make_worker("worker", model=broken)
    embedding = broken.runner.model.get_input_embeddings()
    embedding.weight = torch.nn.Parameter(torch.zeros(1, 1))
    async with small_system(worker, index=store_node._index, membership=membership) as system:
        await system.listed("worker")
        assert worker.worker.healthy()
        with caplog.at_level(logging.INFO):
            for number in range(50):
                with pytest.raises(WorkerUnavailable):
                    await system.ask(prompts(2 * B, salt=480 + number))
        assert not worker.worker.healthy()
    first, *after = caplog.records
    assert "a step of the engine failed" in first.getMessage()
    assert first.exc_info is not None
    assert "run_step" in caplog.text.partition("attempt at worker failed")[0], "the way to the fault is not told"
    lines = [record.getMessage() for record in after]
    assert sum(line.count("\n") + 1 for line in lines) <= 2 * 50
    assert not any(record.exc_info for record in after)
