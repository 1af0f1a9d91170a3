"""Which architectures may be served, which may not, and why.

This file owns the allow-list. An architecture is on it when its greedy tokens were shown equal to plain transformers'
through the paged attention function; `compare_forward.py` checks that again, for the real checkpoint, at every first
load. Anything else is refused by name: an architecture that runs and is silently wrong is worse than one that does not
start. It knows nothing of weights.
"""

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from headrace.core.errors import ModelRefused

if TYPE_CHECKING:  # the families are asked for before anything heavy is imported
    from transformers import PretrainedConfig

SERVED = frozenset(
    {
        "cohere2",
        "gemma2",
        "gemma3_text",
        "gpt2",
        "gpt_neox",
        "gpt_oss",
        "gptj",
        "granite",
        "llama",
        "mistral",
        "mixtral",
        "olmo2",
        "opt",
        "phi",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "smollm3",
        "stablelm",
        "starcoder2",
    }
)

# Served, but never as exact: which rows an expert sees, and how many, depends on the batch.
MIXTURE_OF_EXPERTS = frozenset({"gpt_oss", "mixtral", "qwen3_moe"})

# Frequencies that depend only on the position. The others depend on the longest sequence of the batch.
ROPE_TYPES_SERVED = frozenset({"default", "linear", "llama3", "yarn"})

_OWN_ATTENTION = "it does not use transformers' attention interface, so its KV cannot be paged"
_LATENT = "its cache holds compressed latents (MLA), not the keys and values that a block holds"
_STATE = "it keeps a recurrent or convolution state beside KV, which a block does not hold"

REFUSED = {
    "bamba": _STATE,
    "bloom": _OWN_ATTENTION,
    "deepseek_v2": _LATENT,
    "deepseek_v3": _LATENT,
    "deepseek_v32": _LATENT,
    "falcon": _OWN_ATTENTION,
    "falcon_h1": _STATE,
    "falcon_mamba": _STATE,
    "gemma3": "it takes images; serve the text-only checkpoint (gemma3_text)",
    "glm4_moe_lite": _LATENT,
    "gpt_neo": _OWN_ATTENTION,
    "granitemoehybrid": _STATE,
    "jamba": _STATE,
    "kimi_linear": _STATE,
    "lfm2": _STATE,
    "lfm2_moe": _STATE,
    "llama4": "its chunked attention lives in the attention mask, which paged attention replaces",
    "llama4_text": "its chunked attention lives in the attention mask, which paged attention replaces",
    "longcat_flash": _LATENT,
    "mamba": _STATE,
    "mamba2": _STATE,
    "minicpm3": _LATENT,
    "mpt": _OWN_ATTENTION,
    "nemotron_h": _STATE,
    "qwen3_next": _STATE,
    "recurrent_gemma": _STATE,
    "zamba": _STATE,
    "zamba2": _STATE,
}


def check_family(name: str, config: "PretrainedConfig") -> None:
    """Return when a model of this configuration may be served; raise ModelRefused with the reason otherwise."""
    check_architecture(name, config.model_type)
    for rope_type in _rope_types(config):
        if rope_type not in ROPE_TYPES_SERVED:
            raise ModelRefused(
                name,
                f"rotary positions of type {rope_type!r} depend on the longest sequence of the batch, so cached keys "
                f"would be wrong; served: {', '.join(sorted(ROPE_TYPES_SERVED))}",
            )


def check_architecture(name: str, family: str) -> None:
    """As `check_family`, by the architecture's name alone (`model_type` of config.json)."""
    if family in REFUSED:
        raise ModelRefused(name, f"architecture {family}: {REFUSED[family]}")
    if family not in SERVED:
        known = ", ".join(sorted(SERVED))
        raise ModelRefused(
            name, f"architecture {family or 'unknown'} was not shown to be right with paged KV; served: {known}"
        )


def _rope_types(config: "PretrainedConfig") -> Iterator[str]:
    """Every rotary type the configuration names: one for the model, or one for each kind of layer."""
    for attribute in ("rope_parameters", "rope_scaling"):
        parameters: Any = getattr(config, attribute, None)
        if not isinstance(parameters, Mapping):
            continue
        for entry in (parameters, *parameters.values()):
            if isinstance(entry, Mapping) and (found := entry.get("rope_type") or entry.get("type")):
                yield str(found)
