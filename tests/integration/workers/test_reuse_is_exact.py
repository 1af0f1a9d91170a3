"""The promise: an answer has the same bits wherever its prefix came from. Real model, real engine, real store node."""

import asyncio
import random

import pytest

from headrace.core.block import CacheSource
from headrace.core.generation import CacheControl, CachedTokens, EvictSelector

from .conftest import meet
from .gateway_kit import load_again
from .priced_steps import PricedSteps

B = 8


async def test_every_way_of_reuse_gives_the_bits_of_a_cold_run(store_node, make_worker, prompts):
    """Fails when one bit of one logit differs between cold, device, shared memory and gRPC."""
    token_ids = prompts(6 * B + 3)
    first, near, far = (
        await make_worker("first"),
        await make_worker("near"),
        await make_worker("far", near=False),
    )
    cold = await first.cold(token_ids)
    computed = await first.decode(token_ids)
    await first.published()
    device = await first.decode(token_ids)
    memory = await near.decode(token_ids)
    remote = await far.decode(token_ids, hint_nodes=("node-1",))
    assert computed.cached == CachedTokens()
    assert device.cached == CachedTokens(device=6 * B)
    assert memory.cached == CachedTokens(shared_memory=6 * B)
    assert remote.cached == CachedTokens(grpc=6 * B)
    for reply in (computed, device, memory, remote):
        assert reply.same_answer_as(cold)


async def test_prefill_and_decode_on_two_workers_equal_one(store_node, make_worker, prompts):
    """Fails when the hand-over changes a bit, or counts as cached what prefill has just computed."""
    token_ids = prompts(5 * B, salt=1)
    prefill, decode = await make_worker("prefill"), await make_worker("decode")
    cold = await decode.cold(token_ids)
    result = await prefill.prefill(token_ids)
    assert (result.reused_blocks, result.published_blocks, result.store_node) == (0, 5, "node-1")
    reply = await decode.decode(token_ids, computed_from=result.reused_blocks)
    assert reply.same_answer_as(cold)
    assert reply.cached == CachedTokens()
    again = await prefill.prefill([*token_ids, *prompts(2 * B)])
    assert (again.reused_blocks, again.published_blocks) == (5, 7)


async def test_the_same_prompt_again_and_again_and_eight_at_once(store_node, make_worker, prompts):
    """Fails when a repeat differs, or misses what the first one left."""
    token_ids = prompts(6 * B, salt=2)
    worker = await make_worker("worker")
    cold = await worker.cold(token_ids)
    replies = [await worker.decode(token_ids) for _ in range(5)]
    replies += await asyncio.gather(*(worker.decode(token_ids) for _ in range(8)))
    assert all(reply.same_answer_as(cold) for reply in replies)
    assert [reply.cached.total for reply in replies] == [0] + [5 * B] * 12


async def test_equal_prompts_that_arrive_together_are_computed_once_and_counted_so(store_node, make_worker, prompts):
    """Fails when several of them compute the prefix, or when usage says otherwise than what was computed for each.

    All are there before the first step: one that comes later may rightly load what was published until then.
    """
    token_ids = prompts(6 * B + 2, salt=8)
    steps = PricedSteps()
    worker = await make_worker("worker", steps=steps)
    cold = await worker.cold(token_ids)
    replies = await meet(worker, steps, [worker.decode(token_ids) for _ in range(8)])
    assert all(reply.same_answer_as(cold) for reply in replies)
    cached = sorted((reply.cached.device, reply.cached.total) for reply in replies)
    assert cached == [(0, 0)] + [(6 * B, 6 * B)] * 7
    await worker.published()
    assert store_node.node.stat().committed_blocks == 6
    may_not = CacheControl(sources=frozenset())
    replies = await asyncio.gather(*(worker.decode(token_ids, cache=may_not) for _ in range(3)))
    assert [reply.cached.total for reply in replies] == [0, 0, 0]
    salted = await asyncio.gather(*(worker.decode(token_ids, salt=salt) for salt in "aabb"))
    assert all(reply.same_answer_as(cold) for reply in salted)
    assert sorted(reply.cached.total for reply in salted) == [0, 0, 6 * B, 6 * B]


