"""Tenants over real HTTP and gRPC: who is let in, that groups never meet, that each sees and evicts its own."""

from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Any

import grpc
import httpx
import pytest
from store_kit import StoreKit, make_kit
from tiny_gateway import BLOCK_TOKENS, NODE, TinyGateway, make_namespace, make_worker_record, tiny_gateway

from headrace.client import AsyncHeadraceClient, Sampling, Selector
from headrace.core.errors import InvalidRequest, PermissionDenied, Unauthenticated
from headrace.core.members import WorkerRole
from headrace.core.tenants import HashedKey, KeyRing, Tenant, TenantRole, new_key
from headrace.gateway.openai_http import build_http_app
from headrace.gateway.prepare_request import hash_for
from headrace.gateway.serve_grpc import serve_grpc
from headrace.store.cache_admin import CacheAdminOfNode
from headrace.transfer.channels import Channels, build_server
from headrace.wire.v1 import admin_pb2, admin_pb2_grpc, inference_pb2

WORKERS = (make_worker_record("d0"), make_worker_record("d1"), make_worker_record("p0", WorkerRole.PREFILL))
TENANTS = {
    "one": Tenant("one", "tenant:one"),
    "two": Tenant("two", "tenant:two"),
    "three": Tenant("three", "group:both"),
    "four": Tenant("four", "group:both"),
    "operator": Tenant("operator", "tenant:operator", TenantRole.ADMIN),
}
KEYS = {name: new_key() for name in TENANTS}
RING = KeyRing(tuple((HashedKey.of(KEYS[name]), tenant) for name, tenant in TENANTS.items()))
SERVICES = (
    inference_pb2.DESCRIPTOR.services_by_name["Inference"],
    admin_pb2.DESCRIPTOR.services_by_name["CacheAdmin"],
)
RPCS = {method.name: method for service in SERVICES for method in service.methods}
PROMPT = "twenty-four characters.."  # six blocks, of which a repeat can use five


@dataclass
class Deployment:
    """A gateway with tenants, one real store node behind its admin API, and both of its front doors."""

    gateway: TinyGateway
    kit: StoreKit
    http: httpx.AsyncClient
    address: str
    channel: grpc.aio.Channel

    async def complete(self, tenant: str, **body: Any) -> int:
        """Cached tokens of a completion over HTTP."""
        body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 3} | body
        reply = await self.http.post("/v1/completions", json=body, headers=bearer(KEYS[tenant]))
        assert reply.status_code == 200, reply.text
        return reply.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

    @asynccontextmanager
    async def client(self, tenant: str):
        client = AsyncHeadraceClient(self.address, api_key=KEYS[tenant])
        try:
            yield client
        finally:
            await client.close()

    def store(self, group: str, text: str, *, salt: str = "") -> int:
        prompt = hash_for(make_namespace(), tuple(ord(c) - 32 for c in text), cache_salt=salt, trust_group=group)
        return len(self.kit.store(prompt, range(len(prompt.chain))))


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


@asynccontextmanager
async def deployed(model_path, key_ring=RING):
    async with AsyncExitStack() as stack:
        gateway = await stack.enter_async_context(tiny_gateway(*WORKERS, model_path=model_path, key_ring=key_ring))
        kit, node_server, channels = make_kit(blocks=32), build_server(), Channels()
        record = replace(NODE, address=f"127.0.0.1:{node_server.add_insecure_port('127.0.0.1:0')}")
        servicer = CacheAdminOfNode(kit.node, gateway.membership, lambda: record)
        admin_pb2_grpc.add_CacheAdminServicer_to_server(servicer, node_server)
        await node_server.start()
        stack.push_async_callback(node_server.stop, 0)
        await gateway.membership.announce(record, ttl_ms=60_000)
        stack.push_async_callback(channels.close)
        server, port = await serve_grpc(gateway.service, address="127.0.0.1:0", channel_to=channels.to)
        stack.push_async_callback(server.stop, 0)
        app = build_http_app(gateway.service, metrics_text=lambda: b"headrace_up 1\n")
        transport = httpx.ASGITransport(app=app)
        http = await stack.enter_async_context(httpx.AsyncClient(transport=transport, base_url="http://gateway"))
        yield Deployment(gateway, kit, http, f"127.0.0.1:{port}", channels.to(f"127.0.0.1:{port}"))


