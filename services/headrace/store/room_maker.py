"""A slot for a new block: by what rules a block is admitted, and which ones leave so that it fits.

First the quota of the new block's account: what it has beyond that leaves from among its own. Then the arena's room:
what the policy names leaves, of any account that keeps its protected minimum. Knows the arena's account, the accounts
of trust groups and the eviction order. What leaving takes (the index, the disk, the record) is the node's: it hands
that in as `remove`.
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

from headrace.blocks.host_arena import UNIT_BYTES, HostArena, units_for
from headrace.core.block import BlockHeader, NamespaceId
from headrace.core.budgets import AccountUsage, Budget, merge_budgets
from headrace.core.errors import InvalidRequest
from headrace.core.limits import BUDGET_NAMESPACES_MAX, BUDGETS_MAX, CHAIN_SHARE_MAX, PROTECTED_SHARE_MAX
from headrace.core.store_limits import BACKGROUND_REMOVALS_MAX
from headrace.store.accounts import Account, Accounts
from headrace.store.disk_blocks import DiskBlocks
from headrace.store.held_blocks import HeldBlock, HeldBlocks
from headrace.store.node_counters import NodeCounters
from headrace.store.pins import Pins
from headrace.store.removal_log import OVER_QUOTA


class RoomMaker:
    """Admission and eviction over one arena. `remove(block)` takes a block out of the node's books, slot included.

    `because(reason)` is a scope in which what leaves is remembered under that reason; whoever remembers sets it.
    """

    def __init__(
        self,
        arena: HostArena,
        blocks: HeldBlocks,
        disk: DiskBlocks,
        counters: NodeCounters,
        *,
        pins: Pins,
        remove: Callable[[HeldBlock], None],
    ) -> None:
        self._arena = arena
        self._blocks = blocks
        self._disk = disk
        self._counters = counters
        self._pins = pins
        self._remove = remove
        self._budgets: tuple[Budget, ...] = ()
        self.because: Callable[[str], AbstractContextManager[None]] = lambda reason: nullcontext()

    def slot_for(self, header: BlockHeader, header_bytes: bytes) -> int | None:
        """A slot for a block that is not held, when its parent is and its chain takes no more than its share."""
        units = units_for(header.payload_bytes, len(header_bytes))
        fair = (header.position + 1) * units <= CHAIN_SHARE_MAX * self._arena.num_units
        account, new_bytes = self.accounts.of(header), units * UNIT_BYTES
        if self._blocks.occupied(header.namespace, header.block_hash) or not fair:
            return None
        if account.bytes_max is not None and (header.position + 1) * new_bytes > account.bytes_max:
            account.refused_blocks += 1  # the chain alone is too long: that must not cost the account its other blocks
            return None
        if not self._blocks.has_parent_for(header):
            return None
        parent = self._blocks.get(header.namespace, header.parent_hash) if header.position > 0 else None
        if not self._keep_quota(account, new_bytes, parent):
            account.refused_blocks += 1
            return None
        return self._make_room(account, units, parent)

    def evict_ahead(self, free_share: float) -> int:
        """One step of what is done ahead of need; returns how many blocks left, at most BACKGROUND_REMOVALS_MAX.

        Accounts that are over their quota, which was lowered, lose what is too much. Then the policy's choice leaves
        until `free_share` of the arena is free, and not a block more. Stops where the disk would have to drop what is
        demoted: what need does not press for can wait until that is written.
        """
        left = 0
        for account in self.accounts:
            while left < BACKGROUND_REMOVALS_MAX and account.lacks_room_for(0):
                victim = self._blocks.oldest_leaf_of(account, keep=None)
                if victim is None:
                    break
                self._evict_for_quota(account, victim)
                left += 1
        while left < BACKGROUND_REMOVALS_MAX and self._arena.free_bytes < free_share * self._arena.data_bytes:
            victim = self._blocks.oldest_leaf(keep=None)
            if victim is None or not self._disk.can_queue(victim.slot_bytes):
                break
            self._evict(victim)
            self._counters.evicted_for_room += 1
            left += 1
        return left

    # Budgets

    @property
    def accounts(self) -> Accounts:
        """What each account has here."""
        return self._blocks.accounts

    def budgets(self) -> tuple[Budget, ...]:
        """The whole table, by account."""
        return self._budgets

    def set_budgets(self, budgets: Iterable[Budget]) -> tuple[Budget, ...]:
        """Merge rows into the table and answer it whole. Raises InvalidRequest, with the arithmetic, when what is
        protected would be more than PROTECTED_SHARE_MAX of the arena, or more than fits beside what is pinned, or the
        table too large; then nothing changes."""
        rows = tuple(budgets)
        asked = {row.account: row.namespaces for row in rows}
        merged = tuple(_capped(row, asked.get(row.account, ())) for row in merge_budgets((self._budgets, rows)))
        if merged == self._budgets:
            return merged
        if len(merged) > BUDGETS_MAX:
            raise InvalidRequest(f"{len(merged)} accounts with a budget; at most {BUDGETS_MAX}", param="budgets")
        protected, protected_max = sum(b.bytes_min for b in merged), int(PROTECTED_SHARE_MAX * self._arena.data_bytes)
        if protected > protected_max:
            raise InvalidRequest(
                f"the protected minima would be {protected} bytes in all; at most {protected_max} of this node's"
                f" {self._arena.data_bytes} bytes can be protected ({PROTECTED_SHARE_MAX:.0%}): lower one of them",
                param="bytes_min",
            )
        self._check_beside_pins(merged)
        self._budgets = merged
        self.accounts.set_budgets(merged, held=self._blocks, disk=self._disk)
        for block in self._blocks:
            self._blocks.offer(block)
        return merged

    def usage(self) -> list[AccountUsage]:
        """What each account has, "" (what belongs to no account that has a row) last."""
        named = sorted(self.accounts, key=lambda account: (account.name == "", account.name))
        return [
            AccountUsage(
                account=account.name,
                host_blocks=account.host_blocks,
                host_bytes=account.host_bytes,
                disk_blocks=account.disk_blocks,
                disk_bytes=account.disk_bytes,
                pinned_bytes=account.pinned_bytes,
                refused_blocks=account.refused_blocks,
                evicted_blocks=account.evicted_blocks,
            )
            for account in named
        ]

    # Steps

    def _check_beside_pins(self, budgets: Sequence[Budget]) -> None:
        """A pin may have been there first; a table that asks for no more than the one in force is always taken."""
        ahead = Accounts()
        ahead.set_budgets(budgets, held=[block for block in self._blocks if block.pin_refs], disk=())
        kept, kept_max = ahead.kept_bytes(), self._pins.kept_bytes_max
        if kept > kept_max and kept > self.accounts.kept_bytes():
            raise InvalidRequest(
                f"the protected minima would be {ahead.bytes_min} bytes in all, which with {self._pins.pinned_bytes} "
                f"pinned, less what is both, are {kept}; pins and minima together may take {kept_max} of this node's "
                f"{self._arena.data_bytes} bytes: lower a minimum or take a pin back",
                param="bytes_min",
            )

    def _keep_quota(self, account: Account, new_bytes: int, parent: HeldBlock | None) -> bool:
        """Have the account's own oldest leaves leave until so much more is within its quota; False when they cannot."""
        while account.lacks_room_for(new_bytes):
            victim = self._blocks.oldest_leaf_of(account, keep=parent)
            if victim is None:
                return False
            self._evict_for_quota(account, victim)
        return True

    def _make_room(self, account: Account, units: int, parent: HeldBlock | None) -> int | None:
        """A slot of that size, evicting the policy's choice of leaves one by one until one fits; None when none can.

        One eviction makes room for one block of the same size. The new block's parent stays, and thereby its chain. A
        leaf of its own account may go although it is protected, when others have none: the new block replaces it.
        """
        while (slot := self._arena.allocate(units)) is None:
            victim = self._blocks.oldest_leaf(keep=parent)
            if victim is None and account.bytes_min:
                victim = self._blocks.oldest_leaf_of(account, keep=parent)
            if victim is None:
                return None
            self._evict(victim)
            self._counters.evicted_for_room += 1
        return slot

    def _evict_for_quota(self, account: Account, victim: HeldBlock) -> None:
        with self.because(OVER_QUOTA):
            self._evict(victim)
        account.evicted_blocks += 1
        self._counters.evicted_for_quota += 1

    def _evict(self, victim: HeldBlock) -> None:
        if victim.visible and victim.may_go_to_disk:
            self._disk.demote(victim, self._arena.payload(victim.slot, victim.header.payload_bytes))
        self._remove(victim)


def _capped(budget: Budget, asked: tuple[NamespaceId, ...]) -> Budget:
    """The row with at most BUDGET_NAMESPACES_MAX namespaces, those just asked for first: gateways ask for what is
    served now, and blocks of models that left so many models ago count for no account."""
    if len(budget.namespaces) <= BUDGET_NAMESPACES_MAX:
        return budget
    first = dict.fromkeys((*asked, *budget.namespaces))
    return replace(budget, namespaces=tuple(sorted(list(first)[:BUDGET_NAMESPACES_MAX])))
