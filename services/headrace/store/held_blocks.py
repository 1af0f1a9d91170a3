"""The blocks that a store node holds, as a tree by parent; an eviction policy that it keeps informed orders the leaves.

Owns parent and child links, visibility, times of use, and the order in which blocks' times run out. A block is
*visible* when it and every block before it are committed: only visible blocks are looked up, leased and registered, so
what others see is closed under prefixes whatever order a chain's blocks are committed in. Knows nothing of bytes,
leases' owners or the index.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.blocks.host_arena import SlotTerms
from headrace.core.block import BlockHash, BlockHeader, NamespaceId, root_hash
from headrace.core.eviction import DEFAULT_POLICY, EvictionPolicy, PolicyName, make_policy
from headrace.core.recompute_cost import recompute_seconds
from headrace.core.retention import NO_END_UNIX_MS
from headrace.store.accounts import Account, Accounts
from headrace.store.due_order import DueOrder

BlockKey = tuple[NamespaceId, BlockHash]


class SlotState(StrEnum):
    """Life of a slot; free slots have no block. Draining: deregistered, no new leases, freed when the last one ends."""

    RESERVED = "reserved"
    COMMITTED = "committed"
    DRAINING = "draining"


@dataclass(slots=True, eq=False)
class HeldBlock:
    """One slot in use. Mutable; owned by `HeldBlocks` and the node, never handed out."""

    header: BlockHeader
    header_bytes: bytes
    slot: int
    slot_bytes: int
    state: SlotState
    created_s: float
    used_s: float
    parent: "HeldBlock | None" = None
    children: dict[BlockHash, "HeldBlock"] = field(default_factory=dict)
    visible: bool = False
    leases: int = 0
    hits: int = 0
    reservation_id: str = ""
    expires_unix_ms: int = 0  # these four as in `SlotTerms`
    ordered_unix_ms: int = 0
    pinned_until_unix_ms: int = 0
    not_on_disk: bool = False
    pin_refs: int = 0  # pinned blocks among itself and those that stand on it

    @property
    def key(self) -> BlockKey:
        """Its name in the node."""
        return (self.header.namespace, self.header.block_hash)

    @property
    def can_leave(self) -> bool:
        """Whether eviction may take it now: committed, unread, not pinned, and nothing stands on it."""
        return self.state is SlotState.COMMITTED and self.leases == 0 and not self.children and self.pin_refs == 0

    @property
    def may_go_to_disk(self) -> bool:
        """Whether a disk tier may keep it: not when its time is bounded, since a disk's records do not say so."""
        return not (self.expires_unix_ms or self.ordered_unix_ms or self.not_on_disk)

    @property
    def due_unix_ms(self) -> int:
        """When its time is over, by use or by order; 0: never."""
        if self.expires_unix_ms and self.ordered_unix_ms:
            return min(self.expires_unix_ms, self.ordered_unix_ms)
        return self.expires_unix_ms or self.ordered_unix_ms

    @property
    def terms(self) -> SlotTerms:
        """What the arena's record says of it."""
        return SlotTerms(self.expires_unix_ms, self.ordered_unix_ms, self.pinned_until_unix_ms, self.not_on_disk)


