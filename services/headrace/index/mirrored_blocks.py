"""What a mirror of the index knows: who holds which blocks, who of them is alive, and whether anything was missed.

Told in this order it ends at the truth: where the numbers of all events stand, then, interleaved, all entries page by
page and the events since. An event may tell again what a page has shown already; the last word on a block is right.

A holder's blocks are kept for each incarnation by itself, under a number of its own (see `PrefixMap`). What an event
of a newer incarnation names is taken from the older ones, as in Redis. A number is used again only when no block has
it any more.

Pure and synchronous: knows neither Redis nor the clock.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from headrace.core.block import BlockHash, Chain, HolderId, NamespaceId
from headrace.core.index_limits import INDEX_MIRROR_DROP_BLOCKS, INDEX_SHARDS, INDEX_SWEEP_MS
from headrace.core.limits import CHAIN_BLOCKS_MAX, HOLDERS_REMEMBERED
from headrace.core.members import NO_MATCH, NumberedRuns, PrefixMatch
from headrace.core.prefix_map import PrefixMap
from headrace.index.redis_keys import Event, Op

NEVER_S = float("-inf")


@dataclass(frozen=True, slots=True)
class Owner:
    """A holder under one incarnation."""

    holder: HolderId
    incarnation: int


@dataclass(frozen=True, slots=True)
class Alive:
    """The incarnation under which a holder is alive, and until when its record stands if it is not renewed."""

    incarnation: int
    until_s: float


class MirroredBlocks:
    """One reading of the index and all changes since. One event loop."""

    def __init__(self, numbers: Mapping[tuple[int, Owner], int]) -> None:
        """numbers: events that each owner has made in each shard before those that will be applied here."""
        self._numbers = dict(numbers)
        self._maps: dict[NamespaceId, PrefixMap[BlockHash]] = {}
        self._owners: list[Owner | None] = []  # by number; None: free, or being dropped
        self._named: tuple[HolderId | None, ...] | None = None
        self._until_s = np.full(64, NEVER_S)  # by number: alive until then
        self._holder_to_numbers: dict[HolderId, dict[int, int]] = {}  # incarnation -> number
        self._free: list[int] = []
        self._live: dict[HolderId, Alive | None] = {}  # as last observed, of every holder that has a number
        self._dead_since_s: dict[Owner, float] = {}
        self._dropped: dict[HolderId, int] = {}  # newest incarnation whose blocks are not kept any more; oldest first
        self._dying: list[int] = []
        self._walk: Iterator[None] | None = None
        self.num_blocks = 0

    @property
    def num_holders(self) -> int:
        """Incarnations of holders that have a number, those that are being dropped included."""
        return len(self._owners) - len(self._free)

    @property
    def has_unobserved(self) -> bool:
        """Whether there are holders of whom it is not known whether they are alive."""
        return len(self._live) < len(self._holder_to_numbers)

    @property
    def is_dropping(self) -> bool:
        """Whether `drop_some` has something to do."""
        return self._walk is not None or bool(self._dying)

    def watched(self) -> list[HolderId]:
        """Holders whose liveness matters."""
        return list(dict.fromkeys((*self._holder_to_numbers, *self._dropped)))

    def longest_prefix(self, namespace: NamespaceId, chain: Chain, *, now_s: float) -> PrefixMatch:
        """For every holder alive at `now_s`, the length of its leading run. A handful of look-ups, see PrefixMap."""
        held = self._maps.get(namespace)
        if held is None:
            return NO_MATCH
        depths = held.depths(chain[:CHAIN_BLOCKS_MAX], len(self._owners))
        depths *= self._until_s[: len(depths)] > now_s
        return PrefixMatch(NumberedRuns(self._names(), depths))

    def _names(self) -> tuple[HolderId | None, ...]:
        """Holders by number, one object until a number changes hands."""
        if self._named is None:
            self._named = tuple(None if owner is None else owner.holder for owner in self._owners)
        return self._named

    def found(self, namespace: NamespaceId, block_hash: BlockHash, owners: Iterable[Owner]) -> None:
        """The entries of a block were read."""
        with self._changing(namespace) as held:
            for owner in owners:
                if owner.incarnation > self._dropped.get(owner.holder, 0):
                    held.add(self._number_of(owner), (block_hash,))

    def apply(self, shard: int, event: Event) -> bool:
        """Take a change over. False: an earlier one is missing, or it does not say which blocks of a live holder went;
        then only reading everything again leads to the truth."""
        owner = Owner(event.holder, event.incarnation)
        if event.incarnation <= self._dropped.get(event.holder, 0):
            return True  # nobody is told of it; should it be alive after all, `observe` finds that out
        if event.number != self._numbers.get((shard, owner), 0) + 1:
            return False
        self._numbers[shard, owner] = event.number
        if event.op is Op.SWEPT:
            alive = self._live.get(owner.holder)
            self._drop(owner)
            return alive is None or alive.incarnation != owner.incarnation
        number = self._number_of(owner) if event.op is Op.REGISTERED else None
        with self._changing(event.namespace) as held:
            for incarnation, other in self._holder_to_numbers.get(owner.holder, {}).items():
                if incarnation <= owner.incarnation and other != number:
                    held.remove(other, event.blocks)
            if number is not None:
                held.add(number, event.blocks)
        return True

    def observe(self, live: Mapping[HolderId, Alive], *, now_s: float) -> bool:
        """Take over who of the `watched` is alive; those not named are not. False: one is alive whose blocks were
        dropped, so that everything must be read again.

        Blocks of an incarnation that has a successor are dropped at once; those of a holder that is gone after
        INDEX_SWEEP_MS, since it may only have been slow to renew its record.
        """
        for holder, incarnation_to_number in list(self._holder_to_numbers.items()):
            alive = self._live[holder] = live.get(holder)
            for incarnation, number in list(incarnation_to_number.items()):
                owner = Owner(holder, incarnation)
                if alive is not None and alive.incarnation == incarnation:
                    self._until_s[number] = alive.until_s
                    self._dead_since_s.pop(owner, None)
                    continue
                self._until_s[number] = NEVER_S
                dead_since_s = self._dead_since_s.setdefault(owner, now_s)
                is_replaced = alive is not None and alive.incarnation > incarnation
                if is_replaced or now_s - dead_since_s >= INDEX_SWEEP_MS / 1_000:
                    self._drop(owner)
        return not any(alive.incarnation <= self._dropped.get(holder, 0) for holder, alive in live.items())

    def drop_some(self) -> None:
        """Walk over INDEX_MIRROR_DROP_BLOCKS blocks and take the dropped holders from them."""
        if self._walk is None and self._dying:
            numbers, self._dying = self._dying, []
            self._walk = self._drop_everywhere(numbers)
        if self._walk is not None and next(self._walk, self) is self:
            self._walk = None

    def check_integrity(self) -> None:
        """Every count is what is there, and every number has one owner or is on its way to be free."""
        for held in self._maps.values():
            held.check_integrity()
            assert len(held), "an empty namespace is kept"
        assert self.num_blocks == sum(len(held) for held in self._maps.values())
        numbered = {n for numbers in self._holder_to_numbers.values() for n in numbers.values()}
        assert numbered == {n for n, owner in enumerate(self._owners) if owner is not None}
        assert not numbered & {*self._free, *self._dying}
        assert all(self._until_s[number] == NEVER_S for number in {*self._free, *self._dying})

    def _number_of(self, owner: Owner) -> int:
        numbers = self._holder_to_numbers.setdefault(owner.holder, {})
        if owner.incarnation in numbers:
            return numbers[owner.incarnation]
        self._named = None
        if self._free:
            number = self._free.pop()
            self._owners[number] = owner
        else:
            number = len(self._owners)
            self._owners.append(owner)
            if number == len(self._until_s):
                self._until_s = np.concatenate((self._until_s, np.full(number, NEVER_S)))
        numbers[owner.incarnation] = number
        alive = self._live.get(owner.holder)
        if alive is not None and alive.incarnation == owner.incarnation:
            self._until_s[number] = alive.until_s
        elif alive is None or alive.incarnation < owner.incarnation:
            self._live.pop(owner.holder, None)  # it may have come to life since we looked
        return number

    def _drop(self, owner: Owner) -> None:
        """Have what an owner holds forgotten: at once for those who ask, step by step in memory."""
        numbers = self._holder_to_numbers.get(owner.holder, {})
        number = numbers.pop(owner.incarnation, None)
        if number is not None:
            self._owners[number], self._until_s[number], self._named = None, NEVER_S, None
            self._dying.append(number)
        if not numbers:
            self._holder_to_numbers.pop(owner.holder, None)
            self._live.pop(owner.holder, None)
        self._dead_since_s.pop(owner, None)
        for shard in range(INDEX_SHARDS):
            self._numbers.pop((shard, owner), None)
        self._dropped[owner.holder] = max(owner.incarnation, self._dropped.pop(owner.holder, 0))
        if len(self._dropped) > HOLDERS_REMEMBERED:
            del self._dropped[next(iter(self._dropped))]

    def _drop_everywhere(self, numbers: list[int]) -> Iterator[None]:
        walked = 0
        for namespace in list(self._maps):
            blocks = self._maps[namespace].blocks() if namespace in self._maps else []
            for start in range(0, len(blocks), INDEX_MIRROR_DROP_BLOCKS):
                chunk = blocks[start : start + INDEX_MIRROR_DROP_BLOCKS]
                with self._changing(namespace) as held:
                    for number in numbers:
                        held.remove(number, chunk)
                walked += len(chunk)
                if walked >= INDEX_MIRROR_DROP_BLOCKS:
                    walked = 0
                    yield
        self._free += numbers

    def _changing(self, namespace: NamespaceId) -> "_Changing":
        return _Changing(self, self._maps, namespace)


class _Changing:
    """One namespace's map for the length of a change; afterwards the blocks are counted and nothing empty is kept."""

    def __init__(
        self, mirrored: MirroredBlocks, maps: dict[NamespaceId, PrefixMap[BlockHash]], namespace: NamespaceId
    ) -> None:
        self._mirrored, self._maps, self._namespace = mirrored, maps, namespace

    def __enter__(self) -> PrefixMap[BlockHash]:
        self._held = self._maps.setdefault(self._namespace, PrefixMap())
        self._before = len(self._held)
        return self._held

    def __exit__(self, *_: object) -> None:
        self._mirrored.num_blocks += len(self._held) - self._before
        if not len(self._held):
            del self._maps[self._namespace]
