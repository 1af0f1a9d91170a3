"""Loading: what is ready afterwards, what its namespace says, and what is refused with which words."""

import json
import shutil
import threading
from dataclasses import replace

import pytest
import torch

from headrace.config import EngineSettings, ModelSettings
from headrace.core.block import HashAlgorithm
from headrace.core.errors import ConfigInvalid, ModelRefused
from headrace.engine.check_model import check_model
from headrace.engine.load_model import load_model
from headrace.engine.model_runner import SequenceStep
from tests.unit.engine_model.tiny_models import VOCAB_SIZE, make_model

ENGINE = EngineSettings(block_tokens=16, pool_tokens=320)


@pytest.fixture
def tiny(tmp_path):
    """A checkpoint directory of a tiny llama."""
    path = tmp_path / "tiny-llama"
    make_model("llama").save_pretrained(path)
    return path


def load(path, tmp_path, *, engine=ENGINE, said=None, **settings):
    chosen = ModelSettings(model=str(path), model_cache_dir=str(tmp_path / "cache"), torch_threads=1, **settings)
    return load_model(
        chosen,
        engine,
        trust_group="default",
        hash_algorithm=HashAlgorithm.XXH3_128,
        report=(lambda line: None) if said is None else said.append,
    )


def test_a_loaded_model_answers_and_says_what_others_need_to_know(tiny, tmp_path):
    (tiny / "generation_config.json").write_text(json.dumps({"eos_token_id": [3, 5]}))
    loaded = load(tiny, tmp_path)
    logits = loaded.runner.run_step([SequenceStep((1, 2, 3), 0, [7], 1)])
    assert logits.shape == (1, VOCAB_SIZE)
    assert logits.dtype == torch.float32
    assert (loaded.name, loaded.path, loaded.context_tokens_max) == ("tiny-llama", tiny, 512)
    assert loaded.eos_token_ids == {3, 5}
    assert loaded.exact
    assert loaded.kv.num_blocks == 20
    assert loaded.kv.layout.shape == (2, 2, 2, 16, 16)


@pytest.mark.parametrize("content", ["{", '{"eos_token_id": 2}\xff'])
def test_a_damaged_generation_config_is_refused_by_its_name(tiny, tmp_path, content):
    (tiny / "generation_config.json").write_bytes(content.encode("latin-1"))
    with pytest.raises(ModelRefused, match=r"generation_config\.json cannot be used"):
        load(tiny, tmp_path)


def test_the_namespace_is_the_same_on_the_next_start_and_the_self_tests_are_not_run_again(tiny, tmp_path):
    said = []
    first = load(tiny, tmp_path, said=said).namespace
    again = load(tiny, tmp_path, said=said).namespace
    assert first == again
    assert len([line for line in said if "checking" in line]) == 1


