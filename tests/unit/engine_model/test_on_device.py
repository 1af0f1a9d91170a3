"""A whole model where it is put: the same on a CPU and, where there is one, on a CUDA device."""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from headrace.core.block import payload_digest
from headrace.engine.attention import attend_gathered
from headrace.engine.flex_attention import FlexAttention
from headrace.engine.model_runner import SequenceStep
from headrace.transfer.coded_pool import stored_pool
from tests.unit.engine_model.test_architectures import NEW_TOKENS, PROMPT_LENGTHS, paged_greedy, plain_greedy
from tests.unit.engine_model.test_flex_attention import make_tokens
from tests.unit.engine_model.test_load_model import ENGINE, load
from tests.unit.engine_model.tiny_models import make_model

DEVICES = ["cpu", *(["cuda"] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("attention_backend", ["gather", "flex"])
@pytest.mark.parametrize("case", ["llama", "mistral with a window"])
def test_greedy_tokens_are_plain_transformers(tmp_path, device, case, attention_backend):
    """Fails if anything that a step needs were left on another device, or what came back were not waited for."""
    model = make_model(case)
    model.save_pretrained(tmp_path / "model")
    prompts = [make_tokens(length, case) for length in PROMPT_LENGTHS]
    expected = [plain_greedy(model, prompt, NEW_TOKENS) for prompt in prompts]
    loaded = load(
        tmp_path / "model",
        tmp_path,
        engine=replace(ENGINE, pool_tokens=640),
        device=device,
        exact=False,
        attention_backend=attention_backend,
    )
    is_flex = isinstance(loaded.runner.attention, FlexAttention)
    assert is_flex if attention_backend == "flex" else loaded.runner.attention is attend_gathered
    assert paged_greedy(loaded.runner, prompts, NEW_TOKENS, seed=case) == expected


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("codec", ["raw", "int8"])
def test_blocks_go_in_and_out_whole_while_steps_run(tmp_path, device, codec):
    """Fails if a copy went where a step writes, or a step read what a copy had not finished."""
    make_model("llama").save_pretrained(tmp_path / "model")
    loaded = load(tmp_path / "model", tmp_path, device=device, exact=False)
    pool = stored_pool(loaded.kv, replace(loaded.kv.layout, codec=codec))
    prompt, size = make_tokens(100, 1), pool.layout.block_bytes
    steps = [[SequenceStep(prompt[first : first + 10], first, range(7), 1)] for first in range(0, 100, 10)]
    alone = [loaded.runner.run_step(each) for each in steps]
    source = bytearray(size)
    pool.read_block(2, memoryview(source))  # any bytes that the codec gives back as they were

    def copy(block):
        out, digests = bytearray(size), set()
        for _ in range(20):
            digests.add(pool.write_block(block, memoryview(bytes(source))))
            digests.add(pool.read_block(block, memoryview(out)))
            assert np.array_equal(out, source)
        return digests

    with ThreadPoolExecutor(3) as threads:
        copies = [threads.submit(copy, block) for block in range(10, 16)]
        beside = [loaded.runner.run_step(each) for each in steps]
        assert [each.result() for each in copies] == [{payload_digest(source)}] * 6
    assert all(map(torch.equal, alone, beside))
