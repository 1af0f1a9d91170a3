"""The account of a model's pool, of one part or of two, and pools of other sizes over the same weights: the same for an
engine and for whoever goes without."""

from collections.abc import Callable
from dataclasses import replace

from headrace.core.clock import Clock
from headrace.core.key_window import KeyWindow
from headrace.engine.attention import attend_gathered
from headrace.engine.block_pool import BlockPool
from headrace.engine.layered_kv import LayeredKV, PoolKV, make_kv
from headrace.engine.layered_pool import LayeredPool
from headrace.engine.load_model import LoadedModel
from headrace.engine.model_runner import ModelRunner


def make_pool(kv: PoolKV, window: KeyWindow, *, clock: Clock, on_freed: Callable[[], None] = lambda: None) -> BlockPool:
    """All blocks free. window: what the model reads of a sequence; the windows of near parts are `kv`'s to know."""
    if isinstance(kv, LayeredKV):
        return LayeredPool(
            kv.num_blocks, num_near=kv.num_near, near_window=kv.near_window, clock=clock, on_freed=on_freed
        )
    return BlockPool(kv.num_blocks, clock=clock, on_freed=on_freed, window=window)


def with_pool(model: LoadedModel, *, num_blocks: int, num_near: int | None = None, codec: str = "") -> LoadedModel:
    """The same weights over another pool. num_near: as of `LayeredKV`; codec: of the pool, the same if empty."""
    layout = replace(model.kv.layout, codec=codec) if codec else model.kv.layout
    windows = dict(enumerate(model.windows.tokens))
    kv = make_kv(layout, num_blocks, windows=windows, num_near=num_near, device=model.kv.device)
    runner = model.runner
    return replace(
        model,
        kv=kv,
        runner=ModelRunner(
            runner.model,
            kv,
            row_multiple=runner.row_multiple,
            threads=runner.threads,
            small_threads_max=runner.small_threads_max,
            attention=attend_gathered if codec else runner.attention,
        ),
    )
