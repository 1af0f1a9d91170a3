"""What must be in a store node's arena: the rules of leases, visibility, pins and times once more, as plain dicts.

Predicts every effect but one: which blocks leave to make room is the eviction policy's choice. The machine observes
who left, and the model says whether they were allowed to and whether anybody else could have gone.
"""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field, replace
from enum import StrEnum

from known_blocks import BLOCKS, Key, KnownBlock
from store_kit import HandClock

from headrace.blocks.host_arena import SlotTerms
from headrace.core.block import Tier
from headrace.core.generation import EvictSelector
from headrace.core.retention import KEEP, Retention


class Life(StrEnum):
    """As `held_blocks.SlotState`, in the model's own words."""

    RESERVED = "reserved"
    COMMITTED = "committed"
    DRAINING = "draining"


@dataclass(slots=True, eq=False)
class ModelBlock:
    """One slot in use."""

    known: KnownBlock
    life: Life
    used_s: float
    reservation_id: str = ""
    leases: int = 0
    terms: SlotTerms = field(default_factory=SlotTerms)
    order_waits: bool = False  # its ordered moment has not been acted on since the order, or since a pin on it ended
    payload: bytes = b""  # what memory must hold; differs from what was written once a test broke it

    @property
    def key(self) -> Key:
        return self.known.key

    @property
    def is_broken(self) -> bool:
        return self.payload != self.known.payload


@dataclass(slots=True)
class ModelLease:
    """A reader's claim: the blocks, where they lie, and how long."""

    blocks: tuple[ModelBlock, ...]
    slots: tuple[int, ...]
    expires_at_s: float


@dataclass(slots=True)
class ModelReservation:
    """A writer's claim, and for how long the block is to stay once it is committed."""

    block: ModelBlock
    expires_at_s: float
    retention: Retention


