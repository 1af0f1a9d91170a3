"""What is left behind of every changing admin call and of every refused key: lines of the audit log, and counts."""

import asyncio
import contextlib
import json

import grpc
import httpx
import pytest
from admin_kit import admin_over, store_text
from hand_clock import HandClock
from tiny_gateway import until

from headrace.core.errors import (
    ContextExceeded,
    DeadlineExceeded,
    HeadraceError,
    InvalidRequest,
    Overloaded,
    PermissionDenied,
    RateLimited,
    RequestTooLarge,
    Unauthenticated,
    UnknownModel,
    WorkerUnavailable,
)
from headrace.core.front_door_limits import AUDIT_CHARS_MAX, AUDIT_PEERS_MAX
from headrace.core.tenants import HashedKey, KeyRing, Tenant, TenantRole, new_key
from headrace.gateway.audit_log import RefusalLog, audited_change, ended_at
from headrace.gateway.carry_out import carry_out
from headrace.gateway.openai_http import build_http_app
from headrace.telemetry.gateway_metrics import GatewayMetrics
from headrace.telemetry.metrics import Metrics
from headrace.telemetry.refused_calls import REFUSED_CALLS
from headrace.wire.v1 import admin_pb2

TEXT = "sharedheadtail!!"
USER, OPERATOR = Tenant("acme", "tenant:acme"), Tenant("operator", "tenant:operator", TenantRole.ADMIN)
KEYS = {tenant: new_key() for tenant in (USER, OPERATOR)}
RING = KeyRing(tuple((HashedKey.of(key), tenant) for tenant, key in KEYS.items()))

READING = {"ListBlocks", "Stat", "Status", "WhyMiss", "ExplainRoute", "ReadBlock", "ListTenants"}
PREFIX = admin_pb2.Selector(prefix_text=TEXT, tenant="acme")
CHANGING = {
    "Pin": ("pin", lambda block: admin_pb2.PinRequest(selector=PREFIX)),
    "Unpin": ("unpin", lambda block: admin_pb2.PinRequest(selector=PREFIX)),
    "SetTtl": ("set ttl", lambda block: admin_pb2.SetTtlRequest(selector=PREFIX, ttl_s=60)),
    "SetQuota": ("set quota", lambda block: admin_pb2.SetQuotaRequest(tenant="acme", bytes_max=1 << 30)),
    "WriteBlock": ("import block", lambda block: block),
    "Doctor": ("doctor --fix", lambda block: admin_pb2.DoctorRequest(fix=True)),
    "Evict": ("evict", lambda block: admin_pb2.EvictRequest(selector=PREFIX)),
    "DrainNode": ("drain", lambda block: admin_pb2.DrainNodeRequest(holder="node:n1", without_moving=True)),
}


def as_(tenant):
    return (("authorization", f"Bearer {KEYS[tenant]}"),)


def lines_of(caplog):
    return [json.loads(record.getMessage()) for record in caplog.records if record.name == "headrace.audit"]


def test_every_admin_call_is_known_as_reading_or_as_changing():
    """Fails when a call is added of which nobody has said whether it must leave a line."""
    rpcs = {method.name for method in admin_pb2.DESCRIPTOR.services_by_name["CacheAdmin"].methods}
    assert rpcs == READING | set(CHANGING)


async def test_every_changing_call_leaves_one_line_with_who_and_what(model_path, caplog):
    """Fails for a change that leaves none."""
    caplog.set_level("INFO", "headrace.audit")
    async with admin_over(model_path, "n1", key_ring=RING) as admin:
        store_text(admin.kits["n1"], TEXT, group=USER.trust_group)
        listed = (await admin.stub.ListBlocks(admin_pb2.ListBlocksRequest(), metadata=as_(OPERATOR))).blocks
        first = next(block for block in listed if block.position == 0)
        block = await admin.stub.ReadBlock(
            admin_pb2.ReadBlockRequest(holder="node:n1", namespace=first.namespace, chain=[first.block_hash]),
            metadata=as_(OPERATOR),
        )
        block.holder = "node:n1"
        assert [line["what"] for line in lines_of(caplog)] == ["export block"], "and nothing for what says no prompt"
        for rpc, (what, request) in CHANGING.items():
            caplog.clear()
            await whole_answer(getattr(admin.stub, rpc)(request(block), metadata=as_(OPERATOR)))
            told = [(line["who"], line["what"], line["ended"]) for line in lines_of(caplog)]
            assert told == [("operator", what, "done")], rpc
            assert TEXT not in caplog.text


