"""`headrace bench speculation` on a tiny model: the figures belong together, and drafts change no answer."""

import json
from pathlib import Path

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM

from headrace.bench.measure_speculation import measure_speculation
from headrace.config import load_config


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=512,
        eos_token_id=0,
        bos_token_id=None,
    )
    LlamaForCausalLM(config).save_pretrained(path)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: index for index, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.save(str(path / "tokenizer.json"))
    return path


def test_both_engines_answer_alike_and_fewer_steps_bring_as_many_tokens(model_dir):
    """Fails when an answer differs with drafts, or the figures of a row do not add up."""
    flags = {"model": str(model_dir), "model_cache_dir": str(model_dir / "cache"), "torch_threads": 1}
    config = load_config(flags | {"block_tokens": 16}, environ={})
    lines: list[str] = []
    found = measure_speculation(config, tokens=40, batches=(1, 3), rounds=1, report=lines.append)
    assert (found.speculation, found.draft_tokens) == ("ngram", 7)
    assert [(row.what, row.batch) for row in found.rows] == [
        (what, batch) for what in ("copy", "free", "sampled") for batch in (1, 3)
    ]
    for row in found.rows:
        assert row.equal
        assert row.plain_steps >= 40
        assert 0 <= row.accepted_tokens <= row.drafted_tokens
        if row.batch == 1:  # several come one after another, and may share more steps or fewer
            assert row.plain_steps - row.drafted_steps <= row.accepted_tokens
        assert row.speedup > 0
    greedy = [row for row in found.rows if row.what != "sampled"]
    assert any(row.accepted_tokens for row in greedy), "a tiny model repeats itself"
    assert json.loads(json.dumps(found.as_json()))["rows"][0]["acceptance"] == round(found.rows[0].acceptance, 3)
    (table,) = found.tables()
    assert len(table[2]) == len(found.rows)
