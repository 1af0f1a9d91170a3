"""Workers whose store keeps KV in a lossy codec: half the bytes, the same answer at every reading, a stated loss."""

from dataclasses import replace

import pytest

from headrace.config import EngineSettings, ModelSettings
from headrace.core.block import HashAlgorithm
from headrace.core.generation import CachedTokens
from headrace.engine.load_model import LoadedModel, load_model

from .conftest import meet
from .priced_steps import PricedSteps

B = 8


@pytest.fixture(scope="module")
def make_coded(tiny_models):
    """The tiny model again, with this codec in the store or in its pool; a pool of its own each time."""

    def make(codec: str = "raw", said: list[str] | None = None, *, pool_codec: str = "raw") -> LoadedModel:
        path = tiny_models[0].path
        return load_model(
            ModelSettings(
                model=str(path), device="cpu", torch_threads=1, model_cache_dir=str(path / "cache"), dtype="float32"
            ),
            EngineSettings(block_tokens=B, pool_tokens=96 * B, store_codec=codec, pool_codec=pool_codec),
            trust_group="tests",
            hash_algorithm=HashAlgorithm.XXH3_128,
            report=lambda line: None if said is None else said.append(line),
        )

    return make


@pytest.mark.parametrize("codec", ["int8", "fp8"])
async def test_every_reading_of_a_coded_prefix_gives_one_answer(codec, make_coded, store_node, make_worker, prompts):
    """Fails if two ways of loading gave other numbers, or a block that was loaded and stored again drifted."""
    token_ids = prompts(6 * B + 3)
    first = await make_worker("first", model=make_coded(codec))
    near = await make_worker("near", model=make_coded(codec))
    far = await make_worker("far", near=False, model=make_coded(codec))
    await first.prefill(token_ids)
    replies = [await near.decode(token_ids), await near.decode(token_ids)]
    replies.append(await far.decode(token_ids, hint_nodes=("node-1",)))
    assert [reply.cached for reply in replies] == [
        CachedTokens(shared_memory=6 * B),
        CachedTokens(device=6 * B),
        CachedTokens(grpc=6 * B),
    ]
    assert all(reply.same_answer_as(replies[0]) for reply in replies)
    cold = await first.cold(token_ids)
    assert not replies[0].same_answer_as(cold), "nothing was coded"
    (token_id, logprob), coded = cold.logprobs[0][0], dict(replies[0].logprobs[0])
    assert abs(coded[token_id] - logprob) < 1.5  # random weights make much of little


async def test_a_coded_store_takes_less_than_half_of_float32_and_its_blocks_are_listed_so(
    make_coded, store_node, make_worker, prompts
):
    worker = await make_worker("worker", model=make_coded("int8"))
    await worker.prefill(prompts(6 * B))
    raw = worker.worker.engine.kv.layout
    kept = [held.header for held in store_node.node._blocks]
    assert {header.layout for header in kept} == {replace(raw, codec="int8")}
    assert {header.payload_bytes for header in kept} == {replace(raw, codec="int8").block_bytes}
    assert kept[0].payload_bytes < 0.5 * raw.block_bytes


@pytest.mark.parametrize("codec", ["int8", "fp8"])
async def test_every_way_of_reuse_between_quantised_pools_gives_the_bits_of_a_cold_run(
    codec, make_coded, store_node, make_worker, prompts
):
    """Fails if the store coded the pool's numbers again, or a worker attended to numbers that it does not keep."""
    token_ids = prompts(6 * B + 3)
    first = await make_worker("first", model=make_coded(pool_codec=codec))
    near = await make_worker("near", model=make_coded(pool_codec=codec))
    far = await make_worker("far", near=False, model=make_coded(pool_codec=codec))
    cold = await first.cold(token_ids)
    await first.prefill(token_ids)
    replies = [
        await first.decode(token_ids),
        await near.decode(token_ids),
        await far.decode(token_ids, hint_nodes=("node-1",)),
    ]
    assert [reply.cached for reply in replies] == [
        CachedTokens(device=6 * B),
        CachedTokens(shared_memory=6 * B),
        CachedTokens(grpc=6 * B),
    ]
    assert all(reply.same_answer_as(cold) for reply in replies)
    raw = await make_worker("raw")
    assert not cold.same_answer_as(await raw.cold(token_ids)), "nothing was coded"
    kept = {held.header.layout for held in store_node.node._blocks}
    assert kept == {near.worker.engine.kv.layout}


async def test_workers_of_different_codecs_share_nothing(make_coded, store_node, make_worker, prompts, tiny_models):
    """Fails if the codec were not part of the namespace: one would read the other's bytes as its own."""
    token_ids = prompts(6 * B)
    raw, coded = await make_worker("raw"), await make_worker("coded", model=make_coded("int8"))
    await raw.prefill(token_ids)
    assert (await coded.prefill(token_ids)).reused_blocks == 0
    assert coded.faults == []
    named = tiny_models[0].namespace.differing_fields(make_coded("int8").namespace)
    assert named == ["layout.codec", "numerics_probe"]


def test_a_lossy_store_gives_the_claim_of_exactness_up_and_says_so(make_coded):
    """Fails if a lossy codec went unsaid: no silent change of answers."""
    said: list[str] = []
    coded = make_coded("int8", said)
    assert not coded.exact
    assert coded.namespace.numerics_probe == ""
    lines = [line for line in said if "not exact" in line]
    assert len(lines) == 1
    assert "headrace verify --codec int8" in lines[0]
    quiet: list[str] = []
    assert make_coded("raw", quiet).exact
    assert not [line for line in quiet if "codec" in line]


async def test_a_preempted_request_that_reuses_nothing_is_exact_with_a_lossy_store(
    make_coded, store_node, make_worker, prompts
):
    """Fails if a sequence that gave its blocks up reads back what the codec has left of its own numbers."""
    steps = PricedSteps(price=1_000)  # nothing is read back so slowly that computing it would be sooner
    worker = await make_worker("worker", model=make_coded("int8"), steps=steps)
    engine = worker.worker.engine
    asked = [prompts(30 + number, salt=50 + number) for number in range(5)]
    cold = [await worker.cold(token_ids, max_tokens=32) for token_ids in asked]
    taken = engine.pool.take(engine.pool.num_blocks - 18)
    try:
        replies = await meet(worker, steps, [worker.decode(token_ids, max_tokens=32) for token_ids in asked])
    finally:
        engine.pool.unref_all(taken.block_ids)
    assert engine.steps.num_preemptions > 0
    for reply, want in zip(replies, cold, strict=True):
        assert reply.cached.total == 0
        assert reply.same_answer_as(want)
