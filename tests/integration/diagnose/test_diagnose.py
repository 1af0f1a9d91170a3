"""`headrace diagnose` as a user runs it, on a tiny model, and what its sentences say."""

import json
import math
from dataclasses import replace
from pathlib import Path

from click.testing import CliRunner
from tiny_model import make_tiny_model
from transformers import AutoModelForCausalLM

from headrace.admin.cli import main
from headrace.core.layer_windows import LayerWindows
from headrace.core.model_work import MachineLimits, ModelWork
from headrace.diagnose.diagnose_model import Diagnosis, MemoryRow, StepRow, different_tokens, left_in_cgroup
from headrace.diagnose.give_advice import give_advice
from tests.unit.engine_loop.conftest import make_byte_tokenizer
from tests.unit.engine_model.tiny_models import make_model

WORK = ModelWork(
    layer_weights=900_000,
    output_weights=100_000,
    weight_bytes=2,
    layer_attention_width=500,
    layer_kv_bytes=1_000,
    windows=LayerWindows((None, None)),
)
LIMITS = MachineLimits(flops_per_s=100e9, bytes_per_s=10e9)


def make_decode(batch: int, *, ratio: float) -> StepRow:
    work = WORK.decode_step(batch, 128)
    least_ms = work.least_seconds(LIMITS) * 1e3
    return StepRow("decode", batch, 128, work, least_ms, least_ms * ratio, "bandwidth")


def make_diagnosis(*, ratio: float) -> Diagnosis:
    return Diagnosis(
        model="m",
        dtype="bfloat16",
        device="cpu",
        threads=2,
        limits=LIMITS,
        work=WORK,
        context_tokens_max=8_000_000,
        num_experts=1,
        int8_token_bytes=1_040,
        free_bytes=8_000_000_000,
        steps=(make_decode(1, ratio=ratio), make_decode(8, ratio=ratio)),
        compute_bound_batch={0: 10.0, 1_024: None},
        memory=(MemoryRow(1, 1_000, 4_000_000), MemoryRow(64, 16, 62_500)),
    )


def test_diagnose_measures_the_machine_and_the_steps_of_a_real_model(tmp_path: Path):
    """Fails if a step was not measured, if weights are counted wrongly, or if what is written is no picture."""
    model, plot = make_tiny_model(tmp_path / "tiny-llama"), tmp_path / "roofline.png"
    done = CliRunner().invoke(
        main,
        ["diagnose", "--json", f"--model={model}", f"--plot={plot}", "--block-tokens=16", "--torch-threads=1"],
        catch_exceptions=False,
    )
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert {row["what"] for row in found["steps"]} == {"prefill", "decode"}
    for row in found["steps"]:
        assert row["measured_ms"] > 0
        assert math.isclose(row["ratio"], row["measured_ms"] / row["least_ms"])
    loaded = AutoModelForCausalLM.from_pretrained(model)
    matrices = {name: p.numel() for name, p in loaded.named_parameters() if p.dim() == 2}
    embeddings = matrices.pop("model.embed_tokens.weight")
    output = matrices.pop("lm_head.weight", embeddings)  # the same numbers where the two are tied
    assert found["work"]["layer_weights"] == sum(matrices.values())
    assert found["work"]["output_weights"] == output
    assert found["advice"]
    assert plot.read_bytes().startswith(b"\x89PNG")


def test_a_model_is_measured_within_its_context(tmp_path: Path):
    """Learned positions end at 512. Fails if a step, or a figure, is of a context that the model does not have."""
    make_model("gpt2").save_pretrained(tmp_path)
    make_byte_tokenizer().save(str(tmp_path / "tokenizer.json"))
    settings = [f"--model={tmp_path}", f"--model-cache-dir={tmp_path}", "--block-tokens=16", "--torch-threads=1"]
    plot = f"--plot={tmp_path / 'roofline.png'}"
    done = CliRunner().invoke(main, ["diagnose", "--json", plot, *settings], catch_exceptions=False)
    assert done.exit_code == 0, done.stderr
    found = json.loads(done.stdout)
    assert {row["tokens"] for row in found["steps"] if row["what"] == "decode"} == {128}
    assert list(found["compute_bound_batch"]) == ["0"]
    assert "512 tokens" in "\n".join(found["advice"])


def test_what_is_measured_are_different_tokens_as_far_as_there_are_some():
    """Fails if all rows of a step would be computed by the same experts, or a token is none of a small vocabulary."""
    assert len(set(different_tokens(256, vocab_size=32_000))) == 256
    assert set(different_tokens(256, vocab_size=3)) == {0, 1, 2}
    assert set(different_tokens(16, vocab_size=1)) == {0}


