"""The tenants file: API keys (hashed), tenants, roles and trust groups, in YAML. See docs/tenants.md.

tenants:
  - name: acme
    keys: ["sha256:<salt>:<digest>"]    # made by `headrace tenants hash-key`
    ttl: 1h                             # of blocks of its requests that name no time to live themselves
    quota_mb: 4096                      # the most that its trust group may have on each store node, in MiB
    priority_max: 0                     # the highest priority that its requests may have, -4..4; default 0, the normal
    protected_mb: 512                   # what others' blocks never take from it on each store node
    requests_per_minute: 600            # the most that it may ask of each gateway; left out: no bound
    tokens_per_minute: 200000           # of prompts and answers together
    concurrent_max: 32                  # requests under way at once
  - name: acme-batch
    trust_group: acme-all               # shares blocks, and bounds, with every tenant of the same trust_group
    keys: [...]
  - name: operator
    role: admin
    keys: [...]
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from headrace.core.errors import ConfigInvalid, InvalidRequest
from headrace.core.front_door_limits import RATE_PER_MINUTE_MAX
from headrace.core.limits import API_KEYS_MAX, PRIORITY_MAX, TENANTS_FILE_BYTES_MAX
from headrace.core.rate_limits import RateLimits
from headrace.core.retention import parse_ttl
from headrace.core.tenants import HashedKey, KeyRing, Tenant, TenantRole, trust_group_of

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
RATES = tuple(rate.name for rate in fields(RateLimits))
FIELDS = {"name", "keys", "role", "trust_group", "ttl", "quota_mb", "protected_mb", "priority_max", *RATES}
_Bounds = tuple[int | None, int]  # bytes_max, bytes_min
MIB_MAX = 1 << 40  # an exbibyte: more is a mistake, and must still fit a 64-bit number of bytes


def read_tenants(path: str | Path) -> KeyRing:
    """Read and check a tenants file. Raises ConfigInvalid, which names the tenant but never quotes a key."""
    try:
        with Path(path).open("rb") as file:
            text = file.read(TENANTS_FILE_BYTES_MAX + 1)
        if len(text) > TENANTS_FILE_BYTES_MAX:
            raise _invalid(path, f"is larger than {TENANTS_FILE_BYTES_MAX} bytes")
        loaded = yaml.safe_load(text.decode("utf-8"))
    except OSError as error:
        raise _invalid(path, f"cannot be read: {error.strerror}") from error
    except (ValueError, yaml.YAMLError, RecursionError):
        raise _invalid(path, "is not YAML") from None  # the parser's message would quote the line, and so a key
    entries = loaded.get("tenants") if isinstance(loaded, dict) and set(loaded) == {"tenants"} else None
    if not isinstance(entries, list) or not entries:
        raise _invalid(path, "must be a mapping with one key, `tenants`, a list of at least one tenant")
    bounds = _bounds_of_groups(entries, path)
    keys = [pair for entry in entries for pair in _keys_of(entry, bounds, path)]
    names = [entry["name"] for entry in entries]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise _invalid(path, f"tenant {twice!r} stands there twice; give one entry several keys instead")
    if len(keys) > API_KEYS_MAX:
        raise _invalid(path, f"has {len(keys)} keys; at most {API_KEYS_MAX}")
    if len({hashed for hashed, _ in keys}) < len(keys):
        raise _invalid(path, "has the same key line twice; a key stands for one tenant")
    return KeyRing(tuple(keys))


def _bounds_of_groups(entries: Sequence[Any], path: str | Path) -> dict[str, _Bounds]:
    """Quota and protected minimum of each trust group, in bytes: those of any of its tenants, no two differently."""
    found: dict[str, dict[str, int]] = {}
    for entry in entries:
        name, group = _checked_name(entry, path)
        of_group = found.setdefault(trust_group_of(name, group), {})
        for field in ("quota_mb", "protected_mb"):
            mib = entry.get(field)
            if mib is None:
                continue
            if type(mib) is not int or not 0 <= mib <= MIB_MAX:
                raise _invalid(path, f"tenant {name!r}: {field} must be a whole number of MiB, not {mib!r:.40}")
            if of_group.setdefault(field, mib) != mib:
                raise _invalid(path, f"tenant {name!r}: {field} {mib} contradicts {of_group[field]} of its trust group")
        if of_group.get("protected_mb", 0) > of_group.get("quota_mb", MIB_MAX):
            raise _invalid(path, f"tenant {name!r}: protected_mb is larger than quota_mb")
    return {
        group: (bounds["quota_mb"] << 20 if "quota_mb" in bounds else None, bounds.get("protected_mb", 0) << 20)
        for group, bounds in found.items()
    }


def _checked_name(entry: Any, path: str | Path) -> tuple[str, str | None]:
    """A tenant's name and the trust group that it names, once all of its fields are known ones."""
    name = entry.get("name") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise _invalid(path, "every tenant needs a name of 1 to 64 letters, digits, dots, dashes and underscores")
    unknown = sorted(str(field) for field in set(entry) - FIELDS)
    if unknown:
        raise _invalid(path, f"tenant {name!r}: unknown field {unknown[0]!r:.60}; known: {', '.join(sorted(FIELDS))}")
    group = entry.get("trust_group")
    if group is not None and not (isinstance(group, str) and NAME.fullmatch(group)):
        raise _invalid(path, f"tenant {name!r}: trust_group must be a name, as a tenant's")
    return name, group


