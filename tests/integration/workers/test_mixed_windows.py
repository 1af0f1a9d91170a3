"""Models of mixed layers in real workers over a real store node: of the layers with a window a hit moves one window, of
the others everything, and every answer is the one that a worker without any cache gives."""

import os
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from headrace.config import EngineSettings, ModelSettings, StoreSettings
from headrace.core.block import HashAlgorithm
from headrace.core.clock import Deadline
from headrace.core.errors import StoreFull
from headrace.core.generation import CachedTokens, EvictSelector
from headrace.core.key_window import KeyWindow
from headrace.core.limits import PUBLISH_BATCH_BLOCKS, PUBLISH_QUEUE_BLOCKS
from headrace.engine.layered_kv import LayeredKV
from headrace.engine.layered_pool import LayeredPool
from headrace.engine.load_model import LoadedModel, load_model
from headrace.index.memory_index import MemoryIndex
from headrace.store.service import StoreNodeService
from headrace.transfer.hold_prefix import hold_prefix, take_reused
from headrace.transfer.stored_run import StoredRun

from .conftest import CLOCK, EVERYTHING, meet
from .priced_steps import PricedSteps
from .test_windows import PROMPT_MAX, WINDOW, WINDOW_BLOCKS, B, make_model, mistral_dir, plain_greedy

__all__ = ["mistral_dir"]  # a fixture

POOL_BLOCKS = 110
NODE_0 = f"another-host-{os.getpid()}"


