"""Trust groups on real engines and a real store node: same prompt, same worker, other group, other blocks."""

from dataclasses import replace

import pytest

from headrace.core.block import CacheSource
from headrace.core.errors import WorkerUnavailable
from headrace.core.generation import CacheControl, DecodeCall, EvictSelector
from headrace.decode.decode_tokens import decode_tokens

B = 8
FROM_MEMORY = CacheControl(sources=frozenset([CacheSource.SHARED_MEMORY]))


async def test_each_tier_serves_a_group_what_it_sent_and_nothing_of_others(store_node, make_worker, prompts):
    """Fails when a device pool or a node hands one group's block to another; void when a group does not hit itself.
    Both groups get the answer of a cold run."""
    token_ids = prompts(4 * B, salt=11)
    worker = await make_worker("worker")
    cold = await worker.cold(token_ids)
    for cache, source in ((CacheControl(), "device"), (FROM_MEMORY, "shared_memory")):
        for group in (f"tenant:one-{source}", f"tenant:two-{source}"):
            first = await worker.decode(token_ids, cache=cache, group=group)
            await worker.published()
            again = await worker.decode(token_ids, cache=cache, group=group)
            assert (first.cached.total, getattr(again.cached, source)) == (0, 3 * B)
            assert first.same_answer_as(cold)
            assert again.same_answer_as(cold)


async def test_evicting_one_groups_blocks_leaves_the_others_hits(store_node, make_worker, prompts):
    """Fails when an eviction in one namespace takes blocks of another, in the pool or on the node."""
    token_ids = prompts(4 * B, salt=12)
    worker = await make_worker("worker")
    for group in ("tenant:one", "tenant:two"):
        await worker.decode(token_ids, group=group)
    await worker.published()
    ones = worker.worker.engine.model.namespace.narrowed("", trust_group="tenant:one").id
    selector = EvictSelector(namespace=ones)
    assert worker.worker.evict_device(selector, dry_run=False).blocks == 4
    assert store_node.node.evict(selector, dry_run=False).blocks == 4
    assert (await worker.decode(token_ids, group="tenant:two")).cached.total == 3 * B
    assert (await worker.decode(token_ids, group="tenant:two", cache=FROM_MEMORY)).cached.total == 3 * B
    assert (await worker.decode(token_ids, group="tenant:one")).cached.total == 0


async def test_a_worker_refuses_a_prompt_that_was_hashed_for_another_group(store_node, make_worker, prompts):
    """Fails when a worker computes in a namespace that is not that of the group it is told."""
    worker = await make_worker("worker")
    request = worker.request(prompts(2 * B), CacheControl(), group="tenant:one")
    call = DecodeCall(
        attempt_id="a",
        request=replace(request, trust_group="tenant:two"),
        worker_id=worker.worker.worker_id,
        timeout_ms=1_000,
        computed_from=0,
    )
    with pytest.raises(WorkerUnavailable, match="hashed for another"):
        async for _ in decode_tokens(call, worker.worker):
            pass