REFUSED = {
    "Pin": ("pin", admin_pb2.PinRequest()),
    "Unpin": ("unpin", admin_pb2.PinRequest(selector=admin_pb2.Selector(prefix_text=TEXT, tier="host"))),
    "SetTtl": ("set ttl", admin_pb2.SetTtlRequest(selector=PREFIX, ttl_s=-1)),
    "SetQuota": ("set quota", admin_pb2.SetQuotaRequest(tenant="nobody")),
    "WriteBlock": ("import block", admin_pb2.StoredBlock(holder="node:n1", header=b"no header")),
    "Evict": ("evict", admin_pb2.EvictRequest(selector=admin_pb2.Selector(holders=["node:nowhere"]))),
    "DrainNode": ("drain", admin_pb2.DrainNodeRequest(holder="node:nowhere")),
}


async def test_every_change_that_is_refused_leaves_one_line_with_why(model_path, caplog):
    """Fails when what an operator tried and could not do is not written down, or is written down as done."""
    assert set(REFUSED) == set(CHANGING) - {"Doctor"}, "which refuses nothing"
    caplog.set_level("INFO", "headrace.audit")
    async with admin_over(model_path, "n1", key_ring=RING) as admin:
        for rpc, (what, request) in REFUSED.items():
            caplog.clear()
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await whole_answer(getattr(admin.stub, rpc)(request, metadata=as_(OPERATOR)))
            (line,) = lines_of(caplog)
            assert (line["who"], line["what"], line["ended"]) == ("operator", what, "refused")
            assert line["why"] == refused.value.details()[:AUDIT_CHARS_MAX]
            assert TEXT not in caplog.text


async def test_a_change_that_no_holder_answered_has_failed(model_path, caplog):
    """Fails when an order that reached nobody is written down as done."""
    caplog.set_level("INFO", "headrace.audit")
    async with admin_over(model_path, dead_nodes=["n9"], key_ring=RING) as admin:
        orders = {
            "Pin": admin_pb2.PinRequest(selector=PREFIX),
            "Evict": admin_pb2.EvictRequest(selector=admin_pb2.Selector(holders=["node:n9"])),
            "DrainNode": admin_pb2.DrainNodeRequest(holder="node:n9", without_moving=True),
        }
        for rpc, request in orders.items():
            caplog.clear()
            with contextlib.suppress(grpc.aio.AioRpcError):
                await whole_answer(getattr(admin.stub, rpc)(request, metadata=as_(OPERATOR)))
            assert [line["ended"] for line in lines_of(caplog)] == ["failed"], rpc


@pytest.mark.parametrize(("dead_nodes", "ended"), [([], "refused"), (["n9"], "failed")])
async def test_an_order_about_what_nobody_holds_is_not_done(model_path, caplog, dead_nodes, ended):
    """Fails when the line says that something was done where nobody did anything."""
    caplog.set_level("INFO", "headrace.audit")
    async with admin_over(model_path, "n1", dead_nodes=dead_nodes, key_ring=RING) as admin:
        holders = [f"node:{node_id}" for node_id in ("n1", *dead_nodes)]
        nothing = admin_pb2.Selector(prefix_text="nobody ever sent this", tenant="acme", holders=holders)
        orders = {
            "Pin": admin_pb2.PinRequest(selector=nothing),
            "Unpin": admin_pb2.PinRequest(selector=nothing),
            "SetTtl": admin_pb2.SetTtlRequest(selector=nothing, ttl_s=60),
            "Evict": admin_pb2.EvictRequest(selector=nothing),
        }
        for rpc, request in orders.items():
            caplog.clear()
            await getattr(admin.stub, rpc)(request, metadata=as_(OPERATOR))
            assert [line["ended"] for line in lines_of(caplog)] == [ended], rpc


@pytest.mark.parametrize(
    ("outcomes", "errors", "ended"),
    [
        (["not held", "done"], 1, "done"),
        (["refused", "done"], 0, "done"),
        (["refused", "not held"], 0, "refused"),
        (["refused", "not held"], 1, "failed"),
        ([], 1, "failed"),
        ([], 0, "refused"),
    ],
)
def test_an_order_to_several_is_done_where_one_did_it_and_refused_only_where_all_answered(outcomes, errors, ended):
    """Fails when a holder that did not answer, and may have done it, is taken for one that did nothing."""
    assert ended_at(outcomes, errors=errors) == ended


