"""Tell the index what a store node holds: changes in order, and all of it again when the index may have lost it.

Owns the queue between the node's steps and Redis. Rules:

- Order is kept: a removal is sent before any later addition of the same block, and parents are registered before
  children because the node reports them so.
- The queue is bounded. When Redis is away for longer than the queue lasts, the queue is dropped; the index may then
  name blocks that are gone, so the node takes a new incarnation, which voids all its entries at once, and registers its
  inventory anew.
- When Redis came back empty (the node's record did not stand any more), the inventory is registered again under the
  same incarnation: registering twice is harmless.
- Nothing here is ever waited for by a reader or a writer of blocks.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Protocol

from headrace.core.block import BlockHash, BlockHeader, HolderId, NamespaceId, Tier
from headrace.core.errors import IndexUnavailable
from headrace.core.index_limits import INDEX_BATCH_BLOCKS, INDEX_QUEUE_BLOCKS_MAX, INDEX_RETRY_MS, INDEX_RETRY_MS_MAX
from headrace.core.ports import BlockIndex


class RegisteredNode(Protocol):
    """What is asked of the node whose blocks are registered; `StoreNode` is one."""

    holder_id: HolderId
    incarnation: int

    def inventory(self) -> list[tuple[NamespaceId, BlockHash]]: ...

    def renew_incarnation(self) -> int: ...


async def register_blocks(
    node: RegisteredNode, changes: "PendingChanges", index: BlockIndex, *, announce: Callable[[], Awaitable[object]]
) -> None:
    """Send changes to the index until cancelled.

    `announce` puts the node's record and may raise IndexUnavailable; it is called before a whole inventory is sent,
    since entries count only under a standing record.
    """
    wait_ms = INDEX_RETRY_MS
    while True:
        await changes.wait()
        try:
            if changes.restart_wanted:
                if changes.overflowed:
                    node.renew_incarnation()
                await announce()
                changes.restart(node.inventory())
            batch = changes.next_batch()
            if batch:
                await _send(batch, node, index)
                changes.sent(batch)
            wait_ms = INDEX_RETRY_MS
        except IndexUnavailable:
            # Nothing is lost: the batch is still first in the queue. The index itself reports that it is away.
            await asyncio.sleep(wait_ms / 1_000)
            wait_ms = min(2 * wait_ms, INDEX_RETRY_MS_MAX)


@dataclass(frozen=True, slots=True)
class Change:
    """One block became readable, or is about to be freed."""

    is_added: bool
    namespace: NamespaceId
    block_hash: BlockHash


class PendingChanges:
    """The ordered, bounded queue; `store_node.BlockChanges`. One event loop: `added` and `removed` never wait."""

    def __init__(self, *, changes_max: int = INDEX_QUEUE_BLOCKS_MAX) -> None:
        self._changes_max = changes_max
        self._inventory: deque[Change] = deque()  # sent before `_changes`; bounded by what the node holds
        self._changes: deque[Change] = deque()
        self._something = asyncio.Event()
        self.inventory_blocks = 0  # registered by the last restart
        self.restart_wanted = False
        self.overflowed = False  # removals were dropped: the index may name blocks that are gone

    def __len__(self) -> int:
        return len(self._inventory) + len(self._changes)

    def added(self, header: BlockHeader) -> None:
        """As `BlockChanges.added`."""
        self._put(Change(True, header.namespace, header.block_hash))

    def removed(self, namespace: NamespaceId, block_hash: BlockHash) -> None:
        """As `BlockChanges.removed`."""
        self._put(Change(False, namespace, block_hash))

    def want_restart(self) -> None:
        """Have the whole inventory registered again."""
        self.restart_wanted = True
        self._something.set()

    def restart(self, inventory: Sequence[tuple[NamespaceId, BlockHash]]) -> None:
        """Begin anew with what the node holds now. Queued additions are contained in it; queued removals go first."""
        removals = [change for change in (*self._inventory, *self._changes) if not change.is_added]
        self._inventory = deque([*removals, *(Change(True, *key) for key in inventory)])
        self._changes.clear()
        self.inventory_blocks = len(inventory)
        self.restart_wanted = self.overflowed = False
        self._something.set()

    async def wait(self) -> None:
        """Return when there is something to do."""
        await self._something.wait()

    def next_batch(self) -> list[Change]:
        """The next changes that one index command can take: one kind, one namespace. They stay queued until `sent`."""
        queue = self._inventory or self._changes
        head = list(islice(queue, INDEX_BATCH_BLOCKS))
        if not head:
            self._something.clear()
            return []
        _, alike = next(groupby(head, key=lambda change: (change.is_added, change.namespace)))
        return list(alike)

    def sent(self, batch: Sequence[Change]) -> None:
        """Take a batch that the index has taken off the queue."""
        if self.restart_wanted and self.overflowed:
            return  # the queue was dropped while the batch was on its way
        queue = self._inventory or self._changes
        for change in batch:
            popped = queue.popleft()
            assert popped is change, "changes left the queue out of order"

    def _put(self, change: Change) -> None:
        if self.overflowed:
            return  # the inventory that will be sent says it all
        self._changes.append(change)
        if len(self._changes) > self._changes_max:
            self._changes.clear()
            self._inventory.clear()
            self.overflowed = True
            self.restart_wanted = True
        self._something.set()


async def _send(batch: Sequence[Change], node: RegisteredNode, index: BlockIndex) -> None:
    namespace, blocks = batch[0].namespace, [change.block_hash for change in batch]
    if batch[0].is_added:
        await index.register(
            holder=node.holder_id, incarnation=node.incarnation, tier=Tier.HOST, namespace=namespace, blocks=blocks
        )
    else:
        await index.deregister(holder=node.holder_id, incarnation=node.incarnation, namespace=namespace, blocks=blocks)
