"""Blocks that hold numbers which are none (NaN, infinite): kept from being shared, and forgotten where they are.

Arithmetic that overflows and memory that fails spoil every token behind them. The request fails, but its KV would stay:
in the pool, and in stores under a checksum that is right, where it would fail every later request of that prefix long
after the cause has gone. So a block is looked at when it is full, before anybody can find it by its hash. One that was
spoilt in the pool afterwards shows by logits that are no numbers: then the run's blocks are looked at once more.

It looks at numbers that a run has computed or taken; when to look is `step_loop.py`'s to know.
"""

from headrace.engine.block_pool import BlockPool
from headrace.engine.layered_kv import PoolKV
from headrace.engine.pool_values import Selection
from headrace.engine.run import Run


class KvInvalid(ValueError):
    """The model computed keys or values that are NaN or infinite."""


def check_computed(run: Run, kv: PoolKV, *, since: int) -> None:
    """Look at the blocks that became full since positions [0, since) were computed. Raises KvInvalid."""
    filled = [block.block_id for block in run.hashed_blocks(since)]
    if not kv.is_finite(filled):
        raise KvInvalid(f"of the KV of tokens {since} to {run.num_computed} some is NaN or infinite")


def forget_spoilt(run: Run, kv: PoolKV, pool: BlockPool) -> None:
    """Have no block of the run found any more that is spoilt, nor what stands on it."""
    spoilt = [block.block_hash for block in run.hashed_blocks() if not kv.is_finite((block.block_id,))]
    if spoilt:
        pool.forget(Selection(roots=frozenset(spoilt)))
