"""The breaker's states, on a clock that stands still until it is moved."""

from headrace.index.circuit_breaker import CircuitBreaker, Ticket


class SettableClock:
    def __init__(self) -> None:
        self.time_s = 0.0

    def now_s(self) -> float:
        return self.time_s

    def unix_ms(self) -> int:
        return int(self.time_s * 1000)


def make_open_breaker() -> tuple[CircuitBreaker, SettableClock]:
    clock = SettableClock()
    breaker = CircuitBreaker(pause_s=0.5, clock=clock)
    assert breaker.failed(breaker.admit()) is True
    return breaker, clock


def test_a_healthy_server_is_asked_by_everybody():
    breaker = CircuitBreaker(pause_s=0.5, clock=SettableClock())
    assert [breaker.admit() for _ in range(3)] == [Ticket.REGULAR] * 3
    assert breaker.succeeded(Ticket.REGULAR) is False


def test_after_a_failure_nobody_asks_during_the_pause():
    breaker, clock = make_open_breaker()
    clock.time_s = 0.49
    assert breaker.admit() is None


def test_after_the_pause_one_caller_probes_and_the_others_fail_at_once():
    breaker, clock = make_open_breaker()
    clock.time_s = 0.5
    assert [breaker.admit() for _ in range(3)] == [Ticket.PROBE, None, None]


def test_a_probe_that_succeeds_lets_everybody_in_again():
    breaker, clock = make_open_breaker()
    clock.time_s = 0.5
    assert breaker.succeeded(breaker.admit()) is True
    assert [breaker.admit(), breaker.admit()] == [Ticket.REGULAR] * 2


def test_a_probe_that_fails_starts_another_pause():
    breaker, clock = make_open_breaker()
    clock.time_s = 0.5
    assert breaker.failed(breaker.admit()) is False, "the outage has not begun now"
    clock.time_s = 0.99
    assert breaker.admit() is None
    clock.time_s = 1.0
    assert breaker.admit() is Ticket.PROBE


def test_a_probe_whose_caller_goes_away_leaves_the_place_to_the_next():
    # Fails when a cancelled probe keeps the breaker open for ever.
    breaker, clock = make_open_breaker()
    clock.time_s = 0.5
    breaker.abandoned(breaker.admit())
    assert breaker.admit() is Ticket.PROBE


def test_a_straggler_from_before_the_outage_does_not_end_the_probe_of_another():
    breaker = CircuitBreaker(pause_s=0.5, clock=(clock := SettableClock()))
    straggler = breaker.admit()
    breaker.failed(breaker.admit())
    clock.time_s = 0.5
    assert breaker.admit() is Ticket.PROBE
    breaker.abandoned(straggler)
    assert breaker.admit() is None