async def test_a_quota_that_one_node_refuses_and_another_may_have_taken_has_failed(model_path, caplog):
    """Fails when an operator is told that its word was wrong and nothing changed, which nobody knows."""
    caplog.set_level("INFO", "headrace.audit")
    request = admin_pb2.SetQuotaRequest(tenant="acme", bytes_min=1 << 40)
    for dead_nodes, code, ended in (
        ([], grpc.StatusCode.INVALID_ARGUMENT, "refused"),
        (["n9"], grpc.StatusCode.UNAVAILABLE, "failed"),
    ):
        caplog.clear()
        async with admin_over(model_path, "n1", dead_nodes=dead_nodes, key_ring=RING) as admin:
            with pytest.raises(grpc.aio.AioRpcError) as raised:
                await admin.stub.SetQuota(request, metadata=as_(OPERATOR))
        assert raised.value.code() is code
        (line,) = lines_of(caplog)
        assert line["ended"] == ended


async def test_a_quota_that_was_refused_at_once_is_written_down_with_its_bounds(model_path, caplog):
    """Fails when nobody can tell later what was asked for."""
    caplog.set_level("INFO", "headrace.audit")
    async with admin_over(model_path, "n1", key_ring=RING) as admin:
        request = admin_pb2.SetQuotaRequest(tenant="nobody", bytes_max=0, bytes_min=7)
        with pytest.raises(grpc.aio.AioRpcError):
            await admin.stub.SetQuota(request, metadata=as_(OPERATOR))
    (line,) = lines_of(caplog)
    assert line["asked"] == {"tenant": "nobody", "reset": False, "bytes_max": 0, "bytes_min": 7}


async def test_repairs_before_the_one_that_failed_are_written_down(model_path, caplog):
    """Fails when a repair that ends half-way leaves a line as if nothing had been touched."""
    caplog.set_level("INFO", "headrace.audit")
    async with admin_over(model_path, "n1", key_ring=RING) as admin:
        store_text(admin.kits["n1"], TEXT, group=USER.trust_group)

        async def sweep(live, *, limit):
            raise ValueError("a bug")

        admin.gateway.service.index.sweep = sweep
        with pytest.raises(grpc.aio.AioRpcError):
            await admin.stub.Doctor(admin_pb2.DoctorRequest(fix=True), metadata=as_(OPERATOR))
    (line,) = lines_of(caplog)
    assert (line["what"], line["ended"]) == ("doctor --fix", "failed")
    assert line["effect"] == {"index entries node:n1": "registers its 4 blocks again"}


async def test_a_caller_without_the_right_begins_nothing_and_leaves_no_line_of_a_change(model_path, caplog):
    """Fails when a user's key can fill the audit log by changes that it may not make."""
    caplog.set_level("INFO", "headrace.audit")
    async with admin_over(model_path, "n1", key_ring=RING) as admin:
        for rpc in set(CHANGING) - {"Evict", "SetTtl"}:  # those that a user may make of its own blocks
            request = CHANGING[rpc][1](admin_pb2.StoredBlock(holder="node:n1"))
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await whole_answer(getattr(admin.stub, rpc)(request, metadata=as_(USER)))
            assert refused.value.code() is grpc.StatusCode.PERMISSION_DENIED, rpc
    assert {line["what"] for line in lines_of(caplog)} == {"refused"}


async def whole_answer(call):
    """Wait for the end of a call, whether it answers once or in a stream."""
    if hasattr(call, "__aiter__"):
        return [message async for message in call]
    return await call


ENDINGS = {
    "done": None,
    "refused": InvalidRequest("no such tenant"),
    "failed": ValueError("a bug"),
    "abandoned": asyncio.CancelledError(),
}


@pytest.mark.parametrize("ended", ENDINGS)
def test_a_change_leaves_one_line_that_says_how_it_ended(caplog, ended):
    """Fails when one of the ends leaves no line, or two, or the word of another one."""
    caplog.set_level("INFO", "headrace.audit")
    caught = contextlib.suppress(InvalidRequest, ValueError, asyncio.CancelledError)
    with caught, audited_change("operator", "evict", {"model": "m"}) as change:
        change.effect = {"blocks": 2}
        if ENDINGS[ended] is not None:
            raise ENDINGS[ended]
    (line,) = lines_of(caplog)
    assert (line["ended"], line["effect"]) == (ended, {"blocks": 2})
    assert "a bug" not in caplog.text, "what is not ours is told in the log of errors, with its stack"


