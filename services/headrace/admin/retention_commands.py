"""`headrace cache pin`, `unpin` and `ttl`: what must stay, and what must go at a moment, on every holder."""

from collections.abc import Sequence

import click

from headrace.admin.connection import address_option, connect
from headrace.admin.selection import Duration, prefix_options
from headrace.admin.terminal import (
    EXIT_INCOMPLETE,
    exit_if_incomplete,
    human_bytes,
    human_moment,
    json_option,
    print_json,
    print_table,
    say,
    unix_ms_now,
)
from headrace.client import ControlOutcome, ControlReport, Selector
from headrace.core.retention import checked_ttl


@click.command("pin", short_help="Keep a prefix, for a time or until unpinned.")
@prefix_options
@click.option("--for", "for_s", type=Duration(), help="How long: 90s, 12h, 7d. Default: until it is unpinned.")
@address_option
@json_option
def pin_prefix(*, selector: Selector, for_s: float | None, address: str, as_json: bool) -> None:
    """Keep a prefix: its last full block, and thereby all before it, on every store node that has it.

    What is pinned is not evicted, whatever needs room, and outlives restarts of the node. A node refuses a pin that
    would take more than its pin budget (setting pin_share) and drops nothing for it. A node that does not have the
    prefix pins nothing: `headrace cache warm` computes it first.

    Exit code 9: no node has it, or a node refused or did not answer.

    \b
    Examples:
      headrace cache pin --prefix-file system-prompt.txt --for 7d
      headrace cache pin --hash 9c1a90616645db6eb8f01b9deb611955 --node host-3
    """
    _require_prefix(selector)
    with connect(address) as client:
        reports = client.pin(selector, for_s=None if for_s is None else checked_ttl(for_s, param="--for"))
    _print_reports(reports, done="pinned", as_json=as_json)
    _exit_by(reports)
    if not any(report.outcome is ControlOutcome.DONE for report in reports):
        say("no node has this prefix, so nothing is pinned (`headrace cache warm` computes it)")
        raise SystemExit(EXIT_INCOMPLETE)


@click.command("unpin", short_help="Take a pin back.")
@prefix_options
@address_option
@json_option
def unpin_prefix(*, selector: Selector, address: str, as_json: bool) -> None:
    """Take a pin back: name the prefix as it was named to `cache pin`, or the pinned block by its hash.

    The blocks stay until room is needed. Where nothing was pinned there is nothing to do, which is no error.

    \b
    Examples:
      headrace cache unpin --prefix-file system-prompt.txt
      headrace cache unpin --hash 9c1a90616645db6eb8f01b9deb611955
    """
    _require_prefix(selector)
    with connect(address) as client:
        reports = client.unpin(selector)
    _print_reports(reports, done="unpinned", as_json=as_json)
    _exit_by(reports)
    if not any(report.outcome is ControlOutcome.DONE for report in reports):
        say("no node has a pin on it; nothing was changed")


@click.command("ttl", short_help="Have a prefix go at a moment.")
@prefix_options
@click.option("--in", "ttl_s", type=Duration(), help="When it goes, from now: 10m, 2h.")
@click.option("--clear", is_flag=True, help="Take an earlier order back.")
@address_option
@json_option
def set_ttl(*, selector: Selector, ttl_s: float | None, clear: bool, address: str, as_json: bool) -> None:
    """Have a prefix's last full block, and all that stands on it, go at a moment, from every node and worker.

    The moment is fixed: use does not move it. (A request's own time to live, `--ttl` of `headrace generate`, slides
    with each use.) Pinned blocks stay: pins win.

    Exit code 9: a holder refused or did not answer.

    \b
    Examples:
      headrace cache ttl --prefix "Draft of the announcement" --in 10m
      headrace cache ttl --prefix "Draft of the announcement" --clear
    """
    _require_prefix(selector)
    if (ttl_s is None) != clear:
        raise click.UsageError("say --in (when it goes) or --clear (take an earlier order back)")
    with connect(address) as client:
        reports = client.set_ttl(selector, ttl_s=None if ttl_s is None else checked_ttl(ttl_s, param="--in"))
    _print_reports(reports, done="stays" if clear else "goes", as_json=as_json)
    _exit_by(reports)
    if not any(report.outcome is ControlOutcome.DONE for report in reports):
        say("nobody has this prefix, or no order stands on it; nothing was changed")


def _require_prefix(selector: Selector) -> None:
    if not (selector.prefix_text or selector.prefix_token_ids or selector.block_hashes):
        raise click.UsageError("name a prefix (--prefix, --prefix-file, --token-ids) or blocks (--hash)")


def _print_reports(reports: Sequence[ControlReport], *, done: str, as_json: bool) -> None:
    """done: what "done" is called in the table."""
    if as_json:
        print_json({"reports": reports})
        return
    now = unix_ms_now()
    rows = [
        [report.holder, "?", "?", "?", "?", "?", "", report.error]
        if report.error
        else [
            report.holder,
            done if report.outcome is ControlOutcome.DONE else str(report.outcome),
            f"{report.blocks:,}",
            f"{report.tokens:,}",
            human_bytes(report.bytes),
            f"{human_bytes(report.pinned_bytes)} of {human_bytes(report.pin_bytes_max)}"
            if report.pin_bytes_max
            else "-",
            _until(report, done, now),
            report.why,
        ]
        for report in reports
    ]
    columns = ["holder ", "outcome ", "blocks", "tokens", "size", "all pins", "until ", "why "]
    print_table(columns, rows)


def _until(report: ControlReport, done: str, now_unix_ms: int) -> str:
    """Until when a pin or before when a block stays; nothing where the order was taken back or not taken."""
    if report.outcome is not ControlOutcome.DONE or done not in ("pinned", "goes"):
        return ""
    return human_moment(report.until_unix_ms, now_unix_ms=now_unix_ms)


def _exit_by(reports: Sequence[ControlReport]) -> None:
    """End with exit code 9 where a node refused, with its arithmetic, or did not answer."""
    failed = [(report.holder, report.error) for report in reports if report.error]
    failed += [
        (report.holder, f"refused: {report.why}") for report in reports if report.outcome is ControlOutcome.REFUSED
    ]
    exit_if_incomplete(failed)
