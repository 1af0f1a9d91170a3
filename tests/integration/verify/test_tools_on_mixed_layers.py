"""Measurements and experiments on a model some of whose layers have a window: on a worker's pool of two parts."""

import asyncio
import json
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tiny_model import make_tiny_model
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.admin.cli import main
from headrace.bench.measure_engine import Extent, measure_engine
from headrace.config import STORE_CODECS, Config, load_config
from headrace.core.block import HashAlgorithm, hash_prompt
from headrace.core.clock import SystemClock
from headrace.core.generation import SamplingParams
from headrace.core.key_window import KeyWindow
from headrace.core.limits import POOL_NAMES_PER_BLOCK_MAX, PUBLISH_BATCH_BLOCKS, PUBLISH_QUEUE_BLOCKS
from headrace.core.model_work import MachineLimits
from headrace.core.part_ids import PartIds
from headrace.core.prefix_map import PrefixMap
from headrace.diagnose.diagnose_model import _decode_row, _prefill_row, model_work
from headrace.engine.drafter import DraftWish
from headrace.engine.layered_kv import LayeredKV
from headrace.engine.load_drafter import load_drafter
from headrace.engine.load_model import LoadedModel, load_model
from headrace.engine.lone_sequence import LonePool, LoneSequence
from headrace.engine.make_pool import with_pool
from headrace.engine.model_runner import SequenceStep
from headrace.simulate.windowed_memory import WindowedMemory
from headrace.verify.measure_codec import _CodedPool, _CodedStore, _Comparison
from headrace.verify.run_requests import run_requests
from headrace.verify.verify_together import verify_together

B, WINDOW, LAYERS = 16, 40, 4
HELD = 2 * 3 + 2  # blocks of layers with the window that a sequence holds at most
FAMILIES = {
    "mixed": ["sliding_attention"] * 3 + ["full_attention"],
    "all windowed": ["sliding_attention"] * 4,
    "no window": ["full_attention"] * 4,
}


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Models of the same weights, with windows in three of four layers, in all, and in none."""
    return {name: make_model(tmp_path_factory.mktemp("model") / "tiny", kinds) for name, kinds in FAMILIES.items()}


def make_model(path: Path, kinds: list[str]) -> Path:
    make_tiny_model(path)
    torch.manual_seed(3)
    config = AutoConfig.for_model(
        "qwen2", vocab_size=300, hidden_size=64, intermediate_size=96, num_hidden_layers=LAYERS, num_attention_heads=4,
        num_key_value_heads=2, initializer_range=0.2, use_sliding_window="sliding_attention" in kinds,
        layer_types=kinds, eos_token_id=0, bos_token_id=None, max_position_embeddings=1_024, sliding_window=WINDOW,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return path


def settings(path: Path, **flags: object) -> Config:
    given = {"model": str(path), "model_cache_dir": str(path.parent), "torch_threads": 1, "block_tokens": B}
    return load_config(given | flags, config_file=None, environ={})


def load(path: Path, **engine: object) -> LoadedModel:
    config = settings(path)
    return load_model(
        config.model,
        replace(config.engine, **engine),  # type: ignore[arg-type]
        trust_group="",
        hash_algorithm=HashAlgorithm.XXH3_128,
        report=lambda line: None,
    )


def run(path: Path, *arguments: str) -> dict:
    flags = [
        f"--model={path}",
        f"--model-cache-dir={path.parent}",
        f"--block-tokens={B}",
        "--torch-threads=1",
        "--json",
    ]
    done = CliRunner().invoke(main, [*arguments, *flags], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    return json.loads(done.stdout)


def make_tokens(count: int, *, seed: int = 0) -> list[int]:
    return [(7 * n * n + 13 * n + seed) % 290 + 5 for n in range(count)]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_pool_has_the_bytes_that_the_formula_says_and_sequences_hold_no_more(family, paths):
    """Three sequences of 20 blocks. Fails if a formula counts a layer's KV beyond its windows, or too little of it."""
    tokens, new = 20 * B - 8, 8
    model = load(paths[family], pool_tokens=3 * 20 * B, batch_sequences_max=3)
    windows, layer_bytes = model.windows, model.layer_token_bytes
    assert layer_bytes == 2 * 2 * 16 * 4  # K and V of two heads of 16 float32
    pool = windows.pool(3, 20 * B, block_tokens=B) * layer_bytes
    if family == "mixed":  # and one part that stands where nothing is read
        pool += 3 * B * layer_bytes
        assert isinstance(model.kv, LayeredKV)
        assert model.kv.num_near == min(60, 3 * HELD + PUBLISH_QUEUE_BLOCKS + PUBLISH_BATCH_BLOCKS)
    if family == "all windowed":  # the setting says how many blocks there are; so many are needed
        assert pool == 3 * HELD * B * LAYERS * layer_bytes < model.kv.num_bytes
    else:
        assert model.kv.num_bytes == pool
    watched = Watched(model)
    asyncio.run(
        run_requests(
            replace(model, runner=watched), settings(paths[family]).engine, [make_tokens(tokens)], reuse=False,
            sampling=SamplingParams(max_tokens=new, ignore_eos=True),
        )
    )  # fmt: skip
    held = windows.held(tokens + new, block_tokens=B) * layer_bytes
    assert 0.7 * held < watched.held_bytes_max <= held