def test_other_weights_positions_numbers_or_tokenizer_give_another_namespace(tiny, tmp_path):
    """Fails if one of the digests does not read what it names."""
    base = load(tiny, tmp_path).namespace
    other_weights = tmp_path / "other" / "tiny-llama"
    make_model("llama", seed=1).save_pretrained(other_weights)
    assert base.differing_fields(load(other_weights, tmp_path).namespace) == ["weights_digest", "numerics_probe"]
    other_numbers = load(tiny, tmp_path, dtype="bfloat16").namespace
    assert base.differing_fields(other_numbers) == ["layout.dtype", "numerics_probe"]
    (tiny / "tokenizer.json").write_text("{}")
    assert base.differing_fields(load(tiny, tmp_path).namespace) == ["tokenizer_digest"]
    config = json.loads((tiny / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 500_000.0
    (tiny / "config.json").write_text(json.dumps(config))
    assert "position_digest" in base.differing_fields(load(tiny, tmp_path).namespace)


def test_a_quantised_pool_is_exact_within_itself_and_says_what_it_is(tiny, tmp_path):
    """Fails if workers with and without it shared blocks, or the self-tests were not run on what the pool holds."""
    said = []
    base = load(tiny, tmp_path).namespace
    loaded = load(tiny, tmp_path, engine=replace(ENGINE, pool_codec="int8"), said=said)
    assert loaded.exact
    assert loaded.kv.layout == loaded.namespace.layout == replace(base.layout, codec="int8_token")
    assert base.differing_fields(loaded.namespace) == ["layout.codec", "numerics_probe"]
    assert loaded.namespace.numerics_probe
    lines = [line for line in said if "codec" in line]
    assert len(lines) == 1
    assert "reuse changes nothing" in lines[0]
    assert "headrace verify --codec int8_token" in lines[0]


def test_a_damaged_check_file_costs_a_new_check_and_nothing_else(tiny, tmp_path):
    said = []
    first = load(tiny, tmp_path).namespace
    for file in (tmp_path / "cache" / "checks").iterdir():
        file.write_bytes(b"{half")
    assert load(tiny, tmp_path, said=said).namespace == first
    assert any("checking" in line for line in said)


def test_a_remembered_check_is_not_believed_when_the_probe_gives_other_bytes(tiny, tmp_path):
    """As after a change of kernels that no version tells: the digest of the probe prompt decides."""
    said = []
    load(tiny, tmp_path)
    for file in (tmp_path / "cache" / "checks").iterdir():
        stored = json.loads(file.read_text())
        if stored["key"]["what"] == "numerics":
            stored["value"]["digest"] = "0" * 32
            file.write_text(json.dumps(stored))
    loaded = load(tiny, tmp_path, said=said)
    assert any("checking" in line for line in said)
    assert loaded.namespace.numerics_probe not in ("", "0" * 32)


def test_mixture_of_experts_is_served_and_says_that_it_is_not_exact(tmp_path):
    path, said = tmp_path / "tiny-mixtral", []
    make_model("mixtral").save_pretrained(path)
    loaded = load(path, tmp_path, said=said)
    assert not loaded.exact
    assert loaded.namespace.numerics_probe == ""
    assert any("exact mode is off" in line and "mixture of experts" in line for line in said)


def test_exact_mode_can_be_switched_off(tiny, tmp_path):
    loaded = load(tiny, tmp_path, exact=False)
    assert not loaded.exact
    assert loaded.namespace.numerics_probe == ""


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"model_type": "bloom"}, "attention interface"),
        ({"model_type": "llama4_text"}, "chunked attention"),
        ({"model_type": "no-such-architecture"}, "config.json"),
        ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}}, "dynamic"),
    ],
)
def test_a_checkpoint_that_cannot_be_cached_is_refused_by_name(tiny, tmp_path, change, words):
    config = json.loads((tiny / "config.json").read_text())
    (tiny / "config.json").write_text(json.dumps({**config, **change}))
    with pytest.raises(ModelRefused, match=words) as refused:
        load(tiny, tmp_path)
    assert refused.value.model == "tiny-llama"


def test_a_directory_without_weights_is_refused(tiny, tmp_path):
    (tiny / "model.safetensors").unlink()
    with pytest.raises(ModelRefused, match="holds no"):
        load(tiny, tmp_path)


def test_a_truncated_weight_file_is_refused(tiny, tmp_path):
    file = tiny / "model.safetensors"
    file.write_bytes(file.read_bytes()[:1_000])
    with pytest.raises(ModelRefused, match="weights cannot be loaded"):
        load(tiny, tmp_path)


@pytest.mark.parametrize("name", ["/nowhere/at/all", "./missing"])
def test_a_missing_directory_is_refused(name, tmp_path):
    with pytest.raises(ModelRefused, match="no such directory"):
        load(name, tmp_path)


def test_a_name_that_is_no_hub_id_is_refused_with_the_remedy(tmp_path):
    with pytest.raises(ModelRefused, match="give a directory"):
        load("not a hub id", tmp_path)


def test_a_name_that_the_hub_does_not_have_is_refused_before_anything_starts():
    """Fails when the workers are the first to ask: Ray and all else would have started by then."""
    with pytest.raises(ModelRefused, match="give a directory"):
        check_model(ModelSettings(model="not a hub id"))


def test_a_block_longer_than_the_context_is_refused(tiny, tmp_path):
    with pytest.raises(ConfigInvalid, match="block_tokens"):
        load(tiny, tmp_path, engine=EngineSettings(block_tokens=64, pool_tokens=320, context_tokens_max=32))


def test_a_copied_directory_is_the_same_model(tiny, tmp_path):
    copied = tmp_path / "elsewhere" / "tiny-llama"
    shutil.copytree(tiny, copied)
    assert load(copied, tmp_path).namespace == load(tiny, tmp_path).namespace


def test_loading_leaves_no_thread_behind(tiny, tmp_path):
    """Fails when torch's threads of the load stay: with more of them than cores none spins while it waits for another,
    and two threads do a step no faster than one."""
    loading = set()

    class Listening(list):
        def append(self, line):
            loading.add(threading.current_thread())

    load(tiny, tmp_path, said=Listening())
    assert loading
    assert not [thread for thread in loading if thread.is_alive()]
