"""`headrace cache ...`: look into the cache and evict from it, through the gateway, over every holder."""

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import TypeVar

import click

from headrace.admin.connection import address_option, connect
from headrace.admin.prefix_tree import PrefixRun, build_prefix_runs, one_line
from headrace.admin.selection import UINT32_MAX, Size, selector_options
from headrace.admin.terminal import (
    counted,
    exit_if_incomplete,
    human_bytes,
    human_left,
    human_seconds,
    json_option,
    print_json,
    print_table,
    say,
    unix_ms_now,
)
from headrace.client import BlockEntry, BlockListing, Eviction, EvictReport, HolderStat, Selector

KEPT_WITH = "with what follows"  # a pin further on keeps all before it


@click.group(short_help="See, keep, warm, move and evict cached prefixes.")
def cache() -> None:
    """Look into the prefix cache, keep parts of it, and evict from it."""


@cache.command("ls", short_help="List cached prefixes as a tree.")
@selector_options
@click.option("--text", "with_text", is_flag=True, help="Show what the prefixes say, which is what users sent.")
@click.option("--blocks", is_flag=True, help="One row for each block on each holder, instead of runs of blocks.")
@click.option(
    "--limit", type=click.IntRange(0, UINT32_MAX), default=0, help="Blocks to read at most. 0: the server's bound."
)
@address_option
@json_option
def list_cache(*, selector: Selector, with_text: bool, blocks: bool, limit: int, address: str, as_json: bool) -> None:
    """List cached prefixes: prompts that share a beginning form a tree.

    A row is a run of blocks that nothing branches off, named by its last block; its children are indented below it. A
    run's pin is how long it is kept from now on; "goes in" is when the first of it goes for its time to live, unless
    it is used before.

    \b
    Examples:
      headrace cache ls --text
      headrace cache ls --tenant acme --idle 1h
      headrace cache ls --blocks --tier disk --json | jq '.blocks | length'
    """
    with connect(address) as client:
        listing = client.list_blocks(selector, with_text=with_text, limit=limit)
    runs = build_prefix_runs(listing.blocks)
    if as_json:
        print_json(_blocks_json(listing) if blocks else {"prefixes": runs, **_listing_totals(listing)})
    else:
        if blocks:
            _print_blocks(listing, with_text=with_text)
        else:
            _print_runs(runs, with_text=with_text)
        shown = len(listing.blocks)
        of = f"{shown:,} of " if shown != listing.total_blocks else ""
        say(
            f"{of}{counted(listing.total_blocks, 'block')}, {human_bytes(sum(block.bytes for block in listing.blocks))}"
        )
    exit_if_incomplete(listing.errors)


def _blocks_json(listing: BlockListing) -> dict[str, object]:
    return {"blocks": listing.blocks, "total_blocks": listing.total_blocks, "errors": dict(listing.errors)}


def _listing_totals(listing: BlockListing) -> dict[str, object]:
    return {
        "blocks": len(listing.blocks),
        "total_blocks": listing.total_blocks,
        "bytes": sum(block.bytes for block in listing.blocks),
        "errors": dict(listing.errors),
    }


def _print_runs(runs: Sequence[PrefixRun], *, with_text: bool) -> None:
    now = unix_ms_now()
    columns: list[Column[PrefixRun]] = [
        ("prefix ", lambda run: "  " * run.depth + run.last_hash.hex()),
        ("from token", lambda run: f"{run.first_position * run.block_tokens:,}"),
        ("tokens", lambda run: f"{run.num_tokens:,}"),
        ("blocks", lambda run: f"{run.num_blocks:,}"),
        ("size", lambda run: human_bytes(run.bytes)),
        ("hits", lambda run: f"{run.hits:,}"),
        ("age", lambda run: human_seconds(run.age_s)),
        ("idle", lambda run: human_seconds(run.idle_s)),
        ("tiers ", lambda run: ", ".join(run.tiers)),
        ("holders ", lambda run: ", ".join(run.holders)),
        ("model ", lambda run: run.model),
    ]
    columns += _where_any(
        runs,
        ("tenant ", lambda run: run.tenant),
        ("pinned ", lambda run: describe_pins(run, now_unix_ms=now)),
        ("goes in", lambda run: _left(run.expires_unix_ms, now)),
    )
    if with_text:
        columns.insert(0, ("text ", lambda run: "  " * run.depth + one_line(run.text)))
    _print_columns(columns, runs)


