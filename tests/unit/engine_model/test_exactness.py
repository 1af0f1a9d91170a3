"""The bits of a row's logits and KV do not depend on chunking, batch, block size, or where the prefix came from."""

import random

import pytest
import torch

from headrace.core.block import KvLayout, payload_digest
from headrace.engine.attention import ATTENTION_NAME, register_attention
from headrace.engine.fused_layer import fuse_layers
from headrace.engine.model_runner import ModelRunner, SequenceStep
from headrace.engine.numerics_probe import ExactRows, find_exact_rows, probe_numerics, probe_runner
from headrace.engine.packed_linear import pack_linears
from headrace.engine.paged_kv import PagedKV
from headrace.engine.probe_shapes import probe_shapes
from tests.unit.engine_model.tiny_models import VOCAB_SIZE, make_model

POOL_TOKENS = 1_600


def make_exact_model(case="llama", dtype=torch.float32, *, form="fused"):
    """form: transformers' modules, those with packed linear layers, or as `load_model` has them: fused and packed."""
    register_attention()
    model = make_model(case, dtype=dtype)
    model.set_attn_implementation(ATTENTION_NAME)
    if form == "fused":
        fuse_layers(model)
    if form != "plain":
        pack_linears(model, exact=True, threads=1)
    rows = find_exact_rows(model, make_layout(model, 16), threads=1)
    assert rows is not None
    model.exact_row_multiple = rows.row_multiple
    return model


def make_layout(model, block_tokens, codec="raw"):
    probe = probe_shapes(model)
    kv_heads, head_dim, _ = probe.shapes[0]
    return KvLayout(str(model.dtype)[6:], len(probe.shapes), kv_heads, head_dim, block_tokens, codec)


