"""Small makers that store tests import: a clock moved by hand, headers of a tiny layout, chains, payloads, a node."""

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.blocks.claims import SlotReserved
from headrace.blocks.host_arena import HostArena
from headrace.core.block import (
    BlockHash,
    BlockHeader,
    HashAlgorithm,
    HashedPrompt,
    KvLayout,
    NamespaceId,
    hash_prompt,
    payload_digest,
)
from headrace.core.retention import KEEP, Retention
from headrace.store.block_changes import BlockChanges, TellEach
from headrace.store.node_rules import NodeRules
from headrace.store.store_node import StoreNode

NAMESPACE = NamespaceId("0123456789abcdef" * 2)
BLOCK_TOKENS = 4
LAYOUT = KvLayout(dtype="float32", num_layers=1, num_kv_heads=2, head_dim=32, block_tokens=BLOCK_TOKENS)


@dataclass
class HandClock:
    """Time that stands still until a test moves it."""

    seconds: float = 1_000.0

    def now_s(self) -> float:
        return self.seconds

    def unix_ms(self) -> int:
        return int(self.seconds * 1_000)


class ChangeLog:
    """Every change in order, and the set that an index following them would hold."""

    def __init__(self) -> None:
        self.changes: list[tuple[str, BlockHash]] = []
        self.registered: set[tuple[NamespaceId, BlockHash]] = set()

    def added(self, header: BlockHeader) -> None:
        key = (header.namespace, header.block_hash)
        assert key not in self.registered
        self.registered.add(key)
        self.changes.append(("added", header.block_hash))

    def removed(self, namespace: NamespaceId, block_hash: BlockHash) -> None:
        self.registered.remove((namespace, block_hash))
        self.changes.append(("removed", block_hash))


@dataclass
class StoreKit:
    """One node in private memory with everything a test wants to look at."""

    clock: HandClock
    arena: HostArena
    changes: ChangeLog
    node: StoreNode

    def store(
        self,
        prompt: HashedPrompt,
        blocks: Sequence[int],
        layout: KvLayout = LAYOUT,
        *,
        retention: Retention = KEEP,
    ) -> list[BlockHeader]:
        """Reserve, fill and commit blocks of a prompt; those that get no slot are left out."""
        stored = []
        headers = [make_header(prompt, i, layout) for i in blocks]
        for outcome in self.node.reserve(headers, retention=retention):
            if isinstance(outcome, SlotReserved):
                fill(outcome)
                self.node.commit(outcome.reservation_id, payload_digest(outcome.buffer))
                stored.append(outcome.header)
        return stored

    def held(self, prompt: HashedPrompt) -> int:
        """Leading blocks of a prompt that could be read now."""
        return self.node.lookup(prompt.namespace, prompt.chain)


def make_prompt(token: int, num_blocks: int, *, algorithm: HashAlgorithm = HashAlgorithm.XXH3_128) -> HashedPrompt:
    """A prompt of `num_blocks` full blocks; different `token`, different chain."""
    return _hash([token * 1_000 + i for i in range(num_blocks * BLOCK_TOKENS)], algorithm)


def make_branch(head: int, tail: int, *, head_blocks: int, tail_blocks: int) -> HashedPrompt:
    """A prompt whose first blocks are shared by all branches with the same `head`."""
    tokens = [head * 1_000 + i for i in range(head_blocks * BLOCK_TOKENS)]
    return _hash([*tokens, *(tail * 100_000 + i for i in range(tail_blocks * BLOCK_TOKENS))], HashAlgorithm.XXH3_128)


def _hash(tokens: Sequence[int], algorithm: HashAlgorithm) -> HashedPrompt:
    return hash_prompt(NAMESPACE, tokens, block_tokens=BLOCK_TOKENS, algorithm=algorithm)


def make_header(prompt: HashedPrompt, position: int, layout: KvLayout = LAYOUT) -> BlockHeader:
    return BlockHeader(
        namespace=prompt.namespace,
        block_hash=prompt.chain[position],
        parent_hash=prompt.parent_of(position),
        position=position,
        token_ids=prompt.block_token_ids(position),
        layout=layout,
        payload_bytes=layout.block_bytes,
        payload_xxh3=0,
        producer="worker-1",
        created_unix_ms=1_000_000,
        narrowed_from=prompt.narrowed_from,
    )


def payload_of(header: BlockHeader) -> bytes:
    """Bytes that depend on the block, so that a payload in the wrong place is seen."""
    return (header.block_hash * (header.payload_bytes // len(header.block_hash) + 1))[: header.payload_bytes]


def fill(reserved: SlotReserved) -> None:
    reserved.buffer[:] = payload_of(reserved.header)


def make_kit(
    *,
    blocks: int = 8,
    lease_ttl_ms: int = 30_000,
    reservation_ttl_ms: int = 10_000,
    follower: BlockChanges | None = None,
    node_id: str = "n1",
) -> StoreKit:
    """A node whose arena holds exactly `blocks` blocks of LAYOUT (one unit each)."""
    clock, changes = HandClock(), ChangeLog()
    record_units = -(-blocks * 32 // 4_096)
    arena = HostArena.in_memory((1 + record_units + blocks) * 4_096)
    assert arena.num_units == blocks
    node = StoreNode(
        arena,
        node_id=node_id,
        clock=clock,
        changes=changes if follower is None else TellEach(changes, follower),
        rules=NodeRules(lease_ttl_ms=lease_ttl_ms, reservation_ttl_ms=reservation_ttl_ms),
    )
    return StoreKit(clock, arena, changes, node)
