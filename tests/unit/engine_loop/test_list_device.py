"""The books of a worker's pool as people see them."""

from dataclasses import replace
from types import SimpleNamespace

from tiny_gateway import make_worker_record

from headrace.core.block import HashAlgorithm, hash_prompt
from headrace.core.clock import SystemClock
from headrace.core.generation import EvictSelector
from headrace.core.key_window import KeyWindow
from headrace.engine.block_pool import BlockPool, Taken
from headrace.engine.evict_device import evict_device
from headrace.engine.layered_pool import LayeredPool
from headrace.engine.list_device import list_device


def test_free_and_committed_are_all_there_is_whatever_is_kept_and_in_use() -> None:
    """Fails when a block that is kept for reuse counts as free and as committed."""
    pool, worker = BlockPool(10), make_worker_record("d0")
    prompt = hash_prompt(worker.namespace.id, range(3), block_tokens=1, algorithm=HashAlgorithm.XXH3_128)
    kept = pool.take(3, prompt=prompt, shared_max=3)
    assert isinstance(kept, Taken)
    pool.hash_blocks(prompt, kept.block_ids)
    pool.unref_all(kept.block_ids)
    assert isinstance(pool.take(2, prompt=None, shared_max=0), Taken)
    stat = list_device(pool, worker, EvictSelector(), limit=10).stat
    assert (stat.total_blocks, stat.free_blocks, stat.committed_blocks, stat.leased_blocks) == (10, 5, 5, 2)


def test_evicting_frees_at_least_the_bytes_that_were_asked_for_where_near_parts_went_before() -> None:
    """Fails when each block counts as whole: of two parts, the near one of most blocks is gone already."""
    namespace = make_worker_record("d0").namespace
    layout = replace(namespace.layout, num_layers=6, near_layers=5)
    model = SimpleNamespace(name="m", namespace=replace(namespace, layout=layout), kv=SimpleNamespace(layout=layout))
    pool = LayeredPool(20, num_near=20, near_window=KeyWindow(2, 1), clock=SystemClock())
    prompt = hash_prompt(namespace.id, range(12), block_tokens=1, algorithm=HashAlgorithm.XXH3_128)
    taken = pool.take(12, prompt=prompt)
    assert isinstance(taken, Taken)
    wide = pool.parts.split(taken.block_ids)[0]
    pool.hash_blocks(prompt, wide)
    pool.unref_all(taken.block_ids)
    asked = 5 * layout.wide.block_bytes
    freed = evict_device(pool, model, EvictSelector(free_bytes=asked), dry_run=False)
    assert (freed.blocks, freed.bytes) == (5, asked)