def make_runner(model, block_tokens, *, row_multiple=None, codec="raw"):
    """row_multiple: as the self-test at load has found it for this machine's libraries, unless one is named."""
    row_multiple = row_multiple or model.exact_row_multiple
    layout = make_layout(model, block_tokens, codec)
    return ModelRunner(model, PagedKV(layout, POOL_TOKENS // block_tokens), row_multiple=row_multiple, threads=0)


def block_bytes(runner, block_id):
    payload = bytearray(runner.kv.layout.block_bytes)
    digest = runner.kv.read_block(block_id, memoryview(payload))
    assert digest == payload_digest(payload)
    return bytes(payload)


def spoil(kv):
    """What no result may depend on: every number of the pool is NaN."""
    if kv.layout.codec == "raw":
        kv.pool.fill_(torch.nan)
        return
    for block_id in range(kv.num_blocks):
        kv.write_block(block_id, memoryview(b"\xff" * kv.layout.block_bytes))  # scales of NaN


class Reference:
    """Every answer from scratch: one sequence alone, in one piece, in a pool of its own."""

    def __init__(self, model, block_tokens, **settings):
        self.runner = make_runner(model, block_tokens, **settings)
        self.table = list(range(self.runner.kv.num_blocks))

    def compute(self, tokens):
        """Logits of the last token; the pool then holds the tokens' KV in blocks 0.. in order."""
        self.runner.kv.pool.zero_()
        return self.runner.run_step([SequenceStep(tuple(tokens), 0, self.table, 1)])[0]


def count_differences(model, seed, *, block_tokens, **settings):
    """One random scenario; returns (differing logits rows, differing KV, rows compared).

    Up to four sequences start from scratch or from blocks copied out of the reference's pool, advance in random chunks
    (often of one row) in random company, in shuffled blocks that held NaN before.
    """
    dice = random.Random(seed)
    reference = Reference(model, block_tokens, **settings)
    runner = make_runner(model, block_tokens, **settings)
    spoil(runner.kv)
    free = list(range(runner.kv.num_blocks))
    dice.shuffle(free)
    sequences = []
    for _ in range(dice.randint(1, 4)):
        tokens = tuple(dice.randrange(VOCAB_SIZE) for _ in range(dice.choice((1, 5, 40, 129, 300))))
        table = [free.pop() for _ in range(-(-len(tokens) // block_tokens))]
        restored = dice.randint(0, (len(tokens) - 1) // block_tokens)
        reference.compute(tokens)
        for index in range(restored):
            payload = block_bytes(reference.runner, index)
            assert runner.kv.write_block(table[index], memoryview(payload)) == payload_digest(payload)
        sequences.append([tokens, table, restored * block_tokens])
    bad_logits = bad_kv = compared = 0
    while any(done < len(tokens) for tokens, _, done in sequences):
        steps, checks = [], []
        for sequence in sequences:
            tokens, table, done = sequence
            if done == len(tokens) or dice.random() < 0.3:
                continue
            last = min(len(tokens), done + dice.choice((1, 1, 2, 3, 17, 64, 128, 250)))
            steps.append(SequenceStep(tokens[done:last], done, table, int(dice.random() < 0.6)))
            checks.append(tokens[:last])
            sequence[2] = last
        if not steps:
            continue
        wanted = [check for check, step in zip(checks, steps, strict=True) if step.num_logits]
        for logits, check in zip(runner.run_step(steps), wanted, strict=True):
            bad_logits += not torch.equal(logits, reference.compute(check))
            compared += 1
    for tokens, table, _ in sequences:
        reference.compute(tokens)
        expected = reference.runner.kv.bytes_in_order(reference.table, len(tokens))
        bad_kv += runner.kv.bytes_in_order(table, len(tokens)) != expected
    return bad_logits, bad_kv, compared


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("form", ["fused", "packed", "plain"])
@pytest.mark.parametrize("block_tokens", [1, 7, 16, 64])
def test_bits_do_not_depend_on_chunks_company_or_where_the_prefix_came_from(dtype, form, block_tokens):
    """Fails at once when padding, the tile grid or the zeroed tail is dropped from the code."""
    model = make_exact_model(dtype=dtype, form=form)
    found = [count_differences(model, seed, block_tokens=block_tokens) for seed in range(4)]
    assert sum(compared for *_, compared in found) >= 5
    assert [(bad_logits, bad_kv) for bad_logits, bad_kv, _ in found] == [(0, 0)] * len(found)


@pytest.mark.parametrize("case", ["gemma3_text", "qwen3", "gpt2", "opt", "phi"])
def test_bits_do_not_depend_on_chunks_in_other_architectures(case):
    """Windows, softcap-free norms, Conv1D layers and absolute positions keep the rule too."""
    model = make_exact_model(case, torch.bfloat16)
    found = [count_differences(model, seed, block_tokens=16) for seed in range(2)]
    assert [(bad_logits, bad_kv) for bad_logits, bad_kv, _ in found] == [(0, 0)] * len(found)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("codec", ["int8_token", "fp8_token"])
@pytest.mark.parametrize("block_tokens", [7, 64])
def test_a_quantised_pool_keeps_the_rule(codec, dtype, block_tokens):
    """Fails if a step attended to its own rows as they were before they were quantised, or a scale spanned rows."""
    model = make_exact_model(dtype=dtype)
    found = [count_differences(model, seed, block_tokens=block_tokens, codec=codec) for seed in range(3)]
    assert [(bad_logits, bad_kv) for bad_logits, bad_kv, _ in found] == [(0, 0)] * len(found)


def count_window_differences(model, window, seed, *, block_tokens):
    """As `count_differences`, for one prompt of many windows whose blocks are given up, and overwritten with NaN, as
    soon as the window of the next row has passed them."""
    dice = random.Random(seed)
    reference, runner = (make_runner(model, block_tokens) for _ in range(2))
    runner.kv.pool.fill_(torch.nan)
    tokens = tuple(dice.randrange(VOCAB_SIZE) for _ in range(430))
    table = dice.sample(range(runner.kv.num_blocks), -(-len(tokens) // block_tokens))
    in_order = list(range(len(table)))
    done = first_block = bad = 0
    while done < len(tokens):
        cut = 410 if done < 410 else len(tokens)  # where a block of 64 is all that a window of 24 needs, half written
        last = min(cut, done + dice.choice((1, 1, 3, 17, 64, 128, 250)))
        logits = runner.run_step([SequenceStep(tokens[done:last], done, table[first_block:], 1, first_block)])
        expected = reference.run_step([SequenceStep(tokens[:last], 0, in_order, 1)])
        bad += not torch.equal(logits, expected)
        for index in range(done // block_tokens, last // block_tokens):
            bad += block_bytes(runner, table[index]) != block_bytes(reference, index)
        done = last
        while (first_block + 1) * block_tokens <= done - window + 1:
            runner.kv.pool[:, :, :, table[first_block]] = torch.nan
            first_block += 1
    assert first_block * block_tokens > len(tokens) - window - block_tokens
    return bad


@pytest.mark.parametrize("block_tokens", [1, 7, 16, 64])
@pytest.mark.parametrize(("window", "dtype"), [(24, torch.bfloat16), (24, torch.float32), (150, torch.float32)])
def test_a_windowed_models_bits_depend_neither_on_chunks_nor_on_blocks_behind_the_window(window, dtype, block_tokens):
    """Fails if the range of keys is the row's instead of the tile's, or a block that is gone reaches a product."""
    model = make_exact_model("mistral with a window", dtype)
    model.config.sliding_window = window
    assert [count_window_differences(model, window, seed, block_tokens=block_tokens) for seed in range(2)] == [0, 0]


def test_a_row_whose_window_reaches_blocks_that_are_gone_is_our_bug():
    model = make_exact_model("mistral with a window")
    runner = make_runner(model, 16)
    with pytest.raises(AssertionError, match="a key that this layer sees is not there"):
        runner.run_step([SequenceStep((1, 2), 38, [0, 1], 1, first_block=1)])  # 38 - 24 + 1 is in block 0


def test_a_mixed_model_may_not_give_blocks_up():
    """Some of its layers see everything."""
    runner = make_runner(make_exact_model("gemma3_text"), 16)
    with pytest.raises(AssertionError, match="a key that this layer sees is not there"):
        runner.run_step([SequenceStep((1, 2), 100, [0, 1], 1, first_block=5)])


def test_without_row_padding_the_same_check_finds_differences():
    """The control: the check above can fail. Plain float32 rows take another kernel when there are fewer than four."""
    model = make_exact_model(dtype=torch.float32, form="plain")
    found = [count_differences(model, seed, block_tokens=16, row_multiple=1) for seed in range(4)]
    assert sum(bad_logits + bad_kv for bad_logits, bad_kv, _ in found) > 0


def test_the_self_test_at_load_finds_a_row_multiple_for_good_numerics():
    model = make_exact_model(dtype=torch.bfloat16)
    rows = find_exact_rows(model, make_layout(model, 16), threads=1)
    assert rows in [ExactRows(multiple, 1) for multiple in (4, 8, 16)]


def test_the_self_test_at_load_refuses_numerics_that_depend_on_the_batch():
    """A layer whose result depends on how many rows it sees cannot be made exact by padding."""
    model = make_exact_model(dtype=torch.float32, form="packed")

    class DependsOnRows(torch.nn.Module):
        def forward(self, rows):
            return torch.nn.functional.silu(rows) * (1 + 1e-6 * rows.shape[1])

    model.model.layers[0].mlp.act_fn = DependsOnRows()
    assert find_exact_rows(model, make_layout(model, 16), threads=1) is None


def test_the_self_test_at_load_keeps_small_steps_on_one_thread_where_bits_depend_on_threads():
    """Fails when a library whose numbers differ between one and two threads costs exactness altogether."""
    model = make_exact_model(dtype=torch.bfloat16, form="packed")

    class DependsOnThreads(torch.nn.Module):
        def forward(self, rows):
            return torch.nn.functional.silu(rows) * (0.75 + 0.25 * torch.get_num_threads())

    threads = torch.get_num_threads()
    try:
        model.model.layers[0].mlp.act_fn = DependsOnThreads()
        rows = find_exact_rows(model, make_layout(model, 16), threads=2)
    finally:
        torch.set_num_threads(threads)
    assert rows is not None
    assert rows.small_threads_max == 1
    runner = ModelRunner(
        model,
        PagedKV(make_layout(model, 16), 8),
        row_multiple=rows.row_multiple,
        threads=2,
        small_threads_max=rows.small_threads_max,
    )
    assert {runner._choice.choose(num_rows) for num_rows in (1, 4, 64)} == {1}


def test_the_probe_digest_names_the_numbers_and_not_the_block_size():
    model = make_exact_model(dtype=torch.bfloat16, form="packed")

    def digest(block_tokens):
        return probe_numerics(probe_runner(model, make_layout(model, block_tokens), row_multiple=4, threads=1))

    before = digest(16)
    assert before == digest(16) == digest(64) == digest(7)
    with torch.no_grad():
        model.model.layers[0].input_layernorm.weight.mul_(1.01)
    assert digest(16) != before


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("num_rows", [1, 3])
def test_sequences_of_one_tile_computed_as_one_batch_have_the_bits_they_have_alone(dtype, num_rows):
    """Decoding: fails if a batch of products gave a row other bits, mixed sequences up, or the order of logits."""
    model = make_exact_model(dtype=dtype)
    reference, runner = Reference(model, 16), make_runner(model, 16)
    dice = random.Random(num_rows)
    steps, expected = [], []
    for which, length in enumerate((140, 7, 200, 131, 12, 255)):  # of two tiles, in an order that mixes them
        tokens = tuple(dice.randrange(VOCAB_SIZE) for _ in range(length))
        table = range(which * 16, which * 16 + 16)
        runner.run_step([SequenceStep(tokens[:-num_rows], 0, table, 0)])
        steps.append(SequenceStep(tokens[-num_rows:], length - num_rows, table, 1))
        expected.append(reference.compute(tokens))
    assert torch.equal(runner.run_step(steps), torch.stack(expected))
