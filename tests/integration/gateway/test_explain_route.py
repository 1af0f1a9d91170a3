"""Explanations of routes over real gRPC: what was decided, what happened, and nothing of other tenants."""

import pytest
from admin_kit import admin_over
from tiny_gateway import BLOCK_TOKENS

from headrace.client import AsyncHeadraceClient, Sampling
from headrace.core.errors import InvalidRequest
from headrace.core.tenants import HashedKey, KeyRing, Tenant, TenantRole, new_key

TENANTS = {
    "one": Tenant("one", "tenant:one"),
    "two": Tenant("two", "tenant:two"),
    "operator": Tenant("operator", "tenant:operator", TenantRole.ADMIN),
}
KEYS = {name: new_key() for name in TENANTS}
RING = KeyRing(tuple((HashedKey.of(KEYS[name]), tenant) for name, tenant in TENANTS.items()))
PROMPT = "twenty-four characters.."  # six blocks, of which a repeat can use five


async def test_a_decision_is_explained_with_what_was_predicted_and_what_happened(model_path):
    """Fails when a term is lost on the way, or when prediction and measurement are mixed up."""
    async with admin_over(model_path, "n0") as admin, AsyncHeadraceClient(admin.address) as client:
        cold = await client.generate(PROMPT, sampling=Sampling(max_tokens=3))
        again = await client.generate(PROMPT, sampling=Sampling(max_tokens=3))
        found = await client.explain_route(cold.request_id)
        assert (found.request_id, found.model, found.prompt_tokens) == (cold.request_id, "tiny", 24)
        assert (found.reason, found.attempts, found.num_considered) == ("no_match", 1, 2)
        assert found.chosen.decode_worker == found.outcome.decode_worker
        assert {found.chosen.decode_worker, *(plan.decode_worker for plan in found.others)} == {"d0", "d1"}
        chosen = found.chosen
        assert (chosen.device_tokens, chosen.loaded_tokens, chosen.computed_tokens) == (0, 0, 24)
        assert chosen.compute_s > 0
        assert chosen.ttft_s == pytest.approx(chosen.wait_s + chosen.compute_s)
        assert found.predicted_ttft_s == pytest.approx(chosen.ttft_s + found.overhead_s)
        assert found.outcome.ttft_s is not None
        assert found.outcome.ttft_s > 0
        warm = await client.explain_route(again.request_id)
        assert warm.outcome.cached_tokens == 5 * BLOCK_TOKENS


async def test_a_request_of_another_tenant_is_as_unknown_as_one_that_never_was(model_path):
    """Fails when a user learns that another tenant's request exists, or where it went."""
    async with admin_over(model_path, "n0", key_ring=RING) as admin:
        clients = {name: AsyncHeadraceClient(admin.address, api_key=key) for name, key in KEYS.items()}
        done = await clients["one"].generate(PROMPT, sampling=Sampling(max_tokens=1))
        for name in ("one", "operator"):
            assert (await clients[name].explain_route(done.request_id)).request_id == done.request_id
        errors = []
        for request_id in (done.request_id, "0" * len(done.request_id)):
            with pytest.raises(InvalidRequest) as refused:
                await clients["two"].explain_route(request_id)
            errors.append(str(refused.value).replace(request_id, "ID"))
        assert errors[0] == errors[1]
        for client in clients.values():
            await client.close()
