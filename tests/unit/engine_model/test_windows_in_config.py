"""What `headrace plan` reads of windows in a config.json, against what the layers of the model made from it do."""

import json

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.engine.attention import ATTENTION_NAME, register_attention
from headrace.engine.probe_shapes import probe_shapes
from headrace.simulate.model_shape import read_model

COMMON = {
    "vocab_size": 32,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 6,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "pad_token_id": None,
}
WINDOWED, FULL = "sliding_attention", "full_attention"
# As published files have it, and as transformers writes it today.
FORMS = {
    "mistral": {"model_type": "mistral", "sliding_window": 8},
    "mistral without": {"model_type": "mistral", "sliding_window": None},
    "gemma2": {"model_type": "gemma2", "sliding_window": 8},
    "gemma3": {"model_type": "gemma3_text", "sliding_window": 8},
    "gemma3 with its pattern": {"model_type": "gemma3_text", "sliding_window": 8, "sliding_window_pattern": 3},
    "gemma3 layer by layer": {"model_type": "gemma3_text", "sliding_window": 8, "layer_types": [WINDOWED, FULL] * 3},
    "qwen2 without": {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": False, "max_window_layers": 2},
    "qwen2 that says nothing": {"model_type": "qwen2", "sliding_window": 8, "max_window_layers": 2},
    "qwen2": {"model_type": "qwen2", "sliding_window": 8, "use_sliding_window": True, "max_window_layers": 2},
    "qwen3": {
        "model_type": "qwen3",
        "sliding_window": 8,
        "use_sliding_window": True,
        "layer_types": [FULL, WINDOWED] * 3,
    },
    "cohere2": {"model_type": "cohere2", "sliding_window": 8},
    "starcoder2": {"model_type": "starcoder2", "sliding_window": 8},
    "llama": {"model_type": "llama"},
}


@pytest.mark.parametrize("form", FORMS)
def test_windows_are_read_as_the_model_has_them(form, tmp_path):
    """Fails if a family's layers are taken for others, or a window that is switched off for one."""
    (tmp_path / "config.json").write_text(json.dumps(COMMON | FORMS[form]))
    register_attention()
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(tmp_path), attn_implementation=ATTENTION_NAME)
    windows = probe_shapes(model.eval()).windows
    said = read_model(tmp_path).layer_windows.tokens
    assert said == tuple(windows[layer] for layer in range(6))
