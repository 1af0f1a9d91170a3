"""Describe a worker's pool to people: its hashed blocks and its books. Reads the pool, changes nothing."""

from headrace.core.block import BlockHash, KvLayout, Namespace, NamespaceId, Tier
from headrace.core.generation import BlockInfo, DeviceListing, EvictSelector, HolderStat
from headrace.core.limits import LIST_BLOCKS_MAX
from headrace.core.members import WorkerRecord
from headrace.engine.block_pool import BlockPool
from headrace.engine.layered_pool import LayeredPool
from headrace.engine.pool_block import PoolBlock
from headrace.engine.pool_values import Selection


def list_device(pool: BlockPool, worker: WorkerRecord, selector: EvictSelector, *, limit: int) -> DeviceListing:
    """The pool's blocks that the selector means, heads first, at most `limit` of them; how many in all; the books.

    A block in use counts as leased: it is found by others and cannot be evicted.
    """
    selection = pool_selection(selector, worker.namespace)
    described = [] if selection is None else pool.describe(selection)
    described.sort(key=lambda block: (block.namespace, block.position))
    shown = described[: max(0, min(limit, LIST_BLOCKS_MAX))]
    return DeviceListing(
        blocks=tuple(_describe(block, worker) for block in shown),
        total_blocks=len(described),
        stat=_stat(pool, worker),
    )


def pool_selection(selector: EvictSelector, namespace: Namespace) -> Selection | None:
    """The selector in the pool's words; None when it means another tier.

    All blocks of a pool are of its worker's namespace or narrowed from it, so naming that namespace means all of them.
    Of blocks of two parts each counts as its wide one: the near one may have gone before.
    """
    if selector.tier not in (None, Tier.DEVICE):
        return None
    every = selector.namespace is None or selector.namespace == namespace.id
    roots = frozenset(BlockHash(block_hash) for block_hash in selector.block_hashes)
    return Selection(
        namespace=None if every else NamespaceId(selector.namespace or ""),
        roots=roots or None,
        prefix_token_ids=selector.prefix_token_ids,
        idle_for_s=selector.idle_for_s,
        created_before_unix_ms=selector.created_before_unix_ms,
        blocks_max=None
        if selector.free_bytes is None
        else -(-selector.free_bytes // namespace.layout.in_pool.wide.block_bytes),
    )


def _describe(block: PoolBlock, worker: WorkerRecord) -> BlockInfo:
    layout = worker.namespace.layout.in_pool
    return BlockInfo(
        namespace=block.namespace,
        base_namespace=worker.namespace.id,
        block_hash=block.block_hash,
        parent_hash=block.parent_hash,
        position=block.position,
        token_ids=block.token_ids,
        bytes=layout.block_bytes if block.has_near else layout.wide_bytes,
        holder=worker.holder_id,
        tier=Tier.DEVICE,
        hits=block.hits,
        age_s=block.age_s,
        idle_s=block.idle_s,
        leases=block.references,
        expires_unix_ms=block.expires_unix_ms,
        narrowed_from=block.narrowed_from,
    )


def _stat(pool: BlockPool, worker: WorkerRecord) -> HolderStat:
    """Committed is what sequences use and what is kept for reuse; leased is what sequences use. Free is empty: what is
    kept could make room too, but is not counted twice."""
    layout: KvLayout = worker.namespace.layout.in_pool
    available, kept = pool.available_blocks, pool.kept_blocks
    empty = max(0, available - kept)
    return HolderStat(
        holder=worker.holder_id,
        tier=Tier.DEVICE,
        incarnation=worker.incarnation,
        total_blocks=pool.num_blocks,
        free_blocks=empty,
        committed_blocks=pool.num_blocks - empty,
        reserved_blocks=0,
        leased_blocks=pool.num_blocks - available,
        block_bytes=_block_bytes(pool, layout),
        lookups_tokens=pool.counters.lookups_blocks * layout.block_tokens,
        hits_tokens=pool.counters.hits_blocks * layout.block_tokens,
        evicted_blocks=pool.counters.evicted_blocks,
        lookups=pool.counters.lookups,
        read_bytes=pool.counters.hits_blocks * _block_bytes(pool, layout),
    )


def _block_bytes(pool: BlockPool, layout: KvLayout) -> int:
    """The pool's bytes for each block: of two parts it has fewer near ones."""
    if not isinstance(pool, LayeredPool):
        return layout.block_bytes
    near_bytes = pool.near.num_blocks * layout.near.block_bytes
    return layout.wide.block_bytes + near_bytes // pool.num_blocks
