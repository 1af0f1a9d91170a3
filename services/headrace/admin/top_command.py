"""`headrace cache top`: what the cache does now, look after look: rates of every holder, and the prefixes used most;
and `headrace top`: the same of every host, with its load."""

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import click
from rich.console import Console
from rich.live import Live
from rich.text import Text

from headrace.admin.connection import address_option, connect
from headrace.admin.holder_rates import HolderRates, HostRates, rate_holders, rate_hosts
from headrace.admin.host_rows import gone_for, host_cells, host_json
from headrace.admin.prefix_tree import PrefixRun, build_prefix_runs, one_line
from headrace.admin.selection import Duration
from headrace.admin.terminal import (
    exit_if_incomplete,
    human_bytes,
    human_seconds,
    json_lines_option,
    print_json_line,
    say,
    table_lines,
    to_jsonable,
    unix_ms_now,
)
from headrace.client import BlockListing, GatewayUnreachable, HeadraceClient, HolderStat, SystemStatus
from headrace.core.errors import DeadlineExceeded

# Blocks read for the prefixes of one look: with their token ids about 1 MB. Where a cache holds more, the prefixes are
# those of a part of it, and the output says so.
BLOCKS_READ_MAX = 2_000
EVERY_S_MIN, EVERY_S_MAX = 0.2, 3_600


@dataclass(frozen=True, slots=True)
class Look:
    """One look at all holders' books and at some of the blocks. `at_s` is a monotonic clock's."""

    at_s: float
    stats: tuple[HolderStat, ...]
    listing: BlockListing | None  # None: prefixes are not wanted
    status: SystemStatus | None = None  # None: hosts are not wanted


@dataclass(frozen=True, slots=True)
class Seen:
    """What one look shows, with the rates since the look before."""

    unix_ms: int
    interval_s: float
    holders: list[HolderRates]
    prefixes: list[PrefixRun]  # those hit most first
    blocks_read: int
    total_blocks: int
    errors: tuple[tuple[str, str], ...]
    hosts: list[HostRates] = field(default_factory=list)


def looking_options(command: Callable[..., Any]) -> Callable[..., Any]:
    """Add how often to look, and whether only once; the command gets `every_s` and `once`."""
    once = click.option("--once", is_flag=True, help="Show the rates of one interval, and end.")
    every = click.option(
        "--every", "every_s", type=Duration(), default="2s", show_default=True, help="Time between looks: 2s, 1m."
    )
    return every(once(command))


@click.command("top", short_help="Watch rates and the hottest prefixes, live.")
@looking_options
@click.option(
    "--prefixes",
    "prefixes_max",
    type=click.IntRange(min=0, max=1_000),
    default=10,
    show_default=True,
    help="How many prefixes to show. 0: do not list any.",
)
@click.option("--text", "with_text", is_flag=True, help="Show what the prefixes say.")
@address_option
@json_lines_option
def top_cache(*, every_s: float, prefixes_max: int, with_text: bool, once: bool, address: str, as_json: bool) -> None:
    """Watch the cache live: what is looked up, hit, read, written and evicted, in each tier of each holder.

    Rates are those since the last look, a second: look-ups, bytes read and written, blocks evicted. "hit" is tokens
    found of tokens looked up. Below them the prefixes with the most hits. Ctrl-C ends it. A gateway that goes away is
    waited for. With --json there is one document a line for each look.

    \b
    Examples:
      headrace cache top
      headrace cache top --every 10s --prefixes 0 | tee top.log
      headrace cache top --once --json | jq -c '.holders[] | [.holder, .tier, .token_hit_rate]'
    """
    _show(every_s, prefixes_max, with_text=with_text, with_hosts=False, once=once, address=address, as_json=as_json)


