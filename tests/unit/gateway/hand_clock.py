"""Time that passes only when a test says so."""

from dataclasses import dataclass


@dataclass
class HandClock:
    """A Clock that stands still until a test moves it."""

    seconds: float = 1_000.0

    def now_s(self) -> float:
        return self.seconds

    def unix_ms(self) -> int:
        return round(self.seconds * 1_000)
