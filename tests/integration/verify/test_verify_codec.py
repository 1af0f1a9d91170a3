"""`headrace verify --codec` as a user runs it, on a tiny model, and what a start says of it afterwards."""

import json
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from tiny_model import make_tiny_model

from headrace.admin.cli import main
from headrace.config import load_config
from headrace.engine.load_model import describe_codec
from headrace.verify.measure_codec import _Answers as Answers


def verify(model: Path, *arguments: str):
    """As a user runs it."""
    settings = [f"--model={model}", f"--model-cache-dir={model.parent}", "--block-tokens=16", "--torch-threads=1"]
    return CliRunner().invoke(main, ["verify", *settings, *arguments], catch_exceptions=False)


@pytest.mark.parametrize(
    ("codec", "setting", "scales"),
    [("int8", {"store_codec": "int8"}, (1 / 16 + 1 / 16) / 2), ("fp8_token", {"pool_codec": "fp8"}, 1 / 16)],
)
def test_a_codec_is_measured_on_a_hundred_prompts_and_a_start_says_what_was_found(tmp_path, codec, setting, scales):
    """Fails if a figure were missing, a codec lost nothing or all, or the outcome were not found again."""
    model = make_tiny_model(tmp_path / "tiny-llama", context_tokens_max=64)  # prompts of three blocks
    config = load_config(
        {"model": str(model), "model_cache_dir": str(tmp_path), "block_tokens": 16, "torch_threads": 1, **setting},
        environ={},
    )
    before = describe_codec(config.model, config.engine, report=print)
    assert f"headrace verify --codec {codec}" in before
    done = verify(model, f"--codec={codec}", "--tokens=3", "--json")
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["codec"] == codec
    assert (found["prompts"], found["positions"]) == (100, 300)
    assert found["bytes_ratio"] == pytest.approx(1 / 4 + scales)  # float32, 16 tokens of 16 numbers
    assert 0.8 < found["greedy_agreement"] <= 1
    assert 0 < found["logit_error_mean"] < found["logit_error_max"] < 1
    assert 0 < found["kl_mean"] < 0.1
    assert found["prefix_tokens"] == 48
    assert 0 < abs(found["perplexity_change"]) < 0.1
    said = describe_codec(config.model, config.engine, report=print)
    assert "measured on 100 prompts" in said
    assert f"{found['greedy_agreement']:.1%}" in said


def test_a_lossy_store_is_not_claimed_to_be_bit_equal(tmp_path: Path):
    refused = verify(make_tiny_model(tmp_path / "tiny-llama"), "--store-codec=int8")
    assert refused.exit_code != 0
    assert "headrace verify --codec int8" in refused.output + refused.stderr


def test_the_figures_are_those_of_the_logits():
    """Two prompts of two positions by hand. Fails if a figure were taken of other rows, or a prompt's end not seen."""
    answers = Answers()
    raw = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    answers.add(raw, raw + torch.tensor([[0.5, 0.5], [0.0, 0.0]]))  # the same distribution, half of it shifted
    answers.end_prompt()
    answers.add(raw, torch.tensor([[3.0, 1.0], [2.0, 0.0]]))
    answers.end_prompt()
    assert (answers.prompts, answers.positions, answers.logits) == (2, 4, 8)
    assert (answers.agreeing, answers.equal_texts) == (3, 1)
    assert (answers.error_max, answers.error_sum) == (3.0, 4.0)
    left, right = torch.tensor([0.0, 1.0]).softmax(0), torch.tensor([3.0, 1.0]).softmax(0)
    assert answers.kl_sum == pytest.approx(float((left * (left / right).log()).sum()), rel=1e-5)
