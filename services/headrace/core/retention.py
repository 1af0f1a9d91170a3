"""How long, and where, what a request leaves in the cache may stay.

A *time to live* runs from a block's last use: a block that nobody used for that long goes, from every tier, whether or
not room is needed. It is a bound and no promise; to be kept for certain a prefix is pinned. Where several requests used
a block, the longest of their retentions holds: it goes when nobody's time is left. An operator's order on a prefix
(`headrace cache ttl`) is a fixed moment instead, and no use moves it.
"""

import math
import re
from dataclasses import dataclass

from headrace.core.errors import InvalidRequest
from headrace.core.limits import TTL_S_MAX, TTL_S_MIN

_SPELLED = re.compile(r"(\d{1,9})(s|m|h|d)")
_UNIT_S = {"s": 1, "m": 60, "h": 3_600, "d": 86_400}


@dataclass(frozen=True, slots=True)
class Retention:
    """What one request, tenant or deployment asks for. The default: stay until room is needed, in any tier."""

    ttl_s: float | None = None  # None: no bound
    on_disk: bool = True  # whether a copy may be written to a disk tier

    def longest(self, other: "Retention") -> "Retention":
        """What holds for a block that was used under both."""
        bounded = self.ttl_s is not None and other.ttl_s is not None
        return Retention(
            ttl_s=max(self.ttl_s or 0.0, other.ttl_s or 0.0) if bounded else None,
            on_disk=self.on_disk or other.on_disk,
        )


KEEP = Retention()
KeptBy = Retention | None  # None: a use that keeps nothing longer

# What stands for "without an end" where a moment is meant to be some number: the largest that every format can carry.
NO_END_UNIX_MS = 2**63 - 1


def parse_ttl(spelled: str, *, param: str) -> float:
    """Seconds of a time to live as people write it: `90s`, `5m`, `1h`, `7d`. Raises InvalidRequest naming `param`."""
    match = _SPELLED.fullmatch(spelled)
    if match is None:
        raise InvalidRequest(f"{param} is a number with s, m, h or d, as 5m; not {spelled!r:.40}", param=param)
    return checked_ttl(int(match[1]) * _UNIT_S[match[2]], param=param)


def checked_ttl(ttl_s: float, *, param: str) -> float:
    """The same seconds, within TTL_S_MIN..TTL_S_MAX. Raises InvalidRequest naming `param`."""
    if not (math.isfinite(ttl_s) and TTL_S_MIN <= ttl_s <= TTL_S_MAX):
        raise InvalidRequest(f"{param} must lie in {TTL_S_MIN}..{TTL_S_MAX} seconds, not {ttl_s!r:.40}", param=param)
    return float(ttl_s)
