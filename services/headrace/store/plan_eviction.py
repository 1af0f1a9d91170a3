"""Decide which blocks an operator's eviction takes. Pure: the node carries the plan out.

A block can leave only after all that stand on it, and never while it is read or written; so the plan is closed under
descendants and ordered tail first.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.core.block import Tier
from headrace.core.generation import EvictSelector
from headrace.store.held_blocks import HeldBlock, HeldBlocks, SlotState


@dataclass(frozen=True, slots=True)
class EvictionPlan:
    """Blocks to remove, in removal order, and how many matching blocks stay because they or their tails are in use, or
    because they or their tails are pinned."""

    victims: tuple[HeldBlock, ...]
    skipped_leased_blocks: int
    skipped_pinned_blocks: int = 0


def plan_eviction(blocks: HeldBlocks, selector: EvictSelector, *, now_s: float) -> EvictionPlan:
    """Select committed blocks, then drop from the plan what is pinned and whatever a leased, reserved or pinned
    descendant stands on.

    The selector is an intersection: namespace, any of the hashes with all their descendants, idle for at least so long.
    A use counts for all blocks before the used one, so an idle block never has a block in use behind it. `free_bytes`
    takes the least recently used first, as many as are needed. `selector.model` must have been turned into namespaces
    by the caller: a node knows no model names.
    """
    assert selector.model is None, "the caller resolves a model to its namespaces"
    if selector.tier not in (None, Tier.HOST):
        return EvictionPlan(victims=(), skipped_leased_blocks=0)
    matched = sorted(select_blocks(blocks, selector, now_s=now_s), key=lambda b: -b.header.position)
    if selector.free_bytes is not None:
        matched.sort(key=lambda b: b.used_s)  # stable: no block is fresher than its parent, so children stay first
    going: set[int] = set()
    victims, skipped, pinned, freed_bytes = [], 0, 0, 0
    for block in matched:  # deepest first: children are decided before their parents
        if selector.free_bytes is not None and freed_bytes >= selector.free_bytes:
            break
        if block.state is not SlotState.COMMITTED:
            continue
        if block.pin_refs:
            pinned += 1
        elif block.leases == 0 and all(id(child) in going for child in block.children.values()):
            going.add(id(block))
            victims.append(block)
            freed_bytes += block.slot_bytes
        else:
            skipped += 1
    return EvictionPlan(victims=tuple(victims), skipped_leased_blocks=skipped, skipped_pinned_blocks=pinned)


def select_blocks(blocks: HeldBlocks, selector: EvictSelector, *, now_s: float) -> list[HeldBlock]:
    """Held blocks that a selector means, in no particular order."""
    pool: Iterable[HeldBlock] = blocks
    if selector.block_hashes or selector.prefix_token_ids:
        roots = select_roots(blocks, selector)
        pool = {id(b): b for root in roots for b in blocks.with_descendants(root)}.values()
    return [
        block
        for block in pool
        if (selector.namespace is None or block.header.is_of(selector.namespace))
        and (selector.idle_for_s is None or now_s - block.used_s >= selector.idle_for_s)
        and (selector.created_before_unix_ms is None or block.header.created_unix_ms <= selector.created_before_unix_ms)
    ]


def select_roots(blocks: HeldBlocks, selector: EvictSelector) -> list[HeldBlock]:
    """The very blocks that a selector names, by hash or as the last full block of a prefix; none where it names none.
    Of its other terms only the namespace counts."""
    if selector.block_hashes:
        named = set(selector.block_hashes)
        roots = [block for block in blocks if block.header.block_hash in named]
    else:
        roots = _last_blocks(blocks, selector.prefix_token_ids) if selector.prefix_token_ids else []
    return [block for block in roots if selector.namespace is None or block.header.is_of(selector.namespace)]


def _last_blocks(blocks: HeldBlocks, token_ids: tuple[int, ...]) -> list[HeldBlock]:
    """The block of a prefix's last full block of tokens in every namespace that has it; each may cut blocks otherwise.

    Compared by tokens and not by hash: nobody can spell the hashes of a namespace whose salt they do not know.
    """
    found: list[HeldBlock] = []
    level = [block for block in blocks if block.header.position == 0]
    while level:
        level = [block for block in level if _is_at(token_ids, block)]
        found += [
            block for block in level if (block.header.position + 2) * len(block.header.token_ids) > len(token_ids)
        ]
        level = [child for block in level for child in block.children.values()]
    return found


def _is_at(token_ids: tuple[int, ...], block: HeldBlock) -> bool:
    start = block.header.position * len(block.header.token_ids)
    return token_ids[start : start + len(block.header.token_ids)] == block.header.token_ids
