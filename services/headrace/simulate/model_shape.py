"""What a model and a machine come to in numbers: bytes of KV, room for it, and seconds of prefill and decode.

Read from a Hugging Face `config.json`, or given field by field. The seconds are an estimate from peak figures and named
efficiencies; who has measured rates gives those instead.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.block import KvCodec, KvLayout
from headrace.core.errors import InvalidRequest
from headrace.core.layer_windows import LayerWindows
from headrace.core.step_costs import DecodeCost, PrefillCost

# Share of a GPU's memory that is neither weights nor KV: activations, graphs, the allocator's slack.
DEVICE_OVERHEAD_SHARE = 0.10

# Seconds that a prefill and a decode step take whatever is in them: launches, sampling, the scheduler.
PREFILL_BASE_S = 0.005
DECODE_SEQUENCE_S = 40e-6


@dataclass(frozen=True, slots=True)
class ModelShape:
    """As far as KV and arithmetic need it. `kv_bytes`, `weight_bytes`: of one number. `windows`: of each layer, None
    for those that see everything; empty where none has one."""

    layers: int
    kv_heads: int
    head_dim: int
    query_heads: int
    parameters: float
    kv_bytes: int = 2
    weight_bytes: float = 2.0
    windows: tuple[int | None, ...] = ()

    @property
    def kv_token_bytes(self) -> int:
        """2 (keys and values) x layers x kv heads x head dim x bytes: what the store keeps of a token."""
        return 2 * self.layers * self.kv_heads * self.head_dim * self.kv_bytes

    @property
    def layer_windows(self) -> LayerWindows:
        """What is read, held and moved of it."""
        return LayerWindows(self.windows or (None,) * self.layers)

    def seen_tokens(self, context_tokens: float) -> float:
        """So many tokens with all their layers are as much KV as one decode step reads of such a context."""
        return self.layer_windows.keys_read(context_tokens) / self.layers

    def held_tokens(self, context_tokens: int, *, block_tokens: int) -> float:
        """... as much as a sequence of such a context holds of a worker's pool at most."""
        return self.layer_windows.held(context_tokens, block_tokens=block_tokens) / self.layers

    def moved_tokens(self, context_tokens: int, *, block_tokens: int) -> float:
        """... as much as a hit of so many tokens moves."""
        return self.layer_windows.moved(context_tokens, block_tokens=block_tokens) / self.layers

    def attended_share(self, tokens: int) -> float:
        """Of the pairs of a token and one before it or itself in a prompt of so many, those that layers attend to."""
        return self.layer_windows.pairs(tokens, 0) / (self.layers * tokens * (tokens + 1) / 2)

    def coded_token_bytes(self, codec: KvCodec, *, block_tokens: int) -> float:
        """The same as a codec keeps it, its scales counted: what `KvLayout.block_bytes` says of a block, per token.

        Raises InvalidRequest where the numbers have less than two bytes: there is nothing that a codec could take off.
        """
        if self.kv_bytes not in _DTYPE_OF_BYTES:
            raise InvalidRequest(f"KV of {self.kv_bytes} bytes a number has no codec", param="kv_bytes")
        layout = KvLayout(
            dtype=_DTYPE_OF_BYTES[self.kv_bytes],
            num_layers=self.layers,
            num_kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            block_tokens=block_tokens,
            codec=codec,
        )
        return layout.block_bytes / block_tokens


_DTYPE_OF_BYTES = {2: "bfloat16", 4: "float32"}


@dataclass(frozen=True, slots=True)
class Machine:
    """One worker: its GPU (or GPUs together), and the host's memory that is given to the store."""

    device_bytes: float
    host_bytes: float
    device_bytes_per_s: float  # memory bandwidth
    flops_per_s: float  # that prefill reaches, not the data sheet's
    network_bytes_per_s: float