def _keys_of(entry: Any, bounds: dict[str, _Bounds], path: str | Path) -> Iterator[tuple[HashedKey, Tenant]]:
    """One tenant's keys."""
    name, group = _checked_name(entry, path)
    role, spelled, ttl = entry.get("role", TenantRole.USER), entry.get("keys"), entry.get("ttl")
    if not isinstance(role, str) or role not in set(TenantRole):
        raise _invalid(path, f"tenant {name!r}: role must be {' or '.join(TenantRole)}")
    try:
        ttl_s = None if ttl is None else parse_ttl(str(ttl), param="ttl")
    except InvalidRequest as refused:
        raise _invalid(path, f"tenant {name!r}: {refused}") from None
    if not isinstance(spelled, list) or not spelled:
        raise _invalid(
            path, f"tenant {name!r}: keys must be a list of at least one line of `headrace tenants hash-key`"
        )
    priority_max = entry.get("priority_max", 0)
    if type(priority_max) is not int or not -PRIORITY_MAX <= priority_max <= PRIORITY_MAX:
        raise _invalid(path, f"tenant {name!r}: priority_max must lie in {-PRIORITY_MAX}..{PRIORITY_MAX}")
    trust_group = trust_group_of(name, group)
    bytes_max, bytes_min = bounds[trust_group]
    tenant = Tenant(
        name=name,
        trust_group=trust_group,
        role=TenantRole(role),
        ttl_s=ttl_s,
        bytes_max=bytes_max,
        bytes_min=bytes_min,
        priority_max=priority_max,
        rates=_rates_of(entry, path),
    )
    for line in spelled:
        hashed = HashedKey.parse(line) if isinstance(line, str) else None
        if hashed is None:
            raise _invalid(
                path, f"tenant {name!r}: a key is not a line of `headrace tenants hash-key`; keys in clear are refused"
            )
        yield hashed, tenant


def _rates_of(entry: Any, path: str | Path) -> RateLimits:
    """One tenant's own bounds. None of them may be 0: a tenant that may ask nothing has no key."""
    rates = {name: entry.get(name) for name in RATES}
    for name, rate in rates.items():
        if rate is not None and (type(rate) is not int or not 1 <= rate <= RATE_PER_MINUTE_MAX):
            raise _invalid(
                path, f"tenant {entry['name']!r}: {name} must lie in 1..{RATE_PER_MINUTE_MAX}, not {rate!r:.40}"
            )
    return RateLimits(**rates)


def _invalid(path: str | Path, why: str) -> ConfigInvalid:
    return ConfigInvalid("tenants_file", f"{path} {why}")
