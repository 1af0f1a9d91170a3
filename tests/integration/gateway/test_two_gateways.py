"""Two gateways of one system, over a real Valkey: they know the same, choose alike, and answer for each other."""

import asyncio
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import pytest
from httpx import ASGITransport, AsyncClient
from patient_redis import patient_index, patient_membership
from tiny_gateway import NODE, TinyCalls, TinyWorker, make_worker_record

from headrace.compose import Gateway, build_gateway
from headrace.config import load_config
from headrace.core.block import Tier
from headrace.core.clock import SystemClock
from headrace.core.generation import CacheControl, GenerateRequest, RequestId, SamplingParams
from headrace.core.limits import MEMBER_TTL_MS
from headrace.core.members import GatewayRecord, WorkerRole
from headrace.core.tenants import HashedKey, new_key
from headrace.gateway.examine_system import examine_system
from headrace.gateway.fleet import Fleet
from headrace.gateway.prepare_request import hash_for
from headrace.gateway.refuse_call import CallRefused
from headrace.index.redis_index import RedisIndex
from headrace.index.redis_membership import RedisMembership
from headrace.transfer.channels import Channels
from headrace.wire.v1 import admin_pb2

KEYS = {name: new_key() for name in ("one", "two")}
PROMPT = "twenty-four characters.."
WORKERS = [make_worker_record(f"w{number}", WorkerRole.BOTH) for number in range(5)]


class Context:
    """A call's context as Serve's proxy gives it, from a tenant."""

    def __init__(self, tenant: str) -> None:
        self._key = KEYS[tenant]
        self.details = ""

    def invocation_metadata(self):
        return [("authorization", f"Bearer {self._key}")]

    def peer(self) -> str:
        return "ipv4:127.0.0.1:1"

    def set_code(self, code) -> None: ...

    def set_details(self, details: str) -> None:
        self.details = details

    def set_trailing_metadata(self, metadata) -> None: ...


class TwoGateways:
    """Started gateways over the same workers, index and members."""

    def __init__(self, gateways: list[Gateway], index: RedisIndex, membership: RedisMembership) -> None:
        self.gateways = gateways
        self.index = index
        self.membership = membership

    async def generate(self, number: int, tenant: str) -> str:
        """One request through one gateway's HTTP API; its id."""
        transport = ASGITransport(self.gateways[number].http_app)
        headers = {"authorization": f"Bearer {KEYS[tenant]}"}
        async with AsyncClient(transport=transport, base_url="http://localhost", headers=headers) as http:
            body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2}
            reply = await http.post("/v1/completions", json=body)
        assert reply.status_code == 200, reply.text
        return reply.json()["id"].rpartition("-")[2]

    async def see_each_other(self) -> None:
        async with asyncio.timeout(60):
            while True:
                is_ready = all(gateway._service.ready() for gateway in self.gateways)
                if is_ready and len(await self.membership.gateways()) == 2:
                    return
                await asyncio.sleep(0.05)


@asynccontextmanager
async def two_gateways(url: str, model_path: str, tmp_path: Path):
    tenants = tmp_path / "tenants.yaml"
    rows = [f"- {{name: {name}, role: user, keys: ['{HashedKey.of(key).spell()}']}}" for name, key in KEYS.items()]
    tenants.write_text("\n".join(["tenants:", *rows]))
    config = load_config(
        {"redis_url": url, "tenants_file": str(tenants), "hash_algorithm": "sha256", "local_prefill_tokens": 8},
        environ={},
    )
    membership, index = patient_membership(url), patient_index(url)
    for record in (NODE, *(replace(each, model_path=model_path) for each in WORKERS)):
        await membership.announce(record, ttl_ms=100 * MEMBER_TTL_MS)
    calls = TinyCalls({record.worker_id: TinyWorker(record, clock=SystemClock()) for record in WORKERS}, index)
    gateways = [build_gateway(config, calls=calls, gateway_id=name) for name in ("a", "b")]
    try:
        for gateway in gateways:
            await gateway.start()
        two = TwoGateways(gateways, index, membership)
        await two.see_each_other()
        yield two
    finally:
        for gateway in gateways:
            await gateway.stop()
        await index.close()
        await membership.close()


@pytest.fixture
async def two(empty_valkey_url: str, model_path: str, tmp_path: Path):
    async with two_gateways(empty_valkey_url, model_path, tmp_path) as started:
        yield started


async def test_a_request_is_explained_by_whichever_gateway_is_asked(two: TwoGateways):
    """Fails when only the gateway that served a request knows of it, or when its answer is another's than its own."""
    request_id = await two.generate(0, "one")
    own, other = two.gateways
    asked = admin_pb2.ExplainRouteRequest(request_id=request_id)
    told = await own.admin.ExplainRoute(asked, Context("one"))
    assert told.request_id == request_id
    assert await other.admin.ExplainRoute(asked, Context("one")) == told
    why = await other.admin.WhyMiss(admin_pb2.WhyMissRequest(request_id=request_id), Context("one"))
    assert why.prompt_tokens == len(PROMPT)


