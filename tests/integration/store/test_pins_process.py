"""Pins and times to live on a store node as a process: over gRPC, through kill -9, and told when they are over."""

import asyncio
import time
import urllib.request

import grpc
import pytest
from store_calls_kit import deadline, publish, read
from store_kit import make_header, make_prompt, payload_of

from headrace.core.block import HashedPrompt, payload_digest
from headrace.core.generation import EvictSelector
from headrace.core.ports import Reservation
from headrace.core.retention import NO_END_UNIX_MS, Retention
from headrace.store.removal_log import TIME_OVER
from headrace.wire.render import render_selector
from headrace.wire.v1 import admin_pb2 as pb
from headrace.wire.v1 import admin_pb2_grpc as pb_grpc

UNIT = 4_096


def of_prefix(prompt: HashedPrompt) -> pb.Selector:
    return render_selector(EvictSelector(prefix_token_ids=prompt.token_ids))


async def entries_of(admin: pb_grpc.CacheAdminStub, prompt: HashedPrompt) -> list[pb.BlockEntry]:
    """What the node lists of a prompt, heads first."""
    selector = render_selector(EvictSelector(block_hashes=(prompt.chain[0],)))
    return list((await admin.ListBlocks(pb.ListBlocksRequest(selector=selector))).blocks)


def expired_blocks(metrics_port: int) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{metrics_port}/metrics", timeout=30) as reply:
        lines = reply.read().decode().splitlines()
    name = 'headrace_evicted_blocks_total{reason="ttl",tier="host"}'
    return next(float(line.split()[-1]) for line in lines if line.startswith(name))


async def test_a_pinned_prefix_and_the_end_of_its_pin_outlive_a_killed_node(nodes) -> None:
    """Fails when a pin or its end is not in the arena at the moment when the process dies."""
    kept, briefly = make_prompt(700, 3), make_prompt(701, 3)
    node = await nodes.start("pins", arena_mb=1)
    admin = pb_grpc.CacheAdminStub(nodes.channels.to(node.record.address))
    for prompt in (kept, briefly):
        assert await publish(nodes.grpc(node.record), prompt, range(3)) == 3
    began_s = time.time()
    for request in (pb.PinRequest(selector=of_prefix(kept)), pb.PinRequest(selector=of_prefix(briefly), for_s=6)):
        (report,) = (await admin.Pin(request)).reports
        assert (report.outcome, report.blocks, report.tokens, report.bytes) == ("done", 3, 12, 3 * UNIT)
    await node.kill()

    node = await nodes.start("pins", arena_mb=1)
    writer, admin = nodes.grpc(node.record), pb_grpc.CacheAdminStub(nodes.channels.to(node.record.address))
    assert [entry.pinned_until_unix_ms for entry in await entries_of(admin, kept)] == [0, 0, NO_END_UNIX_MS]
    assert all(entry.protected_by_pin for entry in await entries_of(admin, kept))
    for n in range(60):
        await publish(writer, make_prompt(800 + n, 6), range(6))
    assert len(await read(writer, kept)) == 3
    (report,) = (await admin.Evict(pb.EvictRequest(selector=of_prefix(kept)))).reports
    assert (report.blocks, report.skipped_pinned_blocks) == (0, 1)

    async with asyncio.timeout(60):
        while (await admin.Stat(pb.StatRequest())).holders[0].pinned_bytes != 3 * UNIT:  # noqa: ASYNC110
            await asyncio.sleep(0.1)
    assert time.time() >= began_s + 6
    for n in range(60):
        await publish(writer, make_prompt(900 + n, 6), range(6))
    assert (len(await read(writer, kept)), len(await read(writer, briefly))) == (3, 0)
    (report,) = (await admin.Unpin(pb.PinRequest(selector=of_prefix(kept)))).reports
    assert (report.outcome, report.blocks, report.pinned_bytes) == ("done", 3, 0)


