"""The account of one worker's KV blocks: who holds which, which are free, which are kept for reuse.

This file owns block ids and nothing else; the bytes are `PagedKV`'s. Each block is in exactly one state:

    free ──take──► held (references > 0) ──last unref──► free           when it has no hash
                     ▲                   └─last unref──► kept for reuse when it has one
                     └──────take (by hash)──────────────┘   └─ evicted when `take` runs short, or by `evict` ─► free

A block with a hash is immutable, holds verified bytes and can be found by that hash. Residency is prefix-closed: the
parent of every hashed block is hashed too (or it is block 0 of its chain), so a chain is never found with a gap.
Blocks kept for reuse are evicted longest unused first, and a child before its parent. Where the model reads a window
only, a prefix is found when its last window is, and blocks are evicted longest unused first whatever stands on them
(`hash_tree.py`). A block may have a time to live (`ttl_s`, infinite for none) that runs from its last use; with
several users it stays until nobody's time is left.

All methods are thread-safe (one lock, held for dictionary work only). Callbacks: `on_freed` runs after the lock is
released, in the thread that gave blocks back; `on_hashes` runs under the lock, so that a listener sees changes in
order, and must neither block nor call the pool.
"""

import math
import threading
from collections.abc import Callable, Iterable, Sequence

from headrace.core.block import BlockHash, HashedPrompt
from headrace.core.clock import Clock, SystemClock
from headrace.core.key_window import EVERYTHING, KeyWindow
from headrace.core.limits import POOL_NAMES_PER_BLOCK_MAX
from headrace.core.part_ids import PartIds
from headrace.engine.hash_tree import HashTree
from headrace.engine.pool_block import HashedBlock, PoolBlock
from headrace.engine.pool_values import Evicted, Found, HashesChanged, PoolCounters, Selection, Short, Taken

NOWHERE = -1  # the block id of a name: its bytes are in no block


