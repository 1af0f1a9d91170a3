"""Whether a server that failed is asked again yet. Pure: time comes from the clock, nothing is sent from here.

    closed --failure--> open (INDEX_PAUSE_MS) --first caller--> probing --success--> closed
                          ^                                        |
                          +----------------- failure --------------+

While it is open, and while another caller probes, nobody waits: a slow server costs one caller its timeout in every
timeout + pause, and all others nothing. Calls that were under way when it opened may each cost their own timeout once.
"""

from enum import Enum

from headrace.core.clock import Clock


class Ticket(Enum):
    """What a caller was let in as; handed back with the outcome."""

    REGULAR = "regular"
    PROBE = "probe"


class CircuitBreaker:
    """One server's recent health, as this process saw it."""

    def __init__(self, *, pause_s: float, clock: Clock) -> None:
        self._pause_s = pause_s
        self._clock = clock
        self._open_until_s: float | None = None  # None: closed
        self._probing = False

    @property
    def is_open(self) -> bool:
        """Whether the server did not answer the last caller who had an outcome."""
        return self._open_until_s is not None

    def admit(self) -> Ticket | None:
        """Let a caller try, or None: fail at once. A ticket must come back by exactly one of the three calls below."""
        if self._open_until_s is None:
            return Ticket.REGULAR
        if self._probing or self._clock.now_s() < self._open_until_s:
            return None
        self._probing = True
        return Ticket.PROBE

    def succeeded(self, ticket: Ticket) -> bool:
        """The server answered. True when that ended an outage."""
        self.abandoned(ticket)
        was_open = self._open_until_s is not None
        self._open_until_s = None
        return was_open

    def failed(self, ticket: Ticket) -> bool:
        """The server did not answer. True when that began an outage."""
        self.abandoned(ticket)
        was_closed = self._open_until_s is None
        self._open_until_s = self._clock.now_s() + self._pause_s
        return was_closed

    def abandoned(self, ticket: Ticket) -> None:
        """The caller went away before there was an outcome; the next one may probe."""
        if ticket is Ticket.PROBE:
            self._probing = False
