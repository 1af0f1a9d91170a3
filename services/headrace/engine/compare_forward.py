"""Is paged attention right for this checkpoint? The first layers of the real weights, against the model's own forward.

This file owns that comparison, in float32 on the CPU. It tells an architecture that runs and is wrong from one that is
right; it says nothing of bits (`numerics_probe.py` does).
"""

import copy
import math
from itertools import pairwise
from pathlib import Path

import torch
from transformers import PretrainedConfig, PreTrainedModel

from headrace.core.block import KvLayout
from headrace.core.errors import ModelRefused
from headrace.engine.attention import ATTENTION_NAME, TILE
from headrace.engine.fused_layer import fuse_layers
from headrace.engine.load_weights import load_weights
from headrace.engine.model_runner import ModelRunner, SequenceStep
from headrace.engine.paged_kv import PagedKV
from headrace.engine.probe_shapes import probe_shapes

PROMPT_TOKENS = TILE + 40  # crosses the tile grid
CUTS = (0, 50, TILE - 1, TILE + 1, PROMPT_TOKENS)
SLICE_LAYERS_MIN = 2
SLICE_LAYERS_MAX = 8  # layer kinds alternate with a period of at most 6 in the architectures served
BLOCK_TOKENS = 16

# Largest difference of a logit, relative to the largest logit (or 1): float32 rounding of two orders of summation stays
# two orders of magnitude below, a wrong mask or position lies three above.
LOGIT_TOLERANCE = 1e-4


def compare_forward(name: str, path: Path, config: PretrainedConfig) -> None:
    """Return when the paged forward agrees with the model's own; raise ModelRefused when it does not.

    Loads the first layers (as many as show every kind of layer) in float32, runs a prompt through transformers' eager
    attention, then through the pool in ragged chunks beside a second sequence, and compares the logits.
    """
    sliced = _slice_config(config)
    model = load_weights(path, config=sliced, dtype=torch.float32, attn_implementation="eager")
    difference = forward_difference(model, vocab_size=sliced.vocab_size)
    if not difference <= LOGIT_TOLERANCE:
        raise ModelRefused(
            name,
            "its logits with paged KV differ from transformers' own "
            f"by {difference:.2g} (allowed: {LOGIT_TOLERANCE:g}); "
            f"architecture {config.model_type} does something that paged attention does not reproduce",
        )


@torch.inference_mode()
def forward_difference(model: PreTrainedModel, *, vocab_size: int) -> float:
    """The largest relative difference of logits between a float32 model's own attention and the paged one."""
    prompts = [_tokens(PROMPT_TOKENS, vocab_size, salt=1), _tokens(BLOCK_TOKENS + 3, vocab_size, salt=2)]
    references = [model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0].float() for prompt in prompts]
    model.set_attn_implementation(ATTENTION_NAME)
    probe = probe_shapes(model)
    fuse_layers(model)
    kv_heads, head_dim, _ = probe.shapes[0]
    layout = KvLayout("float32", len(probe.shapes), kv_heads, head_dim, BLOCK_TOKENS)
    tables = [list(range(math.ceil(len(prompt) / BLOCK_TOKENS))) for prompt in prompts]
    tables[1] = [len(tables[0]) + block for block in tables[1]]
    runner = ModelRunner(model, PagedKV(layout, len(tables[0]) + len(tables[1])), row_multiple=1, threads=0)
    differences = []
    for step_index, (first, last) in enumerate(pairwise(CUTS)):
        steps = [SequenceStep(prompts[0][first:last], first, tables[0], 1)]
        wanted = [references[0][last - 1]]
        if step_index == 1:
            steps.append(SequenceStep(prompts[1], 0, tables[1], 1))
            wanted.append(references[1][-1])
        for logits, reference in zip(runner.run_step(steps), wanted, strict=True):
            scale = max(1.0, float(reference.abs().max()))
            differences.append(float((logits - reference).abs().max()) / scale)
    return max(differences) if all(math.isfinite(d) for d in differences) else math.inf


def _slice_config(config: PretrainedConfig) -> PretrainedConfig:
    """The configuration of a model of the first few layers, with every per-layer list cut to them."""
    num_layers = config.num_hidden_layers
    kinds = getattr(config, "layer_types", None) or [""] * num_layers
    keep = min(SLICE_LAYERS_MIN, num_layers)
    while keep < min(num_layers, SLICE_LAYERS_MAX) and set(kinds[:keep]) != set(kinds):
        keep += 1
    sliced = copy.deepcopy(config)
    for attribute, value in vars(config).items():
        if isinstance(value, list) and len(value) == num_layers:
            setattr(sliced, attribute, value[:keep])
    sliced.num_hidden_layers = keep
    return sliced


def _tokens(count: int, vocab_size: int, *, salt: int) -> tuple[int, ...]:
    """Fixed token ids, spread over the vocabulary."""
    return tuple((7_919 * (index + 1) * salt + index * index) % vocab_size for index in range(count))
