"""One block of a worker's pool that can be found by hash: what it stands for, when it was used, how people see it.

Which blocks there are and who holds them is the pool's (`block_pool.py`).
"""

import math
from dataclasses import dataclass

from headrace.core.block import BlockHash, NamespaceId


@dataclass(frozen=True, slots=True)
class PoolBlock:
    """One hashed block as it is now."""

    namespace: NamespaceId
    block_hash: BlockHash
    parent_hash: BlockHash
    position: int
    token_ids: tuple[int, ...]
    narrowed_from: tuple[NamespaceId, ...]
    references: int
    hits: int  # times it was taken by hash
    age_s: float  # since it was hashed
    idle_s: float  # since it was last given back; 0 while it is held
    expires_unix_ms: int = 0  # if nobody uses it until then; 0: no time to live, or held
    has_near: bool = True  # of a block of two parts: whether the near one is there, too


@dataclass(slots=True)
class HashedBlock:
    """What a hashed block stands for. Compared on use, so that a hash collision is a miss."""

    block_id: int
    namespace: NamespaceId
    block_hash: BlockHash
    parent_hash: BlockHash
    position: int
    token_ids: tuple[int, ...]
    narrowed_from: tuple[NamespaceId, ...]
    created_unix_ms: int
    last_used_s: float
    expires_s: float = 0.0  # when the time of its last user is over; infinite: never
    holders_ttl_s: float = 0.0  # the longest time that those who hold it now want it kept after they are done
    hits: int = 0

    def use(self, now_s: float, ttl_s: float) -> None:
        """Somebody uses the block, who wants it kept for `ttl_s` afterwards; nobody's longer time is cut by that."""
        self.last_used_s = now_s
        self.expires_s = max(self.expires_s, now_s + ttl_s)

    def hold(self, now_s: float, ttl_s: float) -> None:
        """As `use`, by somebody who goes on using it until it is given back."""
        self.use(now_s, ttl_s)
        self.holders_ttl_s = max(self.holders_ttl_s, ttl_s)

    def give_back(self, now_s: float) -> None:
        """Nobody holds it any more."""
        self.use(now_s, self.holders_ttl_s)
        self.holders_ttl_s = 0.0

    def describe(self, *, references: int, now_s: float, unix_ms: int) -> PoolBlock:
        """As it is now, in one worker's pool."""
        expires = 0 if references or self.expires_s == math.inf else unix_ms + round((self.expires_s - now_s) * 1_000)
        return PoolBlock(
            namespace=self.namespace,
            block_hash=self.block_hash,
            parent_hash=self.parent_hash,
            position=self.position,
            token_ids=self.token_ids,
            narrowed_from=self.narrowed_from,
            references=references,
            hits=self.hits,
            age_s=max(0.0, (unix_ms - self.created_unix_ms) / 1_000),
            idle_s=0.0 if references else max(0.0, now_s - self.last_used_s),
            expires_unix_ms=expires,
        )
