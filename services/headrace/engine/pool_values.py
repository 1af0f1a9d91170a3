"""What a worker's block pool is asked for and what it answers, as values. The pool itself is `block_pool.py`."""

from dataclasses import dataclass, field

from headrace.core.block import BlockHash, Chain, NamespaceId


@dataclass(frozen=True, slots=True)
class Taken:
    """Blocks the caller now holds one reference to each: a block table from block `first_block` of the prompt on.

    The first `num_shared` blocks of the prompt hold its KV already, as far as they are needed: the table begins there.
    Of a pool of two parts (`layered_pool.py`), blocks [first_near, end_near) of the prompt have near parts.
    """

    block_ids: tuple[int, ...]
    num_shared: int
    first_block: int = 0
    first_near: int = 0
    end_near: int = 0

    @property
    def first_whole(self) -> int:
        """Of the shared blocks, those from here on are there with all their parts."""
        return max(self.first_block, self.first_near)


@dataclass(frozen=True, slots=True)
class Found:
    """What a take is about to take: blocks found by hash, from block `first_block` on, and so many fresh ones."""

    shared: list[int]
    num_shared: int
    first_block: int
    num_fresh: int


@dataclass(frozen=True, slots=True)
class Short:
    """Nothing was taken: `needed` blocks were wanted beyond those found by hash, `available` could be had."""

    needed: int
    available: int


@dataclass(frozen=True, slots=True)
class HashesChanged:
    """What became findable or stopped being so; exactly one of the two is not empty."""

    stored: Chain = ()
    removed: Chain = ()


@dataclass(frozen=True, slots=True)
class Selection:
    """Which hashed blocks an eviction means: `roots` and below (None: all), unused for `idle_for_s` (None: any)."""

    namespace: NamespaceId | None = None  # with those narrowed from it
    roots: frozenset[BlockHash] | None = None
    prefix_token_ids: tuple[int, ...] = ()  # the last full block of this prefix is the root, in every namespace
    idle_for_s: float | None = None
    created_before_unix_ms: int | None = None
    blocks_max: int | None = None  # evict at most so many, longest unused first


@dataclass(frozen=True, slots=True)
class Evicted:
    """What an eviction freed, and how many blocks were selected but kept (held, or parents of a block that stays)."""

    num_blocks: int
    num_kept: int
    block_hashes: Chain = field(default=(), compare=False)  # the freed ones
    num_near: int = 0  # of blocks of two parts: near ones that were freed


@dataclass(slots=True)
class PoolCounters:
    """What happened since the pool was made; only ever rising, in blocks but for `lookups`."""

    lookups: int = 0
    lookups_blocks: int = 0  # asked for by hash, by new prompts that may use the pool
    hits_blocks: int = 0
    evicted_blocks: int = 0  # hashed blocks that stopped being findable
