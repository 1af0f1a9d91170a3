"""Follow the policy that would have saved most recompute seconds lately: several directories of names, one leader.

Each directory is a cache of names alone, as large as the store, run by one policy over the same requests. What a
request finds in a directory is what that policy would have saved. The store evicts what the leader does not hold, so
after a change of leader it turns into the leader's cache one block at a time, and is equal to it from then on.

Pure, and fed by the same events as any policy; the store does not know which policy it has.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Generic

from headrace.core.eviction_arc import ArcOrder
from headrace.core.eviction_order import GdsfOrder, Key, LeafOrder, LfuOrder, LruOrder, Name
from headrace.core.limits import EVICTION_DIRECTORY_NAMES_MAX

# What a saving counts after one more request: half after 350 requests, so that a change of the load is followed within
# minutes, and a burst of one kind of request does not turn the store over.
SCORE_DECAY = 0.998

# Lead of another directory's score that makes it the leader: below it, a change costs more blocks than it wins.
LEAD_CHANGE = 1.02

# Names that the leader may be made to give up for one victim when all that it does not hold is in use.
LEADER_TRIES = 8


@dataclass(slots=True, eq=False)
class _Directory(Generic[Key]):
    """One policy's cache of names, its savings, and the blocks in the store that it does not hold, oldest first."""

    order: LeafOrder[Key]
    size_bytes: int = 0
    score: float = 0.0
    outsiders: OrderedDict[Key, None] = field(default_factory=OrderedDict)


class AdaptiveOrder(LruOrder[Key]):
    """The default. As a policy of its own it is leaf-first LRU: that decides when the leader's choice is in use."""

    name = "adaptive"

    def __init__(self) -> None:
        super().__init__()
        orders: tuple[LeafOrder[Key], ...] = (LruOrder(), GdsfOrder(), LfuOrder(), ArcOrder())
        self._directories = [_Directory(order) for order in orders]
        self._leader = self._directories[0]
        self._size_bytes = 0
        self._room_bytes = 0  # most bytes ever held at once: the room of each directory

    @property
    def leader(self) -> str:
        """The name of the policy that is followed now."""
        return self._leader.order.name

    def added(self, key: Key, parent: Key | None, *, size_bytes: int, recompute_s: float) -> None:
        super().added(key, parent, size_bytes=size_bytes, recompute_s=recompute_s)
        self._size_bytes += size_bytes
        self._room_bytes = max(self._room_bytes, self._size_bytes)
        block = self._names[key]
        if parent is None:
            self._next_request()  # it found nothing here, so nobody called `used`
        for directory in self._directories:
            if key in directory.order:
                directory.score += recompute_s
                directory.order.used((key,))
            else:
                self._insert(directory, block)

    def used(self, keys: Sequence[Key]) -> None:
        super().used(keys)
        self._next_request()
        names = self._names
        saved_s = [0.0, *accumulate(names[key].recompute_s for key in keys)]
        for directory in self._directories:
            order = directory.order
            num_held = order.num_leading(keys)
            if num_held == len(keys):
                order.used(keys)
            else:
                order.used(keys[:num_held])
                self._insert(directory, names[keys[-1]])
            directory.score += saved_s[num_held]

    def removed(self, key: Key) -> None:
        block = self._names[key]
        parent = block.parent
        super().removed(key)
        self._size_bytes -= block.size_bytes
        for directory in self._directories:
            directory.outsiders.pop(key, None)
        if parent is not None and not parent.children:
            self._offer_outsider(parent.key)

    def offer(self, key: Key) -> None:
        super().offer(key)
        self._offer_outsider(key)

    def victim(self, keep: Key | None = None, *, may_leave: Callable[[Key], bool] | None = None) -> Key | None:
        for _ in range(LEADER_TRIES):
            found = self._outsider(self._leader, keep, may_leave)
            if found is not None:
                return found
            dropped = self._leader.order.victim(keep)
            if dropped is None:
                break
            self._drop(self._leader, dropped)
        return super().victim(keep, may_leave=may_leave)

    def _next_request(self) -> None:
        """Judge what the requests so far have saved, and let it count a little less from now on."""
        best = max(self._directories, key=lambda directory: directory.score)
        if best.score > LEAD_CHANGE * self._leader.score:
            self._leader = best
        for directory in self._directories:
            directory.score *= SCORE_DECAY

    def _outsider(
        self, directory: _Directory[Key], keep: Key | None, may_leave: Callable[[Key], bool] | None
    ) -> Key | None:
        """The block that the directory has done without for longest. Those in use are forgotten until offered again."""
        outsiders, found, kept = directory.outsiders, None, False
        while outsiders:
            key = next(iter(outsiders))
            if key != keep and not self._names[key].children and (may_leave is None or may_leave(key)):
                found = key
                break
            del outsiders[key]
            kept = kept or key == keep
        if kept and keep is not None:
            outsiders[keep] = None
        return found

    def _offer_outsider(self, key: Key) -> None:
        for directory in self._directories:
            if key not in directory.order:
                directory.outsiders[key] = None

    def _insert(self, directory: _Directory[Key], block: Name[Key]) -> None:
        """Give a directory a name, and before it those of its prefix that it lacks."""
        order = directory.order
        missing: list[Name[Key]] = []
        walked: Name[Key] | None = block
        while walked is not None and walked.key not in order:
            missing.append(walked)
            walked = walked.parent
        for name in reversed(missing):
            parent = None if name.parent is None else name.parent.key
            while (
                directory.size_bytes + name.size_bytes > self._room_bytes or len(order) >= EVICTION_DIRECTORY_NAMES_MAX
            ):
                dropped = order.victim(parent)
                if dropped is None:
                    return  # the chain alone fills the directory
                self._drop(directory, dropped)
            order.added(name.key, parent, size_bytes=name.size_bytes, recompute_s=name.recompute_s)
            directory.size_bytes += name.size_bytes
            directory.outsiders.pop(name.key, None)

    def _drop(self, directory: _Directory[Key], key: Key) -> None:
        directory.size_bytes -= directory.order.size_of(key)
        directory.order.removed(key)
        if key in self._names:
            directory.outsiders[key] = None
