"""The seam between a store node's books and whoever follows them: what became readable, and what is about to go."""

from typing import Protocol

from headrace.core.block import BlockHash, NamespaceId


class BlockChanges(Protocol):
    """Called in the order of events, parents added before children, children removed before parents.

    Must neither block nor raise: `removed` is called before the block's memory may be given to another.
    """

    def added(self, namespace: NamespaceId, block_hash: BlockHash) -> None: ...

    def removed(self, namespace: NamespaceId, block_hash: BlockHash) -> None: ...


class IgnoreChanges:
    """For a node that no index follows (tests, simulation)."""

    def added(self, namespace: NamespaceId, block_hash: BlockHash) -> None:
        """Nobody listens."""

    def removed(self, namespace: NamespaceId, block_hash: BlockHash) -> None:
        """Nobody listens."""