async def test_equal_prefills_at_once_say_what_each_computed(store_node, make_worker, prompts):
    token_ids = prompts(5 * B + 1, salt=9)
    worker = await make_worker("worker")
    results = await asyncio.gather(*(worker.prefill(token_ids) for _ in range(4)))
    assert sorted(result.reused_blocks for result in results) == [0, 5, 5, 5]
    assert [result.published_blocks for result in results] == [5] * 4


async def test_many_tails_on_shared_heads_side_by_side(store_node, make_worker, prompts):
    """Fails when prompts that share a head disturb each other, on one worker or between two."""
    rng = random.Random(9)
    workers = [await make_worker("near"), await make_worker("far", near=False)]
    heads = [prompts(rng.randrange(2 * B, 6 * B), salt=salt) for salt in range(4)]

    async def one(number: int) -> int:
        head = rng.choice(heads)
        token_ids = head[: rng.randrange(1, len(head))] + prompts(rng.randrange(1, 2 * B), salt=100 + number)
        worker = rng.choice(workers)
        async with slots:
            reply = await worker.decode(token_ids, hint_nodes=("node-1",), max_tokens=4)
            assert reply.same_answer_as(await worker.cold(token_ids, max_tokens=4))
        return reply.cached.total

    slots = asyncio.Semaphore(6)
    hits = await asyncio.gather(*(one(number) for number in range(20)))
    assert sum(hit > 0 for hit in hits) >= 5, "without hits this test shows nothing"


