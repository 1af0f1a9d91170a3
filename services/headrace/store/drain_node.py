"""Handing a node's blocks to other nodes: each to one of them, parents first, hottest first.

Owns which peer gets a block and the account of what became of it. A block is settled when a peer has it, when every
peer refused it, or when it left this node meanwhile. The peers fill evenly: a block goes where its parent went until
that peer has had its share, then the next peer gets the blocks before it too. Nothing is removed here but
what turns out to be broken, and nothing that travels counts as used: until the node's process ends, readers find all
that it holds.
"""

import logging
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from headrace.core.block import BlockHash, BlockHeader, NamespaceId, payload_digest
from headrace.core.errors import StoreUnavailable
from headrace.core.store_limits import DRAIN_BLOCKS_IN_FLIGHT
from headrace.store.drain_peer import BlockCopy, DrainPeer
from headrace.store.held_blocks import BlockKey
from headrace.store.plan_drain import MovingBlock, plan_drain
from headrace.store.store_node import StoreNode
from headrace.transfer.run_in_thread import run_in_thread

_log = logging.getLogger(__name__)

Copied = tuple[BlockHeader, bytes | memoryview]
ReadDisk = Callable[[NamespaceId, BlockHash], Awaitable[Copied | None]]


async def drain_node(moving: "MovingBlocks") -> None:
    """Move until every block is settled, the node serves again or no peer is left. May be cancelled at any moment.

    What is committed by writers that had their reservation before the drain began is found by looking again.
    """
    while moving.can_go_on and (unsettled := await moving.plan()):
        await _move(moving, deque(unsettled))


@dataclass(frozen=True, slots=True)
class DrainCount:
    """How far a drain has come; the fields of `admin.proto:DrainNodeProgress`."""

    total_blocks: int
    moved_blocks: int
    present_blocks: int
    refused_blocks: int
    moved_bytes: int
    error: str
    moved_to: dict[str, int]  # by node id; a block that went to two of them counts in both


class MovingBlocks:
    """One drain's account: the peers, and what became of each block."""

    def __init__(self, node: StoreNode, peers: Sequence[DrainPeer], *, read_disk: ReadDisk | None = None) -> None:
        """read_disk: how blocks are read that lie on disk alone; without it there are none."""
        self.node = node
        self.peers = list(peers)
        self._read_disk = read_disk or nothing_on_disk
        self._known: dict[BlockKey, MovingBlock] = {}
        self._refused: set[BlockKey] = set()
        self._gone: set[BlockKey] = set()
        self._total_bytes = 0
        self._errors: list[str] = []
        self._lost_orders: list[str] = []

    @property
    def can_go_on(self) -> bool:
        """Whether there is somebody to move to, and the order to drain stands."""
        return self.node.draining and bool(self.peers)

    async def plan(self) -> list[MovingBlock]:
        """The blocks that are not settled, in the order in which they go.

        Ordering 100,000 blocks takes half a second, so a thread does it. A block that is used meanwhile may be ranked
        by either time of use; what stands on what never changes.
        """
        order = await run_in_thread(plan_drain, self.node.residents())
        here = {block.key: block for block in order}
        self._gone |= {key for key in self._known if key not in here}
        self._known |= here
        self._total_bytes = sum(block.bytes for block in self._known.values())
        return [block for block in order if not self.is_settled(block.key)]

    def is_settled(self, key: BlockKey) -> bool:
        """Whether nothing is left to do about a block."""
        return key in self._refused or key in self._gone or any(peer.has(key) for peer in self.peers)

    def count(self) -> DrainCount:
        """The account now. What a failed peer had been sent counts no more, nor what left unmoved."""
        sent: set[BlockKey] = set().union(*(peer.sent for peer in self.peers))
        had: set[BlockKey] = set().union(*(peer.had for peer in self.peers)) - sent
        refused = self._refused - sent - had - self._gone
        failures = self._errors if refused or not self.peers else []  # of no matter where another peer took it all
        return DrainCount(
            total_blocks=len(self._known.keys() - (self._gone - sent - had)),
            moved_blocks=len(sent),
            present_blocks=len(had),
            refused_blocks=len(refused),
            moved_bytes=sum(peer.sent_bytes for peer in self.peers),
            error="; ".join([*failures, *self._about_orders()]),
            moved_to={peer.node_id: len(peer.sent) for peer in self.peers if peer.sent},
        )

    def candidates(self, block: MovingBlock) -> list[DrainPeer]:
        """Peers in the order in which they are asked to take a block."""
        share_bytes = self._total_bytes / len(self.peers)
        return sorted(
            self.peers,
            key=lambda peer: (
                peer.sent_bytes > share_bytes,
                not peer.has(block.parent_key),
                peer.sent_bytes,
                peer.node_id,
            ),
        )

    def path_on(self, peer: DrainPeer, block: MovingBlock) -> list[MovingBlock]:
        """What a peer lacks before it can keep a block, parents first, the block last."""
        path = [block]
        while not peer.has(path[-1].parent_key):
            parent_key = path[-1].parent_key
            assert parent_key is not None
            path.append(self._known[parent_key])
        return path[::-1]

    def has_refused_parent(self, block: MovingBlock) -> bool:
        """Whether no peer can keep the block, since none keeps what it stands on."""
        return block.parent_key in self._refused

    def refused(self, blocks: Sequence[MovingBlock]) -> None:
        """Every peer was asked to take these; those that none has stay where they are."""
        self._refused |= {block.key for block in blocks if not self.is_settled(block.key)}

    def lost_order(self, why: str) -> None:
        """A pin, or a moment to go at, is not in force on the peer that has the block."""
        self._lost_orders.append(why)

    def _about_orders(self) -> list[str]:
        lost = self._lost_orders
        return [f"{len(lost)} pins or times to live do not hold where the blocks went: {lost[0]}"] if lost else []

    def set_aside(self, peer: DrainPeer, fault: StoreUnavailable) -> None:
        """A peer failed: it is asked no more, and what it was sent goes to another one."""
        _log.warning("a peer is set aside: %s", fault)
        self.peers.remove(peer)
        self._errors.append(str(fault))
        if not self.peers:
            self._errors.append("no peer is left to move blocks to")

    async def copies_of(self, run: Sequence[MovingBlock]) -> list[BlockCopy]:
        """The bytes of as many leading blocks of a run as are here whole."""
        copies: list[BlockCopy] = []
        for block in run:
            found: Copied | None = self.node.copy_block(*block.key) or await self._read_disk(*block.key)
            if found is None:
                break
            if payload_digest(found[1]) != found[0].payload_xxh3:
                self._drop_broken(block)
                break
            copies.append(BlockCopy(*found))
        return copies

    def _drop_broken(self, block: MovingBlock) -> None:
        """Have the node look at its own copy again, as for a reader that found it broken."""
        lease = self.node.lease(block.key[0], self._chain(block), first_block=block.position, retention=None)
        self.node.release(lease.lease_id, suspects=[0])

    def _chain(self, block: MovingBlock) -> tuple[BlockHash, ...]:
        chain = [block]
        while chain[-1].parent_key is not None:
            chain.append(self._known[chain[-1].parent_key])
        return tuple(each.key[1] for each in reversed(chain))


