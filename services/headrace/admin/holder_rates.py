"""What happened on each holder, and on each host, between two looks at their books."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from headrace.admin.host_rows import HostRow, host_of_holders, host_rows
from headrace.client import HolderStat, SystemStatus

COUNTERS = ("lookups", "lookups_tokens", "hits_tokens", "read_bytes", "written_bytes", "evicted_blocks")


@dataclass(frozen=True, slots=True)
class HolderRates:
    """One tier of one holder: its books now, and its rates since the look before. Rates are None where there is no
    look before, or the holder did not answer, or it started anew in between."""

    stat: HolderStat
    lookups_per_s: float | None = None
    token_hit_rate: float | None = None  # None also when nothing was looked up
    read_bytes_per_s: float | None = None
    written_bytes_per_s: float | None = None
    evicted_blocks_per_s: float | None = None


def rate_holders(before: Sequence[HolderStat], now: Sequence[HolderStat], *, elapsed_s: float) -> list[HolderRates]:
    """Rates of every holder and tier of `now`, in its order. elapsed_s: between the looks, larger than 0."""
    assert elapsed_s > 0
    earlier = {(stat.holder, stat.tier): stat for stat in before}
    return [_rates(earlier.get((stat.holder, stat.tier)), stat, elapsed_s) for stat in now]


def _rates(before: HolderStat | None, now: HolderStat, elapsed_s: float) -> HolderRates:
    if before is None or before.error or now.error:
        return HolderRates(now)
    grown = {name: getattr(now, name) - getattr(before, name) for name in COUNTERS}
    # Not the incarnation: a node takes a new one without a restart too (`doctor --fix`), and counts on.
    if min(grown.values()) < 0:
        return HolderRates(now)
    looked_up = grown["lookups_tokens"]
    return HolderRates(
        stat=now,
        lookups_per_s=grown["lookups"] / elapsed_s,
        token_hit_rate=grown["hits_tokens"] / looked_up if looked_up else None,
        read_bytes_per_s=grown["read_bytes"] / elapsed_s,
        written_bytes_per_s=grown["written_bytes"] / elapsed_s,
        evicted_blocks_per_s=grown["evicted_blocks"] / elapsed_s,
    )


@dataclass(frozen=True, slots=True)
class HostRates:
    """One host as it is now, and the rates of its holders together; None where no holder has any."""

    row: HostRow
    lookups_per_s: float | None = None
    read_bytes_per_s: float | None = None
    written_bytes_per_s: float | None = None
    evicted_blocks_per_s: float | None = None


def rate_hosts(status: SystemStatus, stats: Sequence[HolderStat], rates: Sequence[HolderRates]) -> list[HostRates]:
    """The hosts of a status, each with the rates of what it holds."""
    hosts = host_of_holders(status)
    return [
        HostRates(
            row,
            **{
                name: _sum_of(getattr(rate, name) for rate in rates if hosts.get(rate.stat.holder) == row.host)
                for name in ("lookups_per_s", "read_bytes_per_s", "written_bytes_per_s", "evicted_blocks_per_s")
            },
        )
        for row in host_rows(status, stats)
    ]


def _sum_of(rates: Iterable[float | None]) -> float | None:
    known = [rate for rate in rates if rate is not None]
    return sum(known) if known else None
