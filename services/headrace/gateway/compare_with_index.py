"""Does the index say of each node what the node holds? Both ways: blocks that it does not name, and entries for blocks
that are not there.

The index is asked about whole chains: those that any node holds, as far as their listings go, and those of requests
that this gateway served lately, since entries for what no node has any more are not seen otherwise. Where the index and
a listing differ, the node itself is asked after a pause: registration runs behind on a busy system.
"""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.core.block import BlockHash, Chain, HolderId, NamespaceId
from headrace.core.limits import DOCTOR_CHAINS_MAX, DOCTOR_DIFFERENCES_MAX, DOCTOR_RECHECK_MS
from headrace.core.members import StoreNodeRecord
from headrace.core.ports import BlockIndex
from headrace.gateway.fleet import TIMEOUT_S, Fleet
from headrace.wire.v1 import admin_pb2

BlockName = tuple[NamespaceId, BlockHash]


@dataclass(frozen=True, slots=True)
class KnownChain:
    """A chain that somebody holds or asked for."""

    namespace: NamespaceId
    chain: Chain


@dataclass(slots=True)
class IndexGaps:
    """What the index says wrongly of one node, in blocks, among the chains that were looked at."""

    chains: int = 0
    missing_blocks: int = 0  # held, and not in the index
    stale_blocks: int = 0  # in the index, and not held


async def compare_with_index(
    fleet: Fleet, listings: Mapping[StoreNodeRecord, Sequence[Any]], *, asked_for: Sequence[KnownChain]
) -> dict[HolderId, IndexGaps]:
    """The gaps of each node. Looks at DOCTOR_CHAINS_MAX chains of those held, spread evenly, and as many of the others.

    listings: entries of `ListBlocks` of each node that answers.  Raises IndexUnavailable, grpc.aio.AioRpcError.
    """
    index = fleet.service.index
    held = {node: {_name_of(block) for block in blocks} for node, blocks in listings.items()}
    found = [chain for blocks in listings.values() for chain in _leaf_chains(blocks)]
    chains = list(dict.fromkeys([*_spread(found), *_spread(asked_for)]))
    gaps = {node.holder_id: IndexGaps(chains=len(chains)) for node in listings}
    doubtful = []
    for known in chains:
        match = await index.longest_prefix(known.namespace, known.chain)
        doubtful += [(node, known) for node in listings if match.of(node.holder_id) != _held_run(known, held[node])]
    if doubtful:
        await asyncio.sleep(DOCTOR_RECHECK_MS / 1_000)
    for node, known in _bounded(doubtful):
        difference = await _difference(fleet, index, node, known)
        gaps[node.holder_id].missing_blocks += max(0, difference)
        gaps[node.holder_id].stale_blocks += max(0, -difference)
    return gaps


async def _difference(fleet: Fleet, index: BlockIndex, node: StoreNodeRecord, known: KnownChain) -> int:
    """Leading blocks that the node has, by its own word now, less those that the index says."""
    asked = admin_pb2.ExplainRequest(namespace=known.namespace, chain=known.chain)
    explained = await fleet.node_stub(node).Explain(asked, timeout=TIMEOUT_S)
    match = await index.longest_prefix(known.namespace, known.chain)
    return int(explained.held_blocks) - match.of(node.holder_id)


def _leaf_chains(blocks: Sequence[Any]) -> list[KnownChain]:
    """Chains of the listed blocks that no other one stands on, as far as the listing has them from the first block."""
    parents = {_name_of(block): BlockHash(block.parent_hash) if block.position else None for block in blocks}
    stood_on = {(namespace, parent) for (namespace, _), parent in parents.items() if parent is not None}
    chains = []
    for name in parents:
        if name in stood_on:
            continue
        namespace, block_hash = name
        chain: list[BlockHash] = []
        while (namespace, block_hash) in parents:
            chain.append(block_hash)
            parent = parents[(namespace, block_hash)]
            if parent is None:
                chains.append(KnownChain(namespace, tuple(reversed(chain))))
                break
            block_hash = parent
    return chains


def _spread(chains: Sequence[KnownChain]) -> Sequence[KnownChain]:
    """At most DOCTOR_CHAINS_MAX of them, from everywhere."""
    return chains[:: max(1, -(-len(chains) // DOCTOR_CHAINS_MAX))]


def _bounded(doubtful: Sequence[tuple[StoreNodeRecord, KnownChain]]) -> list[tuple[StoreNodeRecord, KnownChain]]:
    """At most DOCTOR_DIFFERENCES_MAX of each node: one that is wrong about so many need not be asked more."""
    by_node: dict[str, list[tuple[StoreNodeRecord, KnownChain]]] = {}
    for node, known in doubtful:
        by_node.setdefault(node.node_id, []).append((node, known))
    return [pair for pairs in by_node.values() for pair in pairs[:DOCTOR_DIFFERENCES_MAX]]


def _held_run(known: KnownChain, held: set[BlockName]) -> int:
    """Leading blocks of a chain that a listing has."""
    for position, block_hash in enumerate(known.chain):
        if (known.namespace, block_hash) not in held:
            return position
    return len(known.chain)


def _name_of(block: Any) -> BlockName:
    return NamespaceId(block.namespace), BlockHash(block.block_hash)
