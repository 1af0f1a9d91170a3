"""What a tenant may ask of one gateway per minute and at once, and when it may ask again.

Each rate is a token bucket that holds one minute's worth and fills evenly: whoever was quiet may ask for a minute's
worth at once, and after that as fast as it fills. So the wait of a refused request is known, not guessed. Tokens are
those of the prompt and the most that may come out; what did not come out is given back at the end.

Pure: time comes from the injected clock. Who the tenants are is `core/tenants.py`'s.
"""

from dataclasses import dataclass

from headrace.core.clock import Clock
from headrace.core.errors import ContextExceeded, RateLimited
from headrace.core.front_door_limits import RATE_ACCOUNTS_MAX
from headrace.core.limits import RETRY_AFTER_MS

MINUTE_S = 60.0
ROUNDING = 1e-6  # of a request or a token: what adding up times may cost


@dataclass(frozen=True, slots=True)
class RateLimits:
    """A tenant's bounds on each gateway; None is none."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None  # of prompts and answers together
    concurrent_max: int | None = None  # requests under way


UNLIMITED = RateLimits()


class TokenBucket:
    """A level between 0 and `per_minute` that rises by `per_minute` in a minute. Begins full."""

    def __init__(self, per_minute: int, *, now_s: float) -> None:
        assert per_minute > 0
        self.per_minute = per_minute
        self._level = float(per_minute)
        self._as_of_s = now_s

    def level(self, now_s: float) -> float:
        """What can be taken now."""
        # A clock that is read twice in one step may give the same time, never an earlier one.
        self._level = min(self.per_minute, self._level + (now_s - self._as_of_s) * self.per_minute / MINUTE_S)
        self._as_of_s = now_s
        return self._level

    def wait_s(self, amount: float, now_s: float) -> float:
        """Seconds until `amount` can be taken, 0 when it can be now. `amount` is at most what the bucket holds."""
        assert amount <= self.per_minute
        missing = amount - self.level(now_s)
        return 0.0 if missing <= ROUNDING else missing * MINUTE_S / self.per_minute

    def take(self, amount: float, now_s: float) -> None:
        """Take what `wait_s` says is there."""
        assert self.wait_s(amount, now_s) == 0.0
        self._level = max(0.0, self._level - amount)

    def give_back(self, amount: float, now_s: float) -> None:
        """Put back what was taken and not used."""
        assert amount >= 0
        self._level = min(self.per_minute, self.level(now_s) + amount)

    def resize(self, per_minute: int, now_s: float) -> None:
        """The bound has changed: what was used up stays used up."""
        missing = self.per_minute - self.level(now_s)
        self.per_minute = per_minute
        self._level = max(0.0, per_minute - missing)


@dataclass(slots=True)
class _Account:
    """What one tenant has under way and left."""

    requests: TokenBucket | None = None
    tokens: TokenBucket | None = None
    under_way: int = 0

    def follow(self, limits: RateLimits, now_s: float) -> None:
        """Have the buckets that these bounds ask for: a tenants file may change them at any time."""
        self.requests = _resized(self.requests, limits.requests_per_minute, now_s)
        self.tokens = _resized(self.tokens, limits.tokens_per_minute, now_s)

    def is_at_rest(self, now_s: float) -> bool:
        """Whether a fresh account would say the same."""
        buckets = (self.requests, self.tokens)
        return not self.under_way and all(b is None or b.level(now_s) >= b.per_minute for b in buckets)


def _resized(bucket: TokenBucket | None, per_minute: int | None, now_s: float) -> TokenBucket | None:
    if per_minute is None:
        return None
    if bucket is None:
        return TokenBucket(per_minute, now_s=now_s)
    if bucket.per_minute != per_minute:
        bucket.resize(per_minute, now_s)
    return bucket


class RateAccounts:
    """Every tenant's account in one gateway. For one event loop; nothing waits."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._name_to_account: dict[str, _Account] = {}

    def begin(self, tenant: str, limits: RateLimits) -> None:
        """Count one more request. Raises RateLimited; then nothing is counted. Pair it with `end`."""
        now_s = self._clock.now_s()
        account = self._account(tenant, limits, now_s)
        if limits.concurrent_max is not None and account.under_way >= limits.concurrent_max:
            # When one of them ends is not ours to know: about one short request.
            raise RateLimited(
                "concurrent_max",
                f"{account.under_way} requests of tenant {tenant} are under way",
                retry_after_ms=RETRY_AFTER_MS,
            )
        if account.requests is not None:
            self._take(account.requests, 1, "requests_per_minute", tenant, now_s)
        account.under_way += 1

    def take_tokens(self, tenant: str, *, prompt_tokens: int, output_tokens_max: int) -> int:
        """Take the tokens of a request that has begun: how many, for `end`. Raises RateLimited, and ContextExceeded
        for a request that is larger than a minute's worth and so would wait for ever."""
        account, now_s = self._name_to_account[tenant], self._clock.now_s()
        if account.tokens is None:
            return 0
        asked, most = prompt_tokens + output_tokens_max, account.tokens.per_minute
        if asked > most:
            raise ContextExceeded(
                f"{prompt_tokens} prompt tokens and {output_tokens_max} of answers make {asked}, and tenant {tenant}"
                f" has {most} tokens per minute (tokens_per_minute): this never fits, ask for fewer",
                tokens_max=most,
                param="max_tokens",
            )
        self._take(account.tokens, asked, "tokens_per_minute", tenant, now_s)
        return asked

    def end(self, tenant: str, *, unused_tokens: int, unused_turn: bool = False) -> None:
        """One request is over; give back what it took and did not use."""
        account, now_s = self._name_to_account[tenant], self._clock.now_s()
        account.under_way -= 1
        if account.tokens is not None and unused_tokens > 0:
            account.tokens.give_back(unused_tokens, now_s)
        if account.requests is not None and unused_turn:
            account.requests.give_back(1, now_s)

    def check_integrity(self) -> None:
        """Nothing is below 0, and no bucket holds more than it can."""
        now_s = self._clock.now_s()
        for account in self._name_to_account.values():
            assert account.under_way >= 0
            for bucket in (account.requests, account.tokens):
                assert bucket is None or 0 <= bucket.level(now_s) <= bucket.per_minute

    def _account(self, tenant: str, limits: RateLimits, now_s: float) -> _Account:
        account = self._name_to_account.get(tenant)
        if account is None:
            if len(self._name_to_account) >= RATE_ACCOUNTS_MAX:
                self._forget_those_at_rest(now_s)
            account = self._name_to_account[tenant] = _Account()
        account.follow(limits, now_s)
        return account

    def _forget_those_at_rest(self, now_s: float) -> None:
        """Tenants come from the file alone, so this is about those that have left it."""
        at_rest = [name for name, account in self._name_to_account.items() if account.is_at_rest(now_s)]
        for name in at_rest:
            del self._name_to_account[name]

    def _take(self, bucket: TokenBucket, amount: int, limit: str, tenant: str, now_s: float) -> None:
        wait_s = bucket.wait_s(amount, now_s)
        if wait_s > 0:
            raise RateLimited(
                limit,
                f"tenant {tenant} has used up its {limit} of {bucket.per_minute}",
                # Rounded up: whoever comes back then is let in, unless others of the tenant came first.
                retry_after_ms=int(wait_s * 1000) + 1,
            )
        bucket.take(amount, now_s)
