"""Describe held blocks to people. Pure: reads the books, changes nothing."""

from headrace.core.block import HolderId, Tier
from headrace.core.clock import Clock
from headrace.core.generation import BlockInfo, EvictSelector
from headrace.core.limits import LIST_BLOCKS_MAX
from headrace.store.held_blocks import HeldBlocks
from headrace.store.plan_eviction import select_blocks


def list_blocks(
    blocks: HeldBlocks, selector: EvictSelector, *, holder: HolderId, clock: Clock, limit: int
) -> tuple[list[BlockInfo], int]:
    """Readable blocks that the selector means, heads first, at most `limit` of them; and how many in all.

    Age is counted from the header's wall time, so that it survives restarts of the node; idleness is not.
    """
    now_s, unix_ms = clock.now_s(), clock.unix_ms()
    selected = [block for block in select_blocks(blocks, selector, now_s=now_s) if block.visible]
    if selector.tier not in (None, Tier.HOST):
        return [], 0
    selected.sort(key=lambda block: (block.header.namespace, block.header.position, block.header.created_unix_ms))
    infos = [
        BlockInfo(
            namespace=block.header.namespace,
            base_namespace=block.header.base_namespace,
            block_hash=block.header.block_hash,
            parent_hash=block.header.parent_hash,
            position=block.header.position,
            token_ids=block.header.token_ids,
            bytes=block.slot_bytes,
            holder=holder,
            tier=Tier.HOST,
            hits=block.hits,
            age_s=max(0.0, (unix_ms - block.header.created_unix_ms) / 1_000),
            idle_s=max(0.0, now_s - block.used_s),
            leases=block.leases,
            producer=block.header.producer,
            created_unix_ms=block.header.created_unix_ms,
            payload_xxh3=block.header.payload_xxh3,
        )
        for block in selected[: max(0, min(limit, LIST_BLOCKS_MAX))]
    ]
    return infos, len(selected)