@pytest.mark.parametrize(
    "headers",
    [{}, bearer(""), bearer(new_key()), bearer(KEYS["one"][:-1]), {"authorization": KEYS["one"]}, bearer("é" * 30)],
    ids=["none", "empty", "unknown", "cut", "no scheme", "not ASCII"],
)
async def test_a_call_without_a_known_key_is_refused_before_anything_is_done(model_path, headers):
    """Fails when somebody gets in, sees models, or learns from the answer which keys are good."""
    headers = {name: value.encode() for name, value in headers.items()}
    async with deployed(model_path) as system:
        body = {"model": "tiny", "prompt": PROMPT}
        replies = [await system.http.post("/v1/completions", json=body, headers=headers)]
        replies += [
            await system.http.get(path, headers=headers) for path in ("/v1/models", "/v1/models/tiny", "/metrics")
        ]
        for reply in replies:
            assert (reply.status_code, reply.headers["www-authenticate"]) == (401, "Bearer")
            assert reply.json()["error"]["code"] == "invalid_api_key"
            assert KEYS["one"][:-1] not in reply.text
        assert not any(worker.calls for worker in system.gateway.calls.workers.values())


async def test_probes_need_no_key(model_path):
    """Fails when a kubelet, which has no key, takes a guarded gateway for a dead one."""
    async with deployed(model_path) as system:
        assert (await system.http.get("/health")).status_code == 200
        assert (await system.http.get("/ready")).status_code in (200, 503)


async def test_every_rpc_refuses_an_unknown_key_with_its_own_error(model_path):
    """Fails when one RPC was left open, or a client cannot tell a wrong key from a broken gateway."""
    async with deployed(model_path) as system:
        client = AsyncHeadraceClient(system.address, api_key=new_key())
        calls = [client.generate("x"), client.list_models(), client.status(), client.stat(), client.list_blocks()]
        for call in [*calls, client.evict(Selector(), dry_run=False)]:
            with pytest.raises(Unauthenticated, match="not known here; send an API key"):
                await call
        await client.close()


@pytest.mark.parametrize("rpc", [*RPCS], ids=str)
async def test_no_rpc_is_open(model_path, rpc):
    """Fails for an RPC, also one that is added later, that answers a caller without a key."""
    async with deployed(model_path) as system:
        call = system.channel.unary_stream if RPCS[rpc].server_streaming else system.channel.unary_unary
        service = RPCS[rpc].containing_service.full_name
        answer = call(f"/{service}/{rpc}", request_serializer=bytes, response_deserializer=bytes)(b"", timeout=60)
        assert await answer.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize("door", ["http", "grpc"])
async def test_a_group_never_hits_what_another_group_sent_and_hits_what_it_sent_itself(model_path, door):
    """The paired test: the same prompt from two tenants by turns. Fails when one hits the other's blocks, and is void
    when nobody hits. A first time looks the same to whoever comes second: the same counts by the same path."""
    async with deployed(model_path) as system, AsyncExitStack() as stack:

        async def cached(tenant: str) -> int:
            if door == "http":
                return await system.complete(tenant)
            client = await stack.enter_async_context(system.client(tenant))
            return (await client.generate(PROMPT, sampling=Sampling(max_tokens=3))).usage.cached.total

        hit = 5 * BLOCK_TOKENS
        assert [await cached(t) for t in ("one", "one", "two", "two", "one")] == [0, hit, 0, hit, hit]
        first, warm, others_first, others_warm, _ = system.gateway.observer.decisions
        assert (others_first, others_warm) == (first, warm)
        assert first != warm


