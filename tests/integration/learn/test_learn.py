"""Every experiment of `headrace learn`, run as a reader of docs/learn runs it, on a tiny model."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from tiny_model import make_tiny_model

from headrace.admin.cli import main
from headrace.admin.learn_commands import EXPERIMENTS


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("learn") / "tiny-llama", context_tokens_max=1_024)


def learn(name: str, model: Path, *arguments: str) -> str:
    done = CliRunner().invoke(
        main,
        ["learn", name, f"--model={model}", "--block-tokens=16", "--torch-threads=1", *arguments],
        catch_exceptions=False,
    )
    assert done.exit_code == 0, done.stderr
    return done.stdout


def facts_of(name: str, model: Path) -> dict[str, Any]:
    return json.loads(learn(name, model, "--json"))


def test_what_follows_changes_nothing_and_a_changed_token_all_from_itself_on(model: Path):
    facts = facts_of("validity", model)
    assert facts["differ_with_more_text"] == 0
    assert facts["differ_before_change"] == 0
    assert facts["differ_from_change_on"] == facts["compared_from_change_on"] > 0


def test_the_formula_is_what_transformers_cache_takes(model: Path):
    facts = facts_of("memory", model)
    assert len(facts["rows"]) == 5
    for row in facts["rows"]:
        assert row["measured_bytes"] == row["formula_bytes"] == row["tokens"] * facts["token_bytes"]
        assert 0 <= row["block_bytes"] - row["formula_bytes"] < 16 * facts["token_bytes"]


def test_turning_makes_up_for_the_position_in_the_first_layer_only(model: Path):
    facts = facts_of("positions", model)
    assert facts["values_first_layer"] == 0
    assert facts["keys_first_layer"] > 0.1
    assert facts["turned_keys_first_layer"] < 0.01
    assert facts["turned_keys_last_layer"] > 0.01


def test_paged_room_is_used_best_without_copies(model: Path):
    facts = facts_of("paging", model)
    assert facts["used_share"]["preallocated"] < 0.5 < facts["used_share"]["paged"]
    assert facts["longest_contiguous_tokens"] < facts["free_tokens"] / 2
    assert facts["turned_away_paged"] == 0 < facts["turned_away_contiguous"]


def test_a_window_bounds_what_a_sequence_holds_and_changes_no_answer(model: Path):
    facts = facts_of("windows", model)
    block_bytes = 2 * 4 * 2 * 32 * 4 * 16  # K and V of four layers of two heads of 32 float32, 16 tokens
    full, held = facts["prompt_tokens"] // 16 * block_bytes, (2 * 2 + 2) * block_bytes
    assert facts["held_bytes_full"] >= full
    assert facts["held_bytes_window"] <= held
    assert facts["held_bytes_window"] < facts["held_bytes_mixed"] <= facts["held_bytes_full"] / 4 + held * 3 / 4
    assert facts["same_answers"]


def test_raw_loses_nothing_and_no_codec_drifts(model: Path):
    raw, *lossy = facts_of("codecs", model)["rows"]
    assert (raw["codec"], raw["kv_error"], raw["logit_error_mean"]) == ("raw", 0.0, 0.0)
    assert [row["codec"] for row in lossy] == ["fp8", "int8"]
    for row in lossy:
        assert 0 < row["kv_error"] < 0.1
        assert row["bytes_ratio"] < 0.6
    assert not any(row["drifts"] for row in (raw, *lossy))


def test_a_common_beginning_is_computed_once(model: Path):
    facts = facts_of("sharing", model)
    assert facts["computed_alone"] == facts["prompt_tokens"]
    assert facts["computed_shared"] < facts["prompt_tokens"] / 3
    assert facts["same_answers"]


def test_batches_change_no_answer(model: Path):
    facts = facts_of("batching", model)
    assert [row["batch"] for row in facts["rows"]] == [1, 2, 4, 8]
    assert facts["same_answers"]


@pytest.mark.parametrize("name", [function.removeprefix("show_") for function in EXPERIMENTS])
def test_the_experiments_print_tables_and_what_they_show(name: str, model: Path):
    lines = learn(name, model).splitlines()
    assert len(lines) > 5
    assert lines[-1].endswith(".")