@pytest.fixture(scope="module")
def gemma_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Five layers with a window to one without, as Gemma 3 has them."""
    path = tmp_path_factory.mktemp("gemma3")
    return make_model(path, "gemma3_text", num_hidden_layers=6, query_pre_attn_scalar=16)


def load(path: Path, *, pool_blocks: int = POOL_BLOCKS, codec: str = "raw") -> LoadedModel:
    return load_model(
        ModelSettings(
            model=str(path), device="cpu", torch_threads=1, model_cache_dir=str(path / "cache"), dtype="float32"
        ),
        EngineSettings(block_tokens=B, pool_tokens=pool_blocks * B, batch_sequences_max=1, store_codec=codec),
        trust_group="tests",
        hash_algorithm=HashAlgorithm.XXH3_128,
        report=lambda line: None,
    )


def priced(model: LoadedModel) -> dict[str, object]:
    """For `make_worker`: steps so dear that nothing is loaded so slowly that computing it would be sooner."""
    return {"model": model, "steps": PricedSteps(price=1_000)}


def loaded(path: Path, **settings: object) -> dict[str, object]:
    return priced(load(path, **settings))  # type: ignore[arg-type]


def moved_bytes(model: LoadedModel, num_blocks: int, *, whole: int = WINDOW_BLOCKS) -> int:
    layout = model.namespace.layout
    return whole * layout.block_bytes + (num_blocks - whole) * layout.wide_bytes


async def test_a_hit_of_six_windows_moves_one_of_the_layers_that_have_them(store_node, make_worker, gemma_dir, prompts):
    """Fails when more is fetched or held than is read, or usage counts what was moved instead of what was saved."""
    model, other = load(gemma_dir), load(gemma_dir)
    assert isinstance(model.kv, LayeredKV)
    assert model.kv.near_window == KeyWindow(WINDOW, B)
    being_published = PUBLISH_QUEUE_BLOCKS + PUBLISH_BATCH_BLOCKS
    assert load(gemma_dir, pool_blocks=400).kv.num_near == 2 * WINDOW_BLOCKS + 2 + being_published
    assert model.kv.num_near == POOL_BLOCKS < being_published, "no more of them than of wide parts"
    worker, loader = await make_worker("worker", **priced(model)), await make_worker("loader", **priced(other))
    token_ids, blocks = prompts(PROMPT_MAX), PROMPT_MAX // B - 1
    cold = await worker.cold(token_ids)
    assert cold.token_ids == plain_greedy(gemma_dir, token_ids, len(cold.token_ids))
    computed = await worker.decode(token_ids)
    await worker.published()
    read_before = store_node.node.stat().read_bytes
    loaded = await loader.decode(token_ids)
    assert loaded.cached == CachedTokens(shared_memory=blocks * B)
    moved = store_node.node.stat().read_bytes - read_before
    assert moved == moved_bytes(model, blocks)
    assert moved < 0.35 * blocks * model.namespace.layout.block_bytes
    for reply in (computed, loaded, await loader.cold(token_ids), await worker.decode(token_ids)):
        assert reply.same_answer_as(cold)
    pool = loader.worker.engine.pool
    assert isinstance(pool, LayeredPool)
    assert pool.near.available_blocks == pool.near.num_blocks
    pool.check_integrity()


async def test_prefill_and_decode_apart_hand_over_one_window_of_near_parts(store_node, make_worker, gemma_dir, prompts):
    prefill = await make_worker("prefill", **loaded(gemma_dir))
    decode = await make_worker("decode", **loaded(gemma_dir))
    token_ids = prompts(PROMPT_MAX, salt=3)
    cold = await decode.cold(token_ids)
    result = await prefill.prefill(token_ids)
    assert (result.reused_blocks, result.published_blocks) == (0, PROMPT_MAX // B)
    read_before = store_node.node.stat().read_bytes
    reply = await decode.decode(token_ids, computed_from=result.reused_blocks)
    assert reply.same_answer_as(cold)
    assert store_node.node.stat().read_bytes - read_before <= moved_bytes(load(gemma_dir), PROMPT_MAX // B)
    longer = [*token_ids, *prompts(3 * B, salt=4)]
    again = await decode.prefill(longer)  # behind a prefix that came from the store just now
    assert (again.reused_blocks, again.published_blocks) == (PROMPT_MAX // B, PROMPT_MAX // B + 3)


@pytest.mark.parametrize("codec", ["raw", "int8"])
async def test_a_prefix_from_another_host_gives_the_same_bits(codec, store_node, make_worker, gemma_dir, prompts):
    """Over gRPC blocks come by their wide part first, and whole at the end; of a lossy codec, the same at every way."""
    near = await make_worker("near", **loaded(gemma_dir, codec=codec))
    far = await make_worker("far", near=False, **loaded(gemma_dir, codec=codec))
    beside = await make_worker("beside", **loaded(gemma_dir, codec=codec))
    token_ids = prompts(PROMPT_MAX - 11, salt=5)
    blocks = (PROMPT_MAX - 11) // B
    cold = await near.decode(token_ids)
    await near.published()
    read_before = store_node.node.stat().read_bytes
    remote = await far.decode(token_ids, hint_nodes=("node-1",))
    assert remote.cached == CachedTokens(grpc=blocks * B)
    assert store_node.node.stat().read_bytes - read_before == moved_bytes(load(gemma_dir, codec=codec), blocks)
    again = await far.decode(token_ids)
    assert again.cached == CachedTokens(device=blocks * B)
    local = await beside.decode(token_ids)
    assert local.cached == CachedTokens(shared_memory=blocks * B)
    assert remote.same_answer_as(local)
    assert again.same_answer_as(local)
    assert remote.same_answer_as(cold) == (codec == "raw")


async def test_prompts_that_part_anywhere_find_their_window(store_node, make_worker, gemma_dir, prompts):
    """The store has near parts of all blocks, whoever needs them; what only a pool lacks of a window is loaded."""
    first = await make_worker("first", **loaded(gemma_dir))
    other = await make_worker("other", **loaded(gemma_dir))
    token_ids = prompts(PROMPT_MAX - 40, salt=6)
    await first.decode(token_ids)
    await first.published()
    for cut in (30, 29, 9, 3, 1):
        for number, worker in enumerate((first, other)):
            shorter = [*token_ids[: cut * B], *prompts(60, salt=100 * number + cut)]
            reply = await worker.decode(shorter)
            assert reply.cached.total == cut * B
            assert reply.same_answer_as(await worker.cold(shorter))


async def test_broken_bytes_of_either_part_are_never_used(store_node, make_worker, gemma_dir, prompts):
    """One byte of a wide part, of a near part that is read, of a checksum: what comes before it is used at most."""
    writer = await make_worker("writer", **loaded(gemma_dir))
    layout = writer.worker.layout
    token_ids, blocks = prompts(PROMPT_MAX, salt=11), PROMPT_MAX // B - 1
    cold = await writer.decode(token_ids)
    await writer.published()
    prompt = writer.request(token_ids, cache=None).prompt
    near_at = layout.wide_bytes + 5
    for number, (block, at) in enumerate(
        [(blocks - 2, near_at), (blocks - 1, layout.block_bytes - 1), (blocks - 4, 7), (11, layout.wide_bytes - 1)]
    ):
        reader = await make_worker(f"reader-{number}", **loaded(gemma_dir))
        await writer.decode(token_ids)
        held = store_node.node._blocks.run(prompt.namespace, prompt.chain, first_block=block)[0]
        payload = store_node.node._arena.payload(held.slot, held.header.payload_bytes)
        payload[at] ^= 1
        reply = await reader.decode(token_ids)
        assert reply.same_answer_as(cold)
        assert reply.cached.total < blocks * B
        assert reader.faults, "nobody noticed"
        # The node has dropped it with all that stands on it, and who computes it stores it anew.
        await reader.published()


async def test_a_broken_near_part_that_nobody_reads_costs_nothing(store_node, make_worker, gemma_dir, prompts):
    writer = await make_worker("writer", **loaded(gemma_dir))
    reader = await make_worker("reader", **loaded(gemma_dir))
    token_ids, blocks = prompts(PROMPT_MAX, salt=12), PROMPT_MAX // B - 1
    cold = await writer.decode(token_ids)
    await writer.published()
    prompt = writer.request(token_ids, cache=None).prompt
    held = store_node.node._blocks.run(prompt.namespace, prompt.chain, first_block=3)[0]
    store_node.node._arena.payload(held.slot, held.header.payload_bytes)[-20] ^= 1
    reply = await reader.decode(token_ids)
    assert reply.cached == CachedTokens(shared_memory=blocks * B)
    assert reply.same_answer_as(cold)


@pytest.mark.parametrize("short_of", ["wide parts", "near parts"])
async def test_sequences_that_gave_their_blocks_up_answer_as_if_they_had_kept_them(
    short_of, store_node, make_worker, gemma_dir, prompts
):
    """Five sequences past their window with blocks for two and a half, or five that grow to it with near parts for two.
    Fails if a part comes back wrong or is leaked, or half a window is taken for one."""
    steps = PricedSteps(price=1_000)
    begin, grown = (14 * B, 24) if short_of == "wide parts" else (4 * B, 56)
    worker = await make_worker("worker", model=load(gemma_dir), steps=steps)
    engine = worker.worker.engine
    asked = [prompts(begin + number, salt=50 + number) for number in range(5)]
    cold = [await worker.cold(token_ids, max_tokens=grown) for token_ids in asked]
    if short_of == "wide parts":
        taken = engine.pool.take(engine.pool.num_blocks - 45).block_ids
    else:
        near = engine.pool.take_near(engine.pool.near.num_blocks - (2 * WINDOW_BLOCKS + 2))
        taken = [engine.pool.parts.near_alone(each) for each in near]
    try:
        replies = await meet(worker, steps, [worker.decode(token_ids, max_tokens=grown) for token_ids in asked])
    finally:
        engine.pool.unref_all(taken)
    for reply, want in zip(replies, cold, strict=True):
        assert reply.same_answer_as(want)
        assert reply.cached.total == 0
    assert engine.steps.preemption.num_preemptions > 0
    await worker.published()
    assert engine.pool.near.available_blocks == engine.pool.near.num_blocks


@pytest.fixture
async def other_node(membership) -> AsyncIterator[StoreNodeService]:
    """A store node of another host: /dev/shm is not where the tests' own node has its arena."""
    service = StoreNodeService(
        StoreSettings(node_id=NODE_0, arena_mb=8), index=MemoryIndex(membership), membership=membership, clock=CLOCK
    )
    await membership.announce(await service.start(), ttl_ms=60_000)
    yield service
    service.node.check_integrity()
    await service.stop(remove_arena=True)


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
async def test_what_is_computed_behind_a_window_of_another_host_is_stored_there(
    family, store_node, other_node, make_worker, membership, gemma_dir, mistral_dir, prompts
):
    """Fails if the turns of a conversation that moved to another host are kept nowhere: that host's node lacks the
    blocks before the window, and takes none without its parent."""
    path = gemma_dir if family == "gemma3" else mistral_dir
    first = await make_worker("first", **loaded(path))
    moved = await make_worker("moved", near=False, **loaded(path))
    for worker in (first, moved):
        await worker.worker._node_table.refresh()
    assert (first.worker.nodes.sink_node_id(), moved.worker.nodes.sink_node_id()) == ("node-1", NODE_0)
    conversation = prompts(3 * WINDOW, salt=21)
    await first.decode(conversation)
    await first.published()
    longer = [*conversation, *prompts(4 * B, salt=22)]
    reply = await moved.decode(longer, hint_nodes=("node-1",))
    assert reply.cached == CachedTokens(grpc=3 * WINDOW)
    await moved.published()
    again = await first.decode([*longer, 5])
    assert again.cached.shared_memory + again.cached.device == len(longer)
    assert again.same_answer_as(await first.cold([*longer, 5]))
    assert not moved.faults


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
async def test_nothing_is_prefilled_for_others_behind_a_window_of_another_host(
    family, store_node, other_node, make_worker, membership, gemma_dir, mistral_dir, prompts
):
    """Fails if a prefill worker computes what its host's node cannot keep, while the decode worker waits for it."""
    path = gemma_dir if family == "gemma3" else mistral_dir
    first = await make_worker("first", **loaded(path))
    moved = await make_worker("moved", near=False, **loaded(path))
    for worker in (first, moved):
        await worker.worker._node_table.refresh()
    conversation = prompts(3 * WINDOW, salt=31)
    await first.prefill(conversation)
    longer = [*conversation, *prompts(4 * B, salt=32)]
    result = await moved.prefill(longer, hint_nodes=("node-1",))
    assert (result.reused_blocks, result.published_blocks) == (3 * WINDOW_BLOCKS, 0)
    assert moved.worker.engine.pool.resident_blocks(moved.request(longer, cache=None).prompt) == 3 * WINDOW_BLOCKS


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
async def test_what_is_computed_behind_such_a_window_later_is_stored_there_too(
    family, store_node, other_node, make_worker, membership, gemma_dir, mistral_dir, prompts
):
    """The next turns find the window in the worker's pool, and nobody tells where it came from. Fails if they are kept
    nowhere from then on."""
    path = gemma_dir if family == "gemma3" else mistral_dir
    first = await make_worker("first", **loaded(path))
    moved = await make_worker("moved", near=False, **loaded(path))
    for worker in (first, moved):
        await worker.worker._node_table.refresh()
    conversation = prompts(3 * WINDOW, salt=41)
    await first.decode(conversation)
    await first.published()
    await moved.decode(conversation, hint_nodes=("node-1",))
    for turn in range(2):
        conversation = [*conversation, *prompts(3 * B, salt=42 + turn)]
        reply = await moved.decode(conversation)
        assert reply.cached.device == len(conversation) - 3 * B
        await moved.published()
    again = await first.decode([*conversation, 5])
    assert again.cached.total == len(conversation)
    assert again.same_answer_as(await first.cold([*conversation, 5]))
    assert not moved.faults