class BlockPool:
    """Thread-safe account of `num_blocks` block ids, 0-based. Holds no tensors."""

    def __init__(
        self,
        num_blocks: int,
        *,
        clock: Clock | None = None,
        on_freed: Callable[[], None] = lambda: None,
        on_hashes: Callable[[HashesChanged], None] = lambda change: None,
        window: KeyWindow = EVERYTHING,
        lock: "threading.Lock | threading.RLock | None" = None,
        names_max: int | None = None,
    ) -> None:
        """window: what the model reads of a sequence. lock: the pool's own, or one that several share. names_max: of
        blocks without bytes; None for POOL_NAMES_PER_BLOCK_MAX for each block."""
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self.counters = PoolCounters()
        self._clock = clock or SystemClock()
        self._on_freed = on_freed
        self._on_hashes = on_hashes
        self.parts = PartIds(num_blocks)  # how a block of two parts is named; these have one, and its own name
        self._lock = lock or threading.Lock()
        self._free = list(reversed(range(num_blocks)))
        self._references = [0] * num_blocks
        self._window = window
        self._hashed: dict[int, HashedBlock] = {}  # block id -> what it stands for
        self._tree = HashTree()
        self._names_max = POOL_NAMES_PER_BLOCK_MAX * num_blocks if names_max is None else names_max
        self._kept: dict[int, None] = {}  # unreferenced hashed blocks, longest unused first
        self._private: set[int] = set()  # held blocks that were forgotten: not to be shared again

    @property
    def available_blocks(self) -> int:
        """Blocks that `take` could hand out now: the free ones and all that are only kept for reuse."""
        with self._lock:
            return len(self._free) + len(self._kept)

    @property
    def kept_blocks(self) -> int:
        """Of the available blocks, those that hold a block for reuse: nobody's, but not empty."""
        with self._lock:
            return len(self._kept)

    def take(
        self, num_blocks: int, *, prompt: HashedPrompt | None = None, shared_max: int = 0, ttl_s: float = math.inf
    ) -> Taken | Short:
        """Take `num_blocks` blocks, the leading ones by hash as far as `prompt`'s chain is resident.

        At most `shared_max` blocks come by hash; they are kept for at least `ttl_s` after this use. The rest are fresh:
        their bytes are undefined, and blocks kept for reuse are evicted for them, only as many as are missing. All or
        nothing. Of a prompt of a model with a window, what it does not need of the prefix is not taken, and of the
        blocks behind only as many as a sequence may hold at once.
        """
        assert num_blocks >= 0
        with self._lock:
            found = self._find(num_blocks, prompt, shared_max)
            return found if isinstance(found, Short) else self._take_found(found, ttl_s)

    def _find(self, num_blocks: int, prompt: HashedPrompt | None, shared_max: int) -> Found | Short:
        """What `take` would take now. Under the lock."""
        num_shared, first_block, shared, needed = 0, 0, list[int](), num_blocks
        if prompt is not None:
            num_shared = self._usable_prefix(prompt, min(shared_max, num_blocks))
            first_block = self._window.first_of_prefix(num_shared)
            shared = self._block_ids(prompt, range(first_block, num_shared))
            needed = self._window.held_blocks(num_blocks - first_block) - len(shared)
        available = len(self._free) + len(self._kept) - sum(block_id in self._kept for block_id in shared)
        if needed > available:
            return Short(needed=needed, available=available)
        return Found(shared, num_shared, first_block, needed)

    def _take_found(self, found: Found, ttl_s: float) -> Taken:
        """Take what was found just now, under the same hold of the lock."""
        for block_id in found.shared:
            self._hold_shared(block_id, ttl_s)
        while len(self._free) < found.num_fresh:
            self._evict_one()
        fresh = [self._free.pop() for _ in range(found.num_fresh)]
        for block_id in fresh:
            assert self._references[block_id] == 0
            self._references[block_id] = 1
        return Taken(block_ids=(*found.shared, *fresh), num_shared=found.num_shared, first_block=found.first_block)

    def take_next(self, prompt: HashedPrompt, wanted: range, *, ttl_s: float) -> tuple[int, ...]:
        """Take blocks [wanted.start, ...) of the chain by hash, as far as they are there: one reference each. The
        caller holds those before. Not counted as a lookup: that was when the prompt came."""
        with self._lock:
            taken: list[int] = []
            for index in wanted:
                if (block_id := self._resident(prompt, index)) is None:
                    break
                self._hold_shared(block_id, ttl_s)
                taken.append(block_id)
            return tuple(taken)

    def ref(self, block_id: int) -> None:
        """Add a reference to a block that somebody holds."""
        with self._lock:
            assert self._references[block_id] > 0, f"block {block_id} is not held by anyone"
            self._references[block_id] += 1

    @property
    def available_near(self) -> int:
        """Near parts that could be handed out now: of a pool whose blocks have two parts (`layered_pool.py`)."""
        return 0

    def take_near(self, num_parts: int) -> tuple[int, ...] | Short:
        """Near parts alone: of a pool whose blocks have two parts."""
        assert num_parts == 0
        return ()

    def sole_near(self, block_ids: Sequence[int]) -> int:
        """As `sole_blocks`, near parts: of a pool whose blocks have two parts."""
        return 0

    def sole_blocks(self, block_ids: Sequence[int]) -> int:
        """How many of these blocks nobody holds but the caller: so many could be had if it gave them back."""
        with self._lock:
            return sum(self._references[block_id] == 1 for block_id in block_ids)

    def unref(self, block_id: int) -> None:
        """Give one reference back; the last one frees the block, or keeps it for reuse when it has a hash."""
        self.unref_all((block_id,))

    def unref_all(self, block_ids: Sequence[int]) -> None:
        """Give back one reference each of a sequence's blocks; tails first, so that eviction meets them first."""
        num_given_back = 0
        with self._lock:
            for block_id in reversed(block_ids):
                assert self._references[block_id] > 0, f"block {block_id} was given back twice"
                self._references[block_id] -= 1
                if self._references[block_id]:
                    continue
                num_given_back += 1
                if block_id in self._hashed:
                    self._hashed[block_id].give_back(self._clock.now_s())
                    self._kept[block_id] = None
                else:
                    self._private.discard(block_id)
                    self._free.append(block_id)
        if num_given_back:
            self._on_freed()

    def hash_blocks(
        self, prompt: HashedPrompt, block_ids: Sequence[int], *, first_block: int = 0, ttl_s: float = math.inf
    ) -> bool:
        """Make blocks of a sequence findable: block_ids[i] holds the verified KV of `prompt`'s block first_block + i.
        They are kept for at least `ttl_s` after this use.

        The caller holds a reference to each and never writes to them again. A hash that is resident already keeps the
        block it has; the caller's copy then stays its own and is freed with it. All ancestors are passed each time,
        since one that somebody else held may have been evicted since, but for those that a window has passed.
        False: one was forgotten (`forget`), and so what the sequence computes behind it is not to be shared.
        """
        assert first_block + len(block_ids) <= len(prompt.chain)
        stored, forgotten = [], False
        with self._lock:
            now_s = self._clock.now_s()
            for index, block_id in enumerate(block_ids, start=first_block):
                block_hash = prompt.chain[index]
                assert self._references[block_id] > 0, f"block {block_id} is not held by anyone"
                resident = self._tree.resident.get(block_hash)
                if resident is not None and resident.block_id == block_id:
                    resident.hold(now_s, ttl_s)
                elif resident is not None:
                    resident.use(now_s, ttl_s)
                if resident is not None or block_id in self._hashed:
                    continue
                if block_id in self._private:
                    forgotten = True
                    break  # nor can what stands on it be found
                if index == first_block and not self._name_ancestors(prompt, first_block):
                    break
                hashed = self._hashed[block_id] = self._describe_block(prompt, index, block_id=block_id)
                self._tree.add(hashed, is_resident=True)
                hashed.hold(now_s, ttl_s)
                stored.append(block_hash)
            if stored:
                self._on_hashes(HashesChanged(stored=tuple(stored)))
            return not forgotten

    def resident_blocks(self, prompt: HashedPrompt) -> int:
        """Leading blocks of `prompt` that would not have to be computed now. A hint: only `take` holds them."""
        with self._lock:
            return self._usable_prefix(prompt, len(prompt.chain))

    def evict(self, selection: Selection, *, dry_run: bool) -> Evicted:
        """Free the selected blocks that nobody holds; a block stays while a descendant of it stays."""
        with self._lock:
            selected = self._select(selection)
            leaving = self._leaving(selected)
            kept = len(selected) - len(leaving)
            if selection.blocks_max is not None:
                used_s: dict[BlockHash, float] = {}  # a block's own last use or that of one on it, whichever was later
                for hashed in leaving:
                    on_it = (used_s[child] for child in self._tree.children(hashed.block_hash) if child in used_s)
                    used_s[hashed.block_hash] = max((hashed.last_used_s, *on_it))
                leaving.sort(key=lambda hashed: used_s[hashed.block_hash])  # stable: of equals, the child stays first
                leaving = leaving[: selection.blocks_max]
            if not dry_run:
                for hashed in leaving:
                    self._forget(hashed)
        if leaving and not dry_run:
            self._on_freed()
        hashes = tuple(hashed.block_hash for hashed in leaving)
        return Evicted(num_blocks=len(leaving), num_kept=kept, block_hashes=hashes)

    def drop(self, hashes: Iterable[BlockHash], *, dry_run: bool) -> int:
        """Free those of these blocks that nobody holds, or count them. Of a pool with a window: what stands on them may
        stay."""
        assert self._window.bounded
        with self._lock:
            found = [hashed for each in hashes if (hashed := self._tree.resident.get(each)) is not None]
            going = [hashed for hashed in found if not self._references[hashed.block_id]]
            for hashed in () if dry_run else going:
                self._forget(hashed)
        if going and not dry_run:
            self._on_freed()
        return len(going)

    def evict_expired(self) -> float:
        """Free the blocks that nobody holds and whose time to live is over, a parent after its children.

        Returns the seconds until the next of those left is over, infinite when none has a time to live.
        """
        next_s = math.inf
        with self._lock:
            now_s, over = self._clock.now_s(), list[HashedBlock]()
            for hashed in (self._hashed[block_id] for block_id in self._kept):
                if hashed.expires_s <= now_s:
                    over.append(hashed)
                else:
                    next_s = min(next_s, hashed.expires_s - now_s)
            for hashed in sorted(over, key=lambda hashed: -hashed.position):
                if self._may_go(hashed):
                    self._forget(hashed)
        if over:
            self._on_freed()
        return next_s

    def forget(self, selection: Selection) -> int:
        """Have the selected blocks and all that stand on them found no more; returns how many. Those in use are freed
        with their last reference and not shared again; whoever computes the same anew shares that."""
        with self._lock:
            going = self._tree.descendants(hashed.block_hash for hashed in self._select(selection))
            for hashed in reversed(going):
                self._forget(hashed)
                if self._references[hashed.block_id]:
                    self._private.add(hashed.block_id)
        if going:
            self._on_freed()
        return len(going)

    def describe(self, selection: Selection) -> list[PoolBlock]:
        """The selected hashed blocks, held or kept, parents before children."""
        now_s, unix_ms = self._clock.now_s(), self._clock.unix_ms()
        with self._lock:
            return [
                each.describe(references=self._references[each.block_id], now_s=now_s, unix_ms=unix_ms)
                for each in self._select(selection)
            ]

    def count_lookup(self, *, asked_blocks: int, hit_blocks: int) -> None:
        """Count one prompt's lookup. The caller says which takes are lookups: a preempted sequence that comes back,
        or a prompt that may not use the pool, is none."""
        assert 0 <= hit_blocks <= asked_blocks
        with self._lock:
            self.counters.lookups += 1
            self.counters.lookups_blocks += asked_blocks
            self.counters.hits_blocks += hit_blocks

    def count_late_hits(self, num_blocks: int) -> None:
        """Count what a prompt found after its lookup, of what it had asked for then."""
        with self._lock:
            self.counters.hits_blocks += num_blocks

    def check_integrity(self) -> None:
        """Assert that the books balance and, where there is no window, that residency is prefix-closed. O(blocks)."""
        with self._lock:
            held = {block_id for block_id, count in enumerate(self._references) if count > 0}
            assert all(count >= 0 for count in self._references)
            assert len(self._free) == len(set(self._free)), "a block is free twice"
            assert not held & set(self._free)
            assert not held & set(self._kept)
            assert not set(self._free) & set(self._kept)
            assert len(self._free) + len(self._kept) + len(held) == self.num_blocks
            assert set(self._kept) == {block_id for block_id in self._hashed if block_id not in held}
            assert self._tree.resident == {hashed.block_hash: hashed for hashed in self._hashed.values()}
            assert all(hashed.block_id == block_id for block_id, hashed in self._hashed.items())
            assert self._private <= held
            assert not self._private & set(self._hashed)
            assert self._window.bounded or not self._tree.names, "a block is resident without its parent"
            self._tree.check_integrity()

    def _usable_prefix(self, prompt: HashedPrompt, blocks_max: int) -> int:
        """Blocks of the longest prefix of which everything is resident that is read of it."""
        longest, unbroken = 0, 0
        for index in range(min(blocks_max, len(prompt.chain))):
            if self._resident(prompt, index) is not None:
                unbroken += 1
            elif self._window.bounded:
                unbroken = 0
            else:
                break
            if unbroken >= index + 1 - self._window.first_of_prefix(index + 1):
                longest = index + 1
        return longest

    def _block_ids(self, prompt: HashedPrompt, wanted: range) -> list[int]:
        """Where these blocks of the chain are, all of which are resident."""
        return [self._tree.resident[prompt.chain[index]].block_id for index in wanted]

    def _resident(self, prompt: HashedPrompt, index: int) -> int | None:
        """Where block `index` of the chain is, if it is that block in all that it stands for."""
        hashed = self._tree.resident.get(prompt.chain[index])
        if hashed is None:
            return None
        same_place = (hashed.namespace, hashed.parent_hash) == (prompt.namespace, prompt.parent_of(index))
        return hashed.block_id if same_place and hashed.token_ids == prompt.block_token_ids(index) else None

    def _describe_block(self, prompt: HashedPrompt, index: int, *, block_id: int) -> HashedBlock:
        return HashedBlock(
            block_id=block_id,
            namespace=prompt.namespace,
            block_hash=prompt.chain[index],
            parent_hash=prompt.parent_of(index),
            position=index,
            token_ids=prompt.block_token_ids(index),
            narrowed_from=prompt.narrowed_from,
            created_unix_ms=self._clock.unix_ms(),
            last_used_s=self._clock.now_s(),
        )

    def _name_ancestors(self, prompt: HashedPrompt, end: int) -> bool:
        """Have all of blocks [0, end) in the tree, those without bytes as names; False when there are too many names.

        Blocks kept for reuse go for them, the longest unused first: their names go with them.
        """
        while missing := self._tree.missing_names(prompt, end):
            if len(self._tree.names) + len(missing) <= self._names_max:
                break
            if not self._kept:
                return False
            self._evict_one()
        for index in missing:
            self._tree.add(self._describe_block(prompt, index, block_id=NOWHERE), is_resident=False)
        return True

    def _hold_shared(self, block_id: int, ttl_s: float) -> None:
        """One more reference to a hashed block, which was found by its hash."""
        self._references[block_id] += 1
        self._kept.pop(block_id, None)
        self._hashed[block_id].hold(self._clock.now_s(), ttl_s)
        self._hashed[block_id].hits += 1

    def _may_go(self, hashed: HashedBlock) -> bool:
        """Whether a block can go by itself: where there is no window, only after all that stands on it."""
        return self._window.bounded or not self._tree.has_children(hashed.block_hash)

    def _evict_one(self) -> None:
        """Free the longest unused block that may go. When none may, since each has a held descendant (a reader kept a
        tail longer than its head), the oldest goes and its descendants stop being findable, which frees the unheld
        ones."""
        for block_id in self._kept:
            if self._may_go(self._hashed[block_id]):
                self._forget(self._hashed[block_id])
                return
        oldest = self._hashed[next(iter(self._kept))]
        for hashed in reversed(self._tree.descendants([oldest.block_hash])):
            self._forget(hashed)

    def _forget(self, hashed: HashedBlock) -> None:
        """Take a block's hash away; free it unless somebody holds it."""
        assert self._may_go(hashed), "a parent must not go before its children"
        del self._hashed[hashed.block_id]
        self._tree.remove(hashed)
        self.counters.evicted_blocks += 1
        if hashed.block_id in self._kept:
            del self._kept[hashed.block_id]
            self._free.append(hashed.block_id)
        self._on_hashes(HashesChanged(removed=(hashed.block_hash,)))

    def _select(self, selection: Selection) -> list[HashedBlock]:
        """What the selection means, parents before children."""
        tops = self._tree.tops() if selection.roots is None else sorted(selection.roots)
        if selection.prefix_token_ids and selection.roots is None:
            tops = self._tree.last_blocks(selection.prefix_token_ids)
        now_s = self._clock.now_s()
        selected = []
        for hashed in self._tree.descendants(tops):
            namespaces = (hashed.namespace, *hashed.narrowed_from)
            if selection.namespace is not None and selection.namespace not in namespaces:
                continue
            held = self._references[hashed.block_id] > 0
            if selection.idle_for_s is not None and (held or now_s - hashed.last_used_s < selection.idle_for_s):
                continue
            before = selection.created_before_unix_ms
            if before is not None and hashed.created_unix_ms > before:
                continue
            selected.append(hashed)
        return selected

    def _leaving(self, selected: Sequence[HashedBlock]) -> list[HashedBlock]:
        """The selected blocks that can go, children before parents."""
        leaving: dict[BlockHash, HashedBlock] = {}
        for hashed in reversed(selected):
            unheld = self._references[hashed.block_id] == 0
            alone = all(child in leaving for child in self._tree.children(hashed.block_hash))
            if unheld and (alone or self._window.bounded):
                leaving[hashed.block_hash] = hashed
        return list(leaving.values())
