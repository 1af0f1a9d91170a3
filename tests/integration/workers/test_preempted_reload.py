"""A worker whose pool runs short reads preempted sequences back from its store node, and nobody's answer changes."""

from headrace.core.generation import CacheControl

from .conftest import meet
from .priced_steps import PricedSteps

B = 8
PUBLISHES_ONLY = CacheControl(sources=frozenset())


async def test_sequences_that_gave_their_blocks_up_come_back_from_the_store(store_node, make_worker, prompts):
    """Five sequences that grow to 8 blocks each in a pool of 18. Fails if a block comes back wrong or is leaked, or
    if what was computed for a request counts as cached when it is read back."""
    steps = PricedSteps(price=1_000)  # nothing is read back so slowly that computing it would be sooner
    worker = await make_worker("worker", steps=steps)
    engine = worker.worker.engine
    asked = [prompts(30 + number, salt=50 + number) for number in range(5)]
    cold = [await worker.cold(token_ids, max_tokens=32) for token_ids in asked]
    taken = engine.pool.take(engine.pool.num_blocks - 18)
    try:
        replies = await meet(worker, steps, [worker.decode(token_ids, max_tokens=32) for token_ids in asked])
    finally:
        engine.pool.unref_all(taken.block_ids)
    for reply, want in zip(replies, cold, strict=True):
        assert reply.same_answer_as(want)
        assert reply.cached.total == 0
    preemption = engine.steps.preemption
    assert preemption.num_preemptions > 0
    assert preemption.num_reloads > 0
    assert preemption.num_reloaded_blocks >= preemption.num_reloads
    assert worker.faults == []


async def test_without_a_store_node_or_leave_to_read_it_they_are_computed_again(make_worker, prompts):
    steps = PricedSteps()
    worker = await make_worker("worker", steps=steps)
    engine = worker.worker.engine
    asked = [prompts(30 + number, salt=70 + number) for number in range(4)]
    cold = [await worker.cold(token_ids, max_tokens=24) for token_ids in asked]
    taken = engine.pool.take(engine.pool.num_blocks - 15)
    caches = [CacheControl(), PUBLISHES_ONLY] * 2
    try:
        replies = await meet(
            worker, steps, [worker.decode(t, max_tokens=24, cache=c) for t, c in zip(asked, caches, strict=True)]
        )
    finally:
        engine.pool.unref_all(taken.block_ids)
    assert all(reply.same_answer_as(want) for reply, want in zip(replies, cold, strict=True))
    assert engine.steps.num_preemptions > 0
    assert engine.steps.preemption.num_reloads == 0