def describe_pins(run: PrefixRun, *, now_unix_ms: int) -> str:
    """How long a run is kept, and where if not on every node that has it; nothing where no pin keeps it."""
    if not run.pins:
        return ""
    untils = {until for _, until in run.pins}
    kept = dict.fromkeys(human_left(until, now_unix_ms=now_unix_ms) if until else KEPT_WITH for until in sorted(untils))
    holders = [holder for holder, _ in run.pins]
    nodes = [holder for holder in run.holders if holder.startswith("node:")]
    return ", ".join(kept) + ("" if holders == nodes else f" (on {', '.join(holders)})")


def _left(unix_ms: int, now_unix_ms: int) -> str:
    return human_left(unix_ms, now_unix_ms=now_unix_ms) if unix_ms else ""


Row = TypeVar("Row")
Column = tuple[str, Callable[[Row], str]]


def _where_any(rows: Sequence[Row], *columns: Column[Row]) -> list[Column[Row]]:
    """Those columns that say anything of any row."""
    return [(name, cell) for name, cell in columns if any(cell(row) for row in rows)]


def _print_columns(columns: Sequence[Column[Row]], rows: Sequence[Row]) -> None:
    print_table([name for name, _ in columns], [[cell(row) for _, cell in columns] for row in rows])


def _print_blocks(listing: BlockListing, *, with_text: bool) -> None:
    now = unix_ms_now()
    columns: list[Column[BlockEntry]] = [
        ("block ", lambda block: block.block_hash.hex()),
        ("position", lambda block: f"{block.position:,}"),
        ("tokens", lambda block: f"{len(block.token_ids):,}"),
        ("size", lambda block: human_bytes(block.bytes)),
        ("holder ", lambda block: block.holder),
        ("tier ", lambda block: block.tier),
        ("hits", lambda block: f"{block.hits:,}"),
        ("age", lambda block: human_seconds(block.age_s)),
        ("idle", lambda block: human_seconds(block.idle_s)),
        ("leases", lambda block: f"{block.leases:,}"),
    ]
    columns += _where_any(
        listing.blocks,
        ("tenant ", lambda block: block.tenant),
        ("pinned ", lambda block: describe_pin(block, now_unix_ms=now)),
        ("goes in", lambda block: _left(block.expires_unix_ms, now)),
    )
    if with_text:
        columns.append(("text ", lambda block: one_line(block.text)))
    _print_columns(columns, listing.blocks)


def describe_pin(block: BlockEntry, *, now_unix_ms: int) -> str:
    """How long a pin keeps a block on its holder; nothing where none does."""
    if block.pinned_until_unix_ms:
        return human_left(block.pinned_until_unix_ms, now_unix_ms=now_unix_ms)
    return KEPT_WITH if block.protected_by_pin else ""


@cache.command("stat", short_help="Show every holder's books.")
@address_option
@json_option
def stat_cache(*, address: str, as_json: bool) -> None:
    """Show every holder's books: room, blocks, leases, pins, and lookups and hits in tokens since it started.

    \b
    Examples:
      headrace cache stat
      headrace cache stat --json | jq '.holders[] | select(.tier == "host") | .free_blocks'
    """
    with connect(address) as client:
        stats = client.stat()
    errors = {stat.holder: stat.error for stat in stats if stat.error}
    if as_json:
        print_json({"holders": stats, "errors": errors})
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
            "pinned",
            "looked up",
            "hit",
            "evicted",
        ]
        print_table([*columns, "error "], [_stat_row(stat) for stat in stats])
    exit_if_incomplete(list(errors.items()))


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
        human_bytes(stat.pinned_bytes) if stat.pin_bytes_max else "-",
        f"{stat.lookups_tokens:,} tokens",
        f"{stat.hits_tokens:,} tokens ({rate})",
        f"{stat.evicted_blocks:,}",
        stat.error,
    ]


