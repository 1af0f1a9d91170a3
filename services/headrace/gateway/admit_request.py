"""Letting a request in, or refusing it at once: before queues grow, and before one tenant has all of them.

Four bounds, each with a time to come back. Of the first three it follows from the workers' own predictions:

- requests under way, and the tokens of their prompts: when all are taken the system is full (Overloaded);
- a tenant's part of both, where there are several tenants: its trust group may have as many as are still free
  (TenantOverShare). So one that floods gets half, two get a third each, and a newcomer always finds room;
- the predicted time to the first token, where a bound is set: who would wait longer is refused now (Overloaded);
- the tenant's own rates, where the tenants file names some (RateLimited): see `core/rate_limits.py`.

Lives on the event loop; nothing here waits. What a refusal looks like to callers is `wire/status.py`'s.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from headrace.core.errors import InvalidRequest, Overloaded, TenantOverShare, WorkerUnavailable
from headrace.core.limits import GATEWAY_INFLIGHT_MAX, GATEWAY_PROMPT_TOKENS_MAX, RETRY_AFTER_MS, RETRY_AFTER_MS_MAX
from headrace.core.rate_limits import RateAccounts
from headrace.core.tenants import Tenant
from headrace.gateway.worker_table import WorkerTable


@dataclass(slots=True)
class Body:
    """What a client sent at once: several requests, of which one that is refused ends all."""

    num_requests: int = 1
    was_refused: bool = False


@contextmanager
def admit_request(tenant: Tenant, places: "Places", *, body: Body | None = None) -> Iterator["Place"]:
    """Hold one of the gateway's places for as long as the scope lasts. Raises Overloaded, TenantOverShare, RateLimited;
    InvalidRequest for one of more requests than the tenant may ever have at once.

    A request that ends before anything was done for it has its tokens given back to its tenant, not its turn; one that
    ends because another one of its body was refused has both.
    """
    body = body or Body()
    most = tenant.rates.concurrent_max
    if most is not None and body.num_requests > most:
        raise InvalidRequest(
            f"{body.num_requests} prompts at once, and tenant {tenant.name} may have {most} (concurrent_max)",
            param="prompt",
        )
    place = Place(tenant, places)
    places.take(place)
    try:
        places.rates.begin(tenant.name, tenant.rates)
        try:
            yield place
        except (InvalidRequest, Overloaded, WorkerUnavailable):
            place.was_refused = body.was_refused = True
            raise
        finally:
            beside_refused = body.was_refused and not place.was_refused and not place.passed_on_tokens
            place.was_refused |= beside_refused
            places.rates.end(tenant.name, unused_tokens=place.unused_tokens, unused_turn=beside_refused)
    except (InvalidRequest, Overloaded):
        body.was_refused = True
        raise
    finally:
        places.give_back(place)


def refuse_late(ttft_s: float, *, shed_ttft_ms: int) -> None:
    """Raise Overloaded when the first token is predicted later than `shed_ttft_ms` (0: however late it comes).

    The time to come back is what is too much: so much of the queue must be done before the same request is let in.
    """
    if shed_ttft_ms and ttft_s * 1000 > shed_ttft_ms:
        raise Overloaded(
            f"the first token would come in {ttft_s:.1f} s, and more than {shed_ttft_ms / 1000:g} s is not offered",
            retry_after_ms=bounded_retry_ms(ttft_s - shed_ttft_ms / 1000),
        )


def shortest_queue_s(table: WorkerTable) -> float:
    """Predicted seconds of prompts before the worker that has the least of them; 0 when there is none."""
    columns = [table.columns(served) for served in table.models()]
    return min((float(table.queue_s(each).min()) for each in columns), default=0.0)


def bounded_retry_ms(wait_s: float) -> int:
    """A predicted wait as callers are told it: neither at once nor later than anybody can predict."""
    return int(1000 * min(max(RETRY_AFTER_MS / 1000, wait_s), RETRY_AFTER_MS_MAX / 1000))


class Place:
    """One request's place; its prompt counts from when its length is known."""

    def __init__(self, tenant: Tenant, places: "Places") -> None:
        self.account = tenant.trust_group
        self.prompt_tokens = 0
        self.passed_on_tokens = 0  # of answers, so far
        self.was_refused = False
        self._tenant = tenant
        self._places = places
        self._charged_tokens = 0

    def hold_prompt(self, num_tokens: int, *, output_tokens_max: int = 0) -> None:
        """Count the prompt as well, once, and what may come out of it against the tenant's rate. Raises as
        `admit_request`, and ContextExceeded; the place itself stays held."""
        assert self.prompt_tokens == 0
        self._places.take_tokens(self, num_tokens)
        self._charged_tokens = self._places.rates.take_tokens(
            self._tenant.name, prompt_tokens=num_tokens, output_tokens_max=output_tokens_max
        )

    @property
    def unused_tokens(self) -> int:
        """What was counted against the tenant's rate and not used."""
        if self.was_refused and not self.passed_on_tokens:
            return self._charged_tokens
        return max(0, self._charged_tokens - self.prompt_tokens - self.passed_on_tokens)


