"""Who is let in: bounds in all and per tenant, what the refused are told, and refusing before the queue is too long."""

import asyncio
from collections import Counter
from contextlib import ExitStack
from dataclasses import replace

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from tiny_gateway import make_worker_record, tiny_gateway

from headrace.config import GatewaySettings
from headrace.core.clock import SystemClock
from headrace.core.errors import Overloaded, TenantOverShare
from headrace.core.limits import RETRY_AFTER_MS_MAX
from headrace.core.rate_limits import RateAccounts
from headrace.core.tenants import EVERYBODY, HashedKey, KeyRing, Tenant, new_key
from headrace.gateway.admit_request import Places, admit_request, refuse_late
from headrace.gateway.goodput import RequestOutcome
from headrace.telemetry.metrics import REFUSAL_REASONS
from headrace.wire.client_request import ClientRequest, SamplingOptions, TokenPrompt

FLOOD, OTHER = Tenant("flood", "tenant:flood"), Tenant("other", "tenant:other")
PROMPT = TokenPrompt(tuple(range(1, 31)))


def make_places(*, requests: int = 8, tokens: int = 1_000, shared: bool = True, queue_s: float = 0.0) -> Places:
    return Places(
        requests_max=requests,
        prompt_tokens_max=tokens,
        is_shared=lambda: shared,
        queue_s=lambda: queue_s,
        rates=RateAccounts(SystemClock()),
    )


def test_a_tenant_that_floods_leaves_room_for_a_newcomer():
    """Fails when places go to whoever comes first: the newcomer would find none."""
    places = make_places()
    with ExitStack() as held:
        for _ in range(4):
            held.enter_context(admit_request(FLOOD, places))
        with pytest.raises(TenantOverShare):
            held.enter_context(admit_request(FLOOD, places))
        held.enter_context(admit_request(OTHER, places))
        with pytest.raises(TenantOverShare):
            held.enter_context(admit_request(FLOOD, places))
        places.check_integrity()
    assert places.num_requests == 0


def test_a_single_tenant_may_have_every_place():
    """Fails when a deployment without tenants can use only half of itself."""
    places = make_places(shared=False)
    with ExitStack() as held:
        for _ in range(8):
            held.enter_context(admit_request(EVERYBODY, places))
        with pytest.raises(Overloaded) as refusal:
            held.enter_context(admit_request(EVERYBODY, places))
        assert not isinstance(refusal.value, TenantOverShare)


def test_prompts_are_bounded_by_tokens_too_and_one_alone_is_let_in():
    places = make_places(shared=False)
    with ExitStack() as held:
        first, second = (held.enter_context(admit_request(EVERYBODY, places)) for _ in range(2))
        first.hold_prompt(5_000)
        with pytest.raises(Overloaded, match="5000 tokens"):
            second.hold_prompt(1)
        places.check_integrity()
    assert (places.num_requests, places.num_prompt_tokens) == (0, 0)


def test_a_tenants_tokens_leave_room_for_others():
    """Fails when a few huge prompts of one tenant take all that there is."""
    places = make_places()
    with ExitStack() as held:
        for tokens in (300, 200):
            held.enter_context(admit_request(FLOOD, places)).hold_prompt(tokens)
        with pytest.raises(TenantOverShare):
            held.enter_context(admit_request(FLOOD, places)).hold_prompt(200)
        held.enter_context(admit_request(OTHER, places)).hold_prompt(400)
        assert places.num_prompt_tokens == 900


@settings(max_examples=60, deadline=None)
@given(st.lists(st.tuples(st.sampled_from("aabcd"), st.sampled_from([True, *[False] * 4])), min_size=20, max_size=80))
@example([(name, False) for name in "aaaaaaabbbbcccdda"])
def test_no_tenant_takes_the_last_place_from_one_that_has_none(steps):
    """Whatever comes and goes: a tenant without a request finds a place until all are taken by at least two others."""
    places, held = make_places(requests=12), []
    for name, leaves in steps:
        tenant = Tenant(name, name)
        if leaves and held:
            held.pop(0)[1].close()
            continue
        mine, free = Counter(n for n, _ in held), 12 - places.num_requests
        scope = ExitStack()
        try:
            scope.enter_context(admit_request(tenant, places))
            held.append((name, scope))
        except TenantOverShare:
            assert mine[name] >= free > 0
        except Overloaded:
            assert free == 0
        places.check_integrity()
        assert places.num_requests == len(held) <= 12
    for _, scope in held:
        scope.close()
    assert places.num_requests == 0