async def test_an_eviction_whose_caller_left_is_done_and_leaves_its_line(model_path, caplog):
    """Fails when a caller that leaves has the change cut short, or nothing written down of it."""
    caplog.set_level("INFO", "headrace.audit")
    begun, may_end = asyncio.Event(), asyncio.Event()
    async with admin_over(model_path, "n1", key_ring=RING) as admin:
        store_text(admin.kits["n1"], TEXT, group=USER.trust_group)
        evict = admin.gateway.calls.evict_device

        async def gated(*args, **options):
            begun.set()
            await may_end.wait()
            return await evict(*args, **options)

        admin.gateway.calls.evict_device = gated
        call = admin.stub.Evict(admin_pb2.EvictRequest(selector=PREFIX), metadata=as_(OPERATOR))
        await begun.wait()
        call.cancel()
        await admin.stub.Status(admin_pb2.StatusRequest(), metadata=as_(OPERATOR))  # comes after it on the connection
        may_end.set()
        await until(lambda: lines_of(caplog))
        (line,) = lines_of(caplog)
        assert (line["what"], line["ended"], line["effect"]["holders"]["node:n1"]) == ("evict", "done", 1)
        assert admin.kits["n1"].node.stat().committed_blocks == 3


async def test_a_change_that_fails_after_its_caller_left_leaves_its_line(caplog):
    """Fails when nobody can tell how a change ended whose caller was not there to be told."""
    caplog.set_level("INFO", "headrace.audit")
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def change():
        with audited_change("operator", "pin", {}):
            begun.set()
            await may_end.wait()
            raise InvalidRequest("no room for pins")

    calling = asyncio.create_task(carry_out(change()))
    await begun.wait()
    calling.cancel()
    await asyncio.sleep(0)
    assert not lines_of(caplog)
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert [(line["ended"], line["why"]) for line in lines_of(caplog)] == [("refused", "no room for pins")]


async def test_who_reads_what_others_sent_leaves_a_line_and_who_reads_its_own_none(model_path, caplog):
    """Fails when an operator, or whoever has its key, reads prompts and nobody can tell."""
    caplog.set_level("INFO", "headrace.audit")
    async with admin_over(model_path, "n1", key_ring=RING) as admin:
        store_text(admin.kits["n1"], TEXT, group=USER.trust_group)
        for tenant in (USER, OPERATOR):
            for with_text in (False, True):
                request = admin_pb2.ListBlocksRequest(with_text=with_text)
                assert (await admin.stub.ListBlocks(request, metadata=as_(tenant))).blocks
    assert [(line["who"], line["what"]) for line in lines_of(caplog)] == [("operator", "read text")]
    assert TEXT not in caplog.text


async def test_a_line_is_short_whatever_a_caller_names(model_path, caplog):
    """Fails when a tenant fills the disk by calls that evict nothing and are written down in full."""
    caplog.set_level("INFO", "headrace.audit")
    async with admin_over(model_path, "n1", key_ring=RING) as admin:
        hashes = [number.to_bytes(16, "big") for number in range(50_000)]
        request = admin_pb2.EvictRequest(selector=admin_pb2.Selector(block_hashes=hashes))
        await admin.stub.Evict(request, metadata=as_(USER))
    (line,) = lines_of(caplog)
    assert line["asked"]["block_hashes"][-1] == "and 49984 more"
    assert len(caplog.records[-1].getMessage()) < 4_000


async def test_a_change_is_carried_out_to_its_end_when_its_caller_leaves_however_often():
    """Fails when leaving early leaves a change half done and no audit line behind."""
    begun, may_end, done = asyncio.Event(), asyncio.Event(), []

    async def change():
        begun.set()
        await may_end.wait()
        done.append("line")

    calling = asyncio.create_task(carry_out(change()))
    await begun.wait()
    for _ in range(3):
        calling.cancel()
        await asyncio.sleep(0)
    assert not calling.done()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await calling
    assert done == ["line"]


