"""The setting `speculation` becomes a drafter, or says why it cannot."""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest
from tokenizers import Tokenizer, models

from headrace.config import EngineSettings, ModelSettings
from headrace.core.block import HashAlgorithm
from headrace.core.clock import SystemClock
from headrace.core.errors import ConfigInvalid
from headrace.core.generation import SamplingParams
from headrace.engine.check_model import check_draft_model
from headrace.engine.draft_ngram import NgramDrafter
from headrace.engine.drafter import Draft, DraftWish
from headrace.engine.load_drafter import load_drafter
from headrace.engine.load_model import LoadedModel, load_model

from .tiny_models import VOCAB_SIZE, make_model

ENGINE = EngineSettings(block_tokens=16, pool_tokens=512, batch_sequences_max=4, prefill_chunk_tokens=32)


def save_model(path: Path, *, seed: int, tokens: int = VOCAB_SIZE) -> Path:
    make_model("llama", seed=seed).save_pretrained(path)
    vocab = {f"t{number}": number for number in range(tokens)}
    Tokenizer(models.WordLevel(vocab, unk_token="t0")).save(str(path / "tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = tmp_path_factory.mktemp("models")
    settings = ModelSettings(model=str(save_model(path / "target", seed=1)), model_cache_dir=str(path), torch_threads=1)
    return load_model(settings, ENGINE, trust_group="", hash_algorithm=HashAlgorithm.XXH3_128, report=lambda line: None)


def load(target: LoadedModel, speculation: str, lines: list[str]):
    settings = ModelSettings(model=str(target.path), model_cache_dir=str(target.path.parent), torch_threads=1)
    engine = EngineSettings(
        block_tokens=16, pool_tokens=512, batch_sequences_max=4, prefill_chunk_tokens=32, speculation=speculation
    )
    return load_drafter(target, settings, engine, clock=SystemClock(), report=lines.append)


def test_off_is_no_drafter_and_ngram_needs_no_model(target):
    assert load(target, "off", []) is None
    assert isinstance(load(target, "ngram", []), NgramDrafter)


def test_a_model_without_exactness_says_that_drafts_may_change_an_answer(target):
    lines: list[str] = []
    load(replace(target, exact=False), "ngram", lines)
    assert "exact mode is off" in lines[0]


def test_a_draft_model_with_other_tokens_is_refused_with_the_reason(target, tmp_path):
    """Fails when ids that mean something else would be drafted for ever, in vain."""
    other = save_model(tmp_path / "other", seed=2, tokens=VOCAB_SIZE - 1)
    with pytest.raises(ConfigInvalid, match=r"'t159'.*must share its model's tokenizer"):
        load(target, str(other), [])


def test_a_draft_model_is_looked_at_before_anything_is_loaded(target, tmp_path):
    """Fails when a system starts for half a minute to say what its two directories say at once."""
    other = save_model(tmp_path / "other", seed=2, tokens=VOCAB_SIZE - 1)
    for speculation, why in (
        (str(other), "must share its model's tokenizer"),
        (str(tmp_path / "none"), "no such directory"),
        (str(target.path), ""),
        ("ngram", ""),
    ):
        refused = pytest.raises(ConfigInvalid, match=why) if why else nullcontext()
        with refused:
            check_draft_model(ModelSettings(model=str(target.path)), replace(ENGINE, speculation=speculation))


def test_what_is_no_model_is_refused_with_the_choices(target):
    with pytest.raises(ConfigInvalid, match="must be off, ngram or a model"):
        load(target, "./nowhere", [])


def test_a_draft_model_reads_a_long_prompt_in_chunks_and_then_follows_it(target, tmp_path):
    """Fails when a call reads more than a step's tokens, or drafts before it has read all, or with blocks it lacks."""
    lines: list[str] = []
    drafter = load(target, str(save_model(tmp_path / "small", seed=1)), lines)
    assert any("choose a smaller one" in line for line in lines), "it is as large as the target"
    prompt = [(7 * n) % VOCAB_SIZE for n in range(80)]
    sampling = SamplingParams(max_tokens=50)
    wish = DraftWish(1, prompt, len(prompt), sampling, most=3)
    assert [drafter.draft([wish]) for _ in range(2)] == [[Draft()]] * 2, "64 of 80 tokens are read"
    (draft,) = drafter.draft([wish])
    assert len(draft.token_ids) == 3
    # One token was right, another followed: it is read with the right one, and what was drafted behind is forgotten.
    grown = [*prompt, draft.token_ids[0], 5]
    (again,) = drafter.draft([DraftWish(1, grown, len(prompt), sampling, most=2)])
    drafter.leave(1)
    fresh = load(target, str(tmp_path / "small"), [])
    wanted = DraftWish(2, grown, len(prompt), sampling, most=2)
    assert [fresh.draft([wanted]) for _ in range(3)][-1] == [again]
    assert drafter.token_s() > 0
