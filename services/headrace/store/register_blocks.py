"""Tell the index what a store node holds: changes in order, and all of it again when the index may have lost it.

Owns the queue between the node's steps and Redis. Rules:

- Order is kept within a shard: a removal is sent before any later addition of the same block, and parents are
  registered before children because the node reports them so. Shards have no order among them, so that one whose
  server is away keeps none of the others waiting.
- One command at a time: after an outage all nodes have much to say, and a server that is asked by each of them eight
  times at once answers none in time.
- The queue is bounded. When Redis is away for longer than the queue lasts, the queue is dropped; the index may then
  name blocks that are gone, so the node takes a new incarnation, once for that outage, which voids all its entries at
  once, and registers its inventory anew.
- When Redis came back empty (the node's record did not stand any more), the inventory is registered again under the
  same incarnation: registering twice is harmless.
- Nothing here is ever waited for by a reader or a writer of blocks.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, islice
from typing import Protocol

from headrace.core.block import BlockHash, BlockHeader, HolderId, NamespaceId, Tier, shard_of
from headrace.core.errors import IndexUnavailable
from headrace.core.index_limits import (
    INDEX_BATCH_BLOCKS,
    INDEX_QUEUE_BLOCKS_MAX,
    INDEX_RETRY_MS,
    INDEX_RETRY_MS_MAX,
    INDEX_SHARDS,
)
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
    turn = asyncio.Lock()

    async def restart() -> None:
        if changes.overflowed and not changes.voided:
            node.renew_incarnation()
            changes.voided = True
        await announce()
        if changes.overflowed and not changes.voided:
            return  # removals were dropped meanwhile; a restart is still wanted, and the next turn voids
        changes.restart(node.inventory())

    async def send_next(shard: int) -> None:
        batch = changes.next_batch(shard)
        if batch:
            await _send(batch, node, index)
            changes.sent(shard, batch)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(_keep_doing(restart, changes.restart_event, turn))
        for shard, event in enumerate(changes.shard_events):
            tasks.create_task(_keep_doing(partial(send_next, shard), event, turn))


async def _keep_doing(step: Callable[[], Awaitable[None]], wanted: asyncio.Event, turn: asyncio.Lock) -> None:
    """Take a step whenever one is wanted, when nobody else takes one. While the index is away, less and less often:
    nothing is lost, and the index itself reports that it is away."""
    wait_ms = INDEX_RETRY_MS
    while True:
        await wanted.wait()
        try:
            async with turn:
                await step()
            wait_ms = INDEX_RETRY_MS
        except IndexUnavailable:
            await asyncio.sleep(wait_ms / 1_000)
            wait_ms = min(2 * wait_ms, INDEX_RETRY_MS_MAX)


@dataclass(frozen=True, slots=True)
class Change:
    """One block became readable, or is about to be freed."""

    is_added: bool
    namespace: NamespaceId
    block_hash: BlockHash


class PendingChanges:
    """The bounded queue, in order within each shard; `store_node.BlockChanges`. One event loop: `added` and `removed`
    never wait."""

    def __init__(self, *, changes_max: int = INDEX_QUEUE_BLOCKS_MAX) -> None:
        """changes_max: of all shards together."""
        self._changes_max = changes_max
        # By shard. An inventory is sent before the changes that came after it; it is bounded by what the node holds.
        self._inventories: list[deque[Change]] = [deque() for _ in range(INDEX_SHARDS)]
        self._changes: list[deque[Change]] = [deque() for _ in range(INDEX_SHARDS)]
        self._num_changes = 0  # queued ones, but for additions of an inventory
        self.shard_events = [asyncio.Event() for _ in range(INDEX_SHARDS)]  # set: the shard has something to send
        self.restart_event = asyncio.Event()  # set: the whole inventory is to be registered again
        self.inventory_blocks = 0  # registered by the last restart
        self.overflowed = False  # removals were dropped: the index may name blocks that are gone
        self.voided = False  # and none of these count any more

    def __len__(self) -> int:
        return sum(map(len, (*self._inventories, *self._changes)))

    @property
    def restart_wanted(self) -> bool:
        """Whether the whole inventory is to be registered again."""
        return self.restart_event.is_set()

    def added(self, header: BlockHeader) -> None:
        """As `BlockChanges.added`."""
        self._put(Change(True, header.namespace, header.block_hash))

    def removed(self, namespace: NamespaceId, block_hash: BlockHash) -> None:
        """As `BlockChanges.removed`."""
        self._put(Change(False, namespace, block_hash))

    def want_restart(self) -> None:
        """Have the whole inventory registered again."""
        self.restart_event.set()

    def restart(self, inventory: Sequence[tuple[NamespaceId, BlockHash]]) -> None:
        """Begin anew with what the node holds now. Queued additions are contained in it; queued removals go first."""
        for shard in range(INDEX_SHARDS):
            queued = (*self._inventories[shard], *self._changes[shard])
            self._inventories[shard] = deque(change for change in queued if not change.is_added)
            self._changes[shard].clear()
        self._num_changes = len(self)  # a shard that stays away must not gather removals without end
        for key in inventory:
            self._inventories[shard_of(key[0])].append(Change(True, *key))
        self.inventory_blocks = len(inventory)
        self.overflowed = self.voided = False
        self.restart_event.clear()
        for queue, event in zip(self._inventories, self.shard_events, strict=True):
            if queue:
                event.set()

    def next_batch(self, shard: int) -> list[Change]:
        """The next changes of a shard that one index command can take: one kind, one namespace. They stay queued until
        `sent`."""
        queue = self._inventories[shard] or self._changes[shard]
        head = list(islice(queue, INDEX_BATCH_BLOCKS))
        if not head:
            self.shard_events[shard].clear()
            return []
        _, alike = next(groupby(head, key=lambda change: (change.is_added, change.namespace)))
        return list(alike)

    def sent(self, shard: int, batch: Sequence[Change]) -> None:
        """Take a batch that the index has taken off the queue."""
        if self.overflowed:
            return  # the queue was dropped while the batch was on its way
        inventory = self._inventories[shard]
        if not (inventory and batch[0].is_added):
            self._num_changes -= len(batch)
        queue = inventory or self._changes[shard]
        for change in batch:
            popped = queue.popleft()
            assert popped is change, "changes left the queue out of order"

    def _put(self, change: Change) -> None:
        if self.overflowed:
            return  # the inventory that will be sent says it all
        shard = shard_of(change.namespace)
        self._changes[shard].append(change)
        self._num_changes += 1
        self.shard_events[shard].set()
        if self._num_changes > self._changes_max:
            for queue in (*self._changes, *self._inventories):
                queue.clear()
            self._num_changes = 0
            self.overflowed = True
            self.restart_event.set()


async def _send(batch: Sequence[Change], node: RegisteredNode, index: BlockIndex) -> None:
    namespace, blocks = batch[0].namespace, [change.block_hash for change in batch]
    if batch[0].is_added:
        await index.register(
            holder=node.holder_id, incarnation=node.incarnation, tier=Tier.HOST, namespace=namespace, blocks=blocks
        )
    else:
        await index.deregister(holder=node.holder_id, incarnation=node.incarnation, namespace=namespace, blocks=blocks)