class HeldBlocks:
    """All blocks of one node by key, with links. The caller decides; this keeps the links and the order right."""

    def __init__(self, policy: PolicyName = DEFAULT_POLICY) -> None:
        self._blocks: dict[BlockKey, HeldBlock] = {}
        self._policy: EvictionPolicy[BlockKey] = make_policy(policy)
        self._due: DueOrder[BlockKey] = DueOrder()
        self.accounts = Accounts()

    def __len__(self) -> int:
        return len(self._blocks)

    def __iter__(self) -> Iterator[HeldBlock]:
        return iter(self._blocks.values())

    def get(self, namespace: NamespaceId, block_hash: BlockHash) -> HeldBlock | None:
        """The block of that name, in any state but draining: a draining block is already gone for everyone."""
        block = self._blocks.get((namespace, block_hash))
        return None if block is None or block.state is SlotState.DRAINING else block

    def occupied(self, namespace: NamespaceId, block_hash: BlockHash) -> bool:
        """Whether a block of that name exists at all, draining included."""
        return (namespace, block_hash) in self._blocks

    def has_parent_for(self, header: BlockHeader) -> bool:
        """Whether the block before this one is held (written or being written) at the position before it."""
        if header.position == 0:
            return header.parent_hash == root_hash(header.namespace)
        parent = self.get(header.namespace, header.parent_hash)
        return parent is not None and parent.header.position == header.position - 1

    def add(self, block: HeldBlock) -> None:
        """Link a block under its parent, which must be held."""
        assert block.key not in self._blocks
        assert self.has_parent_for(block.header)
        if block.header.position > 0:
            block.parent = self._blocks[(block.header.namespace, block.header.parent_hash)]
            block.parent.children[block.header.block_hash] = block
        self._blocks[block.key] = block
        tokens, layout = len(block.header.token_ids), block.header.layout
        self._policy.added(
            block.key,
            None if block.parent is None else block.parent.key,
            size_bytes=block.slot_bytes,
            recompute_s=recompute_seconds(tokens, context_tokens=block.header.position * layout.block_tokens),
        )
        for leaf in self.accounts.added(block):
            self.offer(leaf)

    def remove(self, block: HeldBlock) -> None:
        """Unlink a block that nothing stands on; its parent may become a leaf."""
        assert not block.children, "a block left before the blocks that stand on it"
        del self._blocks[block.key]
        self._policy.removed(block.key)
        self._due.drop(block.key)
        self.accounts.removed(block)
        block.visible = False
        if block.parent is not None:
            del block.parent.children[block.header.block_hash]
            self.offer(block.parent)
            block.parent = None

    def became_committed(self, block: HeldBlock) -> list[HeldBlock]:
        """Blocks that become visible because this one was committed, parents first; marks them."""
        if block.parent is not None and not block.parent.visible:
            return []
        shown, waiting = [], [block]
        while waiting:
            candidate = waiting.pop()
            if candidate.state is SlotState.COMMITTED and not candidate.visible:
                candidate.visible = True
                shown.append(candidate)
                waiting.extend(candidate.children.values())
        return shown

    def run(self, namespace: NamespaceId, chain: tuple[BlockHash, ...], *, first_block: int) -> list[HeldBlock]:
        """Visible blocks of a chain from `first_block` on, without a gap, each at its own position."""
        found = []
        for position in range(first_block, len(chain)):
            block = self._blocks.get((namespace, chain[position]))
            if block is None or not block.visible or block.header.position != position:
                break
            found.append(block)
        return found

    def read(self, last: HeldBlock, now_s: float) -> None:
        """Note that a request reads a chain up to its block `last`: what the policy learns from."""
        self.touch(last, now_s)
        keys = []
        walked: HeldBlock | None = last
        while walked is not None:
            keys.append(walked.key)
            walked = walked.parent
        keys.reverse()
        self._policy.used(keys)
        self.accounts.used(last, keys)

    def touch(self, block: HeldBlock, now_s: float) -> None:
        """Note the time of a use of a block and of all before it, so that no block is ever fresher than its parent."""
        walked: HeldBlock | None = block
        while walked is not None and walked.used_s < now_s:
            walked.used_s = now_s
            walked = walked.parent
        self.offer(block)

    def offer(self, block: HeldBlock) -> None:
        """Note that a block may have become able to leave; called whenever that can have changed."""
        if block.can_leave:
            self._policy.offer(block.key)
            self.accounts.offer(block)
            self.expect(block)

    def expect(self, block: HeldBlock) -> None:
        """Have a block come up in `next_due` when its time is over."""
        if block.due_unix_ms:
            self._due.put(block.key, block.due_unix_ms)

    def expect_order(self, block: HeldBlock) -> None:
        """The same for its ordered moment only: use it where the other is over and the block cannot leave yet."""
        self._due.put(block.key, block.ordered_unix_ms)

    def next_due(self, now_unix_ms: int) -> HeldBlock | None:
        """Take a block whose time is over; None when there is none. Whether it can leave is for the caller to see: one
        that cannot comes up again when it is offered or expected."""
        while (key := self._due.pop(now_unix_ms)) is not None:
            block = self._blocks[key]
            if block.state is SlotState.DRAINING:
                continue
            if 0 < block.due_unix_ms <= now_unix_ms:
                return block
            self.expect(block)  # it was used meanwhile, or an order was taken back
        return None

    def is_due(self, now_unix_ms: int) -> bool:
        """Whether `next_due` may have something."""
        return self._due.is_due(now_unix_ms)

    def oldest_leaf(self, *, keep: HeldBlock | None) -> HeldBlock | None:
        """The block that the policy would have leave, among those that can and that no account's protected minimum
        keeps; None when there is none.

        `keep` (the parent of a block that is about to be written) is never returned, and stays a candidate.
        """
        key = self._policy.victim(None if keep is None else keep.key, may_leave=self._can_leave_for_others)
        return self.accounts.leaf_to_spare(keep) if key is None else self._blocks[key]

    def oldest_leaf_of(self, account: Account, *, keep: HeldBlock | None) -> HeldBlock | None:
        """The least recently used block, among those that can leave, of an account with a bound; `keep` as above."""
        assert account.order is not None, "an account without a bound has no order of its own"
        key = account.order.victim(None if keep is None else keep.key, may_leave=self._can_leave)
        return None if key is None else self._blocks[key]

    def with_descendants(self, block: HeldBlock) -> list[HeldBlock]:
        """A block and all that stand on it, parents first (reverse it to remove them)."""
        found = [block]
        for member in found:  # grows while walked
            found.extend(member.children.values())
        return found

    def check_integrity(self) -> None:
        """Links are mutual, visibility is closed under parents, and the policy knows exactly the blocks held."""
        assert len(self._policy) == len(self._blocks)
        self._policy.check_integrity(
            lambda key: self._can_leave(key) and not self.accounts.is_withheld(self._blocks[key])
        )
        self.accounts.check_integrity(self)
        self._due.check_integrity()
        for key, block in self._blocks.items():
            assert block.key == key
            assert (block.parent is None) == (block.header.position == 0)
            if block.parent is not None:
                assert self._blocks.get(block.parent.key) is block.parent, "the parent of a held block is gone"
                assert block.parent.children[block.header.block_hash] is block
                assert block.parent.header.position == block.header.position - 1
                assert block.used_s <= block.parent.used_s or not block.visible, "a block is fresher than its parent"
            for child in block.children.values():
                assert child.parent is block
            parent_visible = block.parent is None or block.parent.visible
            committed = block.state is SlotState.COMMITTED
            assert block.visible == (parent_visible and committed), "visibility is not what states say"
            assert key in self._policy, "a held block that the policy does not know"
            self._check_terms(block)

    def _check_terms(self, block: HeldBlock) -> None:
        """What has a time comes up in time, and no visible block may stay longer, or be in more tiers, than those
        before it, which must stay as long."""
        coming = self._due.moment_of(block.key) or NO_END_UNIX_MS
        if block.can_leave and block.due_unix_ms:
            assert coming <= block.due_unix_ms, "a leaf whose time nobody watches"
        if block.visible and block.ordered_unix_ms and not block.pin_refs:
            assert coming <= block.ordered_unix_ms, "an order that nobody watches"
        above = block.parent
        if above is not None and block.visible:
            assert not above.expires_unix_ms or 0 < block.expires_unix_ms <= above.expires_unix_ms
            assert not above.not_on_disk or block.not_on_disk, "a block on disk would lose its prefix"

    def _can_leave(self, key: BlockKey) -> bool:
        return self._blocks[key].can_leave

    def _can_leave_for_others(self, key: BlockKey) -> bool:
        block = self._blocks[key]
        return block.can_leave and not self.accounts.withholds(block)
