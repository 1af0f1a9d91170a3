"""The tenants file: API keys (hashed), tenants, roles and trust groups, in YAML. See docs/tenants.md.

tenants:
  - name: acme
    keys: ["sha256:<salt>:<digest>"]    # made by `headrace tenants hash-key`
  - name: acme-batch
    trust_group: acme-all               # shares blocks with every tenant of the same trust_group
    keys: [...]
  - name: operator
    role: admin
    keys: [...]
"""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from headrace.core.errors import ConfigInvalid
from headrace.core.limits import API_KEYS_MAX, TENANTS_FILE_BYTES_MAX
from headrace.core.tenants import HashedKey, KeyRing, Tenant, TenantRole, trust_group_of

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,63}")
FIELDS = {"name", "keys", "role", "trust_group"}


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
    except (UnicodeDecodeError, yaml.YAMLError):
        raise _invalid(path, "is not YAML") from None  # the parser's message would quote the line, and so a key
    entries = loaded.get("tenants") if isinstance(loaded, dict) and set(loaded) == {"tenants"} else None
    if not isinstance(entries, list) or not entries:
        raise _invalid(path, "must be a mapping with one key, `tenants`, a list of at least one tenant")
    keys = [pair for entry in entries for pair in _keys_of(entry, path)]
    names = [entry["name"] for entry in entries]
    if len(set(names)) < len(names):
        twice = next(name for name in names if names.count(name) > 1)
        raise _invalid(path, f"tenant {twice!r} stands there twice; give one entry several keys instead")
    if len(keys) > API_KEYS_MAX:
        raise _invalid(path, f"has {len(keys)} keys; at most {API_KEYS_MAX}")
    if len({hashed for hashed, _ in keys}) < len(keys):
        raise _invalid(path, "has the same key line twice; a key stands for one tenant")
    return KeyRing(tuple(keys))


def _keys_of(entry: Any, path: str | Path) -> Iterator[tuple[HashedKey, Tenant]]:
    """One tenant's keys."""
    name = entry.get("name") if isinstance(entry, dict) else None
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise _invalid(path, "every tenant needs a name of 1 to 64 letters, digits, dots, dashes and underscores")
    unknown = sorted(str(field) for field in set(entry) - FIELDS)
    if unknown:
        raise _invalid(path, f"tenant {name!r}: unknown field {unknown[0]!r:.60}; known: {', '.join(sorted(FIELDS))}")
    role, group, spelled = entry.get("role", TenantRole.USER), entry.get("trust_group"), entry.get("keys")
    if not isinstance(role, str) or role not in set(TenantRole):
        raise _invalid(path, f"tenant {name!r}: role must be {' or '.join(TenantRole)}")
    if group is not None and not (isinstance(group, str) and NAME.fullmatch(group)):
        raise _invalid(path, f"tenant {name!r}: trust_group must be a name, as a tenant's")
    if not isinstance(spelled, list) or not spelled:
        raise _invalid(
            path, f"tenant {name!r}: keys must be a list of at least one line of `headrace tenants hash-key`"
        )
    tenant = Tenant(name=name, trust_group=trust_group_of(name, group), role=TenantRole(role))
    for line in spelled:
        hashed = HashedKey.parse(line) if isinstance(line, str) else None
        if hashed is None:
            raise _invalid(
                path, f"tenant {name!r}: a key is not a line of `headrace tenants hash-key`; keys in clear are refused"
            )
        yield hashed, tenant


def _invalid(path: str | Path, why: str) -> ConfigInvalid:
    return ConfigInvalid("tenants_file", f"{path} {why}")