async def test_tenants_of_one_named_group_share_and_a_salt_keeps_them_apart(model_path):
    """Fails when the operator's grouping has no effect, or a salt narrows less or more than its own callers."""
    async with deployed(model_path) as system:
        hit = 5 * BLOCK_TOKENS
        assert [await system.complete(t) for t in ("three", "four", "one")] == [0, hit, 0]
        salted = [await system.complete(t, cache_salt="s") for t in ("three", "four", "one")]
        assert salted == [0, hit, 0]


async def test_nothing_in_a_request_moves_its_caller_into_another_group(model_path):
    """Fails when a caller can name a group: by salt, or by the hints that OpenAI clients send."""
    async with deployed(model_path) as system:
        await system.complete("one")
        spellings = ("tenant:one", "7:default@tenant:one", "18:7:default@tenant:one:")
        tries = [{"cache_salt": spelled} for spelled in spellings]
        tries += [{"user": "one"}, {"prompt_cache_key": "tenant:one"}]
        for number, attempt in enumerate(tries):
            # The first without a salt fills the group's own blocks; what hits afterwards is its own.
            before = 0 if number <= len(spellings) else 5 * BLOCK_TOKENS
            assert await system.complete("two", **attempt) == before


async def test_a_prompt_cache_key_is_taken_and_changes_nobodys_identity(model_path):
    """Fails when OpenAI's hint is refused, or splits or joins caches."""
    async with deployed(model_path) as system:
        assert await system.complete("one", prompt_cache_key="a") == 0
        assert await system.complete("one", prompt_cache_key="b") == 5 * BLOCK_TOKENS
        assert await system.complete("two", prompt_cache_key="a") == 0


async def test_a_user_sees_and_evicts_its_own_groups_blocks_only(model_path):
    """Fails when a listing, a count or an eviction by any selector reaches into another group, or misses its own."""
    async with deployed(model_path) as system, AsyncExitStack() as stack:
        for group in ("tenant:one", "tenant:two", ""):
            assert system.store(group, "sharedheadtail") == 3
        assert system.store("tenant:one", "saltedheadtail", salt="s") == 3
        one, two, operator = [
            await stack.enter_async_context(system.client(name)) for name in ("one", "two", "operator")
        ]
        seen = {c: await c.list_blocks(with_text=True) for c in (one, two, operator)}
        assert [seen[c].total_blocks for c in (one, two, operator)] == [6, 3, 12]
        assert {b.model for c in seen.values() for b in c.blocks} == {"tiny"}
        assert len({b.namespace for b in seen[one].blocks} | {b.namespace for b in seen[two].blocks}) == 3

        foreign = seen[two].blocks[0]
        held = [b.block_hash for b in seen[two].blocks]
        assert (await one.list_blocks(Selector(block_hashes=tuple(held)))).total_blocks == 0
        assert total(await one.evict(Selector(block_hashes=tuple(held)), dry_run=False)) == 0
        with pytest.raises(InvalidRequest, match="no live worker has namespace"):
            await one.evict(Selector(namespace=foreign.namespace), dry_run=False)
        assert total(await one.evict(Selector(prefix_text="sharedhead"), dry_run=True)) == 2
        assert total(await operator.evict(Selector(prefix_text="sharedhead"), dry_run=True)) == 6

        assert total(await one.evict(Selector(), dry_run=False)) == 6
        assert [(await c.list_blocks()).total_blocks for c in (one, two, operator)] == [0, 3, 6]
        assert total(await two.evict(Selector(model="tiny"), dry_run=False)) == 3
        assert total(await operator.evict(Selector(), dry_run=False)) == 3


async def test_an_admin_evicts_one_tenant_and_leaves_the_others(model_path):
    """Fails when --tenant takes another tenant's blocks, forgets salted ones, or tells a user who else there is."""
    async with deployed(model_path) as system, AsyncExitStack() as stack:
        for group in ("tenant:one", "tenant:two", "group:both"):
            system.store(group, "sharedheadtail")
        system.store("tenant:one", "saltedheadtail", salt="s")
        one, operator = [await stack.enter_async_context(system.client(name)) for name in ("one", "operator")]
        assert (await operator.list_blocks(Selector(tenant="four"))).total_blocks == 3
        assert total(await operator.evict(Selector(tenant="one"), dry_run=False)) == 6
        assert (await operator.list_blocks()).total_blocks == 6
        for name in ("two", "nobody"):
            with pytest.raises(InvalidRequest, match=f"there is no tenant '{name}'"):
                await one.evict(Selector(tenant=name), dry_run=False)
        assert (await one.list_blocks(Selector(tenant="one"))).total_blocks == 0


