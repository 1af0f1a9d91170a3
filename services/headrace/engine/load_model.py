"""Load a model into an engine: weights, pool, runner, and the namespace that names its KV.

This file owns the order of loading and what each refusal says. It knows nothing of requests or stores.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from headrace.config import EngineSettings, ModelSettings
from headrace.core.block import HashAlgorithm, KvLayout, Namespace
from headrace.engine.attention import ATTENTION_NAME, ShapeProbe, attending, register_attention
from headrace.engine.model_runner import ModelRunner
from headrace.engine.paged_kv import PagedKV


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model that is ready to serve, and everything that others need to know of it."""

    name: str
    path: Path  # directory with tokenizer.json and config.json
    runner: ModelRunner
    kv: PagedKV
    namespace: Namespace
    context_tokens_max: int
    eos_token_ids: frozenset[int]
    exact: bool


def load_model(
    settings: ModelSettings,
    engine: EngineSettings,
    *,
    trust_group: str,
    hash_algorithm: HashAlgorithm,
    report: Callable[[str], None],
) -> LoadedModel:
    """Load the model that the settings name, or raise ModelRefused with the reason and the remedy."""
    register_attention()
    path = Path(settings.model)
    config = AutoConfig.from_pretrained(path)
    model = AutoModelForCausalLM.from_pretrained(path, attn_implementation=ATTENTION_NAME).eval()
    probe = ShapeProbe()
    with attending(probe), torch.inference_mode():
        model(input_ids=torch.tensor([[0, 1]]), position_ids=torch.tensor([[0, 1]]), use_cache=False)
    kv_heads, head_dim, _ = probe.shapes[0]
    layout = KvLayout(
        dtype=str(model.dtype).removeprefix("torch."),
        num_layers=len(probe.shapes),
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        block_tokens=engine.block_tokens,
    )
    kv = PagedKV(layout, engine.pool_tokens // engine.block_tokens)
    generation = path / "generation_config.json"
    eos = json.loads(generation.read_text()).get("eos_token_id") if generation.exists() else config.eos_token_id
    namespace = Namespace(
        model_id=path.name,
        weights_digest="",
        tokenizer_digest="",
        adapter_digest="",
        layout=layout,
        position_digest="",
        numerics_probe="",
        hash_algorithm=hash_algorithm,
        trust_group=trust_group,
    )
    return LoadedModel(
        name=path.name,
        path=path,
        runner=ModelRunner(model, kv, row_multiple=8, threads=0),
        kv=kv,
        namespace=namespace,
        context_tokens_max=engine.context_tokens_max or config.max_position_embeddings,
        eos_token_ids=frozenset(eos if isinstance(eos, list) else [eos] if eos is not None else []),
        exact=True,
    )
