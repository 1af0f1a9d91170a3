"""Evicting from a worker's own pool what a selector names and nobody uses. Knows neither calls nor workers."""

from headrace.core.generation import EvictReport, EvictSelector
from headrace.core.limits import EVICT_HASHES_MAX
from headrace.engine.block_pool import BlockPool
from headrace.engine.list_device import pool_selection
from headrace.engine.load_model import LoadedModel


def evict_device(pool: BlockPool, model: LoadedModel, selector: EvictSelector, *, dry_run: bool) -> EvictReport:
    """Free the selected blocks, or only count them. The holder's name is the caller's to fill in."""
    selection = pool_selection(selector, model.namespace)
    if selection is None or selector.model not in (None, model.name):
        return EvictReport("", 0, 0, 0, 0, dry_run)
    evicted = pool.evict(selection, dry_run=dry_run)
    layout = model.kv.layout
    num_bytes = evicted.num_blocks * layout.block_bytes
    if layout.near_layers:
        num_bytes = evicted.num_blocks * layout.wide.block_bytes + evicted.num_near * layout.near.block_bytes
    return EvictReport(
        holder="",
        blocks=evicted.num_blocks,
        tokens=evicted.num_blocks * layout.block_tokens,
        bytes=num_bytes,
        skipped_leased_blocks=evicted.num_kept,
        dry_run=dry_run,
        block_hashes=evicted.block_hashes[:EVICT_HASHES_MAX],
    )