def read_model(folder: Path, *, kv_bytes: int = 2) -> ModelShape:
    """The shape in a `config.json`, or in the folder that has one. Raises InvalidRequest naming what is missing."""
    path = folder / "config.json" if folder.is_dir() else folder
    try:
        config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        config = config.get("text_config", config)
        config = _LEFT_OUT.get(str(config.get("model_type")), {}) | config
        if config.get("kv_lora_rank"):
            raise InvalidRequest(f"{path} is of a model that keeps latents instead of KV (MLA), which is not served")
        heads = int(config["num_attention_heads"])
        hidden, layers = int(config["hidden_size"]), int(config["num_hidden_layers"])
        head_dim = int(config.get("head_dim") or hidden // heads)
        kv_heads = int(config.get("num_key_value_heads") or heads)
        parameters = _count_parameters(config, heads=heads, kv_heads=kv_heads, head_dim=head_dim)
        windows = read_windows(config)
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidRequest(f"{path} cannot be read: {error}", param="model") from error
    except (ValueError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
        raise InvalidRequest(f"{path} is not a model's config: {error}", param="model") from error
    except KeyError as error:
        raise InvalidRequest(f"{path} lacks {error.args[0]}", param="model") from error
    return ModelShape(layers, kv_heads, head_dim, heads, parameters, kv_bytes=kv_bytes, windows=windows)


def read_windows(config: dict[str, Any]) -> tuple[int | None, ...]:
    """Each layer's window as a `config.json` says it; empty where none has one. Raises KeyError, ValueError, TypeError.

    `layer_types` names each layer's kind. Without it, the model's family says which layers have `sliding_window`: one
    in every `sliding_window_pattern` has none (Gemma 2: 2, Gemma 3: 6, Cohere 2: 4, gpt-oss: 2), those before
    `max_window_layers` have none (Qwen, and only if `use_sliding_window` is true), else all have it (Mistral, Phi-3).
    """
    layers, family = int(config["num_hidden_layers"]), str(config.get("model_type", ""))
    is_used = config.get("use_sliding_window", not family.startswith("qwen"))
    if not config.get("sliding_window") or not is_used:
        return ()
    window = int(config["sliding_window"])
    pattern = config.get("sliding_window_pattern") or _WINDOW_PATTERNS.get(family)
    if kinds := config.get("layer_types"):
        windowed = [kind == "sliding_attention" for kind in kinds]
    elif pattern:
        windowed = [(layer + 1) % int(pattern) != 0 for layer in range(layers)]
    elif family.startswith("qwen"):
        windowed = [layer >= int(config.get("max_window_layers", 28)) for layer in range(layers)]
    else:
        windowed = [True] * layers
    if len(windowed) != layers:
        raise ValueError(f"layer_types names {len(windowed)} layers, and there are {layers}")
    return tuple(window if has_one else None for has_one in windowed) if any(windowed) else ()


_WINDOW_PATTERNS = {"gemma2": 2, "gemma3_text": 6, "cohere2": 4, "gpt_oss": 2}

# What a Gemma's config.json leaves out where it is as its authors' code has it.
_LEFT_OUT: dict[str, dict[str, Any]] = {
    "gemma2": {"tie_word_embeddings": True},
    "gemma3_text": {
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262_208,
        "tie_word_embeddings": True,
    },
}


def device_kv_tokens(model: ModelShape, machine: Machine, *, token_bytes: float | None = None) -> int:
    """Tokens with all their layers whose KV a worker's GPU has room for. Raises InvalidRequest where the weights alone
    do not fit.

    token_bytes: of KV there; None: as the model computes it.
    """
    room = machine.device_bytes * (1 - DEVICE_OVERHEAD_SHARE) - model.parameters * model.weight_bytes
    tokens = int(room // (token_bytes or model.kv_token_bytes))
    if tokens <= 0:
        raise InvalidRequest(
            f"the weights ({model.parameters * model.weight_bytes / 1e9:,.0f} GB) leave no room for KV in "
            f"{machine.device_bytes / 1e9:,.0f} GB; --device-memory-gb is of all GPUs of one worker together",
            param="device_memory_gb",
        )  # fmt: skip
    return tokens


def estimate_costs(model: ModelShape, machine: Machine) -> tuple[PrefillCost, DecodeCost]:
    """Prefill: 2 operations a parameter, 4 x layers x heads x head dim a pair of tokens. Decode: the weights once a
    step, each sequence's KV once."""
    pair_flops = 4 * model.layers * model.query_heads * model.head_dim
    prefill = PrefillCost(
        base_s=PREFILL_BASE_S,
        tokens_per_s=machine.flops_per_s / (2 * model.parameters),
        attention_s=pair_flops / machine.flops_per_s,
    )
    decode = DecodeCost(
        base_s=model.parameters * model.weight_bytes / machine.device_bytes_per_s,
        sequence_s=DECODE_SEQUENCE_S,
        kv_token_s=model.kv_token_bytes / machine.device_bytes_per_s,
    )
    return prefill, decode


def _count_parameters(config: dict[str, Any], *, heads: int, kv_heads: int, head_dim: int) -> float:
    """Of a decoder with gated feed-forward layers, all experts counted; norms and biases are left out."""
    hidden, experts = int(config["hidden_size"]), int(config.get("num_local_experts") or config.get("num_experts") or 1)
    inner = int((experts > 1 and config.get("moe_intermediate_size")) or config["intermediate_size"])
    attention = hidden * head_dim * (2 * heads + 2 * kv_heads)
    embeddings = int(config["vocab_size"]) * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return float(embeddings + int(config["num_hidden_layers"]) * (attention + experts * 3 * hidden * inner))