@pytest.mark.parametrize(("queue_s", "expected_ms"), [(0.0, 1_000), (12.5, 12_500), (1e6, RETRY_AFTER_MS_MAX)])
def test_the_refused_are_told_to_come_back_when_the_shortest_queue_is_done(queue_s, expected_ms):
    """Fails when the time to come back is a constant."""
    with pytest.raises(Overloaded) as refusal, admit_request(EVERYBODY, make_places(requests=0, queue_s=queue_s)):
        pass
    assert refusal.value.retry_after_ms == expected_ms


@pytest.mark.parametrize(("ttft_s", "shed_ms", "retry_ms"), [(9.0, 2_000, 7_000), (2.1, 2_000, 1_000), (9.0, 0, None)])
def test_a_request_is_refused_when_it_would_be_late_and_only_then(ttft_s, shed_ms, retry_ms):
    if retry_ms is None:
        refuse_late(ttft_s, shed_ttft_ms=shed_ms)
        return
    with pytest.raises(Overloaded) as refusal:
        refuse_late(ttft_s, shed_ttft_ms=shed_ms)
    assert refusal.value.retry_after_ms == retry_ms


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


def ask(**options) -> ClientRequest:
    return ClientRequest(model="tiny", prompt=PROMPT, sampling=SamplingOptions(max_tokens=3), **options)


async def collect(gateway, request, tenant=EVERYBODY):
    return [event async for event in gateway.service.generate(request, tenant)]


async def test_the_gateway_sheds_when_even_the_best_worker_is_too_far_behind(model_path):
    """Fails when queues are let grow beyond what is offered, or an idle worker beside a busy one is not seen."""
    busy, idle = (make_worker_record("d0", queue_s=3_000.0), make_worker_record("d1"))
    offered, seen = GatewaySettings(local_prefill_tokens=64, shed_ttft_ms=5_000), Remembered()
    late = (busy, replace(busy, worker_id="d2"))
    async with tiny_gateway(*late, model_path=model_path, settings=offered, requests=seen) as gateway:
        with pytest.raises(Overloaded, match="more than 5 s is not offered") as refusal:
            await collect(gateway, ask())
        assert refusal.value.retry_after_ms == RETRY_AFTER_MS_MAX
        assert seen.ends == [(RequestOutcome.REFUSED, False)]
        gateway.assert_at_rest()
    async with tiny_gateway(busy, idle, model_path=model_path, settings=offered) as gateway:
        assert await collect(gateway, ask())
        assert not gateway.worker("d0").calls


async def test_a_flooding_tenant_is_refused_and_another_is_served(model_path):
    """Fails when the gateway does not know whose request it is."""
    ring = KeyRing(tuple((HashedKey.of(new_key()), tenant) for tenant in (FLOOD, OTHER)))
    async with tiny_gateway(make_worker_record("d0"), model_path=model_path, inflight_max=4, key_ring=ring) as gateway:
        gateway.worker("d0").hangs = True
        held = [asyncio.create_task(collect(gateway, ask(timeout_ms=60_000), FLOOD)) for _ in range(2)]
        async with asyncio.timeout(60):
            while len(gateway.worker("d0").calls) < 2:  # noqa: ASYNC110 - the worker tells nobody
                await asyncio.sleep(0.01)
        with pytest.raises(TenantOverShare):
            await collect(gateway, ask(), FLOOD)
        gateway.worker("d0").hangs = False
        assert await collect(gateway, ask(), OTHER)
        for task in held:
            task.cancel()
        await asyncio.gather(*held, return_exceptions=True)
        gateway.assert_at_rest()
        assert gateway.service.places.num_prompt_tokens == 0
