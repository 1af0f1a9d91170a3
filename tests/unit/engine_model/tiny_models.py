"""Tiny random-weight models of the architectures that are served."""

import torch
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB_SIZE = 160

_COMMON = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
_EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2}

# What each architecture needs beside the common sizes: its own parts switched on, small enough to matter in 200 tokens.
ARCHITECTURES = {
    "llama": {},
    "llama with llama3 positions": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10_000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 64,
        }
    },
    "llama with yarn positions": {
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10_000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 128,
        }
    },
    "qwen2": {},
    "qwen3": {"head_dim": 16},
    "mistral with a window": {"sliding_window": 24},
    "gemma2": {"head_dim": 16, "sliding_window": 24, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    "gemma3_text": {"head_dim": 16, "sliding_window": 24, "query_pre_attn_scalar": 16, "num_hidden_layers": 6},
    "phi": {"partial_rotary_factor": 0.5},
    "phi3": {},
    "olmo2": {},
    "granite": {"attention_multiplier": 0.2, "residual_multiplier": 0.5, "embedding_multiplier": 4.0},
    "smollm3": {"num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "layer_types": ["full_attention"] * 4},
    "stablelm": {"partial_rotary_factor": 0.5},
    "starcoder2": {"sliding_window": 24},
    "cohere2": {"sliding_window": 24, "num_hidden_layers": 4},
    "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512},
    "gpt_neox": {"rotary_pct": 0.5},
    "gptj": {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512, "rotary_dim": 8},
    "opt": {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "mixtral": _EXPERTS,
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48},
    "gpt_oss": {"head_dim": 16, "sliding_window": 24, **_EXPERTS},
}


def make_config(case: str):
    """A tiny configuration; the architecture is the first word of the case's name."""
    family, settings = case.split()[0], ARCHITECTURES[case]
    common = _COMMON
    if any(name.startswith("n_") for name in settings):
        common = {name: value for name, value in _COMMON.items() if not name.startswith(("num_", "hidden", "max_"))}
    return AutoConfig.for_model(family, **{**common, **settings})


def make_model(case: str, *, dtype=torch.float32, seed: int = 0):
    """Random weights, spread widely enough that greedy answers vary and no logit is a tie."""
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(make_config(case), dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if parameter.dim() >= 2 or "sink" in name:
                parameter.normal_(0.0, 1.0 if "embed" in name or "sink" in name else 0.12)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.05)
    return model.to(dtype).eval()
