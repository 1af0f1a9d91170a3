"""The blocks of a worker's pool that can be found by hash, as the tree that their parents make of them.

A block is *resident* when the pool has its bytes. Where a model reads a window only, blocks in the middle of a chain
may go while those behind them stay: they are kept as *names* then, without bytes, so that whatever stands on a prefix
can be found and evicted with it. So names are closed under prefixes always; bytes are where there is no window. A name
goes with the last resident block behind it.

It knows nothing of references or of free blocks. No locks: it is the pool's.
"""

from collections.abc import Iterable, Iterator

from headrace.core.block import BlockHash, HashedPrompt, root_hash
from headrace.engine.pool_block import HashedBlock


class HashTree:
    """Hash to what it stands for. `names`: those without bytes."""

    def __init__(self) -> None:
        self.resident: dict[BlockHash, HashedBlock] = {}
        self.names: dict[BlockHash, HashedBlock] = {}
        self._children: dict[BlockHash, set[BlockHash]] = {}  # of a hash; no empty sets

    def get(self, block_hash: BlockHash) -> HashedBlock | None:
        """Resident or a name."""
        return self.resident.get(block_hash) or self.names.get(block_hash)

    def has_children(self, block_hash: BlockHash) -> bool:
        """Whether something that was computed stands on it."""
        return block_hash in self._children

    def missing_names(self, prompt: HashedPrompt, end: int) -> range:
        """Which of blocks [0, end) of the prompt are not in the tree: the last ones, if any."""
        first = end
        while first > 0 and self.get(prompt.chain[first - 1]) is None:
            first -= 1
        return range(first, end)

    def add(self, hashed: HashedBlock, *, is_resident: bool) -> None:
        """One more; its parent is there. A name becomes resident so, with all that stands on it."""
        at_root = hashed.parent_hash == root_hash(hashed.namespace)
        assert at_root or self.get(hashed.parent_hash) is not None, "a block is added without its parent"
        assert hashed.block_hash not in self.resident
        self.names.pop(hashed.block_hash, None)
        (self.resident if is_resident else self.names)[hashed.block_hash] = hashed
        self._children.setdefault(hashed.parent_hash, set()).add(hashed.block_hash)

    def remove(self, hashed: HashedBlock) -> None:
        """Its bytes go; it stays as a name as long as something stands on it."""
        del self.resident[hashed.block_hash]
        self.names[hashed.block_hash] = hashed
        gone: HashedBlock | None = hashed
        while gone is not None and gone.block_hash not in self._children:
            del self.names[gone.block_hash]
            siblings = self._children[gone.parent_hash]
            siblings.remove(gone.block_hash)
            if not siblings:
                del self._children[gone.parent_hash]
            gone = self.names.get(gone.parent_hash)

    def tops(self) -> list[BlockHash]:
        """The first blocks of all chains."""
        blocks = (*self.resident.values(), *self.names.values())
        return [each.block_hash for each in blocks if self.get(each.parent_hash) is None]

    def descendants(self, roots: Iterable[BlockHash]) -> list[HashedBlock]:
        """The resident ones of `roots` and all below them, each once, parents before children."""
        found: dict[BlockHash, None] = {}
        stack = [block_hash for block_hash in roots if self.get(block_hash) is not None]
        while stack:
            block_hash = stack.pop()
            found.pop(block_hash, None)  # reached before as a root: it moves behind its ancestors
            found[block_hash] = None
            stack.extend(self.children(block_hash))
        return [self.resident[block_hash] for block_hash in found if block_hash in self.resident]

    def last_blocks(self, token_ids: tuple[int, ...]) -> list[BlockHash]:
        """Where a prefix's last full block is, in each chain that begins with it."""
        found: list[BlockHash] = []
        level = self.tops()
        while level:
            block = self.get(block_hash := level.pop())
            assert block is not None
            start, length = block.position * len(block.token_ids), len(block.token_ids)
            if token_ids[start : start + length] != block.token_ids:
                continue
            if start + 2 * length > len(token_ids):
                found.append(block_hash)
            else:
                level.extend(self.children(block_hash))
        return found

    def children(self, block_hash: BlockHash) -> Iterator[BlockHash]:
        """Of a block, resident or names."""
        return iter(self._children.get(block_hash, ()))

    def check_integrity(self) -> None:
        """Assert that every parent is there, that no name is left over, and that the tree is what the parents say."""
        assert not set(self.resident) & set(self.names)
        children: dict[BlockHash, set[BlockHash]] = {}
        for block_hash, hashed in (self.resident | self.names).items():
            assert block_hash == hashed.block_hash
            at_root = hashed.parent_hash == root_hash(hashed.namespace)
            assert at_root or self.get(hashed.parent_hash) is not None, "a block is there without its parent"
            children.setdefault(hashed.parent_hash, set()).add(block_hash)
        assert children == self._children
        assert all(block_hash in self._children for block_hash in self.names), "a name without anything behind it"
