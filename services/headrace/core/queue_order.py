"""Whose prompt is computed next when several wait: by priority, fair between accounts, shortest first, none for ever.

Pure: times and amounts come in, an order goes out. An account is a trust group. The rules, first to last:

1. The higher level goes first. A level is the request's priority, one more for each `PRIORITY_LIFT_S` that nobody of
   its account and priority was served: high priorities delay low ones and never shut them out.
2. Within a level, the account that has had less. What an account had is counted in tokens while it competes (virtual
   token counters: Sheng et al., Fairness in Serving Large Language Models, OSDI 2024): prompt tokens computed, and
   tokens generated at twice that. Who comes after a pause is counted as having had as much as the least served who
   waits: a pause earns nothing. Differences below `FAIR_QUANTUM_TOKENS` do not count, so that light use by several
   tenants is ordered by rule 3 alone.
3. Within an account, the least remaining work, less `AGEING_PER_S` for each second that the prompt has waited.
"""

from collections.abc import Iterable
from dataclasses import dataclass

from headrace.core.limits import FAIR_ACCOUNTS_MAX, PRIORITY_MAX

# A waiting prompt's remaining work counts less by this much for each second that it waits: no prompt waits for ever.
AGEING_PER_S = 0.5

# How long a priority waits unserved until it counts as the next higher one.
PRIORITY_LIFT_S = 30.0

# By how much accounts may differ before the one that had less goes first: some ten steps of a prompt, so that two long
# prompts of two tenants are not computed in turns, which would make both late.
FAIR_QUANTUM_TOKENS = 2_048

# What a generated token counts as, in prompt tokens (VTC's weight, as in the prices of this field).
GENERATED_TOKEN_WEIGHT = 2


def shortest_first(work_s: float, waited_s: float) -> float:
    """The rank of a waiting prompt, lowest first: its remaining work in seconds, with ageing."""
    return work_s - AGEING_PER_S * waited_s


@dataclass(frozen=True, slots=True, eq=False)
class Claim:
    """One prompt's claim to be served. Told apart by identity."""

    account: str
    priority: int
    queued_s: float  # when the prompt came

    def __post_init__(self) -> None:
        assert -PRIORITY_MAX <= self.priority <= PRIORITY_MAX


@dataclass(frozen=True, slots=True)
class Waiting:
    """A claim and what serving it takes now."""

    claim: Claim
    work_s: float
    serial: int  # breaks ties: lower first


class ServiceOrder:
    """What each account had while others waited, and the order that follows. Times come from one clock."""

    def __init__(self) -> None:
        self._used: dict[str, float] = {}  # tokens; of accounts that wait, or that are ahead of the least served
        self._level_used = 0.0  # what the least served of those who wait had; never falls
        self._waiting: dict[str, dict[int, set[Claim]]] = {}  # account -> priority -> claims
        self._served_s: dict[tuple[str, int], float] = {}  # since when nobody of that account and priority was served

    def enter(self, claim: Claim, now_s: float) -> None:
        """The claim waits from now on. Idempotent."""
        if claim.account not in self._waiting:
            self._used[claim.account] = max(self._used.get(claim.account, 0.0), self._level_used)
        claims = self._waiting.setdefault(claim.account, {}).setdefault(claim.priority, set())
        if not claims:
            self._served_s[claim.account, claim.priority] = now_s
        claims.add(claim)

    def leave(self, claim: Claim) -> None:
        """The claim waits no more: served, or given up. Idempotent."""
        by_priority = self._waiting.get(claim.account, {})
        claims = by_priority.get(claim.priority, set())
        if claim not in claims:
            return
        self._raise_level()
        claims.remove(claim)
        if not claims:
            del by_priority[claim.priority]
            del self._served_s[claim.account, claim.priority]
        if not by_priority:
            del self._waiting[claim.account]
        self._forget()

    def admitted(self, claim: Claim, now_s: float) -> None:
        """The claim got what it waited for; nothing is charged for it yet."""
        if (claim.account, claim.priority) in self._served_s:
            self._served_s[claim.account, claim.priority] = now_s
        self.leave(claim)

    def computed(self, claim: Claim, tokens: int, now_s: float) -> None:
        """Prompt tokens of the claim were computed."""
        assert tokens >= 0
        if (claim.account, claim.priority) in self._served_s:
            self._served_s[claim.account, claim.priority] = now_s
        self._charge(claim.account, tokens)

    def generated(self, claim: Claim, tokens: int) -> None:
        """Output tokens were given to the claim's request; it need not wait any more."""
        assert tokens >= 0
        self._charge(claim.account, GENERATED_TOKEN_WEIGHT * tokens)

    def in_order(self, waiting: Iterable[Waiting], now_s: float) -> list[Waiting]:
        """The same, first to be served first."""
        self._raise_level()
        return sorted(waiting, key=lambda each: self._key(each, now_s))

    def used_tokens(self, account: str) -> float:
        """What an account counts as having had."""
        return max(self._used.get(account, 0.0), self._level_used)

    def check_integrity(self) -> None:
        """Whoever waits is accounted for, nothing is kept that says nothing."""
        assert {(a, p) for a, by_priority in self._waiting.items() for p in by_priority} == set(self._served_s)
        assert all(claims for by_priority in self._waiting.values() for claims in by_priority.values())
        assert all(by_priority for by_priority in self._waiting.values())
        assert set(self._waiting) <= set(self._used)
        assert len(self._used) - len(self._waiting) <= FAIR_ACCOUNTS_MAX

    def _key(self, each: Waiting, now_s: float) -> tuple[int, int, float, int]:
        claim = each.claim
        unserved_s = now_s - self._served_s.get((claim.account, claim.priority), now_s)
        level = claim.priority + int(unserved_s / PRIORITY_LIFT_S)
        ahead = int((self.used_tokens(claim.account) - self._level_used) / FAIR_QUANTUM_TOKENS)
        return -level, ahead, shortest_first(each.work_s, now_s - claim.queued_s), each.serial

    def _charge(self, account: str, tokens: int) -> None:
        self._used[account] = self.used_tokens(account) + tokens

    def _raise_level(self) -> None:
        if self._waiting:
            self._level_used = max(self._level_used, min(self._used[account] for account in self._waiting))

    def _forget(self) -> None:
        """Accounts that are not ahead of the least served need no entry; of too many others, the least ahead go."""
        idle = [account for account in self._used if account not in self._waiting]
        for account in idle:
            if self._used[account] <= self._level_used:
                del self._used[account]
        ahead = sorted((account for account in idle if account in self._used), key=lambda each: self._used[each])
        for account in ahead[: max(0, len(ahead) - FAIR_ACCOUNTS_MAX)]:
            del self._used[account]