async def test_what_another_gateway_remembers_of_another_tenant_is_as_unknown_as_what_nobody_does(two: TwoGateways):
    """Fails when asking around is asking with more rights than the caller has."""
    request_id = await two.generate(0, "one")
    told = []
    for wanted in (request_id, "0" * len(request_id)):
        context = Context("two")
        with pytest.raises(CallRefused):
            await two.gateways[1].admin.ExplainRoute(admin_pb2.ExplainRouteRequest(request_id=wanted), context)
        told.append(context.details.replace(wanted, "ID"))
    assert told[0] == told[1]
    assert "1 other gateways" in told[0]


async def test_a_gateway_that_stopped_is_not_asked(two: TwoGateways):
    """Fails when a gateway leaves its record behind, and each question waits for it."""
    request_id = await two.generate(0, "one")
    await two.gateways[0].stop()
    context = Context("one")
    with pytest.raises(CallRefused):
        await two.gateways[1].admin.ExplainRoute(admin_pb2.ExplainRouteRequest(request_id=request_id), context)
    assert "other gateways" not in context.details


async def test_a_gateway_that_does_not_answer_is_named_and_keeps_nobody_waiting(two: TwoGateways):
    """Fails when one that died, whose record still stands, holds up a question, or is passed over in silence."""
    request_id = await two.generate(0, "one")
    dead = GatewayRecord(gateway_id="dead", incarnation=1, host="h", address="127.0.0.1:1", pid=1, version="0.0.0")
    await two.membership.announce(dead, ttl_ms=100 * MEMBER_TTL_MS)
    asked = admin_pb2.ExplainRouteRequest(request_id=request_id)
    assert (await two.gateways[1].admin.ExplainRoute(asked, Context("one"))).request_id == request_id
    context = Context("one")
    with pytest.raises(CallRefused):
        await two.gateways[1].admin.ExplainRoute(admin_pb2.ExplainRouteRequest(request_id="0"), context)
    assert "2 other gateways" in context.details
    assert "gateway dead does not answer: UNAVAILABLE" in context.details
    fleet, found = Fleet(two.gateways[0]._service, channel_to=Channels().to), {}
    async with asyncio.timeout(60):
        while not found:  # a busy machine's Redis may be late for a listing
            findings = await examine_system(fleet)
            found = {f.holder: f.ok for f in findings if f.holder.startswith("gateway:")}
    assert found == {
        "gateway:a": True,
        "gateway:b": True,
        "gateway:dead": False,
    }


async def test_both_find_the_same_holders_and_choose_the_same_workers(two: TwoGateways):
    """Fails when a choice depends on which gateway makes it: on its order of hearing, or on a draw of its own."""
    namespace = WORKERS[0].namespace
    prompts = [hash_for(namespace, tuple(range(number, number + 40))) for number in range(0, 4_000, 80)]
    for number, prompt in enumerate(prompts):
        for record in WORKERS[: number % 4]:
            await two.index.register(
                holder=record.holder_id,
                incarnation=record.incarnation,
                tier=Tier.DEVICE,
                namespace=prompt.namespace,
                blocks=prompt.chain[: 1 + number % 10],
            )

    async def knows_all(gateway: Gateway) -> bool:
        matches = [await gateway._service.index.longest_prefix(p.namespace, p.chain) for p in prompts]
        return [len(match.num_blocks_by_holder) for match in matches] == [number % 4 for number in range(len(prompts))]

    async with asyncio.timeout(60):
        for gateway in two.gateways:
            while not await knows_all(gateway):  # noqa: ASYNC110 (a mirror tells nobody)
                await asyncio.sleep(0.05)
    chosen = []
    for gateway in two.gateways:
        service = gateway._service
        plans = []
        for number, prompt in enumerate(prompts):
            match = await service.index.longest_prefix(prompt.namespace, prompt.chain)
            request = GenerateRequest(
                request_id=RequestId(str(number)),
                model="tiny",
                prompt=prompt,
                sampling=SamplingParams(max_tokens=1),
                cache=CacheControl(),
            )
            plan = service.planner.plan(request, match, failed=frozenset())
            service.planner.ended(request.request_id)
            plans.append((match, plan.decode.worker_id, plan.prefill and plan.prefill.worker_id))
        chosen.append(plans)
    assert chosen[0] == chosen[1]
    assert len({worker for _, worker, _ in chosen[0]}) > 1


async def test_a_gateway_that_starts_knows_the_whole_index_before_it_takes_calls(
    two: TwoGateways, empty_valkey_url: str
):
    """Fails when a restarted gateway serves from an index that it has not read yet."""
    prompt = hash_for(WORKERS[0].namespace, tuple(range(8_000)))
    record = WORKERS[0]
    await two.index.register(
        holder=record.holder_id,
        incarnation=record.incarnation,
        tier=Tier.DEVICE,
        namespace=prompt.namespace,
        blocks=prompt.chain,
    )
    late = build_gateway(load_config({"redis_url": empty_valkey_url}, environ={}), calls=two.gateways[0]._service.calls)
    await late.start()
    try:
        mirror = late._service.index
        assert mirror.answers
        assert mirror.stat().blocks == len(prompt.chain)
    finally:
        await late.stop()


async def test_a_gateway_starts_without_an_index_that_is_away():
    """Fails, by the time-out of every test, when a gateway waits for a whole mirror before it serves."""
    gateway = build_gateway(load_config({"redis_url": "redis://127.0.0.1:1/0"}, environ={}), calls=TinyCalls({}, None))
    await gateway.start()
    try:
        assert not gateway._service.index_available
    finally:
        await gateway.stop()
