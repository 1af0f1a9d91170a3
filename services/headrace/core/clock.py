"""Time, in one place: a clock that can be replaced, and deadlines made once at the edge and passed down.

Everything that measures or waits takes a `Clock`, so that the simulator and the tests run the same code on virtual
time. Wall time (`unix_ms`) is only for records that people read; every decision uses the monotonic clock.
"""

import asyncio
import time
from dataclasses import dataclass
from typing import Protocol

from headrace.core.errors import DeadlineExceeded


class Clock(Protocol):
    """Monotonic seconds for decisions, wall milliseconds for records."""

    def now_s(self) -> float: ...

    def unix_ms(self) -> int: ...


class SystemClock:
    """The real clock. `now_s` is CLOCK_MONOTONIC, which all processes of one host share."""

    def now_s(self) -> float:
        return time.monotonic()

    def unix_ms(self) -> int:
        return time.time_ns() // 1_000_000


@dataclass(frozen=True, slots=True)
class Deadline:
    """An instant on a clock after which nobody waits any more."""

    at_s: float
    clock: Clock

    @classmethod
    def after(cls, seconds: float, clock: Clock) -> "Deadline":
        """The instant `seconds` from now."""
        return cls(at_s=clock.now_s() + seconds, clock=clock)

    def left_s(self) -> float:
        """Seconds left; never negative."""
        return max(0.0, self.at_s - self.clock.now_s())

    def capped(self, seconds: float) -> "Deadline":
        """This deadline or `seconds` from now, whichever is earlier."""
        return Deadline(at_s=min(self.at_s, self.clock.now_s() + seconds), clock=self.clock)

    def scope(self, what: str) -> "DeadlineScope":
        """`async with deadline.scope("fetch blocks"):` raises `DeadlineExceeded(what)` when time is up."""
        return DeadlineScope(deadline=self, what=what)


class DeadlineScope:
    """asyncio.timeout with our typed error. Cancellation from outside passes through untouched."""

    def __init__(self, *, deadline: Deadline, what: str) -> None:
        self._deadline = deadline
        self._what = what
        self._timeout: asyncio.Timeout | None = None

    async def __aenter__(self) -> "DeadlineScope":
        self._timeout = asyncio.timeout(self._deadline.left_s())
        await self._timeout.__aenter__()
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        assert self._timeout is not None
        try:
            await self._timeout.__aexit__(kind, error, trace)  # type: ignore[arg-type]
        except TimeoutError:
            raise DeadlineExceeded(what=self._what) from None