async def test_a_sequence_that_gives_way_behind_a_prefix_of_another_host_is_read_back_from_there(
    store_node, other_node, make_worker, membership, mistral_dir, prompts
):
    """Five sequences that grow past their window, to ten blocks each, with 32 for all. Fails if they are looked for in
    their own host's node only, and so computed from their first tokens."""
    first = await make_worker("first", **loaded(mistral_dir))
    moved = await make_worker("moved", near=False, **loaded(mistral_dir))
    for worker in (first, moved):
        await worker.worker._node_table.refresh()
    asked = [prompts(4 * B + number + 1, salt=70 + number) for number in range(5)]
    for conversation in asked:
        await first.decode(conversation)
        await first.published()
        await moved.decode(conversation, hint_nodes=("node-1",))
    cold = [await moved.cold(conversation, max_tokens=56) for conversation in asked]
    engine, steps = moved.worker.engine, moved.worker.engine.steps._clock
    taken = engine.pool.take(engine.pool.num_blocks - 32).block_ids
    try:
        replies = await meet(moved, steps, [moved.decode(conversation, max_tokens=56) for conversation in asked])
    finally:
        engine.pool.unref_all(taken)
    assert all(reply.same_answer_as(want) for reply, want in zip(replies, cold, strict=True))
    assert engine.steps.preemption.num_preemptions > 0
    assert engine.steps.preemption.num_reloads > 0


