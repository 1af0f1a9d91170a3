"""Which blocks of the disk tier a selector means, to list them and to evict them. Pure: reads the books.

A selector that names a prefix means all that stands on it, and a chain's head may be in the arena while its tail is on
disk; so selection looks at both tiers as one tree, through the same `select_blocks` as the arena's own.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.core.block import BlockHash, BlockHeader, HolderId, Tier
from headrace.core.clock import Clock
from headrace.core.generation import BlockInfo, EvictReport, EvictSelector
from headrace.core.limits import EVICT_HASHES_MAX, LIST_BLOCKS_MAX
from headrace.store.disk_block import DiskBlock, HeaderBrief
from headrace.store.disk_blocks import DiskBlocks
from headrace.store.held_blocks import BlockKey, HeldBlock, HeldBlocks
from headrace.store.plan_eviction import EvictionPlan, select_blocks, select_roots


def select_disk_blocks(disk: DiskBlocks, selector: EvictSelector, *, now_s: float) -> list[DiskBlock]:
    """Blocks kept on disk that a selector means, whether or not the arena has them too; heads first."""
    if len(disk) == 0:
        return []
    tree: Any = _BothTiers(disk)  # has what `select_blocks` asks of HeldBlocks
    selected: list[Any] = select_blocks(tree, selector, now_s=now_s)
    found = [node.disk for node in selected if node.disk is not None]
    return sorted(found, key=lambda block: (block.header.namespace, block.header.position))


def plan_disk_eviction(
    disk: DiskBlocks, selector: EvictSelector, *, arena_victims: Sequence[HeldBlock], now_s: float
) -> list[DiskBlock]:
    """What has to leave the disk when the arena's victims do, in removal order: their copies, what the selector means
    here, and all that would lose its prefix. A block that stays in the arena, because it is read, keeps its copy unless
    the selector names the disk. With `free_bytes` the least recently used go first, as many as are needed."""
    victims: dict[BlockKey, DiskBlock] = {}
    lost: set[BlockKey] = set()
    for held in sorted(arena_victims, key=lambda each: each.header.position):
        kept, header = disk.get(held.key), held.header
        if kept is None or selector.tier is None or (header.namespace, header.parent_hash) in lost:
            lost.add(held.key)
            if kept is not None:
                victims[held.key] = kept
    if selector.tier in (None, Tier.DISK):
        candidates = select_disk_blocks(disk, selector, now_s=now_s)
        if selector.free_bytes is not None:
            candidates.sort(key=lambda block: (block.used_s, -block.header.position))
        freed_bytes = sum(block.total_bytes for block in victims.values())
        for candidate in candidates:
            if selector.free_bytes is not None and freed_bytes >= selector.free_bytes:
                break
            if candidate.key not in victims and (selector.tier == Tier.DISK or not disk.in_arena(candidate.key)):
                victims[candidate.key] = candidate
                freed_bytes += candidate.total_bytes
    lost |= {key for key in victims if not disk.in_arena(key)}
    for key in lost:
        victims |= {below.key: below for below in disk.descendants(key)}
    return sorted(victims.values(), key=lambda block: -block.header.position)


def report_eviction(
    plan: EvictionPlan, on_disk: Sequence[DiskBlock], *, holder: HolderId, dry_run: bool
) -> EvictReport:
    """What an eviction takes from both tiers; a block that is in both counts in each."""
    hashes = [block.header.block_hash for block in plan.victims] + [block.header.block_hash for block in on_disk]
    return EvictReport(
        holder=holder,
        blocks=len(plan.victims) + len(on_disk),
        tokens=sum(len(b.header.token_ids) for b in plan.victims) + sum(len(b.header.token_ids) for b in on_disk),
        bytes=sum(block.slot_bytes for block in plan.victims) + sum(block.total_bytes for block in on_disk),
        skipped_leased_blocks=plan.skipped_leased_blocks,
        skipped_pinned_blocks=plan.skipped_pinned_blocks,
        dry_run=dry_run,
        block_hashes=tuple(hashes[:EVICT_HASHES_MAX]),
    )


def roots_on_disk_alone(disk: DiskBlocks, selector: EvictSelector) -> int:
    """How many of the very blocks that a selector names are on disk and not in the arena."""
    if len(disk) == 0:
        return 0
    tree: Any = _BothTiers(disk)
    return sum(
        1 for node in select_roots(tree, selector) if not disk.in_arena((node.header.namespace, node.header.block_hash))
    )


def resident_blocks(held: HeldBlocks, disk: DiskBlocks) -> list[HeldBlock | DiskBlock]:
    """Every readable block of either tier, each once, parents before children."""
    resident: list[HeldBlock | DiskBlock] = [block for block in held if block.visible]
    resident += [block for block in disk if not disk.in_arena(block.key)]
    return sorted(resident, key=lambda block: block.header.position)


def list_disk_blocks(
    disk: DiskBlocks, selector: EvictSelector, *, holder: HolderId, clock: Clock, limit: int
) -> tuple[list[BlockInfo], int]:
    """As `list_blocks`, of the disk tier."""
    if selector.tier not in (None, Tier.DISK):
        return [], 0
    selected = select_disk_blocks(disk, selector, now_s=clock.now_s())
    shown = selected[: max(0, min(limit, LIST_BLOCKS_MAX))]
    return [_describe(block, holder, clock) for block in shown], len(selected)


def _describe(block: DiskBlock, holder: HolderId, clock: Clock) -> BlockInfo:
    header = block.header
    return BlockInfo(
        namespace=header.namespace,
        base_namespace=header.base_namespace,
        block_hash=header.block_hash,
        parent_hash=header.parent_hash,
        position=header.position,
        token_ids=header.token_ids,
        bytes=block.total_bytes,
        holder=holder,
        tier=Tier.DISK,
        hits=block.hits,
        age_s=max(0.0, (clock.unix_ms() - header.created_unix_ms) / 1_000),
        idle_s=max(0.0, clock.now_s() - block.used_s),
        leases=0,
        narrowed_from=header.narrowed_from,
    )


@dataclass(slots=True, eq=False)
class _Node:
    """One resident block of either tier or of both, with what `select_blocks` looks at."""

    header: BlockHeader | HeaderBrief
    used_s: float
    disk: DiskBlock | None
    children: dict[BlockHash, "_Node"] = field(default_factory=dict)


class _BothTiers:
    """All resident blocks of a node as one tree; the arena's view of a block's last use wins."""

    def __init__(self, disk: DiskBlocks) -> None:
        self._nodes: dict[BlockKey, _Node] = {
            held.key: _Node(held.header, held.used_s, disk.get(held.key))
            for held in disk.arena_blocks
            if disk.in_arena(held.key)
        }
        for block in disk:
            if block.key not in self._nodes:
                self._nodes[block.key] = _Node(block.header, block.used_s, block)
        for node in self._nodes.values():
            if node.header.position > 0:
                parent = self._nodes[(node.header.namespace, node.header.parent_hash)]
                parent.children[node.header.block_hash] = node

    def __iter__(self) -> Iterator[_Node]:
        return iter(self._nodes.values())

    def with_descendants(self, node: _Node) -> list[_Node]:
        """A block and all that stand on it, parents first."""
        found = [node]
        for member in found:  # grows while walked
            found.extend(member.children.values())
        return found
