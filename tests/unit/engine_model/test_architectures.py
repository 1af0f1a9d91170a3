"""Paged attention through transformers' model code gives plain transformers' answers, for every served architecture."""

import random

import pytest
import torch
from transformers import AutoConfig, LlamaConfig

from headrace.core.block import KvLayout
from headrace.core.errors import ModelRefused
from headrace.engine.attention import ATTENTION_NAME, register_attention
from headrace.engine.compare_forward import LOGIT_TOLERANCE, forward_difference
from headrace.engine.fused_layer import fuse_layers
from headrace.engine.model_families import REFUSED, SERVED, check_family
from headrace.engine.model_runner import ModelRunner, SequenceStep
from headrace.engine.packed_linear import pack_linears
from headrace.engine.paged_kv import PagedKV
from headrace.engine.probe_shapes import probe_shapes
from tests.unit.engine_model.tiny_models import ARCHITECTURES, VOCAB_SIZE, make_config, make_model

BLOCK_TOKENS = 16
NEW_TOKENS = 6
PROMPT_LENGTHS = (150, 7, 33)


@torch.inference_mode()
def plain_greedy(model, prompt, count):
    tokens = list(prompt)
    for _ in range(count):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1]
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def paged_greedy(runner, prompts, count, seed):
    """Prompts in ragged chunks beside each other, in shuffled blocks; then decoded together."""
    dice = random.Random(seed)
    blocks = list(range(runner.kv.num_blocks))
    dice.shuffle(blocks)
    tables = [[blocks.pop() for _ in range(-(-(len(p) + count) // BLOCK_TOKENS))] for p in prompts]
    tokens, done = [list(p) for p in prompts], [0] * len(prompts)
    while any(len(t) < len(p) + count for t, p in zip(tokens, prompts, strict=True)):
        steps, whose = [], []
        for i, sequence in enumerate(tokens):
            if len(sequence) == len(prompts[i]) + count:
                continue
            chunk = tuple(sequence[done[i] : done[i] + dice.randint(1, 70)])
            steps.append(SequenceStep(chunk, done[i], tables[i], int(done[i] + len(chunk) == len(sequence))))
            whose.append(i)
            done[i] += len(chunk)
        logits = iter(runner.run_step(steps))
        for step, i in zip(steps, whose, strict=True):
            if step.num_logits:
                tokens[i].append(int(next(logits).argmax()))
    return [t[len(p) :] for t, p in zip(tokens, prompts, strict=True)]


def make_runner(model, *, row_multiple=4):
    register_attention()
    model.set_attn_implementation(ATTENTION_NAME)
    probe = probe_shapes(model)
    kv_heads, head_dim, _ = probe.shapes[0]
    layout = KvLayout(str(model.dtype)[6:], len(probe.shapes), kv_heads, head_dim, BLOCK_TOKENS)
    return ModelRunner(model, PagedKV(layout, 40), row_multiple=row_multiple, threads=0)


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_greedy_tokens_equal_plain_transformers(case):
    """Fails if a mask, a window, a position, a cap, a sink or a block table is wrong."""
    model = make_model(case)
    dice = random.Random(case)
    prompts = [tuple(dice.randrange(VOCAB_SIZE) for _ in range(n)) for n in PROMPT_LENGTHS]
    expected = [plain_greedy(model, prompt, NEW_TOKENS) for prompt in prompts]
    assert len({tuple(e) for e in expected}) == len(prompts)
    fuse_layers(model)
    pack_linears(model, exact=True, threads=1)
    assert paged_greedy(make_runner(model), prompts, NEW_TOKENS, seed=case) == expected


@pytest.mark.parametrize("case", ARCHITECTURES)
def test_the_load_time_comparison_accepts_what_is_right(case):
    """Fails if the comparison at load would refuse a served architecture."""
    register_attention()
    assert forward_difference(make_model(case), vocab_size=VOCAB_SIZE) <= LOGIT_TOLERANCE


def test_the_load_time_comparison_sees_a_wrong_forward():
    """Dynamic-NTK positions run and are silently wrong: the frequencies follow the longest sequence seen so far."""
    register_attention()
    config = make_config("llama")
    config.max_position_embeddings = 64
    config.rope_parameters = {"rope_type": "dynamic", "rope_theta": 10_000.0, "factor": 4.0}
    torch.manual_seed(0)
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM._from_config(config, attn_implementation="eager").eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 2:
                parameter.normal_(0.0, 0.3)
    assert forward_difference(model, vocab_size=VOCAB_SIZE) > LOGIT_TOLERANCE


@pytest.mark.parametrize("rope_type", ["dynamic", "longrope"])
def test_positions_that_depend_on_the_batch_are_refused_by_name(rope_type):
    config = LlamaConfig()
    config.rope_parameters = {"rope_type": rope_type, "rope_theta": 10_000.0, "factor": 2.0}
    with pytest.raises(ModelRefused, match=rope_type):
        check_family("some-model", config)


@pytest.mark.parametrize("family", sorted(REFUSED))
def test_unfit_architectures_are_refused_with_their_reason(family):
    config = LlamaConfig()
    config.model_type = family
    with pytest.raises(ModelRefused, match=f"architecture {family}: "):
        check_family("some-model", config)


def test_an_architecture_nobody_has_checked_is_refused():
    with pytest.raises(ModelRefused, match="bert was not shown"):
        check_family("some-model", AutoConfig.for_model("bert"))


def test_every_served_architecture_is_tested_here():
    assert {case.split()[0] for case in ARCHITECTURES} == SERVED
    assert not SERVED & set(REFUSED)