@dataclass(slots=True)
class StoreModel:
    """One node's arena. Every method is one step of a node that works."""

    clock: HandClock
    blocks: dict[Key, ModelBlock] = field(default_factory=dict)
    reservations: dict[str, ModelReservation] = field(default_factory=dict)
    leases: dict[str, ModelLease] = field(default_factory=dict)

    # Looking

    def get(self, key: Key | None) -> ModelBlock | None:
        """The block in any state but draining."""
        block = None if key is None else self.blocks.get(key)
        return None if block is None or block.life is Life.DRAINING else block

    def is_visible(self, key: Key | None) -> bool:
        """Whether the block and all before it are committed; nothing stands before a chain's first block."""
        while key is not None:
            block = self.blocks.get(key)
            if block is None or block.life is not Life.COMMITTED:
                return False
            key = block.known.parent
        return True

    def visible(self) -> set[Key]:
        """What readers may see of the arena."""
        return {key for key in self.blocks if self.is_visible(key)}

    def committed(self) -> set[Key]:
        """What is marked as whole in memory."""
        return {key for key, block in self.blocks.items() if block.life is Life.COMMITTED}

    def children(self, key: Key) -> list[ModelBlock]:
        """What stands on a block directly."""
        return [block for block in self.blocks.values() if block.known.parent == key]

    def family(self, block: ModelBlock) -> list[ModelBlock]:
        """A block and all that stand on it, parents first."""
        found = [block]
        for member in found:  # grows while walked
            found += self.children(member.key)
        return found

    def kept_by_pins(self) -> set[Key]:
        """The union of all pinned blocks' chains."""
        return {
            each for key, block in self.blocks.items() if block.terms.pinned_until_unix_ms for each in ancestry(key)
        }

    def pinned_bytes(self) -> int:
        """What pins take of the arena."""
        return sum(BLOCKS[key].slot_bytes for key in self.kept_by_pins())

    def evictable(self, *, keep: Key | None = None) -> set[Key]:
        """Blocks that room may be made of: committed, unread, not pinned, and nothing stands on them."""
        pinned = self.kept_by_pins()
        parents = {block.known.parent for block in self.blocks.values()}
        return {
            key
            for key, block in self.blocks.items()
            if block.life is Life.COMMITTED and not block.leases and key not in parents | pinned | {keep}
        }

    def evictable_in_time(self) -> set[Key]:
        """Blocks that may be gone once enough room was asked for: all that stand on them may go, too."""
        free = {key for key, block in self.blocks.items() if block.life is Life.COMMITTED and not block.leases}
        free -= self.kept_by_pins()
        return {key for key in free if all(member.key in free for member in self.family(self.blocks[key]))}

    # Readers

    def touch(self, key: Key | None) -> None:
        """A use counts for all blocks before the used one."""
        while key is not None and self.blocks[key].used_s < self.clock.seconds:
            self.blocks[key].used_s = self.clock.seconds
            key = self.blocks[key].known.parent

    def end_lease(self, lease_id: str) -> ModelLease | None:
        """The lease is over; a broken block goes with its last reader."""
        lease = self.leases.pop(lease_id, None)
        for block in reversed(lease.blocks if lease is not None else ()):
            block.leases -= 1
            self._free_if_drained(block)
        return lease

    def drain(self, block: ModelBlock) -> None:
        """A broken block and all that stand on it are out of sight at once, and out of memory with their readers."""
        for member in reversed(self.family(block)):
            if member.life is Life.RESERVED:
                self._remove(member)
            else:
                if member.terms.pinned_until_unix_ms:
                    self.unpin(member)
                member.life, member.terms = Life.DRAINING, SlotTerms()
                self._free_if_drained(member)

    # Writers

    def add(self, known: KnownBlock, life: Life, retention: Retention = KEEP) -> ModelBlock:
        """A slot is taken for a block that is not held, under a parent that is."""
        assert known.key not in self.blocks
        assert known.parent is None or self.get(known.parent) is not None, "stored without its parent"
        terms = SlotTerms(expires_unix_ms=self.end_of(retention), not_on_disk=not retention.on_disk)
        block = self.blocks[known.key] = ModelBlock(known, life, self.clock.seconds, terms=terms)
        return block

    def commit(self, block: ModelBlock, terms: dict[Key, SlotTerms]) -> None:
        """Readable, with all that waited for it; what they stand on stays at least as long."""
        self.reservations.pop(block.reservation_id, None)
        before = self.visible()
        block.life, block.payload = Life.COMMITTED, block.known.payload
        self.set_terms(terms)
        for key in self.visible() - before:
            self.blocks[key].used_s = self.clock.seconds
            self.touch(self.blocks[key].known.parent)
            self.set_terms(self.settled(key))

    def end_of(self, retention: Retention) -> int:
        """When the time of what is used now is over; 0: never."""
        return 0 if retention.ttl_s is None else self.clock.unix_ms() + int(retention.ttl_s * 1_000)

    def used(self, key: Key, retention: Retention) -> dict[Key, SlotTerms]:
        """New terms of a block and of all before it, when it is used under a retention: the longest of all."""
        return self._raised(ancestry(key), self.end_of(retention), on_disk=retention.on_disk)

    def settled(self, key: Key) -> dict[Key, SlotTerms]:
        """New terms of what a block stands on: no less than its own."""
        terms = self.blocks[key].terms
        return self._raised(ancestry(key)[1:], terms.expires_unix_ms, on_disk=not terms.not_on_disk)

    def set_terms(self, terms: dict[Key, SlotTerms]) -> None:
        """Have new terms hold."""
        for key, new in terms.items():
            self.blocks[key].terms = new

    def _raised(self, keys: list[Key], until_unix_ms: int, *, on_disk: bool) -> dict[Key, SlotTerms]:
        raised = {}
        for key in keys:
            terms = self.blocks[key].terms
            if terms.expires_unix_ms and (not until_unix_ms or until_unix_ms > terms.expires_unix_ms):
                terms = replace(terms, expires_unix_ms=until_unix_ms)
            raised[key] = replace(terms, not_on_disk=terms.not_on_disk and not on_disk)
        return raised

    def drop_reserved(self, block: ModelBlock) -> None:
        """A reservation ends without a block: what stands on it has lost its prefix."""
        for member in reversed(self.family(block)):
            self._remove(member)

    def remove(self, keys: Iterable[Key]) -> None:
        """Blocks left, tails first."""
        for key in sorted(keys, key=lambda each: -BLOCKS[each].header.position):
            assert not self.children(key), "a block left before the blocks that stand on it"
            self._remove(self.blocks[key])

    # The clock, operators

    def expire(self) -> set[Key]:
        """End what is over: leases, reservations, pins, then blocks; returns the blocks that went for that."""
        now_s, now_unix_ms = self.clock.seconds, self.clock.unix_ms()
        for lease_id in [lease_id for lease_id, lease in self.leases.items() if lease.expires_at_s <= now_s]:
            self.end_lease(lease_id)
        for reservation_id in list(self.reservations):
            reservation = self.reservations.get(reservation_id)
            if reservation is not None and reservation.expires_at_s <= now_s:
                self.drop_reserved(reservation.block)
        for block in self.blocks.values():
            if 0 < block.terms.pinned_until_unix_ms <= now_unix_ms:
                self.unpin(block)
        gone: set[Key] = set()
        for block in list(self.blocks.values()):
            if block.order_waits and block.terms.ordered_unix_ms <= now_unix_ms and block.life is not Life.DRAINING:
                block.order_waits = False
                pinned = self.kept_by_pins()
                for member in reversed(self.family(block)):
                    if member.key not in pinned and self.get(member.key) is member:
                        gone.add(member.key)
                        self.drain(member)
        while due := {key for key in self.evictable() if 0 < self.blocks[key].terms.expires_unix_ms <= now_unix_ms}:
            gone |= due
            self.remove(due)
        return gone

    def named(self, selector: EvictSelector) -> list[ModelBlock]:
        """The very blocks that an order is about, readable ones only."""
        return [self.blocks[key] for key in self.visible() if is_root(BLOCKS[key], selector)]

    def unpin(self, block: ModelBlock) -> set[Key]:
        """Take a pin back; returns the blocks that no pin keeps any more."""
        before = self.kept_by_pins()
        block.terms = replace(block.terms, pinned_until_unix_ms=0)
        for key in ancestry(block.key):
            self.blocks[key].order_waits = self.blocks[key].terms.ordered_unix_ms > 0
        return before - self.kept_by_pins()

    def evicted_by(self, selector: EvictSelector) -> tuple[set[Key], set[Key], set[Key]]:
        """What an operator's eviction without `free_bytes` takes from the arena, and what it means and must leave:
        because it is in use, and because it is pinned."""
        if selector.tier not in (None, Tier.HOST):
            return set(), set(), set()
        matched = {block.key for block in self.blocks.values() if self._is_meant(block, selector)}
        going: set[Key] = set()
        skipped: set[Key] = set()
        pinned = {key for key in self.kept_by_pins() & matched if self.blocks[key].life is Life.COMMITTED}
        for key in sorted(matched, key=lambda each: -BLOCKS[each].header.position):
            block = self.blocks[key]
            if block.life is Life.COMMITTED and key not in pinned:
                free = block.leases == 0 and {child.key for child in self.children(key)} <= going
                (going if free else skipped).add(key)
        return going, skipped, pinned

    def _is_meant(self, block: ModelBlock, selector: EvictSelector) -> bool:
        idle_s = self.clock.seconds - block.used_s
        return is_named(block.known, selector) and (selector.idle_for_s is None or idle_s >= selector.idle_for_s)

    def _remove(self, block: ModelBlock) -> None:
        del self.blocks[block.key]
        self.reservations.pop(block.reservation_id, None)

    def _free_if_drained(self, block: ModelBlock | None) -> None:
        while block is not None and block.life is Life.DRAINING and not block.leases and not self.children(block.key):
            if self.blocks.get(block.key) is not block:
                return
            self._remove(block)
            block = self.blocks.get(block.known.parent) if block.known.parent else None


