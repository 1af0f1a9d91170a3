"""The account of one worker's KV blocks: who holds which, which are free, which are kept for reuse.

This file owns block ids and nothing else; the bytes are `PagedKV`'s. Each block is in exactly one state:

    free ──take──► held (references > 0) ──last unref──► free           when it has no hash
                     ▲                   └─last unref──► kept for reuse when it has one
                     └──────take (by hash)──────────────┘   └─ evicted when `take` runs short, or by `evict` ─► free

A block with a hash is immutable, holds verified bytes and can be found by that hash. Residency is prefix-closed: the
parent of every hashed block is hashed too (or it is block 0 of its chain), so a chain is never found with a gap.
Blocks kept for reuse are evicted longest unused first, and a child before its parent. A block may have a time to live
(`ttl_s`, infinite for none) that runs from its last use; with several users it stays until nobody's time is left.

All methods are thread-safe (one lock, held for dictionary work only). Callbacks: `on_freed` runs after the lock is
released, in the thread that gave blocks back; `on_hashes` runs under the lock, so that a listener sees changes in
order, and must neither block nor call the pool.
"""

import math
import threading
from collections.abc import Callable, Sequence

from headrace.core.block import BlockHash, HashedPrompt, root_hash
from headrace.core.clock import Clock, SystemClock
from headrace.core.key_window import EVERYTHING, KeyWindow
from headrace.engine.pool_block import HashedBlock, PoolBlock
from headrace.engine.pool_values import Evicted, HashesChanged, PoolCounters, Selection, Short, Taken