@click.command("top", short_help="Watch hosts, their load and their caches, live.")
@looking_options
@address_option
@json_lines_option
def top_system(*, every_s: float, once: bool, address: str, as_json: bool) -> None:
    """Watch the system live, host by host: what runs and waits, how full pools and arenas are, what is read.

    Rates are those since the last look, a second. A host whose part does not answer is silent, one of which nothing is
    left is gone, and shown for 15 minutes. Ctrl-C ends it. A gateway that goes away is waited for. With --json there
    is one document a line for each look; exit code 9 with --once when a part is silent.

    \b
    Examples:
      headrace top
      headrace top --every 10s | tee top.log
      headrace top --once --json | jq -c '.hosts[] | [.address, .state, .waiting]'
    """
    _show(every_s, 0, with_text=False, with_hosts=True, once=once, address=address, as_json=as_json)


def _show(
    every_s: float, prefixes_max: int, *, with_text: bool, with_hosts: bool, once: bool, address: str, as_json: bool
) -> None:
    """Look again and again, and show each look."""
    if not EVERY_S_MIN <= every_s <= EVERY_S_MAX:
        raise click.UsageError(f"--every must lie in {EVERY_S_MIN}..{EVERY_S_MAX} seconds")
    with connect(address) as client, _painter(plain=once or as_json) as paint:
        look = functools.partial(_look, client, prefixes_max, with_text=with_text, with_hosts=with_hosts)
        try:
            for seen in _watch(look, every_s, prefixes_max, keep_on=not once):
                if as_json:
                    print_json_line(_as_json(seen))
                else:
                    paint(_lines(seen, with_text=with_text))
                if once:
                    exit_if_incomplete(seen.errors)
                    return
        except KeyboardInterrupt:
            return


@contextmanager
def _painter(*, plain: bool) -> Iterator[Callable[[Sequence[str]], None]]:
    """How a look is shown: in place on a terminal, below the one before anywhere else."""
    console = Console(highlight=False, markup=False)
    if plain or not console.is_terminal:
        yield lambda lines: click.echo("\n".join(lines) + "\n")
        return
    with Live(console=console, auto_refresh=False) as live:
        # Lines that are too long are cut here, not folded: what moves must stay in its place.
        yield lambda lines: live.update(
            Text.from_ansi("\n".join(lines), no_wrap=True, overflow="ellipsis"), refresh=True
        )


def _watch(look: Callable[[], Look], every_s: float, prefixes_max: int, *, keep_on: bool) -> Iterator[Seen]:
    """Look again and again. A first look that fails is an error; a later one is said and tried again (keep_on)."""
    before = look()
    while True:
        time.sleep(every_s)
        try:
            now = look()
        except (GatewayUnreachable, DeadlineExceeded) as error:
            if not keep_on:
                raise
            say(f"{time.strftime('%H:%M:%S')}  {error}")
            continue
        yield _compare(before, now, prefixes_max)
        before = now


def _look(client: HeadraceClient, prefixes_max: int, *, with_text: bool, with_hosts: bool) -> Look:
    status = client.status() if with_hosts else None
    can_ask = status is None or status.index_available  # without the index nobody knows whom
    stats, at_s = client.stat() if can_ask else (), time.monotonic()
    listing = client.list_blocks(with_text=with_text, limit=BLOCKS_READ_MAX) if prefixes_max else None
    return Look(at_s, stats, listing, status)


def _compare(before: Look, now: Look, prefixes_max: int) -> Seen:
    interval_s = now.at_s - before.at_s
    blocks = now.listing.blocks if now.listing else ()
    runs = sorted(build_prefix_runs(blocks), key=lambda run: (-run.hits, run.first_position))
    errors = {stat.holder: stat.error for stat in now.stats if stat.error}
    errors |= now.listing.errors if now.listing else ()
    rates = rate_holders(before.stats, now.stats, elapsed_s=interval_s)
    return Seen(
        unix_ms=unix_ms_now(),
        interval_s=interval_s,
        holders=rates,
        prefixes=[run for run in runs if run.hits][:prefixes_max],
        blocks_read=len(blocks),
        total_blocks=now.listing.total_blocks if now.listing else 0,
        errors=tuple(errors.items()),
        hosts=[] if now.status is None else rate_hosts(now.status, now.stats, rates),
    )


