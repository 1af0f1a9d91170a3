"""Goodput: how many requests a gateway serves within the latencies that their senders were promised.

    A request is good when it ended well, its first token was passed on within `ttft_slo_ms` of its acceptance, and in
    each of its choices the mean gap between tokens, (last - first) / (tokens - 1), is at most `itl_slo_ms`.

A target of 0 is none. Goodput is good requests per second; its share is good ones of all that were not invalid. The
mean gap, not the worst, as in the studies that use the word (DistServe, OSDI 2024): readers keep up with a stream.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from headrace.core.clock import Clock
from headrace.core.errors import InvalidRequest, Overloaded, RateLimited, TenantOverShare


class RequestOutcome(StrEnum):
    """How a client's request ended."""

    FINISHED = "finished"
    FAILED = "failed"
    CANCELLED = "cancelled"  # its client has left
    REFUSED = "refused"  # the system or the tenant had no room
    INVALID = "invalid"  # the request could not be served by anybody


class RequestObserver(Protocol):
    """What is counted of requests; `compose.py` joins it to metrics."""

    def ended(self, outcome: RequestOutcome, *, is_good: bool) -> None:
        """One client request is over."""
        ...

    def refused(self, tenant: str, reason: str) -> None:
        """One of a tenant's requests had to be refused, for one of `refusal_reason`."""
        ...

    def call_refused(self, error: Exception) -> None:
        """A call of any API, admin calls too, ended with an error before anything was passed on."""
        ...


def refusal_reason(error: Overloaded) -> str:
    """Why a request found no room: one of its tenant's rates by name, `share` or `full`."""
    if isinstance(error, RateLimited):
        return error.limit
    return "share" if isinstance(error, TenantOverShare) else "full"


@dataclass(frozen=True, slots=True)
class LatencyTargets:
    """What a request is promised; 0 promises nothing."""

    ttft_s: float = 0.0
    itl_s: float = 0.0


@dataclass(slots=True)
class _ChoiceTimes:
    first_s: float
    last_s: float
    tokens: int = 1


class RequestTimes:
    """When the tokens of one request were passed on."""

    def __init__(self, *, choices: int, clock: Clock) -> None:
        self._clock = clock
        self._accepted_s = clock.now_s()
        self._choices: dict[int, _ChoiceTimes] = {}
        self._unfinished = choices

    def see(self, choice: int, *, is_token: bool) -> None:
        """One token of a choice is passed on now, or its end."""
        if not is_token:
            self._unfinished -= 1
            return
        now_s = self._clock.now_s()
        times = self._choices.get(choice)
        if times is None:
            self._choices[choice] = _ChoiceTimes(now_s, now_s)
        else:
            times.last_s = now_s
            times.tokens += 1

    @property
    def all_finished(self) -> bool:
        """Whether everything was passed on, whoever closes the stream after that."""
        return self._unfinished == 0

    def meet(self, targets: LatencyTargets) -> bool:
        """Whether the tokens came within the targets."""
        choices = self._choices.values()
        first_s = min((times.first_s for times in choices), default=self._clock.now_s())
        if targets.ttft_s and first_s - self._accepted_s > targets.ttft_s:
            return False
        if not targets.itl_s:
            return True
        return all(times.last_s - times.first_s <= targets.itl_s * (times.tokens - 1) for times in choices)


@contextmanager
def observed_request(
    observer: RequestObserver, targets: LatencyTargets, *, tenant: str, choices: int, clock: Clock
) -> Iterator[RequestTimes]:
    """Time one request, and tell the observer how it ended, however that is."""
    times = RequestTimes(choices=choices, clock=clock)
    outcome = RequestOutcome.CANCELLED  # what is not an error of ours is the consumer's leaving
    try:
        yield times
        outcome = RequestOutcome.FINISHED
    except InvalidRequest:
        outcome = RequestOutcome.INVALID
        raise
    except Overloaded as refused:
        outcome = RequestOutcome.REFUSED
        observer.refused(tenant, refusal_reason(refused))
        raise
    except Exception:
        outcome = RequestOutcome.FAILED
        raise
    finally:
        if times.all_finished:
            outcome = RequestOutcome.FINISHED
        observer.ended(outcome, is_good=outcome is RequestOutcome.FINISHED and times.meet(targets))
