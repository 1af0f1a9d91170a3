"""FlexAttention over pages in place gives the gathering attention's answers, within the tolerance that is documented.

Here without a compiler, on a CPU; `benchmarks/flex_attention.py` runs the compiled kernels of a CPU through the same.
"""

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch._dynamo.utils import counters

from headrace.config import EngineSettings, ModelSettings
from headrace.core.errors import ConfigInvalid
from headrace.engine.attention import (
    LayerRule,
    Scratch,
    SequenceSpan,
    StepContext,
    attend,
    attend_gathered,
    attending,
)
from headrace.engine.choose_attention import FLEX_TOLERANCE, choose_attention, plain_logits
from headrace.engine.flex_attention import (
    FEW_ROWS,
    GROUP_SEQUENCES_MAX,
    TILE_ROWS,
    FlexAttention,
    call_shapes,
    padded_rows,
)
from headrace.engine.fused_layer import fuse_layers
from headrace.engine.layered_kv import LayeredKV
from headrace.engine.model_runner import ModelRunner, SequenceStep
from headrace.engine.paged_kv import PagedKV
from headrace.engine.probe_shapes import probe_shapes
from tests.unit.engine_model.test_architectures import (
    BLOCK_TOKENS,
    NEW_TOKENS,
    PROMPT_LENGTHS,
    make_runner,
    paged_greedy,
    plain_greedy,
)
from tests.unit.engine_model.test_exactness import block_bytes, spoil
from tests.unit.engine_model.test_load_model import ENGINE, load
from tests.unit.engine_model.tiny_models import VOCAB_SIZE, make_model

CASES = ["llama", "mistral with a window", "gemma2", "gemma3_text", "gpt2", "gpt_oss"]
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def make_flex_runner(model, **settings):
    runner = make_runner(model, **settings)
    runner.attention = FlexAttention(compiled=False)
    return runner


def make_tokens(count, seed):
    dice = random.Random(seed)
    return tuple(dice.randrange(VOCAB_SIZE) for _ in range(count))


def difference(found, wanted):
    """As the check at load has it: relative to the largest logit."""
    return float((found - wanted).abs().max()) / max(1.0, float(wanted.abs().max()))


def mixed_steps():
    """A prompt of 300 tokens in chunks, one that is decoded and two with drafts of different lengths beside it."""
    prompt, others = make_tokens(300, 1), [make_tokens(60, salt) for salt in (2, 3, 4)]
    tables = [list(range(first, first + count))[::-1] for first, count in ((0, 19), (20, 4), (24, 4), (28, 4))]

    def part(which, tokens, first, last):
        return SequenceStep(tokens[first:last], first, tables[which], last - first if which else 1)

    return [
        [part(0, prompt, 0, 40), *(part(1 + i, each, 0, 33 + i) for i, each in enumerate(others))],
        [part(1, others[0], 33, 34), part(0, prompt, 40, 290), part(2, others[1], 34, 39)],
        [part(3, others[2], 35, 38), part(1, others[0], 34, 35), part(0, prompt, 290, 291), part(2, others[1], 39, 40)],
        [part(0, prompt, 291, 300), part(1, others[0], 35, 60)],
    ]


@pytest.mark.parametrize("case", CASES)
def test_greedy_tokens_equal_plain_transformers(case):
    """Fails if a mask, a window, a cap, a sink, a group of heads or a block table is wrong."""
    model = make_model(case)
    prompts = [make_tokens(length, case) for length in PROMPT_LENGTHS]
    expected = [plain_greedy(model, prompt, NEW_TOKENS) for prompt in prompts]
    assert paged_greedy(make_flex_runner(model), prompts, NEW_TOKENS, seed=case) == expected


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_logits_of_mixed_steps_are_those_of_the_gathering_attention_within_the_tolerance(case, dtype):
    """Chunks, single rows and drafts in one step, in a pool that held NaN: whatever else is in it is not read."""
    model = make_model(case, dtype=dtype)
    gathering = make_runner(model)
    flex = make_flex_runner(model)
    spoil(flex.kv)
    for steps in mixed_steps():
        found = flex.run_step(steps)
        assert found.isfinite().all()
        assert difference(found, gathering.run_step(steps)) <= FLEX_TOLERANCE[str(dtype)[6:]]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_warm_prefix_other_chunks_and_company_change_logits_within_the_tolerance(dtype):
    model = make_model("gemma2", dtype=dtype)
    prompt, restored = make_tokens(250, 5), 9
    cold, warm = make_flex_runner(model), make_flex_runner(model)
    table = list(range(16))
    wanted = cold.run_step([SequenceStep(prompt, 0, table, 1)])
    spoil(warm.kv)
    elsewhere = [30 - block for block in table]
    for block in range(restored):
        warm.kv.write_block(elsewhere[block], memoryview(block_bytes(cold, block)))
    start = restored * BLOCK_TOKENS
    warm.run_step([SequenceStep(prompt[start:-1], start, elsewhere, 0)])
    stranger = SequenceStep(make_tokens(7, 6), 0, [39], 1)
    found = warm.run_step([stranger, SequenceStep(prompt[-1:], len(prompt) - 1, elsewhere, 1)])[1:]
    assert difference(found, wanted) <= FLEX_TOLERANCE[str(dtype)[6:]]


