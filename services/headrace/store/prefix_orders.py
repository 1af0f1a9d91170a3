"""An operator's orders about prefixes on one node: pin, unpin, and a moment at which they go.

Answers what was done, in blocks, tokens and exact bytes, or why nothing was. An order is about blocks that the arena
has, since its records are where orders are kept: one that the disk alone has must be read first.
"""

from collections.abc import Iterable
from dataclasses import replace

from headrace.core.block import HolderId
from headrace.core.generation import ControlOutcome, ControlReport, EvictSelector
from headrace.core.retention import NO_END_UNIX_MS
from headrace.store.block_terms import BlockTerms
from headrace.store.disk_block import DiskBlock
from headrace.store.disk_blocks import DiskBlocks
from headrace.store.held_blocks import BlockKey, HeldBlock, HeldBlocks
from headrace.store.node_counters import NodeCounters
from headrace.store.pins import Pins, chain_of
from headrace.store.plan_eviction import select_roots
from headrace.store.select_disk_blocks import roots_on_disk_alone


class PrefixOrders:
    """Carries orders out on the node's books. A selector means the very blocks that it names, readable ones only."""

    def __init__(
        self,
        holder: HolderId,
        blocks: HeldBlocks,
        disk: DiskBlocks,
        *,
        pins: Pins,
        terms: BlockTerms,
        counters: NodeCounters,
    ) -> None:
        self._holder = holder
        self._blocks = blocks
        self._disk = disk
        self._pins = pins
        self._terms = terms
        self._counters = counters

    def pin(self, selector: EvictSelector, *, until_unix_ms: int | None, carried: bool = False) -> ControlReport:
        """Keep the named blocks and all before them. All or nothing: refused when pins would take more than they may,
        alone or with what is protected. A block that is pinned already gets the new end; carried: if
        that is later, since the pin comes with the block from another node and is not this node's operator's word."""
        roots = self._named(selector)
        if not roots:
            return self._not_held(selector)
        why = self._why_no_room(self._pins.beyond(roots))
        if why:
            self._counters.refused_pins += 1
            return self._report(ControlOutcome.REFUSED, (), until_unix_ms=until_unix_ms, why=why)
        end_unix_ms = NO_END_UNIX_MS if until_unix_ms is None else until_unix_ms
        for root in roots:
            self._pins.pin(root, max(end_unix_ms, root.pinned_until_unix_ms) if carried else end_unix_ms)
        kept = {held.key: held for root in roots for held in chain_of(root)}
        return self._report(ControlOutcome.DONE, kept.values(), until_unix_ms=until_unix_ms)

    def unpin(self, selector: EvictSelector) -> ControlReport:
        """Take pins on the named blocks back; what another pin keeps, stays kept."""
        roots = self._named(selector)
        pinned = [root for root in roots if root.pinned_until_unix_ms]
        if not pinned:
            return self._not_held(selector, "it is not pinned" if roots else "")
        freed = [held for root in pinned for held in self._pins.unpin(root)]
        return self._report(ControlOutcome.DONE, freed)

    def set_ttl(self, selector: EvictSelector, *, expires_unix_ms: int | None, carried: bool = False) -> ControlReport:
        """Have the named blocks and all that stand on them go at a moment; None takes such orders back. carried: as in
        `pin`; an order that is there already and comes sooner stands."""
        roots = self._named(selector)
        if expires_unix_ms is None:
            ordered = [root for root in roots if root.ordered_unix_ms]
            if roots and not ordered:
                return self._not_held(selector, "no order stands on it")
            roots = ordered
        if not roots:
            return self._not_held(selector)
        for root in roots:
            sooner = carried and 0 < root.ordered_unix_ms < (expires_unix_ms or 0)
            self._terms.order(root, root.ordered_unix_ms if sooner else expires_unix_ms or 0)
        held = {b.key: b for root in roots for b in self._blocks.with_descendants(root) if b.visible}
        why = "what a pin keeps goes when that ends" if any(root.pin_refs for root in roots) and expires_unix_ms else ""
        report = self._report(ControlOutcome.DONE, held.values(), until_unix_ms=expires_unix_ms, why=why)
        return _with_disk(report, self._on_disk(held))

    def _why_no_room(self, beyond: list[HeldBlock]) -> str:
        """Why these cannot be kept for certain, with the arithmetic; "" when they can."""
        pins, accounts = self._pins, self._blocks.accounts
        num_bytes = sum(block.slot_bytes for block in beyond)
        total = pins.pinned_bytes + num_bytes
        if num_bytes and total > pins.bytes_max:
            return (
                f"{num_bytes} bytes more than the {pins.pinned_bytes} pinned already are {total}; "
                f"pins may take {pins.bytes_max}, {pins.share:.0%} of the arena"
            )
        kept = accounts.kept_bytes(beyond)
        if kept > accounts.kept_bytes() and kept > pins.kept_bytes_max:
            return (
                f"{num_bytes} bytes more than the {pins.pinned_bytes} pinned already, with protected minima of "
                f"{accounts.bytes_min}, less what is both, are {kept}; pins and minima together may take "
                f"{pins.kept_bytes_max} of the arena: lower a minimum or take a pin back"
            )
        return ""

    def _named(self, selector: EvictSelector) -> list[HeldBlock]:
        return [block for block in select_roots(self._blocks, selector) if block.visible]

    def _on_disk(self, held: Iterable[BlockKey]) -> dict[BlockKey, DiskBlock]:
        """Copies on disk of held blocks, and what stands on them there."""
        found: dict[BlockKey, DiskBlock] = {}
        for key in held:
            copy = self._disk.get(key)
            found |= {} if copy is None else {key: copy}
            found |= {below.key: below for below in self._disk.descendants(key)}
        return found

    def _not_held(self, selector: EvictSelector, why: str = "") -> ControlReport:
        if not why and roots_on_disk_alone(self._disk, selector):
            why = "on disk only: read it once, or warm it"
        return self._report(ControlOutcome.NOT_HELD, (), why=why)

    def _report(
        self,
        outcome: ControlOutcome,
        blocks: Iterable[HeldBlock],
        *,
        until_unix_ms: int | None = None,
        why: str = "",
    ) -> ControlReport:
        concerned = list(blocks)
        return ControlReport(
            holder=self._holder,
            outcome=outcome,
            blocks=len(concerned),
            tokens=sum(len(block.header.token_ids) for block in concerned),
            bytes=sum(block.slot_bytes for block in concerned),
            pinned_bytes=self._pins.pinned_bytes,
            pin_bytes_max=self._pins.bytes_max,
            until_unix_ms=until_unix_ms or 0,
            why=why,
        )


def _with_disk(report: ControlReport, on_disk: dict[BlockKey, DiskBlock]) -> ControlReport:
    """The same with what goes from the disk; a block that is in both tiers counts in each, as in an eviction."""
    return replace(
        report,
        blocks=report.blocks + len(on_disk),
        tokens=report.tokens + sum(len(block.header.token_ids) for block in on_disk.values()),
        bytes=report.bytes + sum(block.total_bytes for block in on_disk.values()),
    )
