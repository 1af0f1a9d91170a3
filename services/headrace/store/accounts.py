"""Whose blocks a store node holds: what each account has in each tier, its bounds, and which of its leaves is oldest.

An *account* is a trust group (`core/budgets.py`); a block belongs to the one that has its own namespace or, failing
that, one that its own was narrowed from, the closest first. Accounts with a row in the table of budgets are kept apart;
"" has the rest. Fed with the events of `HeldBlocks` and `DiskBlocks`, so that it is exact between any two steps, and
rebuilt from what is held when the table changes.

Owns the *withheld* leaves: those that the eviction policy named and that a protected minimum kept. The policy forgets
what it may not take, so they are kept here, in the order in which it named them, and are offered to it again as their
account grows above the minimum. Decides nothing: who makes room (`room_maker.py`) asks.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from headrace.core.block import NamespaceId
from headrace.core.budgets import Budget
from headrace.core.eviction_order import LruOrder

if TYPE_CHECKING:  # both tell this file of their events, and therefore import it
    from headrace.store.disk_block import DiskBlock
    from headrace.store.held_blocks import BlockKey, HeldBlock


class Owned(Protocol):
    """What of a header tells whose block it is."""

    @property
    def namespace(self) -> NamespaceId: ...

    @property
    def narrowed_from(self) -> tuple[NamespaceId, ...]: ...


@dataclass(slots=True, eq=False)
class Account:
    """What one account has here. Mutable; owned by `Accounts`, counters of what happened by `RoomMaker`."""

    name: str
    bytes_max: int | None = None
    bytes_min: int = 0
    host_blocks: int = 0
    host_bytes: int = 0
    disk_blocks: int = 0
    disk_bytes: int = 0
    pinned_bytes: int = 0  # of what it has in the arena
    refused_blocks: int = 0  # its own quota left no room
    evicted_blocks: int = 0  # gone for its own quota's sake
    least_block_bytes: int = 0  # of those ever added; 0: none was
    order: "LruOrder[BlockKey] | None" = None  # its own blocks; where it has a bound
    withheld: "dict[BlockKey, HeldBlock]" = field(default_factory=dict)

    def lacks_room_for(self, new_bytes: int) -> bool:
        """Whether its quota of the arena would be exceeded with so much more."""
        return self.bytes_max is not None and self.host_bytes + new_bytes > self.bytes_max

    def can_spare(self, num_bytes: int) -> bool:
        """Whether it would still have its protected minimum in the arena without so much."""
        return self.bytes_min == 0 or self.host_bytes - num_bytes >= self.bytes_min


class Accounts:
    """All accounts of one node."""

    def __init__(self) -> None:
        self._rest = Account("")
        self._accounts: dict[str, Account] = {"": self._rest}
        self._namespaces: dict[NamespaceId, Account] = {}
        self._protected: list[Account] = []

    def __iter__(self) -> Iterator[Account]:
        return iter(self._accounts.values())

    def of(self, header: Owned) -> Account:
        """The account that a block belongs to."""
        found = self._namespaces.get(header.namespace)
        for namespace in reversed(header.narrowed_from):
            if found is not None:
                break
            found = self._namespaces.get(namespace)
        return self._rest if found is None else found

    def set_budgets(
        self, budgets: Iterable[Budget], *, held: "Iterable[HeldBlock]", disk: "Iterable[DiskBlock]"
    ) -> None:
        """Take a new table: every block's account and every account's order is settled anew, O(blocks).

        What happened in an account is remembered; nothing is withheld any more, so the caller offers every leaf of
        `held` to the policy again. Of two accounts that claim a namespace the first by name has it.
        """
        before = self._accounts
        self._rest = Account("")
        self._accounts, self._namespaces = {"": self._rest}, {}
        for budget in sorted(budgets, key=lambda each: each.account):
            account = self._accounts.setdefault(budget.account, Account(budget.account))
            account.bytes_max, account.bytes_min = budget.bytes_max, budget.bytes_min
            if budget.bytes_max is not None or budget.bytes_min:
                account.order = LruOrder()
            if budget.account:
                for namespace in budget.namespaces:
                    self._namespaces.setdefault(namespace, account)
        for name, account in self._accounts.items():
            if name in before:
                account.refused_blocks = before[name].refused_blocks
                account.evicted_blocks = before[name].evicted_blocks
        self._protected = [account for account in self._accounts.values() if account.bytes_min]
        self._count_again(list(held), disk)

    # Events of the arena

    def pinned(self, block: "HeldBlock") -> None:
        """A pin keeps a block that none kept before."""
        self.of(block.header).pinned_bytes += block.slot_bytes

    def unpinned(self, block: "HeldBlock") -> None:
        """No pin keeps a block any more."""
        self.of(block.header).pinned_bytes -= block.slot_bytes

    def added(self, block: "HeldBlock") -> "list[HeldBlock]":
        """A block takes room. Returns withheld leaves that the policy may be offered again."""
        account = self.of(block.header)
        self._count_in(account, block)
        account.host_bytes += block.slot_bytes
        account.host_blocks += 1
        return self._released(account) if account.withheld else []

    def removed(self, block: "HeldBlock") -> None:
        """A block that nothing stands on left."""
        account = self.of(block.header)
        account.host_bytes -= block.slot_bytes
        account.host_blocks -= 1
        account.withheld.pop(block.key, None)
        if account.order is not None:
            account.order.removed(block.key)

    def used(self, block: "HeldBlock", keys: "list[BlockKey]") -> None:
        """A request read a block and all before it: `keys`, the first block's first."""
        order = self.of(block.header).order
        if order is not None:
            order.used(keys)

    def offer(self, block: "HeldBlock") -> None:
        """A block may have become one that can leave."""
        order = self.of(block.header).order
        if order is not None:
            order.offer(block.key)

    # What a minimum protects

    @property
    def bytes_min(self) -> int:
        """All minima together."""
        return sum(account.bytes_min for account in self._protected)

    def kept_bytes(self, more_pinned: "Iterable[HeldBlock]" = ()) -> int:
        """What must be able to stay at once: each account's pinned blocks, or its minimum where that is more, since its
        pinned blocks are part of what the minimum protects. more_pinned: counted as pinned, which they are not yet."""
        pinned = {account.name: account.pinned_bytes for account in self}
        for block in more_pinned:
            pinned[self.of(block.header).name] += block.slot_bytes
        return sum(max(account.bytes_min, pinned[account.name]) for account in self)

    def withholds(self, block: "HeldBlock") -> bool:
        """Whether a leaf that the policy named must stay for its account's minimum; if so, it is remembered here."""
        account = self.of(block.header)
        if account.can_spare(block.slot_bytes):
            return False
        account.withheld[block.key] = block
        return True

    def is_withheld(self, block: "HeldBlock") -> bool:
        """Whether it was kept from the policy and not offered again since."""
        return block.key in self.of(block.header).withheld

    def leaf_to_spare(self, keep: "HeldBlock | None") -> "HeldBlock | None":
        """A withheld leaf that may go after all, when the policy knows of none; never `keep`.

        The search through an account's leaves is worth its while only where a block of it can be spared at all.
        """
        for account in self._protected:
            if account.withheld and account.can_spare(account.least_block_bytes):
                for block in account.withheld.values():
                    if block is not keep and block.can_leave and account.can_spare(block.slot_bytes):
                        return block
        return None

    # Events of the disk

    def disk_changed(self, header: Owned, *, blocks: int, num_bytes: int) -> None:
        """Blocks came to the disk or left it, or one of them has another size there."""
        account = self.of(header)
        account.disk_blocks += blocks
        account.disk_bytes += num_bytes

    def has_disk_room(self, header: Owned, new_bytes: int) -> bool:
        """Whether a block's account may have so much more on disk."""
        account = self.of(header)
        return account.bytes_max is None or account.disk_bytes + new_bytes <= account.bytes_max

    # Checks

    def check_integrity(self, held: "Iterable[HeldBlock]") -> None:
        """Blocks and bytes are those held, block by block; orders know exactly their account's; what is withheld is."""
        blocks: dict[str, list[HeldBlock]] = {name: [] for name in self._accounts}
        for block in held:
            blocks[self.of(block.header).name].append(block)
        for name, account in self._accounts.items():
            assert account.host_blocks == len(blocks[name]), "an account's blocks are not those held"
            assert account.host_bytes == sum(block.slot_bytes for block in blocks[name]), "an account's bytes are not"
            pinned_bytes = sum(block.slot_bytes for block in blocks[name] if block.pin_refs)
            assert account.pinned_bytes == pinned_bytes, "an account's pinned bytes are not those of its pinned blocks"
            keys = {block.key: block for block in blocks[name]}
            assert all(keys.get(key) is block for key, block in account.withheld.items()), "a withheld block is gone"
            assert (account.order is not None) == (account.bytes_max is not None or account.bytes_min > 0)
            if account.order is not None:
                assert set(account.order) == set(keys), "an account's order does not know its blocks"
                account.order.check_integrity(lambda key, keys=keys: keys[key].can_leave)  # type: ignore[misc]

    def check_disk(self, kept: "Iterable[DiskBlock]") -> None:
        """Blocks and bytes on disk are those kept there, account by account."""
        found = {name: [0, 0] for name in self._accounts}
        for block in kept:
            count = found[self.of(block.header).name]
            count[0] += 1
            count[1] += block.total_bytes
        for name, account in self._accounts.items():
            assert [account.disk_blocks, account.disk_bytes] == found[name], "an account's disk is not what is kept"

    # Steps

    def _count_again(self, held: "list[HeldBlock]", disk: "Iterable[DiskBlock]") -> None:
        """Count everything under the new table. An order's ranks follow the last uses, a parent after its children."""
        for block in sorted(held, key=lambda each: each.header.position):
            account = self.of(block.header)
            self._count_in(account, block)
            account.host_bytes += block.slot_bytes
            account.host_blocks += 1
            account.pinned_bytes += block.slot_bytes if block.pin_refs else 0
        for block in sorted(held, key=lambda each: (each.used_s, -each.header.position)):
            order = self.of(block.header).order
            if order is not None:
                order.used((block.key,))
        for kept in disk:
            self.disk_changed(kept.header, blocks=1, num_bytes=kept.total_bytes)

    def _count_in(self, account: Account, block: "HeldBlock") -> None:
        least = account.least_block_bytes
        account.least_block_bytes = min(least, block.slot_bytes) if least else block.slot_bytes
        if account.order is not None:
            parent = None if block.parent is None else block.parent.key
            account.order.added(block.key, parent, size_bytes=block.slot_bytes, recompute_s=0.0)

    def _released(self, account: Account) -> "list[HeldBlock]":
        """As many withheld leaves as the account has above its minimum now, those that were named first."""
        released: list[HeldBlock] = []
        released_bytes = 0
        for block in list(account.withheld.values()):
            released_bytes += block.slot_bytes
            if not account.can_spare(released_bytes):
                break
            released.append(block)
        for block in released:
            del account.withheld[block.key]
        return released
