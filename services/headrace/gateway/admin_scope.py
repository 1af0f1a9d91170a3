"""What one caller of the admin API may see and change: its own trust group's blocks, or everything.

The admin service asks this object and nothing else about tenants. Without a tenants file there is one scope, which is
everything, and all answers are as they would be without tenants.
"""

from dataclasses import dataclass

from headrace.core.block import Namespace
from headrace.core.errors import InvalidRequest, PermissionDenied
from headrace.core.tenants import KeyRing, Tenant


@dataclass(frozen=True, slots=True)
class AdminScope:
    """`trust_groups`: where a prefix is looked for and what is listed; "" is the deployment's own group. `sees_all`:
    whether blocks of no group here (a tenant that has left the file, say) are seen too."""

    tenant: Tenant
    trust_groups: tuple[str, ...]
    sees_all: bool
    tenants: tuple[Tenant, ...] = ()

    def namespaces(self, base: Namespace) -> tuple[Namespace, ...]:
        """A model's namespace as each of the groups in sight has it."""
        return tuple(base.narrowed("", trust_group=group) for group in self.trust_groups)

    def of_tenant(self, name: str) -> "AdminScope":
        """This scope cut down to one tenant's trust group. Raises InvalidRequest for a tenant that is not in sight."""
        group = next((t.trust_group for t in self.tenants if t.name == name), None)
        if group is None or group not in self.trust_groups:
            raise InvalidRequest(f"there is no tenant {name[:80]!r}", param="tenant")
        return AdminScope(self.tenant, (group,), sees_all=False, tenants=self.tenants)

    def require_all(self, what: str) -> None:
        """Raise PermissionDenied unless the caller may see everything; `what` completes "may not"."""
        if not self.sees_all:
            raise PermissionDenied(what)


def admin_scope(tenant: Tenant, key_ring: KeyRing | None) -> AdminScope:
    """The scope of a caller whose key has been checked."""
    tenants = (tenant,) if key_ring is None else key_ring.tenants
    if not tenant.is_admin:
        return AdminScope(tenant, (tenant.trust_group,), sees_all=False, tenants=tenants)
    named = () if key_ring is None else key_ring.trust_groups
    groups = dict.fromkeys(("", *named))  # "": blocks from before there were tenants
    return AdminScope(tenant, tuple(groups), sees_all=True, tenants=tenants)
