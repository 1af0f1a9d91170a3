"""What counts as a good request, and how every request's end is counted."""

import asyncio
from contextlib import aclosing

import pytest
from hand_clock import HandClock
from tiny_gateway import make_worker_record, tiny_gateway

from headrace.config import GatewaySettings
from headrace.core.errors import InvalidRequest, Overloaded, WorkerUnavailable
from headrace.core.tenants import EVERYBODY
from headrace.gateway.accepted import Accepted
from headrace.gateway.goodput import LatencyTargets, RequestOutcome, RequestTimes, observed_request
from headrace.telemetry.gateway_metrics import GatewayMetrics
from headrace.telemetry.metrics import REFUSAL_REASONS, REQUEST_OUTCOMES, Metrics
from headrace.wire.client_request import ClientRequest, SamplingOptions, TokenPrompt


def served(token_times_s, *, choices=1) -> RequestTimes:
    """A request accepted at 0 whose tokens came at these times: (choice, seconds)."""
    clock = HandClock()
    times, start_s = RequestTimes(choices=choices, clock=clock), clock.seconds
    for choice, at_s in token_times_s:
        clock.seconds = start_s + at_s
        times.see(choice, is_token=True)
    return times


@pytest.mark.parametrize(
    ("tokens", "targets", "good"),
    [
        ([(0, 0.5)], LatencyTargets(ttft_s=0.5), True),
        ([(0, 0.6)], LatencyTargets(ttft_s=0.5), False),
        ([(0, 9.0), (0, 9.1)], LatencyTargets(itl_s=0.2), True),
        ([(0, 0.1), (0, 0.2), (0, 0.7)], LatencyTargets(itl_s=0.31), True),
        ([(0, 0.1), (0, 0.2), (0, 0.7)], LatencyTargets(itl_s=0.29), False),
        ([(0, 0.1), (1, 0.1), (0, 0.2), (1, 0.9)], LatencyTargets(itl_s=0.5), False),
        ([(0, 9.0), (0, 99.0)], LatencyTargets(), True),
    ],
)
def test_a_request_is_good_when_its_first_token_and_its_mean_gaps_are_in_time(tokens, targets, good):
    """Fails when one of several choices, the worst gap or the wait before the first token is what counts."""
    assert served(tokens).meet(targets) is good


class Remembered:
    """A RequestObserver."""

    def __init__(self):
        self.ends = []

    def ended(self, outcome, *, is_good):
        self.ends.append((outcome, is_good))

    def refused(self, tenant, reason):
        assert reason in REFUSAL_REASONS

    def call_refused(self, error):
        """As RequestObserver.call_refused."""


@pytest.mark.parametrize(
    ("error", "outcome"),
    [
        (InvalidRequest("wrong"), RequestOutcome.INVALID),
        (Overloaded("full", retry_after_ms=1), RequestOutcome.REFUSED),
        (WorkerUnavailable("d0", "died"), RequestOutcome.FAILED),
        (asyncio.CancelledError(), RequestOutcome.CANCELLED),
        (GeneratorExit(), RequestOutcome.CANCELLED),
    ],
)
def test_every_end_has_its_outcome_and_none_of_these_is_good(error, outcome):
    seen = Remembered()
    observed = observed_request(seen, LatencyTargets(), tenant="acme", choices=1, clock=HandClock())
    with pytest.raises(type(error)), observed:
        raise error
    assert seen.ends == [(outcome, False)]


def test_the_metrics_know_every_outcome():
    """Fails when an outcome is added that the metric's fixed series lack."""
    assert set(REQUEST_OUTCOMES) == set(RequestOutcome)


async def test_the_gateway_counts_good_requests_and_late_ones_apart(model_path):
    """Fails when requests are not timed, or a client that closes after the last event counts as one that left."""
    metrics, clock = Metrics(), HandClock()
    options = {"model_path": model_path, "requests": GatewayMetrics(metrics), "clock": clock}
    request = ClientRequest(
        model="tiny", prompt=TokenPrompt((1, 2, 3)), sampling=SamplingOptions(max_tokens=3), choices=2
    )
    offered = GatewaySettings(ttft_slo_ms=1_000, itl_slo_ms=20)

    def counts():
        value = metrics.registry.get_sample_value
        ended = {o: value("headrace_client_requests_total", {"outcome": o}) for o in REQUEST_OUTCOMES}
        return {o: n for o, n in ended.items() if n}, value("headrace_good_requests_total")

    async with tiny_gateway(make_worker_record("d0"), settings=offered, **options) as gateway:
        async with aclosing(gateway.service.generate(request, EVERYBODY)) as events:
            left = [event async for event in events]
        assert isinstance(left[0], Accepted)
        assert counts() == ({"finished": 1}, 1)
        async for _ in gateway.service.generate(request, EVERYBODY):
            clock.seconds += 0.03
        assert counts() == ({"finished": 2}, 1)
        async with aclosing(gateway.service.generate(request, EVERYBODY)) as events:
            await anext(events)
            await anext(events)
        assert counts() == ({"finished": 2, "cancelled": 1}, 1)