async def test_times_to_live_and_orders_outlive_a_killed_node_and_run_out_by_themselves(nodes) -> None:
    """Fails when a restart gives a block its time anew, or makes it one without a bound."""
    bounded, ordered, kept = (make_prompt(710 + n, 3) for n in range(3))
    start_s = time.time()
    node = await nodes.start("times", arena_mb=1)
    writer, admin = nodes.grpc(node.record), pb_grpc.CacheAdminStub(nodes.channels.to(node.record.address))
    began_s = time.time()
    ttl_s = 10 + 4 * (began_s - start_s)  # a busy machine takes long to start the next one
    headers = [make_header(bounded, i) for i in range(3)]
    for outcome in await writer.reserve(headers, deadline=deadline(), retention=Retention(ttl_s=ttl_s)):
        assert isinstance(outcome, Reservation)
        outcome.buffer[:] = payload_of(outcome.header)
        await writer.commit(outcome, payload_xxh3=payload_digest(outcome.buffer), deadline=deadline())
    for prompt in (ordered, kept):
        assert await publish(writer, prompt, range(3)) == 3
    head = render_selector(EvictSelector(block_hashes=(ordered.chain[0],)))
    (report,) = (await admin.SetTtl(pb.SetTtlRequest(selector=head, ttl_s=ttl_s))).reports
    assert (report.outcome, report.blocks, report.tokens) == ("done", 3, 12)
    ordered_s = time.time()
    await node.kill()

    node = await nodes.start("times", arena_mb=1)
    writer, admin = nodes.grpc(node.record), pb_grpc.CacheAdminStub(nodes.channels.to(node.record.address))
    for prompt in (bounded, ordered):
        moments = [entry.expires_unix_ms / 1_000 for entry in await entries_of(admin, prompt)]
        assert len(moments) == 3
        assert began_s + ttl_s <= min(moments) <= max(moments) <= ordered_s + ttl_s + 1
    assert len(await read(writer, ordered)) == 3, "a use does not move an order"
    async with asyncio.timeout(60 + ttl_s):
        while await entries_of(admin, bounded) or await entries_of(admin, ordered):  # noqa: ASYNC110
            await asyncio.sleep(0.2)
    assert time.time() >= began_s + ttl_s
    assert len(await entries_of(admin, kept)) == 3
    explain = pb_grpc.NodeAdminStub(nodes.channels.to(node.record.address)).Explain
    for prompt in (bounded, ordered):
        reply = await explain(pb.ExplainRequest(namespace=prompt.namespace, chain=prompt.chain))
        assert [removal.reason for removal in reply.removals] == [TIME_OVER] * 3
    async with asyncio.timeout(60):
        while expired_blocks(node.record.metrics_port) != 6:  # noqa: ASYNC110
            await asyncio.sleep(0.2)


async def test_orders_over_grpc_are_refused_with_a_reason(nodes) -> None:
    """One MiB: 253 units, of which pins may take half."""
    async with nodes.inside() as service:
        writer, admin = nodes.grpc(service.record), pb_grpc.CacheAdminStub(nodes.channels.to(service.record.address))
        prompt = make_prompt(720, 140)
        assert await publish(writer, prompt, range(140)) == 140
        (report,) = (await admin.Pin(pb.PinRequest(selector=of_prefix(prompt)))).reports
        assert (report.outcome, report.pinned_bytes, report.pin_bytes_max) == ("refused", 0, 253 * UNIT // 2)
        assert report.why == (
            f"{140 * UNIT} bytes more than the 0 pinned already are {140 * UNIT}; "
            f"pins may take {253 * UNIT // 2}, 50% of the arena"
        )
        (report,) = (await admin.Unpin(pb.PinRequest(selector=of_prefix(prompt)))).reports
        assert (report.outcome, report.why) == ("not held", "it is not pinned")
        (report,) = (await admin.SetTtl(pb.SetTtlRequest(selector=of_prefix(make_prompt(721, 1)), ttl_s=60))).reports
        assert report.outcome == "not held"
        idle = of_prefix(prompt)
        idle.idle_for_s = 60
        for call, request, said in (
            (admin.Pin, pb.PinRequest(), "say which"),
            (admin.Pin, pb.PinRequest(selector=pb.Selector(namespace=prompt.namespace)), "say which"),
            (admin.Pin, pb.PinRequest(selector=of_prefix(prompt), for_s=-1), "for_s"),
            (admin.Pin, pb.PinRequest(selector=of_prefix(prompt), for_s=float("nan")), "for_s"),
            (admin.Unpin, pb.PinRequest(selector=idle), "an order is about"),
            (admin.SetTtl, pb.SetTtlRequest(selector=of_prefix(prompt), ttl_s=1), "ttl_s"),
        ):
            with pytest.raises(grpc.aio.AioRpcError, match=said) as refused:
                await call(request)
            assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        service.node.check_integrity()
