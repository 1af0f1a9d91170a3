"""Describe held blocks to people. Pure: reads the books, changes nothing."""

from headrace.core.block import HolderId, Tier
from headrace.core.clock import Clock
from headrace.core.generation import BlockInfo, EvictSelector
from headrace.core.limits import LIST_BLOCKS_MAX
from headrace.store.held_blocks import HeldBlock, HeldBlocks
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
    orders = _Orders()
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
            narrowed_from=block.header.narrowed_from,
            pinned_until_unix_ms=block.pinned_until_unix_ms,
            protected_by_pin=block.pin_refs > 0,
            expires_unix_ms=orders.goes_unix_ms(block),
        )
        for block in selected[: max(0, min(limit, LIST_BLOCKS_MAX))]
    ]
    return infos, len(selected)


class _Orders:
    """When an order has a block go: one on it or on any that it stands on. Each block is walked over once."""

    def __init__(self) -> None:
        self._known: dict[int, int] = {}

    def goes_unix_ms(self, block: HeldBlock) -> int:
        """When its time is over if nobody uses it until then; 0: never."""
        return min((moment for moment in (block.expires_unix_ms, self._ordered(block)) if moment), default=0)

    def _ordered(self, block: HeldBlock) -> int:
        path: list[HeldBlock] = []
        walked: HeldBlock | None = block
        while walked is not None and id(walked) not in self._known:
            path.append(walked)
            walked = walked.parent
        moment = 0 if walked is None else self._known[id(walked)]
        for member in reversed(path):
            moment = min((each for each in (moment, member.ordered_unix_ms) if each), default=0)
            self._known[id(member)] = moment
        return moment
