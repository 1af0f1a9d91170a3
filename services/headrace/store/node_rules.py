"""By which rules a store node keeps blocks, beside those that are limits for all."""

from dataclasses import dataclass

from headrace.core.eviction import DEFAULT_POLICY, PolicyName
from headrace.core.limits import LEASE_TTL_MS, RESERVATION_TTL_MS


@dataclass(frozen=True, slots=True)
class NodeRules:
    """The two times to live are parameters for tests; everyone else takes the limits."""

    eviction_policy: PolicyName = DEFAULT_POLICY
    pin_share: float = 0.5  # of the arena, for pins
    lease_ttl_ms: int = LEASE_TTL_MS
    reservation_ttl_ms: int = RESERVATION_TTL_MS


DEFAULT_RULES = NodeRules()