def test_files_that_the_kernel_keeps_for_a_container_count_as_free(tmp_path: Path):
    """Fails if a container that has read a large file is said to have no room for KV."""
    assert left_in_cgroup(tmp_path) is None
    (tmp_path / "memory.max").write_text("max\n")
    assert left_in_cgroup(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000\n")
    (tmp_path / "memory.current").write_text("900\n")
    (tmp_path / "memory.stat").write_text("anon 200\nfile 700\ninactive_file 400\nactive_file 250\nshmem 50\n")
    assert left_in_cgroup(tmp_path) == 1_000 - 900 + 400 + 250
    (tmp_path / "memory.current").write_text("2000\n")
    assert left_in_cgroup(tmp_path) == 0


def test_advice_says_the_floor_and_how_far_a_step_is_from_it():
    text = "\n".join(give_advice(make_diagnosis(ratio=3.0)))
    assert "3.0 times that" in text
    assert "weights that are read at less than the full rate" in text
    assert "at a batch of 10 without context" in text
    assert "contexts of 1,024 tokens and more it never does" in text


def test_a_step_near_its_floor_is_not_said_to_have_overhead():
    assert "What is above the floor" not in "\n".join(give_advice(make_diagnosis(ratio=1.2)))


def test_advice_does_without_steps_that_a_short_context_has_no_room_for():
    assert give_advice(replace(make_diagnosis(ratio=1.0), steps=()))


def test_advice_says_what_windows_bound():
    """Fails if a limit is named that windows keep away, or none where a layer sees everything."""
    windows = replace(WORK, windows=LayerWindows((64, 64)))
    bounded = (MemoryRow(1, None, None), MemoryRow(64, None, None))
    text = "\n".join(give_advice(replace(make_diagnosis(ratio=1.0), work=windows, memory=bounded)))
    assert "2 of 2 layers read the last 64" in text
    assert "Up to 64 sequences of the whole context" in text
    assert "room for 64 sequences of the whole context" in text
    some = (MemoryRow(1, None, None), MemoryRow(64, 500, 700))
    text = "\n".join(give_advice(replace(make_diagnosis(ratio=1.0), work=windows, memory=some)))
    assert "With 64 sequences of 500 tokens" in text
    assert "which 64 sequences of 700 tokens fill" in text
    assert "layers read" not in "\n".join(give_advice(make_diagnosis(ratio=1.0)))


def test_advice_names_no_sequence_that_is_longer_than_the_model_allows():
    """Of one sequence KV passes the weights at 1,000 tokens, and memory is full at 4,000,000."""
    text = "\n".join(give_advice(replace(make_diagnosis(ratio=1.0), context_tokens_max=900)))
    assert "With 64 sequences of 16 tokens a decode step reads as much KV as weights" in text
    assert "room for 64 sequences of the whole context" in text
    assert "1,000" not in text
    assert "4,000,000" not in text


def test_memory_that_holds_not_even_a_block_is_not_said_to_be_endless():
    """Fails if no token at all is taken for as many as one likes."""
    none = (MemoryRow(1, 1_000, 0), MemoryRow(64, 16, 0))
    text = "\n".join(give_advice(replace(make_diagnosis(ratio=1.0), memory=none, free_bytes=0)))
    assert "which one sequence of 0 tokens or 64 sequences of 0 tokens fill" in text
    assert "room for 64 sequences" not in text


def test_what_int8_would_buy_is_said_of_kv_that_is_not_coded_yet():
    raw = make_diagnosis(ratio=1.0)
    assert "With pool_codec int8 it is room for 1.9 times as many tokens" in "\n".join(give_advice(raw))
    assert "int8" not in "\n".join(give_advice(replace(raw, int8_token_bytes=None)))


def test_prefill_advice_is_what_was_measured():
    """Fails if longer steps are said to buy little where they were measured to be faster."""
    work = WORK.prefill(64)
    rows = tuple(StepRow("prefill", 1, n, work, 1.0, ms, "compute") for n, ms in ((16, 40.0), (64, 100.0)))
    text = "\n".join(give_advice(replace(make_diagnosis(ratio=1.0), steps=rows)))
    assert "In steps of 16 and 64 tokens a prompt is computed at 400 and 640 tokens/s" in text


def test_batches_at_which_arithmetic_takes_over_are_named_for_each_context_that_has_another():
    batches = {0: 10.2, 1_024: 15.0, 4_096: 15.1, 16_384: None}
    text = "\n".join(give_advice(replace(make_diagnosis(ratio=1.0), compute_bound_batch=batches)))
    assert "at a batch of 10 without context and 15 with contexts of 1,024 tokens:" in text
    assert "With contexts of 16,384 tokens and more" in text


def test_experts_and_a_gpu_are_said_to_be_what_they_are():
    text = "\n".join(give_advice(replace(make_diagnosis(ratio=1.0), num_experts=8, device="cuda")))
    assert "All 8 experts of each layer count" in text
    assert "GB/s on its GPU" in text
