"""A tenant's own rates at the gateway: refused with a time to come back, settled by what came out, counted, others
served."""

from dataclasses import replace

import pytest
from tiny_gateway import make_worker_record, tiny_gateway

from headrace.core.errors import ContextExceeded, InvalidRequest, Overloaded, RateLimited
from headrace.core.rate_limits import RateLimits
from headrace.core.tenants import Tenant
from headrace.gateway.admit_request import Body
from headrace.gateway.merge_streams import merge_streams
from headrace.telemetry.gateway_metrics import GatewayMetrics
from headrace.telemetry.metrics import Metrics
from headrace.wire.client_request import ClientRequest, SamplingOptions, TokenPrompt

OTHER = Tenant("other", "tenant:other")


def limited(**rates) -> Tenant:
    return Tenant("acme", "tenant:acme", rates=RateLimits(**rates))


def ask(*, max_tokens=3, prompt_tokens=10, **options) -> ClientRequest:
    prompt = TokenPrompt(tuple(range(1, prompt_tokens + 1)))
    return ClientRequest(model="tiny", prompt=prompt, sampling=SamplingOptions(max_tokens=max_tokens), **options)


async def collect(gateway, request, tenant):
    return [event async for event in gateway.service.generate(request, tenant)]


async def test_a_tenant_beyond_its_requests_is_refused_and_counted_and_others_are_served(model_path):
    """Fails when rates are not looked at, hold for all tenants together, or are not counted by tenant and reason."""
    metrics, tenant = Metrics(), limited(requests_per_minute=1)
    options = {"model_path": model_path, "requests": GatewayMetrics(metrics)}
    async with tiny_gateway(make_worker_record("d0"), **options) as gateway:
        await collect(gateway, ask(), tenant)
        with pytest.raises(RateLimited) as refusal:
            await collect(gateway, ask(), tenant)
        assert (refusal.value.limit, 0 < refusal.value.retry_after_ms <= 60_001) == ("requests_per_minute", True)
        await collect(gateway, ask(), OTHER)
        gateway.assert_at_rest()
        gateway.service.places.rates.check_integrity()
    labels = {"tenant": "acme", "reason": "requests_per_minute"}
    assert metrics.registry.get_sample_value("headrace_refused_requests_total", labels) == 1


async def test_tokens_that_did_not_come_out_are_given_back(model_path):
    """Fails when the bound is charged with max_tokens for good."""
    tenant = limited(tokens_per_minute=10_000)
    async with tiny_gateway(make_worker_record("d0"), model_path=model_path) as gateway:
        generating = gateway.service.generate(ask(max_tokens=200, choices=2), tenant)
        async for event in generating:
            if hasattr(event, "delta"):
                break
        account = gateway.service.places.rates._name_to_account["acme"]
        assert account.tokens.level(gateway.clock.now_s()) < 10_000 - 300
        await generating.aclose()
        assert account.tokens.level(gateway.clock.now_s()) >= 10_000 - 10 - 2
        gateway.assert_at_rest()


async def test_a_request_that_the_system_refuses_costs_its_tenant_no_tokens(model_path):
    """Fails when a tenant pays for what was not done."""
    tenant = limited(tokens_per_minute=1_000)
    async with tiny_gateway(make_worker_record("d0"), model_path=model_path) as gateway:
        gateway.worker("d0").fails = Overloaded("the pool is full", retry_after_ms=1)
        with pytest.raises(Overloaded):
            await collect(gateway, ask(max_tokens=200), tenant)
        account = gateway.service.places.rates._name_to_account["acme"]
        assert account.tokens.level(gateway.clock.now_s()) == 1_000
        gateway.assert_at_rest()


async def test_a_request_larger_than_a_minute_is_wrong_and_not_early(model_path):
    async with tiny_gateway(make_worker_record("d0"), model_path=model_path) as gateway:
        with pytest.raises(ContextExceeded, match="never fits"):
            await collect(gateway, ask(max_tokens=200), limited(tokens_per_minute=100))
        assert not gateway.worker("d0").calls
        gateway.assert_at_rest()


async def test_the_tenants_bound_of_requests_at_once_is_given_back_with_each(model_path):
    """Fails when a request that was cancelled keeps its turn."""
    tenant = limited(concurrent_max=1)
    async with tiny_gateway(make_worker_record("d0"), model_path=model_path) as gateway:
        held = gateway.service.generate(ask(), tenant)
        await anext(held)
        with pytest.raises(RateLimited) as refusal:
            await collect(gateway, ask(), tenant)
        assert refusal.value.limit == "concurrent_max"
        await collect(gateway, ask(), replace(tenant, name="acme-2"))
        await held.aclose()
        await collect(gateway, ask(), tenant)
        gateway.assert_at_rest()


async def test_a_body_of_several_prompts_of_which_one_is_refused_costs_its_tenant_nothing(model_path):
    """Fails when the prompts beside a refused one stay charged: the same body would then never be let in."""
    tenant, body = limited(requests_per_minute=2, tokens_per_minute=10_000), Body(num_requests=3)
    async with tiny_gateway(make_worker_record("d0"), model_path=model_path) as gateway:
        gateway.worker("d0").hangs = True  # nothing comes out before the refusal
        streams = [gateway.service.generate(ask(max_tokens=100), tenant, body=body) for _ in range(3)]
        with pytest.raises(RateLimited):
            async for _ in merge_streams(streams):
                pass
        account, now_s = gateway.service.places.rates._name_to_account["acme"], gateway.clock.now_s()
        assert account.requests.level(now_s) >= 2 - 1e-6
        assert account.tokens.level(now_s) >= 10_000 - 1e-6
        gateway.assert_at_rest()


async def test_a_body_of_more_prompts_than_a_tenant_may_ever_have_at_once_is_invalid_not_early(model_path):
    """Fails when it is told to come back, for ever."""
    tenant, body = limited(concurrent_max=2), Body(num_requests=3)
    async with tiny_gateway(make_worker_record("d0"), model_path=model_path) as gateway:
        with pytest.raises(InvalidRequest, match="concurrent_max"):
            await anext(gateway.service.generate(ask(), tenant, body=body))
        gateway.assert_at_rest()