class BlockPool:
    """Thread-safe account of `num_blocks` block ids, 0-based. Holds no tensors."""

    def __init__(
        self,
        num_blocks: int,
        *,
        clock: Clock | None = None,
        on_freed: Callable[[], None] = lambda: None,
        on_hashes: Callable[[HashesChanged], None] = lambda change: None,
    ) -> None:
        assert num_blocks > 0
        self.num_blocks = num_blocks
        self.counters = PoolCounters()
        self._clock = clock or SystemClock()
        self._on_freed = on_freed
        self._on_hashes = on_hashes
        self._lock = threading.Lock()
        self._free = list(reversed(range(num_blocks)))
        self._references = [0] * num_blocks
        self._hashed: dict[int, HashedBlock] = {}  # block id -> what it stands for
        self._hash_to_block: dict[BlockHash, int] = {}
        self._children: dict[BlockHash, set[BlockHash]] = {}  # hashed children of a hash; no empty sets
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
        self,
        num_blocks: int,
        *,
        prompt: HashedPrompt | None = None,
        shared_max: int = 0,
        ttl_s: float = math.inf,
        window: KeyWindow = EVERYTHING,
    ) -> Taken | Short:
        """Take `num_blocks` blocks, the leading ones by hash as far as `prompt`'s chain is resident.

        At most `shared_max` blocks come by hash; they are kept for at least `ttl_s` after this use. The rest are fresh:
        their bytes are undefined, and blocks kept for reuse are evicted for them, only as many as are missing. All or
        nothing. With a window, what it does not need of the resident prefix is not taken, and of the blocks behind
        only as many as a sequence may hold at once.
        """
        assert num_blocks >= 0
        with self._lock:
            shared = [] if prompt is None else self._resident_prefix(prompt, min(shared_max, num_blocks))
            num_shared = len(shared)
            first_block = window.first_of_prefix(num_shared)
            shared = shared[first_block:]
            needed = window.held_blocks(num_blocks - first_block) - len(shared)
            available = len(self._free) + len(self._kept) - sum(block_id in self._kept for block_id in shared)
            if needed > available:
                return Short(needed=needed, available=available)
            for block_id in shared:
                self._hold_shared(block_id, ttl_s)
            while len(self._free) < needed:
                self._evict_one()
            fresh = [self._free.pop() for _ in range(needed)]
            for block_id in fresh:
                assert self._references[block_id] == 0
                self._references[block_id] = 1
            return Taken(block_ids=(*shared, *fresh), num_shared=num_shared, first_block=first_block)

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
    ) -> None:
        """Make blocks of a sequence findable: block_ids[i] holds the verified KV of `prompt`'s block first_block + i.
        They are kept for at least `ttl_s` after this use.

        The caller holds a reference to each and never writes to them again. A hash that is resident already keeps the
        block it has; the caller's copy then stays its own and is freed with it. All ancestors are passed each time,
        since one that somebody else held may have been evicted since; those that a window has passed are not, and where
        the last of them is not findable, nothing behind it becomes so.
        """
        assert first_block + len(block_ids) <= len(prompt.chain)
        stored = []
        with self._lock:
            now_s = self._clock.now_s()
            for index, block_id in enumerate(block_ids, start=first_block):
                block_hash, parent_hash = prompt.chain[index], prompt.parent_of(index)
                assert self._references[block_id] > 0, f"block {block_id} is not held by anyone"
                resident = self._hash_to_block.get(block_hash)
                if resident == block_id:
                    self._hashed[resident].hold(now_s, ttl_s)
                elif resident is not None:
                    self._hashed[resident].use(now_s, ttl_s)
                if resident is not None or block_id in self._hashed:
                    continue
                if block_id in self._private:
                    break  # nor can what stands on it be found
                if index == first_block > 0 and parent_hash not in self._hash_to_block:
                    break
                assert index == 0 or parent_hash in self._hash_to_block
                self._hash_to_block[block_hash] = block_id
                self._children.setdefault(parent_hash, set()).add(block_hash)
                self._hashed[block_id] = HashedBlock(
                    block_id=block_id,
                    namespace=prompt.namespace,
                    block_hash=block_hash,
                    parent_hash=parent_hash,
                    position=index,
                    token_ids=prompt.block_token_ids(index),
                    narrowed_from=prompt.narrowed_from,
                    created_unix_ms=self._clock.unix_ms(),
                    last_used_s=now_s,
                )
                self._hashed[block_id].hold(now_s, ttl_s)
                stored.append(block_hash)
            if stored:
                self._on_hashes(HashesChanged(stored=tuple(stored)))

    def resident_blocks(self, prompt: HashedPrompt) -> int:
        """Leading blocks of `prompt` that are findable now. A hint: only `take` holds them."""
        with self._lock:
            return len(self._resident_prefix(prompt, len(prompt.chain)))

    def evict(self, selection: Selection, *, dry_run: bool) -> Evicted:
        """Free the selected blocks that nobody holds; a block stays while a descendant of it stays."""
        with self._lock:
            selected = self._select(selection)
            leaving = self._leaving(selected)
            kept = len(selected) - len(leaving)
            if selection.blocks_max is not None:  # stable: a parent is used with its child, so children stay first
                leaving.sort(key=lambda block_hash: self._hashed[self._hash_to_block[block_hash]].last_used_s)
                leaving = leaving[: selection.blocks_max]
            if not dry_run:
                for block_hash in leaving:
                    self._forget(self._hash_to_block[block_hash])
        if leaving and not dry_run:
            self._on_freed()
        return Evicted(num_blocks=len(leaving), num_kept=kept, block_hashes=tuple(leaving))

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
                if hashed.block_hash not in self._children:
                    self._forget(hashed.block_id)
        if over:
            self._on_freed()
        return next_s

    def forget(self, selection: Selection) -> int:
        """Have the selected blocks and all that stand on them found no more; returns how many. Those in use are freed
        with their last reference and not shared again; whoever computes the same anew shares that."""
        with self._lock:
            going = self._descendants(self._select(selection))
            for block_hash in reversed(going):
                block_id = self._hash_to_block[block_hash]
                self._forget(block_id)
                if self._references[block_id]:
                    self._private.add(block_id)
        if going:
            self._on_freed()
        return len(going)

    def describe(self, selection: Selection) -> list[PoolBlock]:
        """The selected hashed blocks, held or kept, parents before children."""
        now_s, unix_ms = self._clock.now_s(), self._clock.unix_ms()
        with self._lock:
            hashed = [self._hashed[self._hash_to_block[block_hash]] for block_hash in self._select(selection)]
            return [
                each.describe(references=self._references[each.block_id], now_s=now_s, unix_ms=unix_ms)
                for each in hashed
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
        """Assert that the books balance and that residency is prefix-closed. O(blocks)."""
        with self._lock:
            held = {block_id for block_id, count in enumerate(self._references) if count > 0}
            assert all(count >= 0 for count in self._references)
            assert len(self._free) == len(set(self._free)), "a block is free twice"
            assert not held & set(self._free)
            assert not held & set(self._kept)
            assert not set(self._free) & set(self._kept)
            assert len(self._free) + len(self._kept) + len(held) == self.num_blocks
            assert set(self._kept) == {block_id for block_id in self._hashed if block_id not in held}
            assert len(self._hash_to_block) == len(self._hashed)
            assert self._private <= held
            assert not self._private & set(self._hashed)
            children: dict[BlockHash, set[BlockHash]] = {}
            for block_id, hashed in self._hashed.items():
                assert self._hash_to_block[hashed.block_hash] == block_id
                at_root = hashed.parent_hash == root_hash(hashed.namespace)
                assert at_root or hashed.parent_hash in self._hash_to_block, "a block is resident without its parent"
                children.setdefault(hashed.parent_hash, set()).add(hashed.block_hash)
            assert children == self._children

    def _resident_prefix(self, prompt: HashedPrompt, blocks_max: int) -> list[int]:
        """Ids of the leading blocks whose hash, parent, namespace and token ids all match."""
        block_ids: list[int] = []
        for index in range(min(blocks_max, len(prompt.chain))):
            if (block_id := self._resident(prompt, index)) is None:
                break
            block_ids.append(block_id)
        return block_ids

    def _resident(self, prompt: HashedPrompt, index: int) -> int | None:
        """Where block `index` of the chain is, if it is that block in all that it stands for."""
        block_id = self._hash_to_block.get(prompt.chain[index])
        if block_id is None:
            return None
        hashed = self._hashed[block_id]
        same_place = (hashed.namespace, hashed.parent_hash) == (prompt.namespace, prompt.parent_of(index))
        return block_id if same_place and hashed.token_ids == prompt.block_token_ids(index) else None

    def _hold_shared(self, block_id: int, ttl_s: float) -> None:
        """One more reference to a hashed block, which was found by its hash."""
        self._references[block_id] += 1
        self._kept.pop(block_id, None)
        self._hashed[block_id].hold(self._clock.now_s(), ttl_s)
        self._hashed[block_id].hits += 1

    def _evict_one(self) -> None:
        """Free the longest unused block without children. When each has a held descendant (a reader kept a tail
        longer than its head), the oldest goes and its descendants stop being findable, which frees the unheld ones."""
        for block_id in self._kept:
            if self._hashed[block_id].block_hash not in self._children:
                self._forget(block_id)
                return
        oldest = next(iter(self._kept))
        for block_hash in reversed(self._descendants([self._hashed[oldest].block_hash])):
            self._forget(self._hash_to_block[block_hash])

    def _descendants(self, roots: Sequence[BlockHash]) -> list[BlockHash]:
        """The resident ones of `roots` and all below them, each once, parents before children."""
        found: dict[BlockHash, None] = {}
        stack = [block_hash for block_hash in roots if block_hash in self._hash_to_block]
        while stack:
            block_hash = stack.pop()
            found.pop(block_hash, None)  # reached before as a root: it moves behind its ancestors
            found[block_hash] = None
            stack.extend(self._children.get(block_hash, ()))
        return list(found)

    def _forget(self, block_id: int) -> None:
        """Take a block's hash away; free it unless somebody holds it. Its children must be gone."""
        hashed = self._hashed.pop(block_id)
        self.counters.evicted_blocks += 1
        assert hashed.block_hash not in self._children, "a parent must not go before its children"
        del self._hash_to_block[hashed.block_hash]
        siblings = self._children[hashed.parent_hash]
        siblings.remove(hashed.block_hash)
        if not siblings:
            del self._children[hashed.parent_hash]
        if block_id in self._kept:
            del self._kept[block_id]
            self._free.append(block_id)
        self._on_hashes(HashesChanged(removed=(hashed.block_hash,)))

    def _select(self, selection: Selection) -> list[BlockHash]:
        """Hashes the selection means, parents before children."""
        tops = [hashed.block_hash for hashed in self._hashed.values() if hashed.parent_hash not in self._hash_to_block]
        if selection.prefix_token_ids:
            tops = self._last_blocks(tops, selection.prefix_token_ids)
        candidates = self._descendants(tops if selection.roots is None else sorted(selection.roots))
        now_s = self._clock.now_s()
        selected = []
        for block_hash in candidates:
            hashed = self._hashed[self._hash_to_block[block_hash]]
            namespaces = (hashed.namespace, *hashed.narrowed_from)
            if selection.namespace is not None and selection.namespace not in namespaces:
                continue
            held = self._references[hashed.block_id] > 0
            if selection.idle_for_s is not None and (held or now_s - hashed.last_used_s < selection.idle_for_s):
                continue
            before = selection.created_before_unix_ms
            if before is not None and hashed.created_unix_ms > before:
                continue
            selected.append(block_hash)
        return selected

    def _last_blocks(self, tops: Sequence[BlockHash], token_ids: tuple[int, ...]) -> list[BlockHash]:
        """Where a prefix's last full block is, below each of `tops` (blocks 0) that it starts with."""
        found: list[BlockHash] = []
        level = list(tops)
        while level:
            block = self._hashed[self._hash_to_block[block_hash := level.pop()]]
            start, length = block.position * len(block.token_ids), len(block.token_ids)
            if token_ids[start : start + length] != block.token_ids:
                continue
            if start + 2 * length > len(token_ids):
                found.append(block_hash)
            else:
                level.extend(self._children.get(block_hash, ()))
        return found

    def _leaving(self, selected: Sequence[BlockHash]) -> list[BlockHash]:
        """The selected blocks that can go, children before parents."""
        leaving: dict[BlockHash, None] = {}
        for block_hash in reversed(selected):
            unheld = self._references[self._hash_to_block[block_hash]] == 0
            if unheld and all(child in leaving for child in self._children.get(block_hash, ())):
                leaving[block_hash] = None
        return list(leaving)