async def test_what_a_sequence_gives_up_behind_such_a_window_is_saved_in_the_node_that_has_it(
    store_node, other_node, make_worker, membership, mistral_dir, prompts
):
    """Fails if blocks for which the publisher had no room are offered to a node that has not got their parents."""
    first = await make_worker("first", **loaded(mistral_dir))
    moved = await make_worker("moved", near=False, **loaded(mistral_dir))
    for worker in (first, moved):
        await worker.worker._node_table.refresh()
    conversation, blocks = prompts(3 * WINDOW, salt=81), 3 * WINDOW_BLOCKS
    longer = [*conversation, *prompts(4 * B, salt=82)]
    await first.decode(conversation)
    await first.published()
    await moved.decode(longer, hint_nodes=("node-1",))
    await moved.published()
    request = moved.request(longer, EVERYTHING)
    store_node.node.evict(EvictSelector(block_hashes=(request.prompt.chain[blocks],)), dry_run=False)
    assert store_node.node.lookup(request.prompt.namespace, request.prompt.chain) == blocks
    how = {"hint_nodes": (), "deadline": Deadline.after(60, CLOCK)}
    holding = hold_prefix(moved.worker, request, num_blocks=blocks + 4, reusable_blocks=blocks + 4, **how)
    async with holding as held:
        backup = StoredRun(moved.worker, held, request, node_id=held.home_node, **how)
        backup.save(take_reused(moved.worker, held, request))
        await moved.published()
    assert store_node.node.lookup(request.prompt.namespace, request.prompt.chain) == blocks + 4
    assert not moved.faults


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
async def test_a_prefix_that_was_lost_and_computed_again_is_at_home_in_the_node_that_got_it(
    family, store_node, other_node, make_worker, membership, gemma_dir, mistral_dir, prompts
):
    """It had come from a node that has lost it since, and is alive. Fails if what stands on it is offered there still,
    and so kept nowhere."""
    path = gemma_dir if family == "gemma3" else mistral_dir
    first = await make_worker("first", **loaded(path))
    moved = await make_worker("moved", near=False, **loaded(path))
    for worker in (first, moved):
        await worker.worker._node_table.refresh()
    conversation = prompts(3 * WINDOW, salt=61)
    await first.decode(conversation)
    await first.published()
    await moved.decode(conversation, hint_nodes=("node-1",))
    everything = EvictSelector(namespace=moved.request(conversation, cache=None).prompt.namespace)
    store_node.node.evict(everything, dry_run=False)
    moved.worker.evict_device(everything, dry_run=False)
    for turn in range(2):
        await moved.decode(conversation)
        await moved.published()
        prompt = moved.request(conversation, cache=None).prompt
        assert other_node.node.lookup(prompt.namespace, prompt.chain) == len(prompt.chain)
        conversation = [*conversation, *prompts(3 * B, salt=62 + turn)]
    assert not moved.faults


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
async def test_a_prefill_behind_a_window_of_its_own_pool_is_stored_whole_where_the_store_lacks_what_is_before(
    family, store_node, other_node, make_worker, membership, gemma_dir, mistral_dir, prompts
):
    """A window that came from another host, and one whose beginning the store has dropped since. Fails if a prefill
    worker computes what no store keeps, while a decode worker waits for it and then computes it itself."""
    path = gemma_dir if family == "gemma3" else mistral_dir
    first = await make_worker("first", **loaded(path))
    moved = await make_worker("moved", near=False, **loaded(path))
    for worker in (first, moved):
        await worker.worker._node_table.refresh()
    conversation, blocks = prompts(3 * WINDOW, salt=51), 3 * WINDOW_BLOCKS
    await first.prefill(conversation)
    await moved.decode(conversation, hint_nodes=("node-1",))
    longer = [*conversation, *prompts(2 * B, salt=52)]
    result = await moved.prefill(longer)
    assert (result.reused_blocks, result.published_blocks) == (0, blocks + 2)
    again = await moved.prefill([*longer, *prompts(B, salt=53)])  # its node has all of it now
    assert (again.reused_blocks, again.published_blocks) == (blocks + 2, blocks + 3)
    prompt = first.request(longer, cache=None).prompt
    store_node.node.evict(EvictSelector(namespace=prompt.namespace), dry_run=False)
    spoken = await first.decode([*longer, *prompts(B, salt=54), 5])  # nobody waits for what is decoded to be stored
    await first.published()
    assert spoken.cached.device == len(conversation)
    assert store_node.node.lookup(prompt.namespace, prompt.chain) == 0
    assert [type(fault) for fault in first.faults] == [StoreFull]
    result = await first.prefill(longer)
    assert (result.reused_blocks, result.published_blocks) == (0, blocks + 2)
    reply = await first.decode([*longer, 5], computed_from=0)
    assert reply.same_answer_as(await first.cold([*longer, 5]))


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
async def test_a_host_without_a_node_prefills_into_the_one_that_has_the_window(
    family, store_node, make_worker, gemma_dir, mistral_dir, prompts
):
    """Fails if it is taken for a host whose own node lacks the prefix."""
    path = gemma_dir if family == "gemma3" else mistral_dir
    first = await make_worker("first", **loaded(path))
    far = await make_worker("far", near=False, **loaded(path))
    conversation = prompts(3 * WINDOW, salt=33)
    await first.prefill(conversation)
    longer = [*conversation, *prompts(4 * B, salt=34)]
    result = await far.prefill(longer, hint_nodes=("node-1",))
    assert (result.reused_blocks, result.published_blocks) == (3 * WINDOW_BLOCKS, 3 * WINDOW_BLOCKS + 4)
