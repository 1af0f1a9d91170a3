"""Waiting for a block, on virtual time: woken by the block, by the clock, by the end of new blocks; by nothing else."""

import asyncio

import pytest
from virtual_loop import run_virtual

from headrace.blocks.block_waiters import BlockWaiters
from headrace.core.block import BlockHash, NamespaceId

NAMESPACE, OTHER = NamespaceId("0" * 32), NamespaceId("1" * 32)
BLOCK, NEXT = BlockHash(b"a" * 16), BlockHash(b"b" * 16)


def waiting(test):
    """Run on virtual time; nobody may wait when the test is over."""

    def run():
        async def main(clock):
            waiters = BlockWaiters(waiters_max=3)
            await test(waiters, clock)
            waiters.check_integrity()
            assert waiters.num_waiting == 0

        run_virtual(main, seed=1)

    run.__name__, run.__doc__ = test.__name__, test.__doc__
    return run


async def seconds_of(wait, clock) -> float:
    started_s = clock.now_s()
    await wait
    return clock.now_s() - started_s


@waiting
async def test_all_who_wait_for_a_block_go_on_in_the_moment_it_comes_and_no_others(waiters, clock):
    """Fails when a waiter polls, is forgotten, or is woken by another block or another namespace's."""
    waits = [(NAMESPACE, BLOCK), (NAMESPACE, BLOCK), (OTHER, BLOCK)]
    tasks = [asyncio.create_task(seconds_of(waiters.wait(*key, timeout_s=5), clock)) for key in waits]
    await asyncio.sleep(1)
    waiters.check_integrity()
    waiters.wake(NAMESPACE, NEXT)
    waiters.wake(NAMESPACE, BLOCK)
    assert [await task for task in tasks] == pytest.approx([1, 1, 5])


@waiting
async def test_more_than_the_bound_do_not_wait(waiters, clock):
    """Fails when the number of waiting calls has no bound, or a place is not given back."""
    tasks = [asyncio.create_task(seconds_of(waiters.wait(NAMESPACE, BLOCK, timeout_s=2), clock)) for _ in range(4)]
    assert sorted([await task for task in tasks]) == pytest.approx([0, 2, 2, 2])
    assert await seconds_of(waiters.wait(NAMESPACE, BLOCK, timeout_s=2), clock) == pytest.approx(2)


@waiting
async def test_a_waiter_that_is_cancelled_leaves_and_the_others_stay(waiters, clock):
    """Fails when a caller that is gone keeps its place, or takes the others with it."""
    gone = asyncio.create_task(waiters.wait(NAMESPACE, BLOCK, timeout_s=5))
    stays = asyncio.create_task(seconds_of(waiters.wait(NAMESPACE, BLOCK, timeout_s=5), clock))
    await asyncio.sleep(1)
    gone.cancel()
    await asyncio.wait([gone])
    assert waiters.num_waiting == 1
    waiters.wake(NAMESPACE, BLOCK)
    assert await stays == pytest.approx(1)


@waiting
async def test_who_waits_again_at_once_waits_for_the_next_coming(waiters, clock):
    """Fails when a woken waiter's leaving takes away one who came after the waking."""

    async def twice():
        await waiters.wait(NAMESPACE, BLOCK, timeout_s=9)
        return await seconds_of(waiters.wait(NAMESPACE, BLOCK, timeout_s=9), clock)

    tasks = [asyncio.create_task(twice()) for _ in range(2)]
    for _ in range(2):
        await asyncio.sleep(1)
        waiters.wake(NAMESPACE, BLOCK)
    assert [await task for task in tasks] == pytest.approx([1, 1])


@waiting
async def test_when_no_new_blocks_come_nobody_waits_until_they_do_again(waiters, clock):
    """Fails when a draining node holds its callers until their time is over."""
    before = asyncio.create_task(seconds_of(waiters.wait(NAMESPACE, BLOCK, timeout_s=5), clock))
    await asyncio.sleep(1)
    waiters.close()
    assert await before == pytest.approx(1)
    assert await seconds_of(waiters.wait(NAMESPACE, BLOCK, timeout_s=5), clock) == 0
    waiters.open()
    assert await seconds_of(waiters.wait(NAMESPACE, BLOCK, timeout_s=5), clock) == pytest.approx(5)