def total(reports) -> int:
    """Blocks on store nodes; the tiny workers report the same figure whatever they are asked."""
    assert not [r.error for r in reports if r.error]
    return sum(r.blocks for r in reports if r.holder.startswith("node:"))


async def test_why_miss_tells_a_user_nothing_of_what_others_sent(model_path):
    """Fails when the reason of a miss is another for a prompt that another group sent than for one that nobody did."""
    async with deployed(model_path) as system:
        system.store("tenant:one", "sharedheadtail")
        stub = admin_pb2_grpc.CacheAdminStub(system.channel)

        async def reasons(tenant: str, text: str) -> list[str]:
            asked = admin_pb2.WhyMissRequest(model="tiny", text=text)
            reply = await stub.WhyMiss(asked, metadata=[("authorization", f"Bearer {KEYS[tenant]}")])
            return [reason.kind for reason in reply.reasons]

        sent, unsent = await reasons("two", "sharedheadtail"), await reasons("two", "nobodysenthis!")
        assert sent == unsent
        assert "other_namespace" in await reasons("operator", "sharedheadtail")


async def test_a_users_books_are_as_if_it_were_alone(model_path):
    """Fails when what another tenant stores shows in a user's counts, in the room left or in who is busy."""
    async with deployed(model_path) as system, AsyncExitStack() as stack:
        one, operator = [await stack.enter_async_context(system.client(name)) for name in ("one", "operator")]
        system.store("tenant:one", "sharedheadtail")
        before = await one.stat()
        system.store("tenant:two", "othertexthere")
        assert await one.stat() == before
        (books,) = [s for s in before if s.holder.startswith("node:")]
        assert (books.total_blocks, books.committed_blocks, books.free_blocks, books.hits_tokens) == (3, 3, 0, 0)
        (all_books,) = [s for s in await operator.stat() if s.holder.startswith("node:")]
        assert (all_books.total_blocks, all_books.committed_blocks) == (32, 6)
        with pytest.raises(PermissionDenied, match="may not see every worker's load"):
            await one.status()
        assert {w.worker_id for w in (await operator.status()).workers} == {"d0", "d1", "p0"}


async def test_metrics_of_all_tenants_are_an_admins_to_read(model_path):
    """Fails when the totals of everybody's hits are shown to one tenant."""
    async with deployed(model_path) as system:
        refused = await system.http.get("/metrics", headers=bearer(KEYS["one"]))
        assert (refused.status_code, refused.json()["error"]["code"]) == (403, "insufficient_permissions")
        assert (await system.http.get("/metrics", headers=bearer(KEYS["operator"]))).text == "headrace_up 1\n"


async def test_each_tenant_is_told_its_own_namespace(model_path):
    """Fails when the namespace that a user is told is not that of its blocks."""
    async with deployed(model_path) as system, system.client("one") as one, system.client("two") as two:
        told = [(await client.list_models())[0].namespace for client in (one, two)]
        assert told == [make_namespace().narrowed("", trust_group=f"tenant:{name}").id for name in ("one", "two")]


async def test_without_a_tenants_file_any_key_and_none_are_the_one_tenant(model_path):
    """Fails when a deployment without tenants asks for keys, or its blocks change their names."""
    async with deployed(model_path, key_ring=None) as system:
        assert await system.complete("one") == 0
        assert await system.complete("two") == 5 * BLOCK_TOKENS
        anonymous = AsyncHeadraceClient(system.address)
        assert (await anonymous.list_models())[0].namespace == make_namespace().id
        assert (await anonymous.status()).index_available
        await anonymous.close()
