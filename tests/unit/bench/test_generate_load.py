"""The open loop on virtual time: when requests go out, what is counted, and how it ends."""

import asyncio
from itertools import count

import pytest
from virtual_loop import run_virtual

from headrace.bench import generate_load as loop
from headrace.bench.generate_load import LoadBounds, generate_load
from headrace.bench.planned_requests import PlannedRequest
from headrace.bench.serving_tally import LoadTally, Slo
from headrace.bench.serving_targets import AnswerUsage, RequestFailed, TokenArrived
from headrace.core.errors import Overloaded

SLO = Slo(ttft_ms=1_500, itl_ms=300)


class ScriptedTarget:
    """Answers after a time of its own, token by token; remembers when it was asked."""

    def __init__(self, clock, *, first_s=1.0, token_s=0.25, fails=lambda number: None):
        self.asked_s, self.open = [], 0
        self._clock, self._first_s, self._token_s, self._fails = clock, first_s, token_s, fails

    async def stream(self, request, *, timeout_s):
        self.asked_s.append(self._clock.now_s())
        error = self._fails(len(self.asked_s) - 1)
        self.open += 1
        try:
            await asyncio.sleep(self._first_s)
            if error is not None:
                raise error
            for number in range(request.max_tokens):
                if number:
                    await asyncio.sleep(self._token_s)
                yield TokenArrived()
            yield AnswerUsage(len(request.prompt), request.max_tokens, {"device": 3})
        finally:
            self.open -= 1


def make_requests(*, gap_s=0.5, max_tokens=5):
    return (PlannedRequest(number * gap_s, (1, 2, 3, 4), max_tokens) for number in count())


def send(requests, *, bounds, target=None, stop_after_s=None, **script):
    """Run one load; (tally, target, seconds)."""

    async def main(clock):
        tally, stop = LoadTally(SLO), asyncio.Event()
        used = target or ScriptedTarget(clock, **script)
        if stop_after_s is not None:
            asyncio.get_running_loop().call_later(stop_after_s, stop.set)
        started_s = clock.now_s()
        await generate_load(
            requests, used, bounds=bounds, tally=tally, stop=stop, clock=clock, report=lambda line: None
        )
        assert used.open == 0
        return tally, [at_s - started_s for at_s in used.asked_s], clock.now_s() - started_s

    return run_virtual(main, seed=1)


def bounds(requests_max=None, duration_s=None, timeout_s=60.0):
    return LoadBounds(requests_max=requests_max, duration_s=duration_s, timeout_s=timeout_s)


def test_requests_go_out_at_their_times_however_slow_the_answers_are():
    """Fails when a request waits for an answer: then the second would go out after 20 s."""
    tally, asked_s, seconds = send(make_requests(), bounds=bounds(10), first_s=19.0)
    assert asked_s == pytest.approx([number * 0.5 for number in range(10)])
    assert (tally.sent, tally.finished, tally.not_sent, tally.kept_arrivals) == (10, 10, 0, True)
    assert seconds == pytest.approx(9 * 0.5 + 19 + 4 * 0.25)


def test_every_time_is_counted_by_its_formula():
    """Fails when a distribution is of something else than `serving_tally` says."""
    tally, _, _ = send(make_requests(max_tokens=5), bounds=bounds(4))
    found = tally.as_json()
    assert found["ttft_ms"]["mean"] == pytest.approx(1_000)
    assert found["itl_ms"]["mean"] == found["tpot_ms"]["mean"] == pytest.approx(250)
    assert found["e2e_ms"]["mean"] == pytest.approx(2_000)
    assert (tally.itl.count, tally.ttft.count) == (16, 4)
    assert found["throughput"]["output_tokens_per_s"] == pytest.approx(20 / 3.5)
    assert found["goodput"]["share_of_sent"] == 1
    assert found["cached_share"] == {"device": 0.75, "total": 0.75}


@pytest.mark.parametrize(("script", "good"), [({"first_s": 1.6}, 0), ({"token_s": 0.31}, 0), ({"first_s": 1.4}, 4)])
def test_goodput_needs_both_targets(script, good):
    assert send(make_requests(), bounds=bounds(4), **script)[0].good == good


def test_a_duration_ends_the_sending_and_not_the_answers():
    tally, asked_s, _ = send(make_requests(), bounds=bounds(duration_s=3.1))
    assert (len(asked_s), tally.finished) == (7, 7)


def test_failures_are_counted_by_kind_and_in_no_throughput():
    """Fails when an error ends the load, or a failed answer counts as one."""
    errors = {1: Overloaded("full", retry_after_ms=5), 2: RequestFailed("http_503_overloaded", "full"), 5: None}
    tally, asked_s, _ = send(make_requests(), bounds=bounds(6), fails=errors.get)
    assert len(asked_s) == 6
    assert tally.errors == {"Overloaded": 1, "http_503_overloaded": 1}
    assert (tally.finished, tally.completion_tokens) == (4, 20)


def test_a_request_without_an_answer_ends_at_its_deadline():
    tally, _, seconds = send(make_requests(), bounds=bounds(2, timeout_s=8.0), first_s=1e6)
    assert tally.errors == {"DeadlineExceeded": 2}
    assert seconds == pytest.approx(8.5)


def test_the_end_by_the_user_keeps_what_was_measured():
    """Fails when Ctrl-C loses the answers before it, waits for those under way, or leaves one open."""
    tally, _, seconds = send(make_requests(), bounds=bounds(), stop_after_s=4.1)
    assert seconds == pytest.approx(4.1)
    assert (tally.sent, tally.finished, tally.interrupted) == (9, 5, 4)
    assert tally.as_json()["requests"]["interrupted"] == 4


def test_a_generator_that_is_late_is_seen_and_makes_its_own_figures_worse():
    """Fails for coordinated omission: when lateness is left out of the times, or of the verdict."""

    class Slow:
        """Prompts take their time: the loop that sends is held up by as much."""

        def __init__(self, clock):
            self.clock = clock

        def __iter__(self):
            for request in make_requests(gap_s=0.01):
                self.clock.advance(0.1)
                yield request

    async def main(clock):
        tally = LoadTally(SLO)
        await generate_load(
            Slow(clock),
            ScriptedTarget(clock),
            bounds=bounds(20),
            tally=tally,
            stop=asyncio.Event(),
            clock=clock,
            report=lambda line: None,
        )
        return tally

    tally = run_virtual(main, seed=1)
    assert not tally.kept_arrivals
    assert tally.as_json()["generator"]["lag_ms"]["max"] > 1_500
    assert tally.as_json()["ttft_ms"]["max"] > 2_500


def test_what_is_under_way_is_bounded_and_the_rest_is_said_to_be_not_sent():
    """Fails when memory grows with a system that does not answer."""
    over = 40
    tally, asked_s, _ = send(make_requests(gap_s=0.001), bounds=bounds(loop.IN_FLIGHT_MAX + over), first_s=30.0)
    assert (len(asked_s), tally.not_sent) == (loop.IN_FLIGHT_MAX, over)
    assert not tally.kept_arrivals
