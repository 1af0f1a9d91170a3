"""A fault that makes numbers which are none fails the requests that meet it, and nobody after it has gone."""

from collections.abc import Callable, Iterator
from contextlib import aclosing, contextmanager

import pytest
import torch

from headrace.core.errors import WorkerUnavailable
from headrace.engine.block_pool import Selection
from headrace.engine.engine import Engine, FilledBlock

from .conftest import BLOCK_TOKENS, admit, generate
from .test_engine import assert_equal, make_tokens

MakeEngine = Callable[..., Engine]

PROMPT = make_tokens(6 * BLOCK_TOKENS + 3, seed=7)
SPOILT_BLOCK = 2
SPOILT_POSITION = SPOILT_BLOCK * BLOCK_TOKENS + 5
SPOILT_TOKEN = PROMPT[SPOILT_POSITION]


@contextmanager
def fault(engine: Engine, number: float) -> Iterator[None]:
    """Meanwhile one token's embedding is no number: nor is the KV of it and of what follows it."""
    weights = engine.model.runner.model.get_input_embeddings().weight
    before = weights[SPOILT_TOKEN].clone()
    try:
        weights.data[SPOILT_TOKEN] = number
        yield
    finally:
        weights.data[SPOILT_TOKEN] = before


def findable(engine: Engine) -> list[int]:
    """Positions of the blocks that the next request could find."""
    return sorted(block.position for block in engine.pool.describe(Selection()))


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
@pytest.mark.parametrize("chunk", [BLOCK_TOKENS, 5, 512])
async def test_what_a_passing_fault_computed_is_never_found(make_engine: MakeEngine, chunk: int, number: float) -> None:
    """Fails if a block is shared before its numbers are looked at: the prefix would fail for ever."""
    assert PROMPT.index(SPOILT_TOKEN) == SPOILT_POSITION, "nothing before it is spoilt"
    want = await generate(make_engine(), PROMPT)
    engine = make_engine(chunk=chunk)
    with fault(engine, number):
        with pytest.raises(WorkerUnavailable, match="NaN or infinite"):
            await generate(engine, PROMPT, use_device=True)
        assert findable(engine) == list(range(SPOILT_BLOCK) if chunk <= BLOCK_TOKENS else [])
    assert_equal(await generate(engine, PROMPT, use_device=True), want)
    assert (await generate(engine, PROMPT, use_device=True)).num_device_blocks == 6
    assert engine.healthy()


async def test_a_run_that_only_computes_a_prompt_tells_of_no_spoilt_block(make_engine: MakeEngine) -> None:
    """Fails if a prefill worker publishes what a fault computed: it never looks at logits."""
    engine = make_engine(chunk=BLOCK_TOKENS)
    told: list[int] = []

    async def compute() -> None:
        admission = await admit(engine, PROMPT)
        async with aclosing(engine.run(admission, cached_tokens=0, sampling=None)) as events:
            async for event in events:
                if isinstance(event, FilledBlock):
                    told.append(event.position)
                    engine.pool.unref(event.block_id)

    with fault(engine, float("nan")), pytest.raises(WorkerUnavailable, match="NaN or infinite"):
        await compute()
    assert set(told) <= set(range(SPOILT_BLOCK))
    assert findable(engine) == list(range(SPOILT_BLOCK))


async def test_a_block_that_was_spoilt_in_the_pool_fails_one_request_and_is_forgotten(make_engine: MakeEngine) -> None:
    """Fails if it is kept: whoever sends the prefix finds it again. What stood before it stays."""
    engine = make_engine()
    want = await generate(engine, PROMPT, use_device=True)
    engine.kv.block(want.filled[SPOILT_BLOCK].block_id)[1, 0, 0, 3, 0] = torch.nan  # one number of one layer
    with pytest.raises(WorkerUnavailable, match="nan"):
        await generate(engine, PROMPT, use_device=True)
    assert findable(engine) == list(range(SPOILT_BLOCK))
    again = await generate(engine, PROMPT, use_device=True)
    assert again.num_device_blocks == SPOILT_BLOCK
    assert_equal(again, want)


async def test_where_nobody_can_look_at_blocks_one_request_fails_and_not_the_engine(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where memory for it is lacking. Fails if looking once more ends the step thread, and so all requests."""

    def out_of_memory(kv: object, block_ids: object) -> bool:
        raise MemoryError("none left")

    engine = make_engine()
    want = await generate(engine, PROMPT)
    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(type(engine.kv), "is_finite", out_of_memory)
        with pytest.raises(WorkerUnavailable, match="none left"):
            await generate(engine, PROMPT)
    assert engine.healthy()
    assert_equal(await generate(engine, PROMPT), want)