async def _move(moving: MovingBlocks, queue: deque[MovingBlock]) -> None:
    """Go through the queue once; ends early when a peer fails, since the order is then made anew."""
    while queue and moving.can_go_on:
        block = queue.popleft()
        if moving.is_settled(block.key):
            continue
        if moving.has_refused_parent(block):
            moving.refused([block])
            continue
        run = [block, *_followers(block, queue, moving)]
        copies = await moving.copies_of(run)
        if len(copies) < len(run):  # the next one left meanwhile or cannot be read, and with it what stands on it
            moving.refused(run[len(copies) :])
        if not copies:
            continue
        for peer in moving.candidates(block):
            try:
                if await _place(moving, peer, run, copies):
                    break
            except StoreUnavailable as fault:
                moving.set_aside(peer, fault)
                return
        moving.refused(run)


def _followers(block: MovingBlock, queue: deque[MovingBlock], moving: MovingBlocks) -> list[MovingBlock]:
    """Take what stands right on the block off the queue, as much as may travel with it."""
    run = [block]
    while queue and len(run) < DRAIN_BLOCKS_IN_FLIGHT:
        following = queue[0]
        if following.parent_key != run[-1].key or moving.is_settled(following.key) or not following.travels_with(block):
            break
        run.append(queue.popleft())
    return run[1:]


async def _place(
    moving: MovingBlocks, peer: DrainPeer, run: Sequence[MovingBlock], copies: Sequence[BlockCopy]
) -> bool:
    """Have a peer keep a run of one chain, as far as there are copies of it, and what comes before it. False when it
    took less than all of that."""
    before = moving.path_on(peer, run[0])[:-1]
    while before:
        batch = list(takewhile(before[0].travels_with, before))[:DRAIN_BLOCKS_IN_FLIGHT]
        if await _store(moving, peer, batch, await moving.copies_of(batch)) < len(batch):
            return False
        before = before[len(batch) :]
    return await _store(moving, peer, run, copies) == len(copies)


async def _store(
    moving: MovingBlocks, peer: DrainPeer, batch: Sequence[MovingBlock], copies: Sequence[BlockCopy]
) -> int:
    """How many leading blocks the peer has afterwards; what operators ordered about them holds there too."""
    if not copies:
        return 0
    stored = await peer.store(copies, retention=batch[0].retention(peer.clock.unix_ms()))
    for block in batch[:stored]:
        if block.pinned_until_unix_ms or block.ordered_unix_ms:
            why = await peer.carry(block)
            if why:
                moving.lost_order(why)
    return stored


async def nothing_on_disk(namespace: NamespaceId, block_hash: BlockHash) -> None:
    """A `ReadDisk` of a node without a disk tier."""
    return
