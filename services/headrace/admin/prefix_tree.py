"""Cached blocks as people think of them: prompts that share a beginning and then part.

A run is a stretch of blocks that nothing branches off, that the same holders have in the same tiers, and that
the same of them keep by a pin; runs form a tree.
Pure: it knows neither the network nor the terminal.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from headrace.client import BlockEntry
from headrace.core.block import Tier


@dataclass(frozen=True, slots=True)
class PrefixRun:
    """One stretch of a prompt. Bytes and hits count every copy; tokens count the stretch once."""

    depth: int  # how many runs lie before it
    model: str
    namespace: str
    first_hash: bytes
    last_hash: bytes
    first_position: int
    num_blocks: int
    num_tokens: int
    holders: tuple[str, ...]
    tiers: tuple[str, ...]  # of the copies, fastest first
    bytes: int
    hits: int
    idle_s: float  # of the copy used last
    age_s: float  # of the oldest copy
    tenant: str
    pins: tuple[tuple[str, int], ...]  # (holder, until unix ms) where its last block is kept by a pin; 0: no own end
    expires_unix_ms: int  # when the first of its copies goes for its time to live; 0: none has one
    text: str

    @property
    def block_tokens(self) -> int:
        """Tokens of each of its blocks."""
        return self.num_tokens // self.num_blocks


TEXT_CHARS_SHOWN = 60


def one_line(text: str) -> str:
    """The beginning of a text, as far as a table's cell shows it."""
    line = " ".join(text.split())
    return line if len(line) <= TEXT_CHARS_SHOWN else line[: TEXT_CHARS_SHOWN - 1] + "…"


Copies = list[BlockEntry]  # one block on each of its holders


def build_prefix_runs(blocks: Sequence[BlockEntry]) -> list[PrefixRun]:
    """Group blocks into runs, parents before children, prompts in the order of their first block's token ids."""
    copies: dict[bytes, Copies] = defaultdict(list)
    for block in blocks:
        copies[block.block_hash].append(block)
    children: dict[bytes, list[bytes]] = defaultdict(list)
    for block_hash, same in copies.items():
        children[same[0].parent_hash].append(block_hash)
    roots = [block_hash for block_hash, same in copies.items() if same[0].parent_hash not in copies]
    runs: list[PrefixRun] = []
    # A stack rather than recursion: a chain may branch at each of 8,192 blocks.
    waiting = [(root, 0) for root in sorted(roots, key=lambda h: copies[h][0].token_ids, reverse=True)]
    while waiting:
        first, depth = waiting.pop()
        stretch = list(_stretch(first, copies, children))
        runs.append(_describe([copies[block_hash] for block_hash in stretch], depth))
        waiting += [(child, depth + 1) for child in reversed(children[stretch[-1]])]
    return runs


def _stretch(first: bytes, copies: dict[bytes, Copies], children: dict[bytes, list[bytes]]) -> Iterator[bytes]:
    yield first
    while len(children[first]) == 1:
        (following,) = children[first]
        if _kept_by(copies[following]) != _kept_by(copies[first]):
            return
        yield following
        first = following


def _kept_by(same: Copies) -> tuple[tuple[str, str, bool], ...]:
    """Who has a block, in which tier, and whether a pin keeps it there: a run ends where that changes."""
    return tuple(sorted((block.holder, block.tier, block.protected_by_pin) for block in same))


def _describe(stretch: list[Copies], depth: int) -> PrefixRun:
    first, last = stretch[0][0], stretch[-1][0]
    every_copy = [block for same in stretch for block in same]
    return PrefixRun(
        depth=depth,
        model=first.model,
        namespace=first.namespace,
        first_hash=first.block_hash,
        last_hash=last.block_hash,
        first_position=first.position,
        num_blocks=len(stretch),
        num_tokens=sum(len(same[0].token_ids) for same in stretch),
        holders=tuple(sorted({block.holder for block in stretch[0]})),
        tiers=tuple(tier for tier in Tier if any(block.tier == tier for block in stretch[0])),
        bytes=sum(block.bytes for block in every_copy),
        hits=sum(block.hits for block in every_copy),
        idle_s=min(block.idle_s for block in every_copy),
        age_s=max(block.age_s for block in every_copy),
        tenant=last.tenant,
        pins=tuple(
            (block.holder, block.pinned_until_unix_ms)
            for block in sorted(stretch[-1], key=lambda block: block.holder)
            if block.protected_by_pin
        ),
        expires_unix_ms=min((block.expires_unix_ms for block in every_copy if block.expires_unix_ms), default=0),
        text="".join(same[0].text for same in stretch),
    )