async def test_every_length_around_block_edges(store_node, make_worker, prompts):
    """Fails at exactly k blocks, one more or one less: an error, another answer, or a hit of the whole prompt."""
    worker, near = await make_worker("worker"), await make_worker("near")
    for length in range(1, 3 * B + 3):
        token_ids = prompts(length, salt=length)
        first = await worker.decode(token_ids, max_tokens=3)
        again = await worker.decode(token_ids, max_tokens=3)
        longer = await worker.decode([*token_ids, 7], max_tokens=3)
        await worker.published()
        elsewhere = await near.decode(token_ids, max_tokens=3)
        expected = (length - 1) // B * B
        assert (first.cached.total, again.cached.device, longer.cached.device) == (0, expected, length // B * B)
        assert elsewhere.cached == CachedTokens(shared_memory=expected)
        cold = await near.cold(token_ids, max_tokens=3)
        assert first.same_answer_as(cold)
        assert again.same_answer_as(cold)
        assert elsewhere.same_answer_as(cold)
        assert longer.same_answer_as(await near.cold([*token_ids, 7], max_tokens=3))


@pytest.mark.parametrize("block_tokens", [1, 7])
async def test_odd_block_sizes_are_reused_around_block_edges(
    block_tokens, store_node, make_worker, tiny_models, prompts
):
    """Fails for a block of one token or of an odd number: another answer, or a hit of more or less than is whole."""
    models = [load_again(tiny_models[0], block_tokens=block_tokens, pool_blocks=96) for _ in range(2)]
    worker, near = [await make_worker(f"odd-{number}", model=model) for number, model in enumerate(models)]
    edges = {k * block_tokens + beside for k in (1, 2, 3) for beside in (-1, 0, 1, 2)} - {0}
    for length in sorted(edges):
        token_ids = [length, *prompts(length - 1, salt=900 + length)]  # no two begin alike
        first = await worker.decode(token_ids, max_tokens=2)
        again = await worker.decode(token_ids, max_tokens=2)
        await worker.published()
        elsewhere = await near.decode(token_ids, max_tokens=2)
        whole = (length - 1) // block_tokens * block_tokens
        assert (first.cached.total, again.cached.device, elsewhere.cached.shared_memory) == (0, whole, whole)
        cold = await near.cold(token_ids, max_tokens=2)
        assert all(reply.same_answer_as(cold) for reply in (first, again, elsewhere))


async def test_what_is_evicted_while_requests_wait_for_room_is_computed(store_node, make_worker, prompts):
    """Five requests wait on a head that is cached; it leaves the pool and the store, and other blocks come in its
    place. Fails if what was found when they came counts when they run."""
    worker, other = await make_worker("worker"), await make_worker("other")
    head = prompts(5 * B, salt=70)
    asked = [[*head, *prompts(B + number, salt=71 + number)] for number in range(5)]
    cold = [await other.cold(token_ids) for token_ids in asked]
    await worker.decode(head)
    await worker.published()
    pool, prompt = worker.worker.engine.pool, worker.request(head, cache=None).prompt
    kept = pool.take(5, prompt=prompt, shared_max=5)
    assert kept.num_shared == 5
    rest = pool.take(pool.available_blocks)
    waiting = [asyncio.create_task(worker.decode(token_ids)) for token_ids in asked]
    async with asyncio.timeout(60):
        while worker.worker.engine.load().waiting < 5:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
    assert pool.resident_blocks(prompt) == 5, "they wait although the head is there"
    everything = EvictSelector(namespace=prompt.namespace)
    pool.unref_all(kept.block_ids)
    worker.worker.evict_device(everything, dry_run=False)
    store_node.node.evict(everything, dry_run=False)
    for salt in range(4):
        await other.decode(prompts(6 * B, salt=80 + salt))
    await other.published()
    assert pool.resident_blocks(prompt) == store_node.node.lookup(prompt.namespace, prompt.chain) == 0
    pool.unref_all(rest.block_ids)
    replies = await asyncio.gather(*waiting)
    assert all(reply.same_answer_as(want) for reply, want in zip(replies, cold, strict=True))
    assert min(reply.cached.total for reply in replies) == 0, "somebody computed the head"


async def test_an_edited_history_is_reused_up_to_the_edit(store_node, make_worker, prompts):
    """Fails when blocks behind a changed token count."""
    worker, near = await make_worker("worker"), await make_worker("near")
    history = prompts(6 * B + 1, salt=3)
    await worker.decode(history)
    await worker.published()
    for reader, new_token in ((worker, 1), (near, 2)):
        edited = list(history)
        edited[2 * B + 3] = new_token
        reply = await reader.decode(edited)
        assert reply.cached.total == 2 * B
        assert reply.same_answer_as(await reader.cold(edited))
        assert (await reader.decode(history)).cached.total == 6 * B


async def test_sources_can_be_chosen_per_request(store_node, make_worker, prompts):
    """Fails when a source that was excluded is used, as `headrace verify` relies on."""
    token_ids = prompts(4 * B + 1, salt=4)
    worker = await make_worker("worker")
    cold = await worker.decode(token_ids)
    await worker.published()
    for source, expected in (
        (CacheSource.DEVICE, CachedTokens(device=4 * B)),
        (CacheSource.SHARED_MEMORY, CachedTokens(shared_memory=4 * B)),
        (CacheSource.GRPC, CachedTokens(grpc=4 * B)),
    ):
        cache = CacheControl(sources=frozenset({source}))
        reply = await worker.decode(token_ids, cache=cache, hint_nodes=("node-1",))
        assert reply.cached == expected
        assert reply.same_answer_as(cold)


async def test_a_salt_shares_with_the_same_salt_only(store_node, make_worker, prompts):
    """Fails when blocks cross between salts, on the device or in the store, or when a salted prompt is not stored."""
    token_ids = prompts(4 * B + 1, salt=9)
    first, second = await make_worker("first"), await make_worker("second")
    cold = await first.cold(token_ids)
    replies = [
        await first.decode(token_ids, salt="a"),
        await first.decode(token_ids, salt="b"),
        await first.decode(token_ids),
    ]
    await first.published()
    assert [reply.cached.total for reply in replies] == [0, 0, 0]
    for salt in ("a", "b", ""):
        device, memory = await first.decode(token_ids, salt=salt), await second.decode(token_ids, salt=salt)
        assert (device.cached.device, memory.cached.shared_memory) == (4 * B, 4 * B)
        replies += [device, memory]
    assert all(reply.same_answer_as(cold) for reply in replies)
