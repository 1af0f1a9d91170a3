"""The queue for KV blocks over the real pool: who gets blocks, who is refused, and what the refused are told."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from headrace.core.block import HashAlgorithm, NamespaceId, hash_prompt
from headrace.core.clock import Deadline, SystemClock
from headrace.core.errors import Overloaded
from headrace.core.limits import RETRY_AFTER_MS_MAX, WORKER_WAITING_MAX, WORKER_WAITING_TOKENS_MAX
from headrace.core.step_costs import PrefillCost
from headrace.engine.admission_queue import Admission, AdmissionQueue
from headrace.engine.block_pool import BlockPool
from headrace.engine.turns import Turns

CLOCK = SystemClock()
COST = PrefillCost(base_s=0.0, tokens_per_s=1_000.0, attention_s=0.0)


def make_queue(num_blocks: int = 8, *, queue_s: Callable[[], float] = lambda: 0.0) -> AdmissionQueue:
    pool = BlockPool(num_blocks, clock=CLOCK)
    turns = Turns(CLOCK, prefill_cost=lambda: COST)
    return AdmissionQueue(pool, may_grant=lambda: True, turns=turns, queue_s=queue_s)


def ask(queue: AdmissionQueue, *, tokens: int = 4, blocks: int = 1, **who: Any) -> "asyncio.Task[Admission]":
    prompt = hash_prompt(
        NamespaceId("ab" * 16), tuple(range(tokens)), block_tokens=max(8, tokens), algorithm=HashAlgorithm.XXH3_128
    )
    return asyncio.ensure_future(
        queue.admit(prompt, num_blocks=blocks, use_device=False, deadline=Deadline.after(60, CLOCK), **who)
    )


async def settle() -> None:
    for _ in range(3):
        await asyncio.sleep(0)


def free(queue: AdmissionQueue, admission: Admission) -> None:
    queue._pool.unref_all(admission.block_ids)
    queue.grant()


async def in_order_of_service(queue: AdmissionQueue, named: dict[str, "asyncio.Task[Admission]"]) -> list[str]:
    """Give the one block from one to the next until all have had it."""
    served: list[str] = []
    while len(served) < len(named):
        await settle()
        (name,) = [name for name, task in named.items() if task.done() and name not in served]
        served.append(name)
        free(queue, named[name].result())
    return served


async def test_a_higher_priority_gets_blocks_first() -> None:
    queue = make_queue(1)
    held = await ask(queue)
    named = {"low": ask(queue, priority=-1), "normal": ask(queue), "high": ask(queue, priority=2)}
    await settle()
    free(queue, held)
    assert await in_order_of_service(queue, named) == ["high", "normal", "low"]


async def test_a_prompt_whose_turn_it_is_is_not_overtaken_while_it_waits_for_more_blocks() -> None:
    """Fails if whatever fits is let in: under load a prompt that needs many blocks would never get them."""
    queue = make_queue(2)
    held = await ask(queue)
    large = ask(queue, blocks=2, priority=1)
    small = ask(queue, blocks=1)
    await settle()
    assert not large.done()
    assert not small.done()
    free(queue, held)
    assert len((await large).block_ids) == 2
    small.cancel()
    await asyncio.wait([small])


async def test_a_full_queue_makes_room_for_who_has_less_in_it() -> None:
    """Fails when a flood of one account keeps all others out; the flood's newest is told to come back."""
    queue = make_queue(1)
    held = await ask(queue)
    flood = [ask(queue, account="flood") for _ in range(WORKER_WAITING_MAX)]
    await settle()
    newcomer = ask(queue, account="other")
    await settle()
    assert queue.num_waiting == WORKER_WAITING_MAX
    assert not newcomer.done()
    assert [task.done() for task in flood] == [False] * (WORKER_WAITING_MAX - 1) + [True]
    with pytest.raises(Overloaded):
        await flood[-1]
    with pytest.raises(Overloaded):
        await ask(queue, account="flood")
    await cancel([*flood[:-1], newcomer])
    free(queue, held)
    assert queue.num_waiting == 0


async def test_the_queue_is_bounded_by_tokens_too_but_one_prompt_may_always_wait() -> None:
    queue = make_queue(1)
    held = await ask(queue)
    huge = ask(queue, tokens=WORKER_WAITING_TOKENS_MAX)
    await settle()
    assert not huge.done()
    with pytest.raises(Overloaded, match="1000000 tokens"):
        await ask(queue, tokens=10)
    await cancel([huge])
    free(queue, held)


@pytest.mark.parametrize(("queue_s", "expected_ms"), [(0.1, 2_000), (7.5, 7_500), (1e9, RETRY_AFTER_MS_MAX)])
async def test_the_refused_are_told_how_long_the_queue_is(queue_s: float, expected_ms: int) -> None:
    """Fails when the time to come back does not grow with the work that waits, or grows without a bound."""
    queue = make_queue(1, queue_s=lambda: queue_s)
    held = await ask(queue)
    waiting = [ask(queue) for _ in range(WORKER_WAITING_MAX)]
    await settle()
    with pytest.raises(Overloaded) as refusal:
        await ask(queue)
    assert refusal.value.retry_after_ms == expected_ms
    await cancel(waiting)
    free(queue, held)


async def cancel(tasks: "list[asyncio.Task[Admission]]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)
