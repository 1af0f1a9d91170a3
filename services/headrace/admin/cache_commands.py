"""`headrace cache ...`: look into the cache and evict from it, through the gateway, over every holder."""

from collections.abc import Sequence
from dataclasses import fields, replace

import click

from headrace.admin.connection import address_option, connect
from headrace.admin.prefix_tree import PrefixRun, build_prefix_runs
from headrace.admin.selection import Size, selector_options
from headrace.admin.terminal import (
    EXIT_INCOMPLETE,
    human_bytes,
    human_seconds,
    json_option,
    print_json,
    print_table,
    say,
)
from headrace.client import BlockListing, Eviction, EvictReport, HolderStat, Selector

TEXT_CHARS_SHOWN = 60


@click.group()
def cache() -> None:
    """Look into the prefix cache and evict from it."""


@cache.command("ls")
@selector_options
@click.option("--blocks", is_flag=True, help="One row for each block on each holder, instead of runs of blocks.")
@click.option("--limit", type=click.IntRange(min=0), default=0, help="Blocks to read at most. 0: the server's bound.")
@address_option
@json_option
def list_cache(*, selector: Selector, blocks: bool, limit: int, address: str, as_json: bool) -> None:
    """List cached prefixes: prompts that share a beginning form a tree.

    A row is a run of blocks that nothing branches off; its children are indented below it.
    """
    with connect(address) as client:
        listing = client.list_blocks(selector, with_text=True, limit=limit)
    runs = build_prefix_runs(listing.blocks)
    if as_json:
        print_json(listing if blocks else {"prefixes": runs, **_listing_totals(listing)})
    else:
        if blocks:
            _print_blocks(listing)
        else:
            _print_runs(runs)
        shown = len(listing.blocks)
        of = "" if shown == listing.total_blocks else f" of {listing.total_blocks:,}"
        say(f"{shown:,}{of} blocks, {human_bytes(sum(block.bytes for block in listing.blocks))}")
    _exit_if_incomplete(listing.errors)


def _listing_totals(listing: BlockListing) -> dict[str, object]:
    return {
        "blocks": len(listing.blocks),
        "total_blocks": listing.total_blocks,
        "bytes": sum(block.bytes for block in listing.blocks),
        "errors": [{"holder": holder, "error": error} for holder, error in listing.errors],
    }


def _print_runs(runs: Sequence[PrefixRun]) -> None:
    rows = [
        [
            "  " * run.depth + _one_line(run.text),
            f"{run.first_position * _block_tokens(run):,}",
            f"{run.num_tokens:,}",
            f"{run.num_blocks:,}",
            human_bytes(run.bytes),
            f"{run.hits:,}",
            human_seconds(run.idle_s),
            ", ".join(run.holders),
            run.model,
            run.last_hash.hex(),
        ]
        for run in runs
    ]
    columns = ["prefix ", "from token", "tokens", "blocks", "size", "hits", "idle", "holders ", "model ", "last block "]
    print_table(columns, rows)


def _block_tokens(run: PrefixRun) -> int:
    return run.num_tokens // run.num_blocks


def _print_blocks(listing: BlockListing) -> None:
    rows = [
        [
            block.block_hash.hex(),
            f"{block.position:,}",
            f"{len(block.token_ids):,}",
            human_bytes(block.bytes),
            block.holder,
            block.tier,
            f"{block.hits:,}",
            human_seconds(block.age_s),
            human_seconds(block.idle_s),
            f"{block.leases:,}",
            _one_line(block.text),
        ]
        for block in listing.blocks
    ]
    columns = ["block ", "position", "tokens", "size", "holder ", "tier ", "hits", "age", "idle", "leases", "text "]
    print_table(columns, rows)


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= TEXT_CHARS_SHOWN else line[: TEXT_CHARS_SHOWN - 1] + "…"


@cache.command("stat")
@address_option
@json_option
def stat_cache(*, address: str, as_json: bool) -> None:
    """Show every holder's books: room, blocks, leases, lookups and hits in tokens."""
    with connect(address) as client:
        stats = client.stat()
    if as_json:
        print_json({"holders": stats})
    else:
        columns = [
            "holder ",
            "tier ",
            "used",
            "of",
            "blocks",
            "free",
            "reserved",
            "leased",
            "looked up",
            "hit",
            "evicted",
        ]
        print_table([*columns, "error "], [_stat_row(stat) for stat in stats])
    _exit_if_incomplete([(stat.holder, stat.error) for stat in stats if stat.error])


def _stat_row(stat: HolderStat) -> list[str]:
    rate = f"{stat.hits_tokens / stat.lookups_tokens:.0%}" if stat.lookups_tokens else "-"
    return [
        stat.holder,
        stat.tier,
        human_bytes(stat.committed_blocks * stat.block_bytes),
        human_bytes(stat.total_blocks * stat.block_bytes),
        f"{stat.committed_blocks:,}",
        f"{stat.free_blocks:,}",
        f"{stat.reserved_blocks:,}",
        f"{stat.leased_blocks:,}",
        f"{stat.lookups_tokens:,} tokens",
        f"{stat.hits_tokens:,} tokens ({rate})",
        f"{stat.evicted_blocks:,}",
        stat.error,
    ]


