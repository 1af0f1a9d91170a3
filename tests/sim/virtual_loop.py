"""An asyncio event loop on virtual time: it never waits, it jumps to the next timer.

A program that waits for something that no timer and no ready callback will ever bring is deadlocked; here that raises
`Deadlocked` at once, instead of hanging. Work for threads runs inline, a seeded moment later, so that a whole run is
one sequence of steps that its seed determines.
"""

import asyncio
import random
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class Deadlocked(AssertionError):
    """Something waits, and nothing is left that could wake it."""


class VirtualClock:
    """A `Clock` that only the loop moves."""

    def __init__(self) -> None:
        self._now_s = 1_000.0

    def now_s(self) -> float:
        return self._now_s

    def unix_ms(self) -> int:
        return 1_700_000_000_000 + round(self._now_s * 1000)

    def advance(self, seconds: float) -> None:
        assert seconds >= 0
        self._now_s += seconds


class _JumpingSelector(selectors.BaseSelector):
    """Watches nothing. "Waiting" for `timeout` seconds moves the clock by as much."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock = clock
        self._keys: dict[Any, selectors.SelectorKey] = {}

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        fd = fileobj if isinstance(fileobj, int) else fileobj.fileno()
        self._keys[fileobj] = selectors.SelectorKey(fileobj, fd, events, data)
        return self._keys[fileobj]

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        return self._keys.pop(fileobj)

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise Deadlocked("every task waits and no timer is set")
        self._clock.advance(timeout)
        return []

    def get_map(self) -> dict[Any, selectors.SelectorKey]:
        return self._keys


class VirtualLoop(asyncio.SelectorEventLoop):
    """Virtual time and inline threads. `rng` decides how long thread work takes."""

    def __init__(self, clock: VirtualClock, rng: random.Random, *, stalls: float) -> None:
        self._clock = clock
        self._rng = rng
        self._stalls = stalls
        super().__init__(_JumpingSelector(clock))

    def time(self) -> float:
        return self._clock.now_s()

    def run_in_executor(self, executor: Any, func: Callable[..., Any], *args: Any) -> Any:
        """Run `func` within 5 ms, or (one time in ten, as a rule) 200 ms later. Cancelling does not stop it, as it does
        not stop a thread."""
        result = self.create_future()

        def work() -> None:
            try:
                value = func(*args)
            except Exception as error:
                if not result.cancelled():
                    result.set_exception(error)
            else:
                if not result.cancelled():
                    result.set_result(value)

        self.call_later(0.2 if self._rng.random() < self._stalls else self._rng.uniform(0, 0.005), work)
        return result


def run_virtual(
    main: Callable[[VirtualClock], Coroutine[Any, Any, Result]],
    *,
    seed: int,
    clock: VirtualClock | None = None,
    stalls: float = 0.1,
) -> Result:
    """Run `main(clock)` to its end on a loop of its own. Errors that asyncio would only log fail the run too."""
    clock = clock or VirtualClock()
    loop = VirtualLoop(clock, random.Random(seed), stalls=stalls)
    unhandled: list[dict[str, Any]] = []
    loop.set_exception_handler(lambda loop, context: unhandled.append(context))
    try:
        result = loop.run_until_complete(main(clock))
        left = asyncio.all_tasks(loop)
        assert not left, f"tasks outlived the run: {left}"
        loop.run_until_complete(loop.shutdown_asyncgens())
    finally:
        loop.close()
    assert not unhandled, f"errors that nobody handled: {unhandled}"
    return result
