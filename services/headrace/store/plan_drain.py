"""In which order a node hands its blocks to others. Pure: reads the books, changes nothing.

A block goes after the block that it stands on, or its new holder could not keep it. Among what may go next, what a pin
keeps goes first and then the block used last: a drain that is cut short has moved what matters most.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.core.limits import TTL_S_MAX, TTL_S_MIN
from headrace.core.retention import Retention
from headrace.store.disk_block import DiskBlock
from headrace.store.held_blocks import BlockKey, HeldBlock


@dataclass(frozen=True, slots=True)
class MovingBlock:
    """One block to be handed on, as it was when the order was made."""

    key: BlockKey
    parent_key: BlockKey | None
    position: int
    bytes: int  # to be sent; of a block on disk with its header
    expires_unix_ms: int = 0  # these four as in `SlotTerms`
    ordered_unix_ms: int = 0
    pinned_until_unix_ms: int = 0
    not_on_disk: bool = False

    def travels_with(self, other: "MovingBlock") -> bool:
        """Whether one call may have a peer keep both: for as long, and in the same tiers."""
        return (self.expires_unix_ms, self.not_on_disk) == (other.expires_unix_ms, other.not_on_disk)

    def retention(self, unix_ms: int) -> Retention:
        """What to ask a peer for, so that the block's time there is over when it would have been here."""
        left_s = min(max((self.expires_unix_ms - unix_ms) / 1_000, TTL_S_MIN), TTL_S_MAX)
        return Retention(ttl_s=left_s if self.expires_unix_ms else None, on_disk=not self.not_on_disk)


def plan_drain(residents: Sequence[HeldBlock | DiskBlock]) -> list[MovingBlock]:
    """Every block once, parents before children: first what pins keep, then the hottest, then those used more often.

    residents: every readable block of both tiers, parents before children, as `StoreNode.residents` gives them.
    """
    blocks = [_moving(block) for block in residents]
    used_s: dict[BlockKey, float] = {}
    for moving, block in zip(reversed(blocks), reversed(residents), strict=True):
        latest = used_s[moving.key] = max(block.used_s, used_s.get(moving.key, block.used_s))
        if moving.parent_key is not None:
            used_s[moving.parent_key] = max(latest, used_s.get(moving.parent_key, latest))
    # A use of a block is one of all before it, so that a parent is never colder than its child and `position` settles
    # the rest: parents first, and a chain of one request stays together.
    ranks = [
        (not _is_kept(block), -used_s[moving.key], moving.position, -block.hits, index)
        for index, (moving, block) in enumerate(zip(blocks, residents, strict=True))
    ]
    ranks.sort()
    return [blocks[rank[-1]] for rank in ranks]


def _parent_key(block: HeldBlock | DiskBlock) -> BlockKey | None:
    header = block.header
    return (header.namespace, header.parent_hash) if header.position > 0 else None


def _is_kept(block: HeldBlock | DiskBlock) -> bool:
    return isinstance(block, HeldBlock) and block.pin_refs > 0


def _moving(block: HeldBlock | DiskBlock) -> MovingBlock:
    """A block on disk alone has no bound in time: one that has is not written there."""
    parent_key = _parent_key(block)
    if not isinstance(block, HeldBlock):
        return MovingBlock(block.key, parent_key, block.header.position, block.total_bytes)
    return MovingBlock(
        key=block.key,
        parent_key=parent_key,
        position=block.header.position,
        bytes=block.header.payload_bytes,
        expires_unix_ms=block.expires_unix_ms,
        ordered_unix_ms=block.ordered_unix_ms,
        pinned_until_unix_ms=block.pinned_until_unix_ms,
        not_on_disk=block.not_on_disk,
    )