def test_what_the_pool_held_before_changes_no_bit():
    """Fails if slots behind a sequence's end are not blanked: their weight is 0, and 0 x NaN is NaN."""
    model = make_model("llama")
    clean, spoilt = make_flex_runner(model), make_flex_runner(model)
    spoil(spoilt.kv)
    for steps in mixed_steps():
        assert torch.equal(spoilt.run_step(steps), clean.run_step(steps))


def make_span(row, num_rows, start, pages):
    return SequenceSpan(row, num_rows, start, pages, torch.tensor(pages))


def make_context(kv, spans, num_rows, attention):
    rows = [(span, position) for span in spans for position in range(span.start, span.end)]
    slots = [span.pages[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS for span, p in rows]
    assert len(slots) == num_rows
    return StepContext(
        kv=kv,
        spans=spans,
        slots=torch.tensor(slots),
        positions=torch.tensor([position for _, position in rows]),
        scratch=Scratch(),
        attention=attention,
    )


def test_rows_that_are_padding_come_out_as_zero():
    kv = make_runner(make_model("llama")).kv
    spans = [make_span(0, 3, 0, [4]), make_span(3, 1, 17, [5, 6])]
    query, keys_values = torch.randn(8, 4, 16), torch.randn(8, 4, 16)
    with torch.inference_mode(), attending(make_context(kv, spans, 4, FlexAttention(compiled=False))):
        attended = attend(0, query, keys_values, LayerRule(scale=0.25))
    assert attended.shape == (8, 64)
    assert (attended[:4].abs().sum(dim=1) > 0).all()
    assert (attended[4:] == 0).all()


def test_a_tile_lists_the_pages_that_its_rows_read_and_no_others():
    """Fails if a window, or the causal end of a tile, did not bound what a kernel reads."""
    kv = make_runner(make_model("llama")).kv
    table = list(range(30, 10, -1))
    span = make_span(0, 200, 100, table)
    context = make_context(kv, [span], 200, FlexAttention(compiled=True))  # never called: it is the plan that counts
    from headrace.engine.flex_attention import _plan_step

    for window, pages in ((None, [range(15), range(19)]), (24, [range(4, 15), range(12, 19)])):
        (group,) = _plan_step(context, torch.zeros(200, 4, 16), window, in_place=True).groups
        counts = group.mask.kv_num_blocks[0, 0].tolist()
        listed = [group.mask.kv_indices[0, 0, tile, :count].tolist() for tile, count in enumerate(counts)]
        assert listed == [[table[page] for page in each] for each in pages]


def test_any_thread_makes_as_many_kernels_as_steps_have_shapes_and_none_twice():
    """Fails if torch's own limit of 8 kernels held in another thread than the one that has loaded the model, whose
    configuration is its own; or if another mask or other pages asked for another kernel of the same shape."""
    gathering = make_runner(make_model("gemma2"))
    flex = FlexAttention(compiled=True, compiler="eager")
    runner = ModelRunner(gathering.model, gathering.kv, row_multiple=4, threads=1, attention=flex)
    counters["stats"].clear()
    with ThreadPoolExecutor(1) as step_thread:
        wanted = [step_thread.submit(runner.run_step, steps).result() for steps in mixed_steps()]
    assert counters["stats"]["unique_graphs"] > 8
    with torch.compiler.set_stance("fail_on_recompile"):
        found = [runner.run_step(steps[::-1]) for steps in mixed_steps()]
    assert [each.shape for each in found] == [each.shape for each in wanted]


def test_every_call_of_a_step_within_the_limits_has_a_shape_that_is_compiled_at_load():
    sequences_max, rows_max = 16, 256
    shapes = call_shapes(sequences_max, rows_max)
    assert shapes == [(count, rows) for rows in (1, FEW_ROWS) for count in (1, 2, 4, 8, 16)] + [(1, 128), (1, 256)]
    assert {padded_rows(rows) for rows in range(1, rows_max + 1)} == {rows for _, rows in shapes}
    assert all(rows % TILE_ROWS == 0 for _, rows in call_shapes(1, 1_000) if rows > FEW_ROWS)
    assert max(count for count, _ in call_shapes(1_000, 1)) == GROUP_SEQUENCES_MAX


def test_a_loaded_model_says_that_it_uses_flex_and_shares_no_blocks_with_one_that_does_not(tmp_path):
    path, said = tmp_path / "tiny-gemma2", []
    make_model("gemma2").save_pretrained(path)
    gathering = load(path, tmp_path, exact=False)
    flex = load(path, tmp_path, exact=False, attention_backend="flex", said=said)
    assert not flex.exact
    assert flex.namespace.numerics_probe == "flex"
    assert gathering.namespace.differing_fields(flex.namespace) == ["numerics_probe"]
    assert len([line for line in said if "FlexAttention" in line]) == 1


def test_layers_with_a_window_read_their_own_pool():
    """Fails if a mask over the one pool were used with the other, or a page that the window has passed were read."""
    model = make_model("gemma2")
    plain = make_runner(model)
    layout = replace(plain.kv.layout, near_layers=1)
    kv = LayeredKV(layout, 20, windows=probe_shapes(model).windows)
    for part in (kv.wide, kv.near):
        spoil(part)
    layered = ModelRunner(model, kv, row_multiple=1, threads=0, attention=FlexAttention(compiled=False))
    prompt = make_tokens(200, 8)
    for first, last in ((0, 150), (150, 199), (199, 200)):
        found = layered.run_step([SequenceStep(prompt[first:last], first, kv.whole_blocks(13), 1)])
        wanted = plain.run_step([SequenceStep(prompt[first:last], first, list(range(13)), 1)])
        assert difference(found, wanted) <= FLEX_TOLERANCE["float32"]


def test_auto_gathers_on_a_cpu_also_where_exact_mode_is_off(tmp_path):
    path = tmp_path / "tiny-llama"
    make_model("llama").save_pretrained(path)
    loaded = load(path, tmp_path, exact=False, attention_backend="auto")
    assert loaded.runner.attention is attend_gathered
    assert loaded.namespace.numerics_probe == ""


def test_flex_over_a_pool_of_codes_is_refused(tmp_path):
    path = tmp_path / "tiny-llama"
    make_model("llama").save_pretrained(path)
    with pytest.raises(ConfigInvalid, match="int8_token is no pool of numbers"):
        load(path, tmp_path, exact=False, attention_backend="flex", engine=replace(ENGINE, pool_codec="int8"))


@pytest.mark.parametrize("case", [*CASES, "qwen3"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_a_device_that_computes_right_is_told_nothing_at_load_and_one_that_does_not_is_found_out(case, dtype):
    """A CPU stands for it. Fails if other rows were compared, or the model left without the attention over pages."""
    said, model = [], make_model(case, dtype=dtype)
    plain = plain_logits(make_runner(model).model)
    fuse_layers(model)
    runner = make_runner(model)

    def choose():
        choose_attention(runner, ModelSettings(), EngineSettings(), name="tiny", report=said.append, plain=plain)

    choose()
    assert not said
    runner.attention = lambda *step: attend_gathered(*step) * 0
    choose()
    assert len(said) == 1
    assert "tiny: on this device its logits differ by" in said[0]


class WrongRunner:
    """Computes something else as soon as attention is not by gathering, as a miscompiled kernel would; or fails."""

    def __init__(self, runner, error=None):
        self.runner, self.error = runner, error
        self.kv, self.model, self.attention = runner.kv, runner.model, runner.attention

    def run_step(self, steps):
        if self.attention is attend_gathered:
            return self.runner.run_step(steps)
        if self.error is not None:
            raise self.error
        return self.runner.run_step(steps) * 1.01


@pytest.mark.parametrize(
    ("error", "words"),
    [(None, "its logits differ"), (RuntimeError("no compiler\nand a traceback"), "RuntimeError: no compiler;")],
)
def test_flex_that_fails_or_computes_something_else_is_refused_at_load(error, words):
    runner = WrongRunner(make_runner(make_model("llama")), error)
    settings = ModelSettings(exact=False, attention_backend="flex")
    with pytest.raises(ConfigInvalid, match=words):
        choose_attention(runner, settings, EngineSettings(), name="tiny", report=lambda line: None)
    assert runner.attention is attend_gathered


def test_flex_is_compared_over_a_pool_of_two_blocks_too():
    """Fails when a pool that the comparison's prompt does not fit keeps a model from being loaded."""
    roomy = make_runner(make_model("llama"))
    runner = ModelRunner(roomy.model, PagedKV(roomy.kv.layout, 2), row_multiple=4, threads=0)
    settings = ModelSettings(exact=False, attention_backend="flex")
    assert choose_attention(runner, settings, EngineSettings(), name="tiny", report=lambda line: None)