@cache.command("evict", short_help="Evict blocks; without --yes say what would go.")
@selector_options
@click.option("--all", "everything", is_flag=True, help="Everything. Needed when nothing narrows the eviction.")
@click.option(
    "--free",
    "free_bytes",
    type=Size(),
    help="As much as is needed to free this much in each tier of each holder: 2GiB.",
)
@click.option(
    "--prefill-tokens-per-s",
    "tokens_per_s",
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
    tokens_per_s: float | None,
    yes: bool,
    address: str,
    as_json: bool,
) -> None:
    """Evict blocks, or (without --yes) say what would go. Options together mean their intersection.

    --free takes the least recently used first. The seconds lost count each token once, and only where no copy stays; a
    dry run also says whose prompts would be cut.

    Blocks that are being read are skipped and counted, and so are pinned ones (`headrace cache unpin`). Exit code 9
    says that a holder did not answer: what it holds is unknown, and with --yes it was not evicted there.

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
        eviction = client.price_eviction(selector, dry_run=not yes, tokens_per_s=tokens_per_s or 0.0)
    reports = eviction.reports
    if as_json:
        print_json({"dry_run": not yes, **_eviction_json(eviction), "total": _evict_total(reports)})
    else:
        _print_evict_reports(reports, done=yes)
        say(_describe_loss(eviction))
        if eviction.prefixes:
            say(_describe_hits(eviction))
    exit_if_incomplete([(report.holder, report.error) for report in reports if report.error])


def _eviction_json(eviction: Eviction) -> dict[str, object]:
    counts = [field.name for field in fields(EvictReport) if field.name != "block_hashes"]
    return {
        "reports": [{name: getattr(report, name) for name in counts} for report in eviction.reports],
        "lost_tokens": eviction.lost_tokens,
        "lost_tokens_at_most": eviction.lost_tokens_at_most,
        "recompute_s": eviction.recompute_s,
        "tokens_per_s": eviction.tokens_per_s or None,
        "tokens_per_s_from": eviction.tokens_per_s_from or None,
        "tenants": eviction.tenants,
        "prefixes": eviction.prefixes,
        "hits_at_least": eviction.hits_at_least,
    }


def _describe_loss(eviction: Eviction) -> str:
    most = "at most " if eviction.lost_tokens_at_most else ""
    lost = f"lost: {most}{eviction.lost_tokens:,} tokens of which no copy stays"
    if eviction.recompute_s is None:
        return f"{lost}; seconds of recompute not known, no prefill was measured yet (--prefill-tokens-per-s says it)"
    rate = f"{eviction.tokens_per_s:,.0f} tokens/s, {eviction.tokens_per_s_from}"
    return f"{lost}, {eviction.recompute_s:.1f} s of recompute ({rate})"


def _describe_hits(eviction: Eviction) -> str:
    """Whose prompts would be cut; only a dry run knows."""
    least = "at least " if eviction.hits_at_least else ""
    whose = [f"{hit.tenant} {hit.prefixes:,}" for hit in eviction.tenants if hit.tenant and hit.prefixes]
    return f"cut: {least}{counted(eviction.prefixes, 'prompt')}" + (f" ({', '.join(whose)})" if whose else "")


def _evict_total(reports: Sequence[EvictReport]) -> dict[str, int]:
    """Sums over the holders that answered."""
    answered = [report for report in reports if not report.error]
    names = ("blocks", "tokens", "bytes", "skipped_leased_blocks", "skipped_pinned_blocks")
    return {name: sum(getattr(report, name) for report in answered) for name in names}


def _print_evict_reports(reports: Sequence[EvictReport], *, done: bool) -> None:
    rows = [
        [report.holder, "?", "?", "?", "?", "?", report.error]
        if report.error
        else [
            report.holder,
            f"{report.blocks:,}",
            f"{report.tokens:,}",
            human_bytes(report.bytes),
            f"{report.skipped_leased_blocks:,}",
            f"{report.skipped_pinned_blocks:,}",
            "",
        ]
        for report in reports
    ]
    print_table(["holder ", "blocks", "tokens", "size", "skipped (leased)", "skipped (pinned)", "error "], rows)
    total = _evict_total(reports)
    size = human_bytes(total["bytes"])
    counts = f"{counted(total['blocks'], 'block')} ({counted(total['tokens'], 'token')}, {size})"
    say(f"evicted {counts}" if done else f"would evict {counts}; nothing was changed, add --yes to do it")
