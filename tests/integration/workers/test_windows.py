"""Models with windows, in real workers over a real store node: plain transformers' answers, and hits that stay."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.config import EngineSettings, ModelSettings
from headrace.core.block import HashAlgorithm
from headrace.core.generation import CacheControl, CachedTokens
from headrace.core.key_window import KeyWindow
from headrace.engine.load_model import LoadedModel, load_model

from .conftest import meet
from .priced_steps import PricedSteps

B, VOCAB = 8, 256
WINDOW = 64
WINDOW_BLOCKS = 8
SESSIONS, TURNS = 8, 3
PROMPT_MAX = 6 * WINDOW

COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "sliding_window": WINDOW,
    "initializer_range": 0.4,
    "eos_token_id": 0,
    "bos_token_id": None,
    "pad_token_id": None,
}
GEMMA2 = {"num_hidden_layers": 2, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16}
GEMMA3 = {
    "num_hidden_layers": 3,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 16,
}
ALL_WINDOWED, MIXED = (
    "every layer sees the last 64 tokens only",
    "layers see the last 64 tokens only, the others see all",
)
CASES = {
    "mistral": ({"num_hidden_layers": 2}, ALL_WINDOWED),
    "gemma2": (GEMMA2, MIXED),
    "gemma3_text": (GEMMA3, MIXED),
}


def make_model(path: Path, family: str, **settings: object) -> Path:
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **{**COMMON, **settings})).save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {"<eos>": 0} | {character: index for index, character in enumerate(alphabet[: VOCAB - 1], start=1)}
    Tokenizer(models.BPE(vocab=vocab, merges=[])).save(str(path / "tokenizer.json"))
    return path


def load(path: Path, *, pool_blocks: int) -> tuple[LoadedModel, list[str]]:
    lines: list[str] = []
    model = load_model(
        ModelSettings(
            model=str(path), device="cpu", torch_threads=1, model_cache_dir=str(path / "cache"), dtype="float32"
        ),
        EngineSettings(block_tokens=B, pool_tokens=pool_blocks * B),
        trust_group="tests",
        hash_algorithm=HashAlgorithm.XXH3_128,
        report=lines.append,
    )
    return model, lines


@pytest.fixture(scope="module")
def mistral_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_model(tmp_path_factory.mktemp("mistral"), "mistral", num_hidden_layers=2)


@torch.inference_mode()
def plain_greedy(path: Path, prompt: Sequence[int], count: int) -> tuple[int, ...]:
    """Greedy tokens by plain transformers, in its own attention and masks, and with no cache at all."""
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager", dtype=torch.float32).eval()
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].argmax()))
    return tuple(tokens[len(prompt) :])


@pytest.mark.parametrize("family", CASES)
async def test_sessions_taking_turns_are_answered_as_by_plain_transformers_and_keep_their_hits(
    family, store_node, make_worker, tmp_path, prompts
):
    """Eight sessions, round-robin on two workers, growing to six windows; the pools are too small to keep them all.

    Fails if a window loses a key or sees one too many anywhere on the way, or when a session finds nothing although the
    store is less than half full.
    """
    settings, said = CASES[family]
    path = make_model(tmp_path / "model", family, **settings)
    (first, lines), (second, _) = (load(path, pool_blocks=60) for _ in range(2))
    assert sum(said in line for line in lines) == 1, lines
    workers = [await make_worker(f"w{i}", model=model) for i, model in enumerate((first, second))]
    sessions = [prompts(PROMPT_MAX - 40 * (TURNS - 1) - 3 * number, salt=number) for number in range(SESSIONS)]
    replies = []
    for turn in range(TURNS):
        if turn:
            sessions = [[*session, *prompts(40, salt=100 * turn + i)] for i, session in enumerate(sessions)]
        asked = (workers[(turn + i) % 2].decode(session, max_tokens=3) for i, session in enumerate(sessions))
        answers = await asyncio.gather(*asked)
        replies += list(zip(map(list, sessions), answers, strict=True))
        for worker in workers:
            await worker.published()
        if turn:
            before = [len(session) - 40 for session in sessions]
            assert [reply.cached.total for reply in answers] == [length // B * B for length in before]
    stat = store_node.node.stat()
    assert 2 * stat.committed_blocks < stat.committed_blocks + stat.free_blocks
    for session, reply in replies[:: 5 if family == "mistral" else 9]:
        assert reply.token_ids == plain_greedy(path, session, 3)


async def test_a_hit_of_six_windows_moves_one(store_node, make_worker, mistral_dir, prompts):
    """Fails when more is fetched or held than the window needs, or usage counts what was moved instead of what was
    saved."""
    model, _ = load(mistral_dir, pool_blocks=64)
    small, _ = load(mistral_dir, pool_blocks=2 * WINDOW_BLOCKS + 2)
    assert model.window == KeyWindow(WINDOW, B)
    worker, tight = await make_worker("worker", model=model), await make_worker("tight", model=small)
    token_ids = prompts(PROMPT_MAX)
    cold = await worker.cold(token_ids)
    computed = await worker.decode(token_ids)
    await worker.published()
    read_before = store_node.node.stat().read_bytes
    loaded = await tight.decode(token_ids)
    assert loaded.cached == CachedTokens(shared_memory=PROMPT_MAX - B)
    assert store_node.node.stat().read_bytes - read_before == WINDOW_BLOCKS * model.namespace.layout.block_bytes
    for reply in (computed, loaded, await tight.cold(token_ids), await worker.decode(token_ids)):
        assert reply.same_answer_as(cold)


async def test_prefill_and_decode_apart_hand_over_the_window_only(store_node, make_worker, mistral_dir, prompts):
    (first, _), (second, _) = (load(mistral_dir, pool_blocks=60) for _ in range(2))
    prefill, decode = await make_worker("prefill", model=first), await make_worker("decode", model=second)
    token_ids = prompts(PROMPT_MAX, salt=3)
    cold = await decode.cold(token_ids)
    result = await prefill.prefill(token_ids)
    assert (result.reused_blocks, result.published_blocks) == (0, PROMPT_MAX // B)
    reply = await decode.decode(token_ids, computed_from=result.reused_blocks)
    assert reply.same_answer_as(cold)
    assert reply.cached == CachedTokens()  # nobody was spared the work, though none of it was done here
    longer = [*token_ids, *prompts(3 * B, salt=4)]
    again = await decode.prefill(longer)  # behind a window that came from the store just now
    assert (again.reused_blocks, again.published_blocks) == (PROMPT_MAX // B, PROMPT_MAX // B + 3)


async def test_sequences_that_gave_their_blocks_up_read_one_window_back(store_node, make_worker, mistral_dir, prompts):
    """Five sequences that grow past their window, to ten blocks each, with 32 for all. Fails if a block comes back
    wrong or is leaked, if more than a window is moved for one, or if all of it is computed again."""
    steps = PricedSteps(price=1_000)  # nothing is read back so slowly that computing it would be sooner
    model, _ = load(mistral_dir, pool_blocks=60)
    worker = await make_worker("worker", model=model, steps=steps)
    engine = worker.worker.engine
    asked = [prompts(4 * B + number, salt=50 + number) for number in range(5)]
    cold = [await worker.cold(token_ids, max_tokens=56) for token_ids in asked]
    taken = engine.pool.take(engine.pool.num_blocks - 32)
    read_before = store_node.node.stat().read_bytes
    try:
        replies = await meet(worker, steps, [worker.decode(token_ids, max_tokens=56) for token_ids in asked])
    finally:
        engine.pool.unref_all(taken.block_ids)
    for reply, want in zip(replies, cold, strict=True):
        assert reply.same_answer_as(want)
        assert reply.cached.total == 0
    preemption = engine.steps.preemption
    assert preemption.num_preemptions > 0
    assert preemption.num_reloads > 0
    read = store_node.node.stat().read_bytes - read_before
    assert read <= preemption.num_reloads * WINDOW_BLOCKS * model.namespace.layout.block_bytes
    assert worker.faults == []


async def test_a_window_from_another_host_gives_the_same_bits(store_node, make_worker, mistral_dir, prompts):
    (first, _), (second, _) = (load(mistral_dir, pool_blocks=60) for _ in range(2))
    near, far = await make_worker("near", model=first), await make_worker("far", near=False, model=second)
    token_ids = prompts(PROMPT_MAX - 11, salt=5)
    cold = await near.decode(token_ids)
    await near.published()
    remote = await far.decode(token_ids, hint_nodes=("node-1",))
    assert remote.cached == CachedTokens(grpc=(PROMPT_MAX - 11) // B * B)
    assert remote.same_answer_as(cold)
    again = await far.decode(token_ids)  # its pool has that window, and not what was before it
    assert again.cached == CachedTokens(device=(PROMPT_MAX - 11) // B * B)
    assert again.same_answer_as(cold)
    unpublished = CacheControl(publish=False)
    assert (await far.decode(token_ids, cache=unpublished, hint_nodes=("node-1",))).same_answer_as(cold)


async def test_what_is_lost_from_the_store_behind_the_window_is_computed(store_node, make_worker, mistral_dir, prompts):
    """The tail of a prefix is evicted first: the window before it is loaded then, and the rest computed."""
    (first, _), (second, _) = (load(mistral_dir, pool_blocks=60) for _ in range(2))
    near, other = await make_worker("near", model=first), await make_worker("other", model=second)
    token_ids = prompts(PROMPT_MAX - 40, salt=6)
    await near.decode(token_ids)
    await near.published()
    longer = [*token_ids[: 30 * B], *prompts(60, salt=7)]
    reply = await other.decode(longer)
    assert reply.cached == CachedTokens(shared_memory=30 * B)
    assert reply.same_answer_as(await near.cold(longer))
