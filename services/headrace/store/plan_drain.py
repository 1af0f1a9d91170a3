"""In which order a node hands its blocks to others. Pure: reads the books, changes nothing.

A block goes after the block that it stands on, or its new holder could not keep it. Among what may go next, the block
used last goes first: a drain that is cut short has then moved what is most likely to be asked for again.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.store.disk_blocks import DiskBlock
from headrace.store.held_blocks import BlockKey, HeldBlock


@dataclass(frozen=True, slots=True)
class MovingBlock:
    """One block to be handed on, as it was when the order was made."""

    key: BlockKey
    parent_key: BlockKey | None
    position: int
    bytes: int  # about what it takes on a peer


def plan_drain(residents: Sequence[HeldBlock | DiskBlock]) -> list[MovingBlock]:
    """Every block once, parents before children, hottest first; of equally hot ones those used more often.

    residents: every readable block of both tiers, parents before children, as `StoreNode.residents` gives them.
    """
    used_s: dict[BlockKey, float] = {}
    for block in reversed(residents):
        used_s[block.key] = max(block.used_s, used_s.get(block.key, block.used_s))
        parent_key = _parent_key(block)
        if parent_key is not None:
            used_s[parent_key] = max(used_s[block.key], used_s.get(parent_key, used_s[block.key]))
    # A use of a block is one of all before it, so that a parent is never colder than its child and `position` settles
    # the rest: parents first, and a chain of one request stays together.
    hottest = sorted(residents, key=lambda block: (-used_s[block.key], block.header.position, -block.hits))
    return [MovingBlock(block.key, _parent_key(block), block.header.position, _bytes_of(block)) for block in hottest]


def _parent_key(block: HeldBlock | DiskBlock) -> BlockKey | None:
    header = block.header
    return (header.namespace, header.parent_hash) if header.position > 0 else None


def _bytes_of(block: HeldBlock | DiskBlock) -> int:
    return block.slot_bytes if isinstance(block, HeldBlock) else block.total_bytes
