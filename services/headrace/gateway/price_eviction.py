"""What an eviction loses: distinct tokens of which no copy is left anywhere, and the seconds to compute them again."""

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.core.generation import EvictReport


@dataclass(frozen=True, slots=True)
class EvictionPrice:
    """`at_most`: not every block could be compared, so copies elsewhere may save some of it."""

    lost_tokens: int
    at_most: bool


def price_eviction(
    reports: Sequence[EvictReport], *, copies: Iterable[bytes], copies_are_all: bool, dry_run: bool
) -> EvictionPrice:
    """Count each evicted block once, and not at all when a copy stays.

    copies: hash of every listed copy on every holder: before a dry run's eviction, after a real one.
    """
    going = Counter(block_hash for report in reports for block_hash in report.block_hashes)
    left = Counter(copies)
    if dry_run:
        left -= going
    lost_tokens, unnamed_blocks, seen = 0, 0, set[bytes]()
    for report in reports:
        if not report.blocks:
            continue
        block_tokens = report.tokens / report.blocks
        lost = {block_hash for block_hash in report.block_hashes if left[block_hash] <= 0} - seen
        seen |= lost
        unnamed = report.blocks - len(report.block_hashes)
        unnamed_blocks += unnamed
        lost_tokens += round((len(lost) + unnamed) * block_tokens)
    return EvictionPrice(lost_tokens=lost_tokens, at_most=bool(unnamed_blocks) or not copies_are_all)