def _as_json(seen: Seen) -> dict[str, Any]:
    holders = [
        {**to_jsonable(rates.stat), **{name: value for name, value in to_jsonable(rates).items() if name != "stat"}}
        for rates in seen.holders
    ]
    found = {**to_jsonable(seen), "holders": holders, "errors": dict(seen.errors)}
    if not seen.hosts:
        del found["hosts"]
        return found
    return {**found, "hosts": [host_json(rates.row) | _own_fields(rates) for rates in seen.hosts]}


def _own_fields(rates: HostRates) -> dict[str, Any]:
    return {name: value for name, value in to_jsonable(rates).items() if name != "row"}


def _lines(seen: Seen, *, with_text: bool) -> list[str]:
    clock = time.strftime("%H:%M:%S", time.localtime(seen.unix_ms / 1e3))
    lines = [f"{clock}, rates a second over the last {seen.interval_s:.1f} s"]
    if seen.hosts:
        lines += [*_host_lines(seen.hosts), ""]
    lines += _holder_lines(seen.holders)
    if seen.prefixes:
        lines += ["", *_prefix_lines(seen.prefixes, with_text=with_text)]
        if seen.total_blocks > seen.blocks_read:
            lines.append(f"(of {seen.blocks_read:,} blocks; there are {seen.total_blocks:,})")
    return lines + [f"incomplete: {holder}: {error}" for holder, error in seen.errors]


def _host_lines(hosts: Sequence[HostRates]) -> list[str]:
    columns, cells = host_cells([rates.row for rates in hosts])
    rows = [
        [
            *own,
            _rate(rates.lookups_per_s),
            "-" if rates.read_bytes_per_s is None else human_bytes(rates.read_bytes_per_s),
            "-" if rates.written_bytes_per_s is None else human_bytes(rates.written_bytes_per_s),
            _rate(rates.evicted_blocks_per_s),
        ]
        for own, rates in zip(cells, hosts, strict=True)
    ]
    lines = table_lines([*columns, "look-ups", "read", "written", "evicted"], rows)
    gone = [(member, seen) for rates in hosts for member, seen in rates.row.gone]
    return lines + [f"gone: {member}, last seen {gone_for(seen)}" for member, seen in gone]


def _holder_lines(holders: Sequence[HolderRates]) -> list[str]:
    # Short names: all of it should fit 100 characters, since a line that is folded cannot be read at a glance.
    columns = ["holder ", "tier ", "used", "of", "pinned", "look-ups", "hit", "read", "written", "evicted"]
    rows = [
        [
            rates.stat.holder,
            rates.stat.tier,
            human_bytes(rates.stat.committed_blocks * rates.stat.block_bytes),
            human_bytes(rates.stat.total_blocks * rates.stat.block_bytes),
            human_bytes(rates.stat.pinned_bytes) if rates.stat.pin_bytes_max else "-",
            _rate(rates.lookups_per_s),
            "-" if rates.token_hit_rate is None else f"{rates.token_hit_rate:.0%}",
            "-" if rates.read_bytes_per_s is None else human_bytes(rates.read_bytes_per_s),
            "-" if rates.written_bytes_per_s is None else human_bytes(rates.written_bytes_per_s),
            _rate(rates.evicted_blocks_per_s),
        ]
        for rates in holders
    ]
    return table_lines(columns, rows)


def _rate(per_s: float | None) -> str:
    if per_s is None:
        return "-"
    return f"{per_s:.1f}" if per_s < 100 else f"{per_s:,.0f}"


def _prefix_lines(prefixes: Sequence[PrefixRun], *, with_text: bool) -> list[str]:
    rows = [
        [
            f"{run.hits:,}",
            f"{run.num_tokens:,}",
            human_bytes(run.bytes),
            human_seconds(run.age_s),
            human_seconds(run.idle_s),
            run.tenant or "-",
            run.model,
            one_line(run.text) if with_text else run.last_hash.hex(),
        ]
        for run in prefixes
    ]
    last = "text " if with_text else "last block "
    return table_lines(["hits", "tokens", "size", "age", "idle", "tenant ", "model ", last], rows)
