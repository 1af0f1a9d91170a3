"""What an eviction loses: distinct tokens of which no copy is left anywhere, whose blocks, and how many prompts."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from headrace.core.generation import EvictReport
from headrace.gateway.name_accounts import account_of
from headrace.wire.v1 import admin_pb2


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


@dataclass(frozen=True, slots=True)
class AccountHit:
    """What of one account's would go: distinct blocks, and prompts that would be cut."""

    account: str  # "" where it is not known
    blocks: int
    prefixes: int


@dataclass(frozen=True, slots=True)
class EvictionHits:
    """Whose blocks would go. `at_least`: not every block that goes is named or was listed."""

    accounts: tuple[AccountHit, ...]
    at_least: bool

    @property
    def prefixes(self) -> int:
        """Over all accounts; a prompt belongs to one."""
        return sum(hit.prefixes for hit in self.accounts)


def count_hits(
    reports: Sequence[EvictReport],
    *,
    listed: Iterable[admin_pb2.BlockEntry],
    namespace_to_account: Mapping[str, str],
) -> EvictionHits:
    """Count by account what a dry run's reports name, each block once however many copies go.

    A prompt that is cut counts by its last block that goes: one on which no other block stands that goes.
    listed: blocks as holders listed them, in any order, copies and strangers among them.
    """
    going = {block_hash for report in reports for block_hash in report.block_hashes}
    found = {block.block_hash: block for block in listed if block.block_hash in going}
    inner = {block.parent_hash for block in found.values()}
    blocks, prefixes = Counter[str](), Counter[str]()
    for block_hash, block in found.items():
        account = account_of(block, namespace_to_account)
        blocks[account] += 1
        prefixes[account] += block_hash not in inner
    unnamed = any(report.blocks > len(report.block_hashes) for report in reports)
    return EvictionHits(
        accounts=tuple(AccountHit(account, blocks[account], prefixes[account]) for account in sorted(blocks)),
        at_least=unnamed or len(found) < len(going),
    )
