"""Everything at once on tiny models of several architectures: batches, chunks, preemption, sharing, windows, drafts."""

import random
from pathlib import Path

import pytest

from headrace.config import EngineSettings, ModelSettings
from headrace.core.block import HashAlgorithm
from headrace.engine.load_model import load_model
from headrace.verify.verify_together import verify_together
from tests.unit.engine_loop.conftest import make_byte_tokenizer
from tests.unit.engine_model.tiny_models import VOCAB_SIZE, make_model

BLOCK_TOKENS = 16


@pytest.mark.parametrize(
    "case",
    ["llama", "qwen3", "mistral with a window", "gemma2", "gemma3_text", "gpt2"],
    ids=lambda case: case.split()[0],
)
def test_company_changes_no_bit_of_an_answer(case: str, tmp_path: Path):
    """Fails if chunks, strangers, a preemption, a block of another run, a window or a draft leaves a trace."""
    make_model(case).save_pretrained(tmp_path)
    make_byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    settings = EngineSettings(block_tokens=BLOCK_TOKENS, pool_tokens=64 * BLOCK_TOKENS)
    model = load_model(
        ModelSettings(model=str(tmp_path), device="cpu", torch_threads=1, model_cache_dir=str(tmp_path / "cache")),
        settings,
        trust_group="tests",
        hash_algorithm=HashAlgorithm.XXH3_128,
        report=lambda line: None,
    )
    dice = random.Random(case)
    found = verify_together(
        model, settings, [dice.randrange(1, VOCAB_SIZE) for _ in range(400)], report=lambda line: None
    )
    assert model.exact
    assert (found.token_equal, found.bit_equal, found.as_meant) == (True, True, True), found
