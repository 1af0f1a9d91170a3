"""Draining a store node through the gateway: who takes its blocks, who is refused, what is left in the audit log."""

import asyncio
import json
import logging
from dataclasses import replace

import grpc
import grpc.aio
import pytest
from admin_kit import admin_over, store_text, token_ids_of
from silent_server import silent_server
from tiny_gateway import make_namespace

from headrace.gateway.prepare_request import hash_for
from headrace.wire.v1 import admin_pb2

TEXT = "sharedheadtail!!"
PROMPT = hash_for(make_namespace(), token_ids_of(TEXT))


async def drain(admin, holder, **order):
    """The last word of a drain."""
    async with asyncio.timeout(60):
        async for progress in admin.stub.DrainNode(admin_pb2.DrainNodeRequest(holder=holder, **order)):
            last = progress
    assert last.done
    return last


async def test_a_nodes_blocks_go_to_the_nodes_that_take_new_ones(model_path, caplog):
    """Fails when a draining node is asked to take blocks, or what was done is not in the audit log."""
    async with admin_over(model_path, "n1", "n2", "n3") as admin:
        store_text(admin.kits["n1"], TEXT)
        assert (await drain(admin, "node:n2", without_moving=True)).state == "draining"
        with caplog.at_level(logging.INFO, "headrace.audit"):
            last = await drain(admin, "node:n1")
        assert (last.state, last.moved_blocks, last.error) == ("drained", 4, "")
        assert [admin.kits[name].held(PROMPT) for name in ("n1", "n2", "n3")] == [4, 0, 4]
        (line,) = [json.loads(record.message) for record in caplog.records if record.name == "headrace.audit"]
        assert (line["what"], line["asked"]["holder"], line["asked"]["peers"]) == ("drain", "node:n1", ["n3"])
        assert (line["ended"], line["effect"]["state"], line["effect"]["moved_blocks"]) == ("done", "drained", 4)
        status = await admin.stub.Status(admin_pb2.StatusRequest())
        assert {node.node_id: node.draining for node in status.store_nodes} == {"n1": True, "n2": True, "n3": False}
        assert (await drain(admin, "node:n1", undo=True)).state == "serving"


@pytest.mark.parametrize(
    ("holder", "why"), [("node:n1", "nowhere to move its blocks to"), ("node:n7", "no live holder 'node:n7'")]
)
async def test_a_drain_that_cannot_be_is_refused_before_anything_changes(model_path, holder, why):
    """Fails when the only node stops taking blocks although it has nobody to give them to."""
    async with admin_over(model_path, "n1") as admin:
        store_text(admin.kits["n1"], TEXT)
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await drain(admin, holder)
        assert refused.value.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert why in refused.value.details()
        assert not admin.kits["n1"].node.draining


async def test_a_node_that_does_not_answer_is_an_error_and_not_a_drain(model_path, caplog):
    """Fails when silence looks like success, or a drain that failed leaves no audit line."""
    async with admin_over(model_path, "n1", dead_nodes=["n9"]) as admin:
        with caplog.at_level(logging.INFO, "headrace.audit"), pytest.raises(grpc.aio.AioRpcError) as failed:
            await drain(admin, "node:n9")
        assert failed.value.code() is grpc.StatusCode.UNAVAILABLE
        (line,) = [json.loads(record.message) for record in caplog.records if record.name == "headrace.audit"]
        assert (line["ended"], line["effect"]) == ("failed", {})


async def test_leaving_the_stream_stops_the_moving_on_the_node(model_path, caplog):
    """Fails when an operator's Ctrl-C does not reach the node, or takes the order back."""
    async with admin_over(model_path, "n1", "n2") as admin, silent_server() as port:
        store_text(admin.kits["n1"], TEXT)
        (peer,) = [node for node in await admin.gateway.membership.store_nodes() if node.node_id == "n2"]
        await admin.gateway.membership.announce(_at(peer, port), ttl_ms=60_000)
        with caplog.at_level(logging.INFO, "headrace.audit"):
            call = admin.stub.DrainNode(admin_pb2.DrainNodeRequest(holder="node:n1"))
            assert not (await asyncio.wait_for(call.read(), 60)).done
            call.cancel()
            async with asyncio.timeout(60):
                while not caplog.records or any(task.get_name() == "drain n1" for task in asyncio.all_tasks()):  # noqa: ASYNC110
                    await asyncio.sleep(0.01)
        assert json.loads(caplog.records[-1].message)["ended"] == "abandoned"
        assert admin.kits["n1"].node.draining


def _at(record, port):
    """The record of a node that has died and left its port to something that never answers."""
    return replace(record, address=f"127.0.0.1:{port}")