@pytest.mark.parametrize(("error", "is_bug"), [(InvalidRequest("no such node"), False), (ValueError("a bug"), True)])
async def test_a_bug_in_a_change_whose_caller_had_left_is_logged_with_its_stack(caplog, error, is_bug):
    """Fails when a bug shows nowhere; what the audit line says is not told twice."""
    begun, may_end = asyncio.Event(), asyncio.Event()

    async def change():
        begun.set()
        await may_end.wait()
        raise error

    calling = asyncio.create_task(carry_out(change()))
    await begun.wait()
    calling.cancel()
    may_end.set()
    with pytest.raises(asyncio.CancelledError):
        await calling
    logged = [record.exc_info[1] for record in caplog.records if record.name == "headrace.gateway.carry_out"]
    assert logged == ([error] if is_bug else [])


async def test_refused_keys_leave_lines_and_counts_over_both_apis_and_no_key_is_in_them(model_path, caplog):
    """Fails when somebody who tries keys is not seen, or what was tried is written down."""
    caplog.set_level("INFO")
    metrics, wrong = Metrics(), "hr-" + "x" * 40
    options = {"key_ring": RING, "requests": GatewayMetrics(metrics)}
    async with admin_over(model_path, **options) as admin:
        transport = httpx.ASGITransport(build_http_app(admin.gateway.service), client=("192.0.2.7", 1))
        async with httpx.AsyncClient(transport=transport, base_url="http://gateway") as http:
            for headers in ({}, {"authorization": f"Bearer {wrong}"}):
                assert (await http.post("/v1/completions", json={}, headers=headers)).status_code == 401
            for metadata in ((), (("authorization", f"Bearer {wrong}"),), as_(USER)):
                with pytest.raises(grpc.aio.AioRpcError):
                    await admin.stub.Status(admin_pb2.StatusRequest(), metadata=metadata)
        admin.gateway.service._refusals._told_s = float("-inf")
        admin.gateway.service._refusals.flush()
    lines = [line for line in lines_of(caplog) if line["what"] == "refused"]
    assert sum(line["effect"].get("no or unknown key", 0) for line in lines) == 4
    assert sum(line["effect"].get("may not see every worker's load", 0) for line in lines) == 1
    peers = {peer for line in lines for peer in line["asked"]["peers"]}
    assert "192.0.2.7" in peers
    assert any("127.0.0.1" in peer for peer in peers)
    assert not [key for key in (wrong, *KEYS.values()) if key in caplog.text]
    value = metrics.registry.get_sample_value
    assert value("headrace_refused_calls_total", {"reason": "unauthenticated"}) == 4
    assert value("headrace_refused_calls_total", {"reason": "permission_denied"}) == 1


def test_somebody_who_tries_keys_by_the_thousand_leaves_one_line_a_second(caplog):
    """Fails when the log can be filled from outside, or what was left out is not counted later."""
    caplog.set_level("INFO", "headrace.audit")
    clock = HandClock()
    refusals = RefusalLog(clock)
    for number in range(3_000):
        refusals.saw(Unauthenticated("no API key was sent"), peer=f"192.0.2.{number % 250}")
        clock.seconds += 0.001
    clock.seconds += 1.0
    refusals.flush()
    refusals.saw(InvalidRequest("wrong"), peer="192.0.2.1")
    lines = lines_of(caplog)
    assert len(lines) <= 5
    assert sum(line["effect"]["no or unknown key"] for line in lines) == 3_000
    assert all(len(line["asked"]["peers"]) <= AUDIT_PEERS_MAX for line in lines)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (Unauthenticated("no key"), "unauthenticated"),
        (PermissionDenied("drain nodes"), "permission_denied"),
        (RequestTooLarge(1), "too_large"),
        (UnknownModel("x", []), "unknown_model"),
        (ContextExceeded("long", tokens_max=1), "context_exceeded"),
        (InvalidRequest("wrong"), "invalid"),
        (RateLimited("concurrent_max", "2", retry_after_ms=1), "no_room"),
        (Overloaded("full", retry_after_ms=1), "no_room"),
        (DeadlineExceeded("a worker"), "deadline"),
        (WorkerUnavailable("d0", "died"), "other"),
        (HeadraceError("?"), "other"),
        (ValueError("?"), "other"),
    ],
)
def test_every_refusal_is_counted_under_one_known_reason(error, reason):
    assert reason in REFUSED_CALLS
    metrics = Metrics()
    GatewayMetrics(metrics).call_refused(error)
    assert metrics.registry.get_sample_value("headrace_refused_calls_total", {"reason": reason}) == 1