class Watched:
    """A model's runner; writes down what a sequence holds at most."""

    def __init__(self, model: LoadedModel) -> None:
        self._model = model
        self.row_multiple = model.runner.row_multiple
        self.held_bytes_max = 0

    def run_step(self, steps: Sequence[SequenceStep]) -> torch.Tensor:
        layout = self._model.kv.layout
        for step in steps:
            wide, near = PartIds(self._model.kv.num_blocks).split(step.block_ids)
            held = len(wide) * layout.wide.block_bytes + sum(layout.near.block_bytes for _ in near)
            self.held_bytes_max = max(self.held_bytes_max, held)
        return self._model.runner.run_step(steps)


def test_steps_without_an_engine_hold_what_is_read_and_give_the_bits_of_whole_tables(paths):
    """A text in pieces of a window, against the same weights whose pool keeps everything and is told so."""
    tokens = make_tokens(200)
    for family in ("mixed", "all windowed"):
        model, whole = load(paths[family], pool_tokens=20 * B), load(paths[family], pool_tokens=20 * B)
        pool = LonePool(model)
        sequence = LoneSequence(pool)
        for step in sequence.steps(tokens, rows=64):
            logits = model.runner.run_step([step])
            near = pool.account.parts.split(step.block_ids)[1] if family == "mixed" else step.block_ids
            assert len(near) <= HELD
        table = whole.kv.whole_blocks(13)
        assert torch.equal(logits, whole.runner.run_step([SequenceStep(tuple(tokens), 0, table, 1)]))
        sequence.leave()
        assert pool.account.available_blocks == pool.account.num_blocks
        if family == "mixed":
            assert pool.account.available_near == model.kv.num_near


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_model_holds_what_its_layers_read_and_drafts_what_it_would_say(family, paths):
    """Long texts of four sequences, drafts right and wrong by turns, against greedy text of the draft model itself.

    Fails if a key that is read has been given away when a draft was wrong, or the pool is larger than a batch needs."""
    config = settings(
        paths[family], speculation=str(paths[family]), batch_sequences_max=4, prefill_chunk_tokens=48, draft_tokens=7,
        pool_tokens=2_048,
    )  # fmt: skip
    target = load(paths[family], pool_tokens=2_048)
    drafter = load_drafter(target, config.model, config.engine, clock=SystemClock(), report=lambda line: None)
    model = drafter._pool.model
    blocks = 1_024 // B + 1
    wide, near = {
        "mixed": (blocks, HELD + 1), "all windowed": (HELD + 1, 0), "no window": (blocks, 0)
    }[family]  # fmt: skip
    assert model.kv.num_blocks == 4 * wide
    assert (model.kv.num_near if family == "mixed" else 0) == 4 * near
    runner = AutoModelForCausalLM.from_pretrained(paths[family], attn_implementation="eager").eval()

    @torch.inference_mode()
    def greedy(text: list[int], count: int) -> list[int]:
        text = list(text)
        for _ in range(count):
            text.append(int(runner(torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
        return text[-count:]

    texts = {key: make_tokens(150 + 31 * key, seed=key) for key in range(4)}
    lengths = {key: len(text) for key, text in texts.items()}
    drafted = 0
    for turn in range(24):
        wishes = [DraftWish(k, t, lengths[k], SamplingParams(max_tokens=100), most=5) for k, t in texts.items()]
        for (key, text), draft in zip(texts.items(), drafter.draft(wishes), strict=True):
            if draft.token_ids:
                drafted += 1
                if turn % 8 == 0:
                    assert list(draft.token_ids) == greedy(text, 5)
                text.extend(draft.token_ids[: 1 + turn % 5])
                text.append(make_tokens(1, seed=turn + key)[0])  # not what it said: the rest of the draft was wrong
    assert drafted >= 24
    for key in texts:
        drafter.leave(key)
    assert drafter._pool.account.available_blocks == drafter._pool.account.num_blocks


def test_the_same_prompts_alone_and_in_company(paths):
    model = load(paths["mixed"], pool_tokens=2_048)
    found = verify_together(model, settings(paths["mixed"]).engine, make_tokens(1_024), report=lambda line: None)
    assert found.bit_equal
    assert found.as_meant


@pytest.mark.parametrize(("family", "blocks", "near_blocks"), [("mixed", 60, 30), ("all windowed", 40, 40)])
def test_a_plans_memory_finds_what_a_workers_pool_finds(family, blocks, near_blocks, paths):
    """Prompts of a few conversations one after another, on a pool too small for all of them. Fails if the simulation of
    `headrace plan` keeps what a pool gives up, or gives up what it keeps."""
    model = with_pool(load(paths[family], pool_tokens=4 * B), num_blocks=blocks, num_near=near_blocks)
    draw = random.Random(4)
    talks = [make_tokens(48, seed=n) for n in range(8)]
    prompts = []
    for number in range(48):
        talk = draw.choice(talks[: 3 + number // 8])
        if len(talk) < 400:
            talk += make_tokens(draw.randrange(20, 90), seed=100 + number)
        prompts.append(talk[: draw.choice((len(talk), len(talk), 48))])
    ran = asyncio.run(
        run_requests(
            model, settings(paths[family]).engine, prompts, one_by_one=True, reuse=True,
            sampling=SamplingParams(max_tokens=1),
        )
    )  # fmt: skip
    names = 1 if family == "mixed" else POOL_NAMES_PER_BLOCK_MAX
    memory = WindowedMemory(
        blocks * B * names, near_tokens=near_blocks * B, window=KeyWindow(WINDOW, B), holder=0, held=PrefixMap()
    )
    found_tokens = []
    for prompt in prompts:
        chain = hash_prompt(model.namespace.id, prompt, block_tokens=B, algorithm=HashAlgorithm.XXH3_128).chain
        found = min(memory.num_leading(chain), (len(prompt) - 1) // B)
        memory.begin(chain[:found], len(prompt) + 1)
        memory.end(chain[:found], len(prompt) + 1)
        memory.add_computed(chain, first=found)
        found_tokens.append(found * B)
    cached = [answer.cached_tokens for answer in ran.answers]
    assert 0.2 * sum(map(len, prompts)) < sum(cached) < 0.8 * sum(map(len, prompts)), "some are found, some are not"
    equal = sum(one == other for one, other in zip(found_tokens, cached, strict=True))
    assert equal >= 0.95 * len(prompts), "but for which of several blocks of one age goes first"
    assert sum(found_tokens) == pytest.approx(sum(cached), rel=0.02)


def test_experiments_run_on_two_parts(paths):
    validity = run(paths["mixed"], "learn", "validity")
    assert validity["differ_with_more_text"] == validity["differ_before_change"] == 0
    # The layer that sees everything is the last one: what it is given knows of a token through three windows.
    assert validity["differ_from_change_on"] == 1 + 3 * (WINDOW - 1) < validity["compared_from_change_on"]
    raw, *lossy = run(paths["mixed"], "learn", "codecs")["rows"]
    assert (raw["kv_error"], raw["logit_error_mean"]) == (0.0, 0.0)
    assert all(0 < row["kv_error"] < 0.1 and not row["drifts"] for row in lossy)


@pytest.mark.parametrize("codec", ["int8", "int8_token"])
def test_a_codec_is_measured_through_both_parts(codec, paths):
    """Of a store and of a pool. Fails if a part does not go through the codec, or is read from elsewhere."""
    room = 9 * 8 * B
    model = load(paths["mixed"], pool_tokens=room, batch_sequences_max=room)
    layout = replace(model.kv.layout, codec=codec)
    coded = _CodedStore(model, layout) if codec in STORE_CODECS else _CodedPool(model, layout)
    raw = _CodedPool(model, model.kv.layout)  # nothing is lost: the same numbers in another pool
    prompts = [make_tokens(4 * B + 1, seed=n) for n in range(3)]
    lossy = _Comparison(model, coded, 4 * B).answers(prompts, 3, print)
    exact = _Comparison(model, raw, 4 * B).answers(prompts, 3, print)
    assert 0 < lossy.error_sum / lossy.logits < lossy.error_max < 2
    assert (exact.error_max, exact.agreeing) == (0, exact.positions)


def test_steps_are_measured_and_diagnosed_on_two_parts(paths):
    small = Extent((100,), (1, 3), (100,), steps=2, rounds=1, round_s_max=60.0)
    report = measure_engine(settings(paths["mixed"]), report=lambda line: None, extent=small)
    assert [(row.what, row.batch) for row in report.rows] == [("prefill", 1), ("decode", 1), ("decode", 3)]
    model = load(paths["mixed"], pool_tokens=4 * 320, batch_sequences_max=4)
    work, limits = model_work(model), MachineLimits(flops_per_s=1e11, bytes_per_s=1e10)
    row = _decode_row(model, work, limits, 4, 256, print)
    # Of 257 keys three layers read 40.
    assert row.work.num_bytes == work.step_bytes + 4 * (257 + 3 * WINDOW) * model.layer_token_bytes
    assert row.measured_ms > 0
    assert _prefill_row(model, work, limits, 16, print).measured_ms > 0
