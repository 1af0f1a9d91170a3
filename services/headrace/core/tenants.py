"""Tenants: who a caller is, by its API key, and with whom it shares blocks.

API key -> tenant -> trust group. The server decides all three; a caller's `cache_salt` can only narrow its group. Keys
are kept as salted SHA-256 only: they are long random strings, so a slow hash would add nothing but time to every
request. Pure: reading the tenants file (`gateway/read_tenants.py`) and the headers of a call, and what of the cache a
tenant may see (`gateway/admin_scope.py`), is the gateway's.
"""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

from headrace.core.block import Namespace
from headrace.core.budgets import TENANTS_FILE, Budget
from headrace.core.limits import API_KEY_CHARS_MAX, API_KEY_CHARS_MIN, PRIORITY_MAX
from headrace.core.rate_limits import UNLIMITED, RateLimits

KEY_PREFIX = "hr-"  # so that scanners for leaked secrets, and people, know one when they see it
SCHEME = "sha256"
_SPELLED = re.compile(rf"{SCHEME}:([0-9a-f]{{32}}):([0-9a-f]{{64}})")


class TenantRole(StrEnum):
    """USER generates, and sees and evicts its own trust group's blocks; ADMIN sees and evicts everything."""

    USER = "user"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Tenant:
    """Who calls. `trust_group` "" is the deployment's own group, which only a deployment without tenants uses.

    The bounds are those of the trust group on each store node (`core/budgets.py`), equal for all of its tenants.
    """

    name: str
    trust_group: str
    role: TenantRole = TenantRole.USER
    ttl_s: float | None = None  # of blocks of its requests that name no time to live themselves
    bytes_max: int | None = None
    bytes_min: int = 0
    priority_max: int = 0  # the highest that its requests may have; 0 is everybody's normal one
    rates: RateLimits = UNLIMITED  # this tenant's own, also within a group

    @property
    def is_admin(self) -> bool:
        """Whether this caller may see what other groups sent."""
        return self.role is TenantRole.ADMIN


# The one tenant of a deployment without a tenants file: nobody is kept from anything.
EVERYBODY = Tenant(name="default", trust_group="", role=TenantRole.ADMIN, priority_max=PRIORITY_MAX)


@dataclass(frozen=True, slots=True)
class HashedKey:
    """An API key as it is kept: `sha256:<salt>:<digest>`, digest = SHA-256(salt || key), both in hex."""

    salt: bytes  # 16 bytes, drawn for each key: equal keys of two tenants do not show as equal
    digest: bytes

    @classmethod
    def of(cls, key: str) -> "HashedKey":
        """Hash a key under a fresh salt."""
        salt = secrets.token_bytes(16)
        return cls(salt, _digest(salt, key))

    @classmethod
    def parse(cls, spelled: str) -> "HashedKey | None":
        """Read `spell`'s output; None for anything else, a key in clear above all."""
        match = _SPELLED.fullmatch(spelled)
        return match and cls(bytes.fromhex(match[1]), bytes.fromhex(match[2]))

    def spell(self) -> str:
        """The line for the tenants file."""
        return f"{SCHEME}:{self.salt.hex()}:{self.digest.hex()}"

    def matches(self, key: str) -> bool:
        """Whether this is that key, in time that does not depend on how much of the digest is right."""
        return hmac.compare_digest(self.digest, _digest(self.salt, key))


@dataclass(frozen=True, slots=True)
class KeyRing:
    """Every key of a deployment and the tenant it stands for."""

    keys: tuple[tuple[HashedKey, Tenant], ...]
    tenants: tuple[Tenant, ...] = field(init=False)  # every one once, in the order of the file
    trust_groups: tuple[str, ...] = field(init=False)  # of all of them, likewise

    def __post_init__(self) -> None:
        tenants = tuple(dict.fromkeys(tenant for _, tenant in self.keys))
        object.__setattr__(self, "tenants", tenants)
        object.__setattr__(self, "trust_groups", tuple(dict.fromkeys(tenant.trust_group for tenant in tenants)))

    def tenant_of(self, key: str) -> Tenant | None:
        """The tenant whose key this is, or None. Looks at every key: the time does not tell which one matched."""
        found = None
        for hashed, tenant in self.keys:
            if hashed.matches(key):
                found = tenant
        return found


def new_key() -> str:
    """A fresh API key: 256 random bits."""
    return KEY_PREFIX + secrets.token_urlsafe(32)


def is_usable_key(key: str) -> bool:
    """Whether a text can be an API key: printable ASCII without spaces, as headers need, and too long to be guessed."""
    return API_KEY_CHARS_MIN <= len(key) <= API_KEY_CHARS_MAX and all("!" <= c <= "~" for c in key)


def trust_group_of(tenant_name: str, named_group: str | None) -> str:
    """The trust group's full name: the tenant's own, or the one the operator named; neither is spelled as the other."""
    return f"tenant:{tenant_name}" if named_group is None else f"group:{named_group}"


def file_budgets(tenants: Sequence[Tenant], bases: Iterable[Namespace]) -> tuple[Budget, ...]:
    """What the tenants file says of each trust group, with its namespaces for the models in `bases`; for every group,
    also one without bounds, so that nodes tell apart what it has."""
    models = set(bases)
    return tuple(
        Budget(
            account=tenant.trust_group,
            namespaces=tuple(sorted(base.narrowed("", trust_group=tenant.trust_group).id for base in models)),
            bytes_max=tenant.bytes_max,
            bytes_min=tenant.bytes_min,
            set_by=TENANTS_FILE,
        )
        for tenant in {tenant.trust_group: tenant for tenant in tenants}.values()
    )


def _digest(salt: bytes, key: str) -> bytes:
    return hashlib.sha256(salt + key.encode("utf-8", "surrogatepass")).digest()
