"""The books of a worker's pool as people see them."""

from tiny_gateway import make_worker_record

from headrace.core.block import HashAlgorithm, hash_prompt
from headrace.core.generation import EvictSelector
from headrace.engine.block_pool import BlockPool, Taken
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