@cache.command("evict")
@selector_options
@click.option("--all", "everything", is_flag=True, help="Everything. Needed when nothing narrows the eviction.")
@click.option(
    "--free",
    "free_bytes",
    type=Size(),
    help="As much as is needed to free this much in each tier of each holder: 2GiB.",
)
@click.option(
    "--tokens-per-second",
    type=click.FloatRange(min=0, min_open=True),
    default=None,
    help="How fast prompts are computed, for the seconds lost. Default: as the gateway measured it.",
)
@click.option("--yes", is_flag=True, help="Do it. Without this, only say what would go.")
@address_option
@json_option
def evict_cache(
    *,
    selector: Selector,
    everything: bool,
    free_bytes: int | None,
    tokens_per_second: float | None,
    yes: bool,
    address: str,
    as_json: bool,
) -> None:
    """Evict blocks, or (without --yes) say what would go. Options together mean their intersection.

    --free takes the least recently used first. The seconds lost count each token once, and only where no copy stays.

    Blocks under a lease are skipped and counted. Exit code 9 says that a holder did not answer: what it holds is
    unknown, and with --yes it was not evicted there.

    \b
    Examples:
      headrace cache evict --prefix "You are a helpful" --model qwen
      headrace cache evict --idle 2h --node host-3 --yes
      headrace cache evict --free 2GiB --tier host --yes
    """
    selector = replace(selector, free_bytes=free_bytes)
    if selector.selects_everything and not everything:
        raise click.UsageError("say what to evict (--prefix, --hash, --model, --node, --idle, --free, ...) or --all")
    if everything and not selector.selects_everything:
        raise click.UsageError("--all and a narrower selection contradict each other; leave one out")
    with connect(address) as client:
        eviction = client.price_eviction(selector, dry_run=not yes, tokens_per_s=tokens_per_second or 0.0)
    reports = eviction.reports
    if as_json:
        print_json({"dry_run": not yes, **_eviction_json(eviction), "total": _evict_total(reports)})
    else:
        _print_evict_reports(reports, done=yes)
        say(_describe_loss(eviction))
    _exit_if_incomplete([(report.holder, report.error) for report in reports if report.error])


def _eviction_json(eviction: Eviction) -> dict[str, object]:
    counts = [field.name for field in fields(EvictReport) if field.name != "block_hashes"]
    return {
        "reports": [{name: getattr(report, name) for name in counts} for report in eviction.reports],
        "lost_tokens": eviction.lost_tokens,
        "lost_tokens_at_most": eviction.lost_tokens_at_most,
        "recompute_s": eviction.recompute_s,
        "tokens_per_s": eviction.tokens_per_s or None,
        "tokens_per_s_from": eviction.tokens_per_s_from or None,
    }


def _describe_loss(eviction: Eviction) -> str:
    most = "at most " if eviction.lost_tokens_at_most else ""
    lost = f"lost: {most}{eviction.lost_tokens:,} tokens of which no copy stays"
    if eviction.recompute_s is None:
        return f"{lost}; seconds of recompute not known, no prefill was measured yet (--tokens-per-second says it)"
    rate = f"{eviction.tokens_per_s:,.0f} tokens/s, {eviction.tokens_per_s_from}"
    return f"{lost}, {eviction.recompute_s:.1f} s of recompute ({rate})"


def _evict_total(reports: Sequence[EvictReport]) -> dict[str, int]:
    """Sums over the holders that answered."""
    answered = [report for report in reports if not report.error]
    names = ("blocks", "tokens", "bytes", "skipped_leased_blocks")
    return {name: sum(getattr(report, name) for report in answered) for name in names}


def _print_evict_reports(reports: Sequence[EvictReport], *, done: bool) -> None:
    rows = [
        [report.holder, "?", "?", "?", "?", report.error]
        if report.error
        else [
            report.holder,
            f"{report.blocks:,}",
            f"{report.tokens:,}",
            human_bytes(report.bytes),
            f"{report.skipped_leased_blocks:,}",
            "",
        ]
        for report in reports
    ]
    print_table(["holder ", "blocks", "tokens", "size", "skipped (leased)", "error "], rows)
    total = _evict_total(reports)
    counts = f"{total['blocks']:,} blocks ({total['tokens']:,} tokens, {human_bytes(total['bytes'])})"
    say(f"evicted {counts}" if done else f"would evict {counts}; nothing was changed, add --yes to do it")


def _exit_if_incomplete(errors: Sequence[tuple[str, str]]) -> None:
    for holder, error in errors:
        say(f"incomplete: {holder}: {error}")
    if errors:
        raise SystemExit(EXIT_INCOMPLETE)