class Places:
    """The account of what is under way in one gateway."""

    def __init__(
        self,
        *,
        requests_max: int = GATEWAY_INFLIGHT_MAX,
        prompt_tokens_max: int = GATEWAY_PROMPT_TOKENS_MAX,
        is_shared: Callable[[], bool],
        queue_s: Callable[[], float],
        rates: RateAccounts,
    ) -> None:
        """is_shared: whether several trust groups may come. queue_s: of the worker with the shortest queue.
        rates: what each tenant has asked for lately."""
        self.rates = rates
        self._requests_max = requests_max
        self._tokens_max = prompt_tokens_max
        self._is_shared = is_shared
        self._queue_s = queue_s
        self._requests: Counter[str] = Counter()
        self._tokens: Counter[str] = Counter()

    @property
    def num_requests(self) -> int:
        """Requests under way, all stages together; 0 at rest."""
        return self._requests.total()

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of their prompts, as far as these have been tokenised."""
        return self._tokens.total()

    def take(self, place: Place) -> None:
        """Count one more request. Raises Overloaded, TenantOverShare; then nothing is counted."""
        free = self._requests_max - self.num_requests
        if free <= 0:
            raise Overloaded(f"{self.num_requests} requests are under way", retry_after_ms=self._retry_ms())
        mine = self._requests[place.account]
        if self._is_shared() and mine >= free:
            raise TenantOverShare(f"{mine} requests of yours are under way", retry_after_ms=self._retry_ms())
        self._requests[place.account] += 1

    def take_tokens(self, place: Place, num_tokens: int) -> None:
        """Count a prompt. One that is alone is let in whatever its length: what it may have is the model's to say."""
        used = self.num_prompt_tokens
        free = self._tokens_max - used - num_tokens
        if used and free < 0:
            raise Overloaded(f"prompts of {used} tokens are under way", retry_after_ms=self._retry_ms())
        mine = self._tokens[place.account]
        if self._is_shared() and mine and mine + num_tokens > free:
            raise TenantOverShare(f"prompts of {mine} tokens of yours are under way", retry_after_ms=self._retry_ms())
        self._tokens[place.account] += num_tokens
        place.prompt_tokens = num_tokens

    def give_back(self, place: Place) -> None:
        """The request is over."""
        for counter, number in ((self._requests, 1), (self._tokens, place.prompt_tokens)):
            counter[place.account] -= number
            if not counter[place.account]:
                del counter[place.account]

    def check_integrity(self) -> None:
        """Nothing is counted below 0 or without a request."""
        assert all(number > 0 for number in self._requests.values())
        assert all(number >= 0 for number in self._tokens.values())
        assert {account for account, number in self._tokens.items() if number} <= set(self._requests)

    def _retry_ms(self) -> int:
        return bounded_retry_ms(self._queue_s())