def ancestry(key: Key) -> list[Key]:
    """A block and all before it, itself first."""
    found = []
    walked: Key | None = key
    while walked is not None:
        found.append(walked)
        walked = BLOCKS[walked].parent
    return found


def closed(keys: Collection[Key]) -> bool:
    """Whether no block is without its prefix."""
    return all(BLOCKS[key].parent is None or BLOCKS[key].parent in keys for key in keys)


def is_root(known: KnownBlock, selector: EvictSelector) -> bool:
    """Whether a selector names this very block, by hash or as the last full block of a prefix."""
    if selector.namespace is not None and not known.header.is_of(selector.namespace):
        return False
    if selector.block_hashes:
        return known.key[1] in selector.block_hashes
    whole = len(selector.prefix_token_ids) // len(known.header.token_ids)
    return known.header.position + 1 == whole and _stands_on(ancestry(known.key), selector.prefix_token_ids)


def is_named(known: KnownBlock, selector: EvictSelector) -> bool:
    """Whether a selector means a block, as far as that does not depend on when it was used."""
    header = known.header
    if selector.namespace is not None and not header.is_of(selector.namespace):
        return False
    if selector.created_before_unix_ms is not None and header.created_unix_ms > selector.created_before_unix_ms:
        return False
    before = ancestry(known.key)
    if selector.block_hashes:
        return any(key[1] in selector.block_hashes for key in before)
    if selector.prefix_token_ids:
        return _stands_on(before, selector.prefix_token_ids)
    return True


def _stands_on(before: list[Key], prefix: tuple[int, ...]) -> bool:
    """Whether a chain starts with all full blocks of a prefix."""
    tokens: tuple[int, ...] = ()
    for key in reversed(before):
        tokens += BLOCKS[key].header.token_ids
    block_tokens = len(BLOCKS[before[0]].header.token_ids)
    whole = len(prefix) // block_tokens * block_tokens
    return whole > 0 and tokens[:whole] == prefix[:whole]
