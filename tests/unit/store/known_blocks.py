"""The blocks that the store machine plays with: a few chains of three accounts, small enough to know by heart.

Everything that the store derives from a block (header bytes, payload, size) is computed here once, so that a step of
the machine costs comparisons only, and so that a block found in memory or on disk is known by its bytes.
"""

from dataclasses import dataclass, replace

from store_kit import payload_of

from headrace.blocks.block_codec import encode_header
from headrace.blocks.host_arena import UNIT_BYTES, units_for
from headrace.core.block import (
    BlockHash,
    BlockHeader,
    Chain,
    HashAlgorithm,
    KvLayout,
    NamespaceId,
    hash_prompt,
    payload_digest,
)

Key = tuple[NamespaceId, BlockHash]

BLOCK_TOKENS = 4
BASE, BLUE, RED, SALTED = (NamespaceId(digit * 32) for digit in "0123")
# A block belongs to the account that has one of its namespaces: the salted one is blue's too.
ACCOUNT_TO_NAMESPACE = {"": BASE, "blue": BLUE, "red": RED}
NARROWED_FROM = {BASE: (), BLUE: (BASE,), RED: (BASE,), SALTED: (BASE, BLUE)}

ONE_UNIT = KvLayout(dtype="float32", num_layers=1, num_kv_heads=1, head_dim=96, block_tokens=BLOCK_TOKENS)
TWO_UNITS = replace(ONE_UNIT, head_dim=160)


@dataclass(frozen=True, slots=True)
class KnownBlock:
    """One block and all that follows from it."""

    header: BlockHeader  # as a writer offers it
    payload: bytes
    header_bytes: bytes  # as the store keeps it once committed
    units: int
    account: str
    parent: Key | None

    @property
    def key(self) -> Key:
        """Its name in a node."""
        return (self.header.namespace, self.header.block_hash)

    @property
    def slot_bytes(self) -> int:
        """What it takes of the arena."""
        return self.units * UNIT_BYTES


@dataclass(frozen=True, slots=True)
class KnownChain:
    """One prompt's blocks in order."""

    namespace: NamespaceId
    hashes: Chain
    blocks: tuple[KnownBlock, ...]
    token_ids: tuple[int, ...]


def _chain(namespace: NamespaceId, *parts: tuple[int, int], layout: KvLayout = ONE_UNIT) -> KnownChain:
    """A chain of parts (first token, blocks): equal leading parts are shared blocks."""
    tokens = [first + i for first, blocks in parts for i in range(blocks * BLOCK_TOKENS)]
    prompt = hash_prompt(namespace, tokens, block_tokens=BLOCK_TOKENS, algorithm=HashAlgorithm.XXH3_128)
    blocks = []
    for position, block_hash in enumerate(prompt.chain):
        header = BlockHeader(
            namespace=namespace,
            block_hash=block_hash,
            parent_hash=prompt.parent_of(position),
            position=position,
            token_ids=prompt.block_token_ids(position),
            layout=layout,
            payload_bytes=layout.block_bytes,
            payload_xxh3=0,
            producer="worker-1",
            created_unix_ms=1_000_000 + 10_000 * (tokens[position * BLOCK_TOKENS] % 7),
            narrowed_from=NARROWED_FROM[namespace],
        )
        payload = payload_of(header)
        header_bytes = encode_header(replace(header, payload_xxh3=payload_digest(payload)))
        blocks.append(
            KnownBlock(
                header=header,
                payload=payload,
                header_bytes=header_bytes,
                units=units_for(len(payload), len(header_bytes)),
                account=next(a for a, n in reversed(ACCOUNT_TO_NAMESPACE.items()) if header.is_of(n)),
                parent=(namespace, prompt.chain[position - 1]) if position else None,
            )
        )
    return KnownChain(namespace, prompt.chain, tuple(blocks), tuple(tokens))


CHAINS = (
    _chain(BLUE, (1_000, 2), (3_000, 2)),
    _chain(BLUE, (1_000, 2), (4_000, 3)),
    _chain(SALTED, (1_000, 2), (3_000, 1)),
    _chain(RED, (2_000, 1), (3_000, 3)),
    _chain(RED, (2_000, 1), (4_000, 2)),
    _chain(BASE, (5_000, 3), layout=TWO_UNITS),
    _chain(BASE, (6_000, 4)),
)
BLOCKS: dict[Key, KnownBlock] = {block.key: block for chain in CHAINS for block in chain.blocks}
BY_HEADER_BYTES = {block.header_bytes: key for key, block in BLOCKS.items()}
assert len(BY_HEADER_BYTES) == len(BLOCKS)
assert {block.units for block in BLOCKS.values()} == {1, 2}
