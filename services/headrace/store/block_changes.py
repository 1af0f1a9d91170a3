"""The seam between a store node's books and whoever follows them: what became readable, and what is about to go."""

from typing import Protocol

from headrace.core.block import BlockHash, BlockHeader, NamespaceId


class BlockChanges(Protocol):
    """Called in the order of events, parents added before children, children removed before parents.

    Must neither block nor raise: `removed` is called before the block's memory may be given to another.
    """

    def added(self, header: BlockHeader) -> None: ...

    def removed(self, namespace: NamespaceId, block_hash: BlockHash) -> None: ...


class IgnoreChanges:
    """For a node that no index follows (tests, simulation)."""

    def added(self, header: BlockHeader) -> None:
        """Nobody listens."""

    def removed(self, namespace: NamespaceId, block_hash: BlockHash) -> None:
        """Nobody listens."""


class TellEach:
    """Hands every change to several followers, in the order in which they are given."""

    def __init__(self, *followers: BlockChanges) -> None:
        self._followers = followers

    def added(self, header: BlockHeader) -> None:
        """As `BlockChanges.added`."""
        for follower in self._followers:
            follower.added(header)

    def removed(self, namespace: NamespaceId, block_hash: BlockHash) -> None:
        """As `BlockChanges.removed`."""
        for follower in self._followers:
            follower.removed(namespace, block_hash)
